"""The layers of a host that a seed can be put beside, between, and merged into.

Plain linear maps over channels, or over channels and a window. A layer is known by the
full name of its class, so that no library that defines one is imported here. All read
and write a weight as `[outputs, inputs, ...]`, however the layer stores it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor, nn

from esper.contracts.errors import InvalidInputError
from esper.growth.blueprints.geometry import Kernel


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How a class of layers stores its sizes and its weight."""

    outputs: str
    inputs: str
    """The attributes that hold the sizes."""
    convolves: bool = False
    transposed: bool = False
    """Whether the weight is stored as `[inputs, outputs]`."""


KINDS: Final[Mapping[str, LayerKind]] = MappingProxyType(
    {
        "torch.nn.modules.linear.Linear": LayerKind("out_features", "in_features"),
        "torch.nn.modules.conv.Conv1d": LayerKind(
            "out_channels", "in_channels", convolves=True
        ),
        "torch.nn.modules.conv.Conv2d": LayerKind(
            "out_channels", "in_channels", convolves=True
        ),
        "transformers.pytorch_utils.Conv1D": LayerKind("nf", "nx", transposed=True),
    }
)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a layer; None for every other module, subclasses included."""
    kind = type(module)
    return KINDS.get(f"{kind.__module__}.{kind.__qualname__}")


def why_no_layer(module: nn.Module) -> str:
    """Why a module is no plain layer, to be said after its name; empty if it is one."""
    kind = kind_of(module)
    if kind is None:
        return f"is no plain linear or convolution layer: {type(module).__name__}"
    if hasattr(module, "parametrizations") or "weight" not in module._parameters:
        return "computes its weight from other parameters"
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        if module.groups > 1:
            return (
                f"is a convolution in {module.groups} groups, which tie inputs to "
                "outputs; new units need one group"
            )
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            how = module.padding if module.padding_mode == "zeros" else None
            return f"pads by {how or module.padding_mode!r}, not by numbers of zeros"
    return ""


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a plain linear map over channels (and a window)."""
    return not why_no_layer(module)


def kernel_of(module: nn.Module) -> Kernel | None:
    """The window of a convolution; None for anything else."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or not is_layer(module):
        return None
    return Kernel(
        tuple(module.kernel_size),
        tuple(module.stride),
        tuple(int(pad) for pad in module.padding),
        tuple(module.dilation),
    )


def turned(module: nn.Module, weight: Tensor) -> Tensor:
    """A weight as its layer stores it from `[outputs, inputs, ...]`, or back."""
    kind = kind_of(module)
    return weight.T.contiguous() if kind is not None and kind.transposed else weight


def units_of(module: nn.Module) -> int:
    """Outputs of a layer."""
    weight = module.get_parameter("weight")
    kind = kind_of(module)
    return int(weight.shape[1 if kind is not None and kind.transposed else 0])


def write_sizes(module: nn.Module) -> None:
    """Let a layer's attributes say the sizes that its weight has."""
    kind = kind_of(module)
    assert kind is not None
    outputs, inputs = turned(module, module.get_parameter("weight")).shape[:2]
    setattr(module, kind.outputs, outputs)
    setattr(module, kind.inputs, inputs)


SIZED_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
"""Norms that get units with the layer before them."""


def fit_sizes(host: nn.Module, state: Mapping[str, Any]) -> Callable[[], None]:
    """Give layers and norms the sizes that they have in an exported network's state.

    They only become larger; what differs otherwise is left for loading to refuse.
    Outputs grow with the inputs that read them: others are those of another host.

    Returns:
        What makes the host as it was.
    """
    _refuse_another_host(host, state)
    before = []
    for name, module in host.named_modules():
        if kind_of(module) is None and not isinstance(module, SIZED_NORMS):
            continue
        tensors = (dict(module._parameters), dict(module._buffers))
        held = (module, dict(vars(module)), *tensors)
        prefix = f"{name}." if name else ""
        grown = [
            _grow(module, key, state.get(f"{prefix}{key}"))
            for key in ("weight", "bias", "running_mean", "running_var")
        ]
        if any(grown):
            before.append(held)
            write = _write_norm_sizes if kind_of(module) is None else write_sizes
            write(module)

    def put_back() -> None:
        for module, attributes, parameters, buffers in before:
            vars(module).update(attributes)
            module._parameters, module._buffers = parameters, buffers

    return put_back


def _refuse_another_host(host: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse sizes that no merged seed can have made.

    New units add as large a share to the outputs of one layer as to the inputs of
    another, whose inputs are a multiple of those outputs where a flatten lies between.
    """
    outputs, inputs, norms = (dict[str, tuple[int, int]]() for _ in range(3))
    for name, module in host.named_modules():
        is_norm = isinstance(module, SIZED_NORMS)
        if kind_of(module) is None and not is_norm:
            continue
        prefix = f"{name}." if name else ""
        for key in ("weight", "running_mean"):
            own, given = getattr(module, key, None), state.get(f"{prefix}{key}")
            if not (isinstance(own, Tensor) and isinstance(given, Tensor)):
                continue
            if own.dim() != given.dim():
                continue
            if is_norm:
                norms[name] = len(own), len(given)
            else:
                shapes = (turned(module, tensor).shape for tensor in (own, given))
                outputs[name], inputs[name], *_ = zip(*shapes, strict=True)
    read = [
        (writer, reader)
        for readers in (inputs, norms)
        for writer, (units, more) in outputs.items()
        for reader, (width, wider) in readers.items()
        if writer != reader and units and width % units == 0
        if wider * units == more * width
    ]
    written = {writer for writer, reader in read if reader in inputs}
    fed = {reader for _, reader in read}
    for what, sizes, known in (
        ("outputs", outputs, written),
        ("inputs", inputs, fed),
        ("channels", norms, fed),
    ):
        for name, (here, there) in sizes.items():
            if there > here and name not in known:
                raise InvalidInputError(
                    f"the saved host is another one: {name!r} has {here} {what} here "
                    f"and {there} there, and nothing beside it grew with them."
                )


def _grow(module: nn.Module, key: str, given: object) -> bool:
    """Give a module's tensor a larger shape; returns whether it got one."""
    own = getattr(module, key, None)
    like = module._parameters.get("weight") if own is None else own
    if like is None or not isinstance(given, Tensor):
        return False
    if own is None:
        fits = key == "bias" and kind_of(module) is not None  # folding may make one
    else:
        larger = zip(given.shape, own.shape, strict=False)
        fits = own.dim() == given.dim() and all(new >= old for new, old in larger)
        fits &= own.shape != given.shape
    if fits and key in module._buffers:
        setattr(module, key, like.new_empty(given.shape))
    elif fits:
        value = nn.Parameter(like.new_empty(given.shape), like.requires_grad)
        setattr(module, key, value)
    return fits


def _write_norm_sizes(norm: nn.Module) -> None:
    """Let a norm's attributes say the size that its weight has; groups stay as wide."""
    like = norm._buffers.get("running_mean")
    units = len(norm.get_parameter("weight") if like is None else like)
    if isinstance(norm, nn.GroupNorm):
        norm.num_groups = norm.num_groups * units // norm.num_channels
        norm.num_channels = units
    elif isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
        norm.num_features = units
