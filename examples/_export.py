"""How every example ends: figures side by side, then the grown network as a file."""

import logging
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import esper


def compare(
    name: str, never: tuple[esper.Grower, float], grown: tuple[esper.Grower, float]
) -> dict[str, float]:
    """Print and return how the two trainings did, and what their networks cost."""
    figures: dict[str, float] = {}
    print(f"\n{'on test rows':<22} {'never grown':>12} {'grown':>12}")
    for what, before, after in (
        (name, never[1], grown[1]),
        ("parameters", count(never[0].model), count(grown[0].model)),
        ("multiply-adds", never[0].model.macs, grown[0].model.macs),
    ):
        print(f"{what:<22} {_short(before):>12} {_short(after):>12}")
        figures |= {f"{what} before": before, what: after}
    return figures


def hand_over(grower: esper.Grower, rows: dict[str, Tensor]) -> dict[str, float]:
    """Export a grown network and compare what it answers on rows of the test set.

    Args:
        grower: The grower, at the end of training.
        rows: What the network is called with, by the names of its arguments.

    Returns:
        The largest difference of any number, relative to the largest number of the
        answer: of the plain module, and of ONNX Runtime on another batch size than
        the one that was exported (missing if it is not installed).
    """
    host = grower.model.host.eval()
    plain = grower.export().eval()
    print(f"\nexported: a plain {type(plain).__name__}, {count(plain):,} parameters")
    with torch.no_grad():
        wanted, found = logits(host(**rows)), logits(plain(**rows))
    gaps = {"gap as a module": _gap("as a module", found, wanted)}
    try:
        found = in_onnx_runtime(plain, rows)
    except ImportError as missing:
        print(f"  ONNX is left out: {missing}; pip install 'esper-lite[onnx]'")
    else:
        gaps["gap in ONNX Runtime"] = _gap("in ONNX Runtime", found, wanted)
    return {"exported parameters": count(plain), **gaps}


def in_onnx_runtime(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """The answer of the exported file, which was traced with four rows only."""
    import onnxruntime
    import onnxscript  # noqa: F401  # torch.onnx needs it

    few = {name: tensor[:4] for name, tensor in rows.items()}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # PyTorch's exporter warns of its own insides, and of a missing torchvision.
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        file = Path(folder) / "grown.onnx"
        torch.onnx.export(
            model,
            (),
            file,
            kwargs=few,
            input_names=[*few],
            output_names=["logits"],
            dynamic_shapes={name: {0: torch.export.Dim("batch")} for name in few},
            dynamo=True,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        feed = {name: tensor.numpy() for name, tensor in rows.items()}
        (answer,) = session.run(["logits"], feed)
    return torch.from_numpy(answer)


def logits(answer: object) -> Tensor:
    """The tensor in what a network returned; Hugging Face returns a dataclass."""
    return answer if isinstance(answer, Tensor) else answer.logits


def count(model: nn.Module) -> int:
    """How many parameters a network has."""
    return sum(parameter.numel() for parameter in model.parameters())


def _gap(where: str, found: Tensor, wanted: Tensor) -> float:
    gap, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    print(
        f"  {where} it differs from the grown network by at most {gap:.1e}, "
        f"{gap / largest:.0e} of the largest logit ({largest:.1f})"
    )
    return gap / largest


def _short(figure: float) -> str:
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:.3f}"
