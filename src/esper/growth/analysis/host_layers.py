"""The layers of a host that seeds can extend: linear and convolution layers.

A layer is recognised by the full name of its class, so that no library needs to be
imported. All functions use weights as `[outputs, inputs, ...]`, also for layers that
store them transposed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

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
            return f"is a grouped convolution with {module.groups} groups"
        if module.padding_mode != "zeros":
            return f"has padding {module.padding_mode!r}; use zeros"
        if (pads := _paddings(module))[::2] != pads[1::2]:
            return f"has padding {module.padding!r} of two unequal sides; use numbers"
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
        tuple(_paddings(module)[::-2]),
        tuple(module.dilation),
    )


def _paddings(module: nn.Conv1d | nn.Conv2d) -> list[int]:
    """Paddings before and after every axis of a convolution, the last axis first."""
    if isinstance(module.padding, str):  # "same" or "valid"
        return [*module._reversed_padding_repeated_twice]
    return [int(pad) for pad in reversed(module.padding) for _ in range(2)]


def swap_layout(module: nn.Module, weight: Tensor) -> Tensor:
    """Convert a weight from `[outputs, inputs, ...]` to its layer's layout, or back."""
    return weight.T.contiguous() if units_axis(module) else weight


def units_axis(module: nn.Module) -> int:
    """The axis of a layer's stored weight that has its outputs."""
    kind = kind_of(module)
    return int(kind is not None and kind.transposed)


def units_of(module: nn.Module) -> int:
    """Number of outputs of a layer."""
    weight: Any = module.weight  # a parametrized one is no parameter
    return int(weight.shape[units_axis(module)])


def write_sizes(module: nn.Module) -> None:
    """Set a layer's size attributes from the shape of its weight."""
    kind = kind_of(module)
    assert kind is not None
    outputs, inputs = swap_layout(module, module.get_parameter("weight")).shape[:2]
    setattr(module, kind.outputs, outputs)
    setattr(module, kind.inputs, inputs)


# Modules with one entry per unit, which are widened with the layer before them.

COUPLING: Final = (nn.LayerNorm, nn.RMSNorm)
"""Norms over all units at once; two of them are no larger one."""
CHANNELS: Final = ("in_channels", "out_channels", "groups")
"""Sizes of a depthwise convolution."""
NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, *COUPLING)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers that have an axis, by name."""
    held = {**module._parameters, **module._buffers}
    return {name: t for name, t in held.items() if t is not None and t.dim()}


def unit_size(module: nn.Module) -> int:
    """Length of axis 0 of all tensors of a module that works on each unit alone.

    Returns 0 for modules that mix units by their shapes, and for those without tensors.
    """
    if isinstance(module, COUPLING):
        return int(module.normalized_shape[-1])
    if isinstance(module, NORMS):
        name = "num_channels" if isinstance(module, nn.GroupNorm) else "num_features"
        return int(getattr(module, name))
    shapes = [tensor.shape for tensor in own_tensors(module).values()]
    weights = [p for p in module._parameters.values() if p is not None]
    if not shapes or [*module.children()] or not all(p.dim() for p in weights):
        return 0
    if isinstance(module, _ConvNd):
        sizes = {module.in_channels, module.out_channels, module.groups}
        return module.groups if len(sizes) == 1 and module.groups > 1 else 0
    fits = kind_of(module) is None and all(s[1:2] in ((), (1,)) for s in shapes)
    return shapes[0][0] if fits and len({shape[0] for shape in shapes}) == 1 else 0


def is_shared(module: nn.Module) -> bool:
    """Whether a module has weights, and all units share them, as in `nn.PReLU()`."""
    if isinstance(module, (*NORMS, _ConvNd)) or kind_of(module) or [*module.children()]:
        return False
    weights = [p for p in module._parameters.values() if p is not None]
    known = [*weights, *own_tensors(module).values()]
    return bool(weights) and all(tensor.numel() == 1 for tensor in known)


def write_unit_size(module: nn.Module, before: int, after: int) -> None:
    """Set the attributes of a module that say its number of units.

    The width of a group of `nn.GroupNorm` stays the same.
    """
    if isinstance(module, nn.GroupNorm):
        size = before // module.num_groups
        module.num_groups = after // size if after % size == 0 else 1
        module.num_channels = after
        return
    sizes = {int: (before, after), tuple: ((before,), (after,))}
    known = vars(module).items()
    if isinstance(module, _ConvNd):  # padding may be as large
        known = {key: vars(module)[key] for key in CHANNELS}.items()
    for key, value in [*known]:
        old, new = sizes.get(type(value), (None, None))
        if old is not None and value == old:
            setattr(module, key, new)


def write_any_size(module: nn.Module, before: int) -> None:
    """Let size attributes follow the tensors of a module; `before` is its unit size."""
    if is_layer(module):
        write_sizes(module)
    elif before and (tensors := own_tensors(module)):
        write_unit_size(module, before, len(next(iter(tensors.values()))))


def sized_copy(
    module: nn.Module, outputs: int, inputs: int, generator: torch.Generator | None
) -> nn.Module:
    """A layer, or a module with one entry per unit, of another size with new weights.

    Weights of norms are those of a new norm. `inputs` is 1 for all but layers.
    """
    made = dict[str, Tensor]()
    for name, held in own_tensors(module).items():
        own = swap_layout(module, held) if held.dim() > 1 else held
        new = new_weight(own, (outputs, inputs, *own.shape[2:])[: own.dim()], generator)
        made[name] = swap_layout(module, new) if held.dim() > 1 else new
    copied = copy_with(module, made, outputs)
    if isinstance(module, NORMS):
        copied.reset_parameters()  # type: ignore[operator]
    return copied


def copy_with(
    module: nn.Module, tensors: Mapping[str, Tensor], units: int
) -> nn.Module:
    """A copy of a leaf module without hooks, with other tensors and sizes."""
    made, fresh = copy(module), nn.Module()
    for key, value in vars(fresh).items():
        if key not in ("training", "_non_persistent_buffers_set"):
            vars(made)[key] = value
    for name, held in module._parameters.items():
        value = tensors.get(name, held)
        made._parameters[name] = None if value is None else nn.Parameter(value)
    for name, buffer in module._buffers.items():
        kept = None if buffer is None else buffer.clone()
        made._buffers[name] = tensors.get(name, kept)
    if is_layer(made):
        write_sizes(made)
    else:
        write_unit_size(made, unit_size(module), units)
    return made


@torch.no_grad()
def new_weight(
    host: Tensor, shape: Sequence[int], generator: torch.Generator | None
) -> Tensor:
    """A new weight in float32: random if the host's is a matrix, else its mean.

    Random weights have the deviation of the host's, scaled to their own fan-in.
    """
    weight = torch.empty(tuple(shape), dtype=torch.float32)
    if weight.is_meta or not host.numel():
        return weight
    if prod(host.shape[1:]) == 1:
        return weight.fill_(float(host.double().mean()))
    more = prod(host.shape[1:]) / prod(shape[1:])
    bound = (3 * more) ** 0.5 * float(host.double().std(correction=0))
    return weight.uniform_(-bound, bound, generator=generator)


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
    if parameter.shape != data.shape:
        # A graph of an earlier batch may be alive, and autograd would go on checking
        # the shape that the parameter had then. It forgets it when the dtype changes,
        # but also forgets hooks such as those of DistributedDataParallel.
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
    modules = host.named_modules()
    sized = {f"{n}." if n else "": m for n, m in modules if sized_tensors(m)}
    undo = restore_sizes(sized.values())
    own = host.state_dict()
    held = {name: getattr(own[name], "shape", None) for name in own if name in state}
    same = all(getattr(state[name], "shape", None) == held[name] for name in held)
    if same and len(held) == len(state):
        return undo
    smallest = {name: shape for name, shape in (smallest or {}).items() if name in held}
    for prefix, module in sized.items():
        small = {n: smallest.get(f"{prefix}{n}") for n in sized_tensors(module)}
        _resize(module, {n: shape for n, shape in small.items() if shape is not None})
    try:
        _refuse_another_host(sized, state)
    except InvalidInputError:
        undo()
        raise
    for prefix, module in sized.items():
        bias = {"bias"} if is_layer(module) else set[str]()  # merging may add one
        given = {n: state.get(f"{prefix}{n}") for n in {*sized_tensors(module)} | bias}
        found = {n: t for n, t in given.items() if isinstance(t, Tensor)}
        larger = [n for n, t in found.items() if _is_larger(t, getattr(module, n))]
        _resize(module, {n: found[n].shape for n in larger})
    return undo


def sized_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a module that merging may enlarge, by name."""
    own = own_tensors(module)
    if is_layer(module) or (unit_size(module) and not isinstance(module, COUPLING)):
        return own
    known = own.items() if [*module.children()] else ()
    return {name: t for name, t in known if t.shape[1:2] in ((), (1,))}


def _resize(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Give tensors of a module other shapes, and write its sizes."""
    before = unit_size(module)
    for key, shape in shapes.items():
        if getattr(getattr(module, key), "shape", None) != shape:
            put_tensor(module, key, torch.zeros(shape))
    write_any_size(module, before)


def _refuse_another_host(
    sized: Mapping[str, nn.Module], state: Mapping[str, Any]
) -> None:
    """Refuse sizes that merged seeds cannot produce.

    New units widen the outputs of one layer and the inputs of another by the same
    factor. After a flatten the inputs are a multiple of those outputs.
    """
    outputs, inputs, norms = (dict[str, tuple[int, int]]() for _ in range(3))
    for prefix, module in sized.items():
        name = prefix.removesuffix(".")
        for key, own in sized_tensors(module).items():
            given = state.get(f"{prefix}{key}")
            if not isinstance(given, Tensor) or own.dim() != given.dim():
                continue
            if not is_layer(module):
                norms[name] = len(own), len(given)
            elif key == "weight":
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


def _is_larger(given: Tensor, own: Tensor | None) -> bool:
    """Whether a tensor has fewer entries on no axis."""
    pairs = zip(given.shape, () if own is None else own.shape, strict=False)
    alike = own is None or own.dim() == given.dim()
    return alike and all(new >= old for new, old in pairs)
