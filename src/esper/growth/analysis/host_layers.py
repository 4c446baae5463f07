"""The layers of a host that seeds can extend: linear and convolution layers.

A layer is recognised by the full name of its class, so that no library needs to be
imported. All functions use weights as `[outputs, inputs, ...]`, also for layers that
store them transposed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from esper.contracts.errors import InvalidInputError
from esper.growth.blueprints.geometry import Kernel


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Attribute names of the sizes of a layer class, and how it stores its weight."""

    outputs: str
    inputs: str
    convolves: bool = False
    transposed: bool = False
    """Whether the weight is stored as `[inputs, outputs]`."""


_CONV: Final = LayerKind("out_channels", "in_channels", convolves=True)
LAYER_KINDS: Final[Mapping[str, LayerKind]] = MappingProxyType(
    {
        "torch.nn.modules.linear.Linear": LayerKind("out_features", "in_features"),
        "torch.nn.modules.conv.Conv1d": _CONV,
        "torch.nn.modules.conv.Conv2d": _CONV,
        "transformers.pytorch_utils.Conv1D": LayerKind("nf", "nx", transposed=True),
    }
)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a layer; None for every other module, including subclasses."""
    kind = type(module)
    return LAYER_KINDS.get(f"{kind.__module__}.{kind.__qualname__}")


def why_no_layer(module: nn.Module) -> str:
    """Why a module is not a supported layer (follows its name); empty if it is one."""
    if kind_of(module) is None:
        return f"is not a plain linear or convolution layer: {type(module).__name__}"
    if hasattr(module, "parametrizations") or "weight" not in module._parameters:
        return "computes its weight from other parameters"
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        if module.groups > 1:
            return f"has {module.groups} groups; new units need a convolution with one"
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            how = module.padding if module.padding_mode == "zeros" else None
            return f"has padding {how or module.padding_mode!r}; use numbers of zeros"
    return ""


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear or convolution layer that seeds can extend."""
    return not why_no_layer(module)


def kernel_of(module: nn.Module) -> Kernel | None:
    """The kernel of a convolution; None for other modules."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or not is_layer(module):
        return None
    return Kernel(
        tuple(module.kernel_size),
        tuple(module.stride),
        tuple(int(pad) for pad in module.padding),
        tuple(module.dilation),
    )


def swap_layout(module: nn.Module, weight: Tensor) -> Tensor:
    """Convert a weight from `[outputs, inputs, ...]` to its layer's layout, or back."""
    kind = kind_of(module)
    return weight.T.contiguous() if kind is not None and kind.transposed else weight


def units_of(module: nn.Module) -> int:
    """Number of outputs of a layer."""
    weight = module.get_parameter("weight")
    kind = kind_of(module)
    return int(weight.shape[1 if kind is not None and kind.transposed else 0])


def write_sizes(module: nn.Module) -> None:
    """Set a layer's size attributes from the shape of its weight."""
    kind = kind_of(module)
    assert kind is not None
    outputs, inputs = swap_layout(module, module.get_parameter("weight")).shape[:2]
    setattr(module, kind.outputs, outputs)
    setattr(module, kind.inputs, inputs)


SIZED_TENSORS: Final = ("weight", "bias", "running_mean", "running_var")
SIZED_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
"""Norms that are widened with the layer before them."""


def write_norm_size(norm: nn.Module, more: nn.Module | None = None) -> None:
    """Set a norm's size attributes from its tensors, or to those of two norms.

    The width of a group stays the same.
    """
    tensors = (*norm._buffers.values(), *norm._parameters.values())
    units = next((len(t) for t in tensors if t is not None and t.dim()), 0)
    name = "num_channels" if isinstance(norm, nn.GroupNorm) else "num_features"
    before = getattr(norm, name)
    units = before + getattr(more, name) if more is not None else units
    setattr(norm, name, units)
    if isinstance(norm, nn.GroupNorm):
        norm.num_groups = norm.num_groups * units // before


def put_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter or buffer with the module's dtype and device; it may be new.

    A parameter stays the same object, since optimisers and users refer to it.
    """
    old = getattr(module, name)
    like = module.get_parameter("weight") if old is None else old
    value = value.to(device=like.device, dtype=like.dtype)
    if name in module._buffers:
        setattr(module, name, value)
    elif old is None:
        setattr(module, name, nn.Parameter(value, requires_grad=like.requires_grad))
    else:
        set_data(old, value, old.grad if old.shape == value.shape else None)


def set_data(parameter: nn.Parameter, data: Tensor, grad: Tensor | None = None) -> None:
    """Give a parameter other numbers, which may have another shape."""
    parameter.grad = None
    # A graph of an earlier batch may be alive, and autograd would go on checking the
    # shape that the parameter had then. It forgets it when the dtype changes.
    other = torch.float32 if data.dtype == torch.float64 else torch.float64
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data
    parameter.grad = grad


def restore_sizes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Return a function that gives modules their attributes and tensors back."""
    before = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in modules
    ]
    held = [
        (parameter, parameter.data, parameter.grad)
        for _, _, parameters, _ in before
        for parameter in parameters.values()
        if parameter is not None
    ]

    def put_back() -> None:
        for module, attributes, parameters, buffers in before:
            vars(module).update(attributes)
            module._parameters, module._buffers = parameters, buffers
        for parameter, data, grad in held:
            set_data(parameter, data, grad)

    return put_back


def fit_sizes(
    host: nn.Module,
    state: Mapping[str, Any],
    smallest: Mapping[str, Sequence[int]] | None = None,
) -> Callable[[], None]:
    """Give layers and norms the sizes that they have in a state; returns an undo.

    No size becomes smaller than in `smallest`, by default that of the host; loading
    refuses every other difference. Refuses outputs that grow without the inputs that
    read them.
    """
    sized = dict(_sized_modules(host))
    undo = restore_sizes(sized.values())
    own = host.state_dict()
    held = {name: getattr(own[name], "shape", None) for name in own if name in state}
    same = all(getattr(state[name], "shape", None) == held[name] for name in held)
    if same and len(held) == len(state):
        return undo
    smallest = {name: shape for name, shape in (smallest or {}).items() if name in held}
    for prefix, module in sized.items():
        shapes = {key: smallest.get(f"{prefix}{key}") for key in SIZED_TENSORS}
        if any([_resize(module, key, shape) for key, shape in shapes.items()]):
            _write_any_size(module)
    try:
        _refuse_another_host(host, state)
    except InvalidInputError:
        undo()
        raise
    for prefix, module in sized.items():
        given = {key: state.get(f"{prefix}{key}") for key in SIZED_TENSORS}
        if any([_grow(module, key, value) for key, value in given.items()]):
            _write_any_size(module)
    return undo


def _resize(module: nn.Module, key: str, shape: Sequence[int] | None) -> bool:
    own = getattr(module, key, None)
    differs = own is not None and shape is not None and own.shape != shape
    if differs and shape is not None:
        put_tensor(module, key, torch.empty(shape))
    return differs


def _write_any_size(module: nn.Module) -> None:
    write = write_norm_size if kind_of(module) is None else write_sizes
    write(module)


def _sized_modules(host: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers and norms that may have grown, with the prefix of their tensors."""
    for name, module in host.named_modules():
        if kind_of(module) is not None or isinstance(module, SIZED_NORMS):
            yield f"{name}." if name else "", module


def _refuse_another_host(host: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse sizes that merged seeds cannot produce.

    New units widen the outputs of one layer and the inputs of another by the same
    factor. After a flatten the inputs are a multiple of those outputs.
    """
    outputs, inputs, norms = (dict[str, tuple[int, int]]() for _ in range(3))
    for prefix, module in _sized_modules(host):
        name = prefix.removesuffix(".")
        for key in ("weight", "running_mean"):
            own, given = getattr(module, key, None), state.get(f"{prefix}{key}")
            if not (isinstance(own, Tensor) and isinstance(given, Tensor)):
                continue
            if own.dim() != given.dim():
                continue
            if isinstance(module, SIZED_NORMS):
                norms[name] = len(own), len(given)
            else:
                shapes = (swap_layout(module, tensor).shape for tensor in (own, given))
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
                    f"the state is from another host: {name!r} has {here} {what} here "
                    f"and {there} there. Pass a host of the same architecture."
                )


def _grow(module: nn.Module, key: str, given: object) -> bool:
    """Enlarge a module's tensor to a given shape; returns whether it changed."""
    own = getattr(module, key, None)
    if module._parameters.get("weight") is None and own is None:
        return False
    if not isinstance(given, Tensor):
        return False
    if own is None:
        fits = key == "bias" and kind_of(module) is not None  # merging may add a bias
    else:
        larger = zip(given.shape, own.shape, strict=False)
        fits = own.dim() == given.dim() and all(new >= old for new, old in larger)
        fits &= own.shape != given.shape
    if fits:
        put_tensor(module, key, torch.empty(given.shape))
    return fits
