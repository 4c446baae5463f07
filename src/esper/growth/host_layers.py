"""The layers of a host that a seed can be put beside, between, and merged into.

Plain linear maps over channels, or over channels and a window. A layer is known by the
full name of its class, so that no library that defines one is imported here. All read
and write a weight as `[outputs, inputs, ...]`, however the layer stores it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor, nn

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
    if hasattr(module, "parametrizations"):
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
