"""The computation between two layers of a host, as modules that new units reuse.

Each step is a channel-wise module or torch function of the host. Where the tensor is
combined with another, a `Join` holds the branch that makes the other one: from a second
layer (gated MLP), from the same tensor (squeeze-excite) or from a parameter. New units
have their own weights; folding makes the direct sum of the host's module and theirs.

Steps are saved as `SavedStep`s. They name modules of the host, or entries of two closed
tables, `FUNCTIONS` and `JOINS`, with typed arguments. Reading looks up nothing else.
Functions outside the tables work in memory but cannot be saved.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Annotated, Any, Final, Literal

import torch
import torch.nn.functional as F
from pydantic import FailFast, Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from esper.contracts.errors import InvalidInputError
from esper.growth.analysis.host_layers import (
    copy_with,
    is_layer,
    is_shared,
    own_tensors,
    sized_copy,
    unit_size,
    units_of,
)

DROPOUTS: Final = {
    "dropout": nn.Dropout,
    "dropout1d": nn.Dropout1d,
    "dropout2d": nn.Dropout2d,
    "dropout3d": nn.Dropout3d,
    "alpha_dropout": nn.AlphaDropout,
    "feature_alpha_dropout": nn.FeatureAlphaDropout,
}
"""Torch functions that differ between training and eval mode, and their modules."""
RESHAPES: Final = ("view", "reshape")
BATCH_SIZE: Final = "rows"
"""Placeholder for the batch size in a saved shape."""

# Types of the arguments that a file may pass to a function.

Axis = Annotated[int, Field(ge=-8, le=8)]
Size = Annotated[int, Field(ge=1, le=1024)]
Margin = Annotated[int, Field(ge=-64, le=1024)]
Factor = Annotated[float, Field(gt=0.0, le=8.0)]
Length = Annotated[int, Field(ge=-1, le=2**31)]
Short = Field(min_length=1, max_length=8)
FLAG: Final = TypeAdapter[Any](bool)
NUMBER: Final = TypeAdapter[Any](Annotated[float, Field(ge=-1e30, le=1e30)])
FRACTION: Final = TypeAdapter[Any](Annotated[float, Field(ge=0.0, le=1.0)])
AXES: Final = TypeAdapter[Any](Axis | Annotated[list[Axis], Short])
SIZES: Final = TypeAdapter[Any](Size | Annotated[list[Size], Short])
MARGINS: Final = TypeAdapter[Any](Margin | Annotated[list[Margin], Short])
FACTORS: Final = TypeAdapter[Any](Factor | Annotated[list[Factor], Short])
SHAPE: Final = TypeAdapter[Any](Annotated[list[Length | Literal["rows"]], Short])
GELU: Final = TypeAdapter[Any](Literal["none", "tanh"])
ROUNDING: Final = TypeAdapter[Any](Literal["floor", "trunc"])
PADDING: Final = TypeAdapter[Any](
    Literal["constant", "reflect", "replicate", "circular"]
)
INTERPOLATION: Final = TypeAdapter[Any](
    Literal["nearest", "linear", "bilinear", "bicubic", "trilinear", "area"]
)


def _reshape(h: Tensor, shape: Sequence[int | str]) -> Tensor:
    return h.reshape([h.shape[0] if n == BATCH_SIZE else int(n) for n in shape])


@dataclass(frozen=True, slots=True)
class Function:
    """A table entry: a function and the types of its arguments."""

    call: Callable[..., Tensor]
    arguments: Mapping[str, TypeAdapter[Any]] = field(default_factory=dict)
    """In torch's order."""
    required: int = 0
    """Number of required arguments."""

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Validated arguments; refuses unknown, missing and wrong ones."""
        odd = {*given} - {*self.arguments}
        missing = {*[*self.arguments][: self.required]} - {*given}
        if odd or missing:
            verb, name = "passes" if odd else "lacks", min(odd or missing)
            raise InvalidInputError(f"{verb} argument {name[:80]!r}")
        try:
            return {
                name: self.arguments[name].validate_python(value, strict=True)
                for name, value in given.items()
            }
        except ValidationError as error:
            problem = f"passes wrong arguments {str(given)[:80]!r}"
            raise InvalidInputError(problem) from error


_WINDOW: Final = {"kernel_size": SIZES, "stride": SIZES, "padding": MARGINS}
_MAX_POOL: Final = {**_WINDOW, "dilation": SIZES, "ceil_mode": FLAG}
_AVG_POOL: Final = {**_WINDOW, "ceil_mode": FLAG, "count_include_pad": FLAG}
_REDUCTION: Final = {"dim": AXES, "keepdim": FLAG}
_OTHER: Final = {"other": NUMBER}
ALIASES: Final = {
    "absolute": "abs",
    "clip": "clamp",
    "divide": "div",
    "expit": "sigmoid",
    "multiply": "mul",
    "negative": "neg",
    "radd": "add",
    "rmul": "mul",
    "rtruediv": "rdiv",
    "subtract": "sub",
    "true_divide": "div",
}
NAMESPACES: Final = ("torch", "torch.Tensor", "torch.nn.functional", "torch.special")


def table_name(function: Callable[..., Any]) -> str:
    """Table name of a torch function; aliases and in-place versions share one."""
    namespace, _, last = (resolve_name(function) or "").rpartition(".")
    name = last.strip("_") if namespace in NAMESPACES else ""
    return ALIASES.get(name, name)


_ELEMENTWISE: Final = (
    *(torch.abs, torch.acos, torch.asin, torch.atan, torch.ceil, torch.clone),
    *(Tensor.contiguous, torch.cos, torch.cosh, torch.erf, torch.erfc, torch.exp),
    *(torch.exp2, torch.expm1, Tensor.float, torch.floor, torch.frac, F.hardsigmoid),
    *(F.hardswish, torch.log, torch.log10, torch.log1p, torch.log2, F.logsigmoid),
    *(F.mish, torch.neg, torch.reciprocal, torch.relu, F.relu6, torch.round),
    *(torch.rsqrt, F.selu, torch.sigmoid, torch.sign, F.silu, torch.sin, torch.sinc),
    *(torch.sinh, F.softsign, torch.sqrt, torch.square, torch.tan, torch.tanh),
    *(F.tanhshrink, torch.trunc),
)
_ADAPTIVE: Final = (
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d),
)
_RESIZING: Final = {
    "size": SIZES,
    "scale_factor": FACTORS,
    "mode": INTERPOLATION,
    "align_corners": FLAG,
    "recompute_scale_factor": FLAG,
    "antialias": FLAG,
}
GROWING: Final = {
    **{table_name(f): Function(f, {"output_size": SIZES}, 1) for f in _ADAPTIVE},
    "interpolate": Function(F.interpolate, _RESIZING),
    "pad": Function(F.pad, {"pad": MARGINS, "mode": PADDING, "value": NUMBER}, 1),
}
"""Functions whose result may be larger than their input."""
FUNCTIONS: Final[Mapping[str, Function]] = {
    **{table_name(function): Function(function) for function in _ELEMENTWISE},
    **GROWING,
    **{name: Function(F.dropout, {"p": FRACTION}) for name in DROPOUTS},
    "add": Function(torch.add, {**_OTHER, "alpha": NUMBER}, 1),
    "sub": Function(torch.sub, {**_OTHER, "alpha": NUMBER}, 1),
    "rsub": Function(lambda h, other: other - h, _OTHER, 1),
    "mul": Function(torch.mul, _OTHER, 1),
    "div": Function(torch.div, {**_OTHER, "rounding_mode": ROUNDING}, 1),
    "rdiv": Function(lambda h, other: other / h, _OTHER, 1),
    "pow": Function(torch.pow, {"exponent": NUMBER}, 1),
    "rpow": Function(lambda h, other: other**h, _OTHER, 1),
    "clamp": Function(torch.clamp, {"min": NUMBER, "max": NUMBER}),
    "clamp_min": Function(torch.clamp_min, {"min": NUMBER}, 1),
    "clamp_max": Function(torch.clamp_max, {"max": NUMBER}, 1),
    "nan_to_num": Function(
        torch.nan_to_num, {"nan": NUMBER, "posinf": NUMBER, "neginf": NUMBER}
    ),
    "gelu": Function(F.gelu, {"approximate": GELU}),
    "leaky_relu": Function(F.leaky_relu, {"negative_slope": NUMBER}),
    "elu": Function(F.elu, {"alpha": NUMBER}),
    "celu": Function(F.celu, {"alpha": NUMBER}),
    "softplus": Function(F.softplus, {"beta": NUMBER, "threshold": NUMBER}),
    "hardtanh": Function(F.hardtanh, {"min_val": NUMBER, "max_val": NUMBER}),
    "hardshrink": Function(F.hardshrink, {"lambd": NUMBER}),
    "softshrink": Function(F.softshrink, {"lambd": NUMBER}),
    "threshold": Function(F.threshold, {"threshold": NUMBER, "value": NUMBER}, 2),
    "max_pool1d": Function(F.max_pool1d, _MAX_POOL, 1),
    "max_pool2d": Function(F.max_pool2d, _MAX_POOL, 1),
    "avg_pool1d": Function(F.avg_pool1d, _AVG_POOL, 1),
    "avg_pool2d": Function(F.avg_pool2d, _AVG_POOL, 1),
    "mean": Function(torch.mean, _REDUCTION, 1),
    "sum": Function(torch.sum, _REDUCTION, 1),
    "amax": Function(torch.amax, _REDUCTION, 1),
    "amin": Function(torch.amin, _REDUCTION, 1),
    "squeeze": Function(torch.squeeze, {"dim": AXES}, 1),
    "unsqueeze": Function(torch.unsqueeze, {"dim": AXES}, 1),
    "flatten": Function(torch.flatten, {"start_dim": AXES, "end_dim": AXES}),
    "reshape": Function(_reshape, {"shape": SHAPE}, 1),
}
"""Functions of one tensor that a file may name."""
JOINS: Final[Mapping[str, Function]] = {
    "add": Function(torch.add, {"alpha": NUMBER}),
    "sub": Function(torch.sub, {"alpha": NUMBER}),
    "mul": Function(torch.mul),
    "div": Function(torch.div, {"rounding_mode": ROUNDING}),
    "pow": Function(torch.pow),
    "maximum": Function(torch.maximum),
    "minimum": Function(torch.minimum),
}
"""Functions of two tensors that a file may name."""
COPYABLE: Final = (
    *(int, float, str, slice, EllipsisType, type(None)),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)
"""Types of arguments that can be copied and pickled."""
MAX_SAVED_STEPS: Final = 64
MAX_SAVED_GROWING: Final = 2
"""Limits for the steps between two layers in a file."""


class Interlayer(nn.Sequential):
    """The steps between two layers."""

    def forward(self, h: Tensor, other: Tensor | None = None) -> Tensor:
        """The second layer's input from the first layer's output.

        `other` is the output of the gate layer, if there is a `Join`.
        """
        for module in self:
            h = module(h, other) if isinstance(module, Join) else module(h)
        return h


class FunctionModule(nn.Module):
    """A torch function that the host calls directly, as a module.

    `name` is a table entry. A function outside the tables passes `function` and `args`.
    """

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        args: Sequence[Any] = (),
        function: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.kwargs, self.args = name, dict(kwargs), tuple(args)
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        """Call the function; refuses two tensors that broadcast to a larger one."""
        if len(given) > 1:
            shapes = [tensor.shape for tensor in given]
            if torch.broadcast_shapes(*shapes) not in shapes:
                raise ValueError(f"{self.name} of {shapes} is larger than both")
        table = FUNCTIONS if len(given) == 1 else JOINS
        function = self.function or table[self.name].call
        result: Tensor = function(*given, *self.args, **self.kwargs)
        return result

    def extra_repr(self) -> str:
        """The function's name."""
        return self.name

    @property
    def copyable(self) -> bool:
        """Whether the function and its arguments can be copied and pickled."""
        leaves = tree_leaves([*self.args, self.kwargs])
        return bool(self.name) and all(isinstance(leaf, COPYABLE) for leaf in leaves)


def function_module(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    joins: bool = False,
) -> FunctionModule:
    """A torch call as a module, by its table name if it has one.

    `args` are the arguments after the tensors. `joins` is set if there are two tensors.
    """
    given = {key: kwargs[key] for key in kwargs if key != "inplace"}
    name = table_name(function)
    entry = (JOINS if joins else FUNCTIONS).get(name)
    if entry is not None and len(args) <= len(entry.arguments):
        unused = {"return_indices", "training" if name in DROPOUTS else ""}
        named = {**dict(zip(entry.arguments, args, strict=False)), **given}
        plain = {
            key: [*value] if isinstance(value, tuple) else value
            for key, value in named.items()
            if value is not None and key not in unused
        }
        with suppress(InvalidInputError):
            return FunctionModule(name, entry.checked(plain))
    return FunctionModule(resolve_name(function) or "", given, args, function)


class Join(nn.Module):
    """Combines a path with a second branch; see `layer` for where it starts."""

    def __init__(
        self,
        function: FunctionModule,
        layer: str,
        branch: Iterable[nn.Module],
        *,
        swapped: bool,
        squeeze: int = 1,
    ) -> None:
        super().__init__()
        self.function = function
        self.layer = layer
        """Name of a first layer that reads the same input; empty if the branch starts
        at the path's own tensor or a parameter."""
        self.branch = nn.Sequential(*branch)
        self.swapped = swapped
        """Whether the second branch is the function's first argument."""
        self.squeeze = squeeze
        """Units per output of the first of two layers in the branch."""

    def forward(self, h: Tensor, other: Tensor | None = None) -> Tensor:
        """Combine both branches; `other` is the output of the second branch's layer."""
        pair = (h, self.branch(other if self.layer else h))
        result: Tensor = self.function(*(pair[::-1] if self.swapped else pair))
        return result

    def with_branch(self, branch: Iterable[nn.Module]) -> "Join":
        """A copy with other modules on the second branch."""
        swapped, squeeze = self.swapped, self.squeeze
        return Join(self.function, self.layer, branch, swapped=swapped, squeeze=squeeze)


class UnitParameter(nn.Module):
    """A parameter that the host's code reads, with one entry per unit or for all."""

    def __init__(self, name: str, value: nn.Parameter) -> None:
        super().__init__()
        self.name, self.value = name, value

    def forward(self, _: Tensor) -> Tensor:
        """The parameter; the input is not used."""
        return self.value


class Shared(nn.Module):
    """Calls a module of the host whose weights all units share, without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.held = (module,)  # not registered: its weights are the host's

    def forward(self, h: Tensor) -> Tensor:
        """The module's output."""
        result: Tensor = self.held[0].forward(h)
        return result


def every_step(interlayer: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """All modules between two layers, including those of a second branch."""
    for module in interlayer:
        yield from module.branch if isinstance(module, Join) else (module,)


# Saving.


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """One step between two layers as plain data; the last four belong to a `Join`."""

    kind: Literal["module", "parameter", "function", "join", "unsaved"]
    name: str
    """Name of a host module or parameter, of a table entry, or of a function outside
    the tables."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    layer: str = ""
    branch: Annotated[tuple["SavedStep", ...], FailFast()] = ()
    swapped: bool = False
    squeeze: Annotated[int, Field(ge=1, lt=2**31)] = 1


SavedSteps = Annotated[tuple[SavedStep, ...], FailFast()]


def unsaved_function(steps: Iterable[SavedStep]) -> str:
    """Name of the first function that cannot be saved; empty if there is none."""
    found = (
        s.name if s.kind == "unsaved" else unsaved_function(s.branch) for s in steps
    )
    return next(filter(None, found), "")


def describe_interlayer(
    modules: Iterable[nn.Module], names: Mapping[nn.Module, str]
) -> SavedSteps:
    """The steps between two layers as plain data; host modules by name."""
    return tuple(_described(module, names) for module in modules)


def _described(module: nn.Module, names: Mapping[nn.Module, str]) -> SavedStep:
    if module in names:
        return SavedStep(kind="module", name=names[module])
    if isinstance(module, UnitParameter):
        return SavedStep(kind="parameter", name=module.name)
    if isinstance(module, FunctionModule):
        if module.function is not None:
            return SavedStep(kind="unsaved", name=module.name)
        return SavedStep(kind="function", name=module.name, kwargs=module.kwargs)
    if isinstance(module, Join):
        if module.function.function is not None:
            return SavedStep(kind="unsaved", name=module.function.name)
        return SavedStep(
            kind="join",
            name=module.function.name,
            kwargs=module.function.kwargs,
            layer=module.layer,
            branch=describe_interlayer(module.branch, names),
            swapped=module.swapped,
            squeeze=module.squeeze,
        )
    assert isinstance(module, tuple(DROPOUTS.values()))
    kinds: dict[type, str] = {kind: name for name, kind in DROPOUTS.items()}
    return SavedStep(kind="function", name=kinds[type(module)], kwargs={"p": module.p})


def restore_interlayer(
    steps: Sequence[SavedStep],
    modules: Mapping[str, nn.Module],
    *,
    inside: bool = False,
) -> tuple[nn.Module, ...]:
    """Modules from the steps of an untrusted file; `modules` are the host's by name."""
    growing = sum(step.name in GROWING for step in steps)
    if len(steps) > MAX_SAVED_STEPS or growing > MAX_SAVED_GROWING:
        raise InvalidInputError(
            f"has {len(steps)} steps, of which {growing} make tensors larger; the "
            f"limits are {MAX_SAVED_STEPS} and {MAX_SAVED_GROWING}"
        )
    return tuple(_restored(step, modules, inside=inside) for step in steps)


def _restored(
    step: SavedStep, modules: Mapping[str, nn.Module], *, inside: bool = False
) -> nn.Module:
    """A step from a file; layers are allowed `inside` a branch without a gate."""
    owner, _, last = step.name.rpartition(".")
    needs = {"module": step.name, "parameter": owner, "join": step.layer}
    wanted = needs.get(step.kind, "")
    if wanted not in modules:
        raise InvalidInputError(f"has {wanted[:80]!r}, which the host does not have")
    if step.kind == "parameter":
        value = modules[owner]._parameters.get(last)
        if not inside or value is None:
            raise InvalidInputError(f"has no parameter {step.name[:80]!r}")
        return UnitParameter(step.name, value)
    if step.kind == "module":
        own = modules[step.name]
        known = unit_size(own) or is_shared(own) or (inside and is_layer(own))
        if known or isinstance(own, tuple(DROPOUTS.values())):
            return own
        if any(True for _ in own.children()) or any(True for _ in own.parameters()):
            raise InvalidInputError(f"has {step.name!r}, which has weights of its own")
        return deepcopy(own)
    table = JOINS if step.kind == "join" else FUNCTIONS
    if step.kind == "unsaved" or step.name not in table:
        raise InvalidInputError(
            f"calls {step.name[:80]!r}, which no file may call; move the call into "
            "an nn.Module of the host"
        )
    kwargs = table[step.name].checked(step.kwargs)
    if step.name in DROPOUTS:
        return DROPOUTS[step.name](**kwargs)
    function = FunctionModule(step.name, kwargs)
    if step.kind == "function":
        return function
    if any(inner.kind == "join" for inner in step.branch):
        raise InvalidInputError("joins more than two layers")
    branch = restore_interlayer(step.branch, modules, inside=not step.layer)
    joint = Join(function, step.layer, branch, swapped=step.swapped)
    joint.squeeze = step.squeeze
    return joint


# New units.


def new_interlayer(
    interlayer: Iterable[nn.Module],
    units: int,
    width: int,
    generator: torch.Generator | None = None,
    squeeze: int = 1,
) -> Interlayer:
    """The steps between two layers for new units, with weights of their own.

    Args:
        interlayer: The steps between the layers of the host.
        units: Number of new units.
        width: Number of units of the host.
        generator: Draws new kernels and matrices.
        squeeze: Units per output of a layer that does not return one output per unit.
    """
    made, new, old = [], units, width
    for module in interlayer:
        if is_layer(module):
            outputs = units_of(module)
            wider = units if outputs == width else max(1, units // squeeze)
            made.append(sized_copy(module, wider, new, generator))
            new, old = wider, outputs
        else:
            made.append(_for_units(module, new, old, generator))
    return Interlayer(*made)


def _for_units(
    module: nn.Module, units: int, width: int, generator: torch.Generator | None
) -> nn.Module:
    if isinstance(module, Join):
        branch = new_interlayer(module.branch, units, width, generator, module.squeeze)
        return module.with_branch(branch)
    if is_shared(module):
        return Shared(module)
    if size := unit_size(module):  # after a flatten, one unit has several entries
        return sized_copy(module, units * (size // width), 1, generator)
    return deepcopy(module)


def units_part(module: nn.Module, first: int, units: int, width: int) -> nn.Module:
    """A copy of a module of the host, for some of its units only."""
    if isinstance(module, Join):
        parts = (units_part(one, first, units, width) for one in module.branch)
        return module.with_branch(parts)
    size = unit_size(module)
    if not size or is_shared(module):
        return deepcopy(module)
    start, count = first * (size // width), units * (size // width)
    tensors = own_tensors(module).items()
    cut = {name: t.detach().narrow(0, start, count) for name, t in tensors}
    return copy_with(module, cut, count)
