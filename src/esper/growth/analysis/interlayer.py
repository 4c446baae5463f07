"""What a host does between two layers, as modules that new units can have too.

A module of the host, or a torch function that it calls directly, works on each channel
by itself. Where two layers read the same tensor and their outputs meet, as in a gated
MLP, a `Join` holds the second one's way to the meeting point.

All of it is saved as `SavedStep`s, which name modules of the host and entries of two
closed tables, `FUNCTIONS` and `JOINS`, with typed arguments. Nothing else is looked up
when they are read. A function outside the tables works in memory and cannot be saved.
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

NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)
"""Norms that can be given units of their own."""
DROPOUTS: Final = {
    "dropout": nn.Dropout,
    "dropout1d": nn.Dropout1d,
    "dropout2d": nn.Dropout2d,
    "dropout3d": nn.Dropout3d,
    "alpha_dropout": nn.AlphaDropout,
    "feature_alpha_dropout": nn.FeatureAlphaDropout,
}
"""Functions of torch that train otherwise than they answer, and modules for them."""
SHAPING: Final = ("view", "reshape")
ROWS: Final = "rows"
"""Stands for the rows of a batch in a shape."""

# The functions that a file may name, and their arguments behind the tensors.

Axis = Annotated[int, Field(ge=-8, le=8)]
Size = Annotated[int, Field(ge=1, le=1024)]
Margin = Annotated[int, Field(ge=-64, le=1024)]
Factor = Annotated[float, Field(gt=0.0, le=8.0)]
Length = Annotated[int, Field(ge=-1, le=2**31)]
Short = Field(min_length=1, max_length=8)
FLAG: Final = TypeAdapter[Any](bool)
NUMBER: Final = TypeAdapter[Any](Annotated[float, Field(ge=-1e30, le=1e30)])
SHARE: Final = TypeAdapter[Any](Annotated[float, Field(ge=0.0, le=1.0)])
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
    return h.reshape([h.shape[0] if n == ROWS else int(n) for n in shape])


@dataclass(frozen=True, slots=True)
class Function:
    """An entry of a table: what is called, and the arguments that it takes."""

    call: Callable[..., Tensor]
    arguments: Mapping[str, TypeAdapter[Any]] = field(default_factory=dict)
    """In the order of torch's own."""
    required: int = 0
    """How many of them must be given."""

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as they are passed on; refuses all others."""
        odd = {*given} - {*self.arguments}
        missing = {*[*self.arguments][: self.required]} - {*given}
        if odd or missing:
            what = (
                f"{'passes' if odd else 'lacks'} argument {min(odd or missing)[:80]!r}"
            )
            raise InvalidInputError(what)
        try:
            return {
                name: self.arguments[name].validate_python(value, strict=True)
                for name, value in given.items()
            }
        except ValidationError as error:
            raise InvalidInputError(
                f"passes wrong arguments {str(given)[:80]!r}"
            ) from error


_WINDOW: Final = {"kernel_size": SIZES, "stride": SIZES, "padding": MARGINS}
_MAX: Final = {**_WINDOW, "dilation": SIZES, "ceil_mode": FLAG}
_MEAN: Final = {**_WINDOW, "ceil_mode": FLAG, "count_include_pad": FLAG}
_OVER: Final = {"dim": AXES, "keepdim": FLAG}
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
SPACES: Final = ("torch", "torch.Tensor", "torch.nn.functional", "torch.special")


def table_name(function: Callable[..., Any]) -> str:
    """What a function of torch is called in the tables, whichever of its names it is.

    In-place functions are called like those that are not.
    """
    space, _, last = (resolve_name(function) or "").rpartition(".")
    name = last.strip("_") if space in SPACES else ""
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
"""Functions whose result may be larger than what they are given."""
FUNCTIONS: Final[Mapping[str, Function]] = {
    **{table_name(function): Function(function) for function in _ELEMENTWISE},
    **GROWING,
    **{name: Function(F.dropout, {"p": SHARE}) for name in DROPOUTS},
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
    "max_pool1d": Function(F.max_pool1d, _MAX, 1),
    "max_pool2d": Function(F.max_pool2d, _MAX, 1),
    "avg_pool1d": Function(F.avg_pool1d, _MEAN, 1),
    "avg_pool2d": Function(F.avg_pool2d, _MEAN, 1),
    "mean": Function(torch.mean, _OVER, 1),
    "sum": Function(torch.sum, _OVER, 1),
    "amax": Function(torch.amax, _OVER, 1),
    "amin": Function(torch.amin, _OVER, 1),
    "squeeze": Function(torch.squeeze, {"dim": AXES}, 1),
    "unsqueeze": Function(torch.unsqueeze, {"dim": AXES}, 1),
    "flatten": Function(torch.flatten, {"start_dim": AXES, "end_dim": AXES}),
    "reshape": Function(_reshape, {"shape": SHAPE}, 1),
}
"""Functions of one tensor."""
JOINS: Final[Mapping[str, Function]] = {
    "add": Function(torch.add, {"alpha": NUMBER}),
    "sub": Function(torch.sub, {"alpha": NUMBER}),
    "mul": Function(torch.mul),
    "div": Function(torch.div, {"rounding_mode": ROUNDING}),
    "pow": Function(torch.pow),
    "maximum": Function(torch.maximum),
    "minimum": Function(torch.minimum),
}
"""Functions of two tensors."""
COPYABLE: Final = (
    *(int, float, str, slice, EllipsisType, type(None)),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)
"""Arguments that can be copied and pickled."""
MOST_STEPS: Final = 64
MOST_GROWING: Final = 2
"""Of what a file may put between two layers."""


class Interlayer(nn.Sequential):
    """What lies between two layers, one step after the other."""

    def forward(self, h: Tensor, other: Tensor | None = None) -> Tensor:
        """From what the first layer gives to what the second one reads.

        Args:
            h: The first layer's output.
            other: The output of the layer beside it, if there is a `Join`.
        """
        for module in self:
            h = module(h, other) if isinstance(module, Join) else module(h)
        return h


class FunctionModule(nn.Module):
    """A torch function that the host called directly, as a module.

    Args:
        name: Of an entry of the table, or torch's own of the function.
        kwargs: Its arguments by name.
        args: Its arguments behind the tensors, for a function outside the tables.
        function: One outside the tables.
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
        """The same call on other tensors."""
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
        """Whether it can be copied and pickled with its arguments."""
        leaves = tree_leaves([*self.args, self.kwargs])
        return bool(self.name) and all(isinstance(leaf, COPYABLE) for leaf in leaves)


def called(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    joins: bool = False,
) -> FunctionModule:
    """A call of torch as a module, by its name in a table if there is one.

    Args:
        function: Any of torch's names for it; in place or not.
        args: Its arguments behind the tensors.
        kwargs: Its arguments by name.
        joins: Whether it is a function of two tensors.
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
    """Where a second branch, from a layer that reads the same, meets the first."""

    def __init__(
        self,
        function: FunctionModule,
        layer: str,
        branch: Iterable[nn.Module],
        *,
        swapped: bool,
    ) -> None:
        super().__init__()
        self.function = function
        self.layer = layer
        """Name of the layer that the second branch begins with."""
        self.branch = nn.Sequential(*branch)
        self.swapped = swapped
        """Whether the function takes the second branch first."""

    def forward(self, h: Tensor, other: Tensor) -> Tensor:
        """Both branches together.

        Args:
            h: The first branch.
            other: What the layer of the second branch gives.
        """
        pair = (h, self.branch(other))
        result: Tensor = self.function(*(pair[::-1] if self.swapped else pair))
        return result

    def with_branch(self, branch: Iterable[nn.Module]) -> "Join":
        """The same with other modules on the second branch."""
        return Join(self.function, self.layer, branch, swapped=self.swapped)


def every_step(interlayer: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """All modules between two layers, those of a second branch included."""
    for module in interlayer:
        yield from module.branch if isinstance(module, Join) else (module,)


# Saving.


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """One step between two layers as plain data."""

    kind: Literal["module", "function", "join", "unsaved"]
    name: str
    """Of a module of the host, of an entry of a table, or of an unsaved function."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    layer: str = ""
    branch: Annotated[tuple["SavedStep", ...], FailFast()] = ()
    swapped: bool = False
    """Those of a `Join`."""


SavedSteps = Annotated[tuple[SavedStep, ...], FailFast()]


def unsaved_function(steps: Iterable[SavedStep]) -> str:
    """A function among steps that cannot be saved; empty if there is none."""
    found = (
        s.name if s.kind == "unsaved" else unsaved_function(s.branch) for s in steps
    )
    return next(filter(None, found), "")


def describe_middle(
    modules: Iterable[nn.Module], names: Mapping[nn.Module, str]
) -> SavedSteps:
    """What lies between two layers as plain data; the host's modules by their names."""
    return tuple(_described(module, names) for module in modules)


def _described(module: nn.Module, names: Mapping[nn.Module, str]) -> SavedStep:
    if module in names:
        return SavedStep(kind="module", name=names[module])
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
            branch=describe_middle(module.branch, names),
            swapped=module.swapped,
        )
    assert isinstance(module, tuple(DROPOUTS.values()))
    kinds: dict[type, str] = {kind: name for name, kind in DROPOUTS.items()}
    return SavedStep(kind="function", name=kinds[type(module)], kwargs={"p": module.p})


def restore_middle(
    steps: Sequence[SavedStep], modules: Mapping[str, nn.Module]
) -> tuple[nn.Module, ...]:
    """The modules that `describe_middle` has described.

    Args:
        steps: From a file of anyone.
        modules: Those of the host by name.
    """
    growing = sum(step.name in GROWING for step in steps)
    if len(steps) > MOST_STEPS or growing > MOST_GROWING:
        raise InvalidInputError(
            f"has {len(steps)} steps, of which {growing} make tensors larger, and "
            f"{MOST_STEPS} and {MOST_GROWING} are the limits"
        )
    return tuple(_restored(step, modules) for step in steps)


def _restored(step: SavedStep, modules: Mapping[str, nn.Module]) -> nn.Module:
    wanted = {"module": step.name, "join": step.layer}.get(step.kind, "")
    if wanted not in modules:
        raise InvalidInputError(f"has {wanted[:80]!r}, which the host does not have")
    if step.kind == "module":
        own = modules[step.name]
        if isinstance(own, (*NORMS, *DROPOUTS.values())):
            return own
        if any(True for _ in own.children()) or any(True for _ in own.parameters()):
            raise InvalidInputError(
                f"has {step.name!r}, whose weights are not saved with it"
            )
        return deepcopy(own)
    table = JOINS if step.kind == "join" else FUNCTIONS
    if step.kind == "unsaved" or step.name not in table:
        raise InvalidInputError(
            f"calls {step.name[:80]!r}, which no file may call; let an nn.Module of "
            "the host call it"
        )
    kwargs = table[step.name].checked(step.kwargs)
    if step.name in DROPOUTS:
        return DROPOUTS[step.name](**kwargs)
    function = FunctionModule(step.name, kwargs)
    if step.kind == "function":
        return function
    if any(inner.kind == "join" for inner in step.branch):
        raise InvalidInputError("joins more than two layers")
    branch = restore_middle(step.branch, modules)
    return Join(function, step.layer, branch, swapped=step.swapped)


# New units.


def new_interlayer(
    interlayer: Iterable[nn.Module], units: int, width: int
) -> Interlayer:
    """What lies between two layers, for new units with norms of their own."""
    return Interlayer(*(_for_units(module, units, width) for module in interlayer))


def _for_units(module: nn.Module, units: int, width: int) -> nn.Module:
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        # After a flatten a unit has several features.
        return type(module)(
            units * (module.num_features // width),
            eps=module.eps,
            momentum=module.momentum,
            affine=module.affine,
            track_running_stats=module.track_running_stats,
        )
    if isinstance(module, nn.GroupNorm):
        size = width // module.num_groups
        groups = units // size if units % size == 0 else 1
        return nn.GroupNorm(groups, units, eps=module.eps, affine=module.affine)
    if isinstance(module, nn.LayerNorm):
        return nn.LayerNorm(
            units * (module.normalized_shape[-1] // width),
            eps=module.eps,
            elementwise_affine=module.elementwise_affine,
        )
    if isinstance(module, Join):
        return module.with_branch(new_interlayer(module.branch, units, width))
    return deepcopy(module)
