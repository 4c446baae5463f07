"""Train without and with growth, print both, and check what is exported."""

import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import esper

Train = Callable[[str, int], tuple[esper.Grower, float]]


def compare(metric: str, train: Train, epochs: int, **rows: Tensor) -> dict[str, float]:
    """Train with the controllers `never` and `early`; export the grown network."""
    (never, before), (grower, after) = train("never", epochs), train("early", epochs)
    plain = grower.export().eval()
    with torch.no_grad():
        outputs, found = (model(**rows) for model in (grower.model.host.eval(), plain))
    if not isinstance(outputs, Tensor):  # Hugging Face returns a dataclass
        outputs, found = outputs.logits, found.logits
    gaps = {"gap as a module": gap(found, outputs)}
    try:
        gaps["gap in ONNX Runtime"] = gap(in_onnx_runtime(plain, rows), outputs)
    except ImportError as error:
        print(f"No export to ONNX: {error}. Install the extra `onnx`.")
    models = {"parameters before": never.export(), "parameters": plain}
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    print(f"{grower.summary()}\n\n{'':18} {'never grown':>12} {'grown':>12}")
    print(f"{metric:18} {before:12.3f} {after:12.3f}")
    print("parameters        ", *(f"{size:12,}" for size in sizes.values()), "\n")
    print("\n".join(f"{name}: {value:.0e} of a logit" for name, value in gaps.items()))
    return {f"{metric} before": before, metric: after, **sizes, **gaps}


def in_onnx_runtime(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """Export with four rows, and run the file on all of them."""
    import onnxruntime
    import onnxscript  # noqa: F401  # torch.onnx needs it

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    few = {name: tensor[:4] for name, tensor in rows.items()}
    batch = {name: {0: torch.export.Dim("batch")} for name in rows}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own code
        file = Path(folder) / "grown.onnx"
        given = {"kwargs": few, "dynamic_shapes": batch, "input_names": [*rows]}
        torch.onnx.export(model, (), file, dynamo=True, verbose=False, **given)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        feed = {name: tensor.numpy() for name, tensor in rows.items()}
        return torch.from_numpy(session.run(None, feed)[0])


def gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())
