"""What a host does between two layers, as modules that new units can have too.

A module of the host, or a torch function that it calls directly, works on each channel
by itself. Where two layers read the same tensor and their outputs meet, as in a gated
MLP, a `Join` holds the second one's way to the meeting point. All of it can be written
as plain data and read again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.contracts.errors import BadInput

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
"""Stands for the rows of a batch among the arguments of these."""


class Middle(nn.Sequential):
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

    It is kept by name, since not every torch function can be pickled.
    """

    def __init__(
        self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> None:
        super().__init__()
        self.name, self.args = name, tuple(args)
        self.kwargs = {key: kwargs[key] for key in kwargs if key != "inplace"}

    def forward(self, *given: Tensor) -> Tensor:
        """The same call on other tensors."""
        function, args = _torch_function(self.name), self.args
        if args[:1] == (ROWS,):
            args = (given[0].shape[0], *args[1:])
        result: Tensor = function(*given, *args, **self.kwargs)
        return result

    def extra_repr(self) -> str:
        """The function's name."""
        return self.name

    @property
    def savable(self) -> bool:
        """Whether name and arguments are plain data."""
        return bool(self.name) and all(
            isinstance(value, int | float | str | bool | None)
            for value in tree_leaves([*self.args, self.kwargs])
        )


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


def every_step(middle: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """All modules between two layers, those of a second branch included."""
    for module in middle:
        yield from module.branch if isinstance(module, Join) else (module,)


NAMESPACES = {"torch": torch, "torch.nn.functional": F, "torch.Tensor": Tensor}


@cache
def function_names() -> dict[int, str]:
    """The full names of torch's functions by their ids."""
    return {
        id(getattr(space, name)): f"{where}.{name}"
        for where, space in NAMESPACES.items()
        for name in dir(space)
        if callable(getattr(space, name, None))
    }


@cache
def _torch_function(name: str) -> Callable[..., Any]:
    """A torch function by its full name; nothing else can be named."""
    where, _, last = name.rpartition(".")
    function = getattr(NAMESPACES.get(where), last, None)
    if function is None or id(function) not in function_names():
        raise BadInput(f"{name!r} is no function of this version of torch.")
    found: Callable[..., Any] = function
    return found


def describe_middle(
    steps: Iterable[nn.Module], names: Mapping[nn.Module, str]
) -> list[dict[str, Any]]:
    """What lies between two layers as plain data; the host's modules by their names."""
    return [_described(module, names) for module in steps]


def _described(module: nn.Module, names: Mapping[nn.Module, str]) -> dict[str, Any]:
    if module in names:
        return {"module": names[module]}
    if isinstance(module, FunctionModule):
        how = {"args": [*module.args], "kwargs": module.kwargs}
        return {"function": module.name, **how}
    if isinstance(module, Join):
        return {
            "join": _described(module.function, names),
            "layer": module.layer,
            "branch": describe_middle(module.branch, names),
            "swapped": module.swapped,
        }
    for name, kind in DROPOUTS.items():
        if type(module) is kind:
            return {name: module.p}
    return {"flatten": 1}


def restore_middle(
    described: Iterable[Mapping[str, Any]], host: nn.Module
) -> tuple[nn.Module, ...]:
    """The modules that `describe_middle` has described."""
    return tuple(_restored(one, host) for one in described)


def _restored(one: Mapping[str, Any], host: nn.Module) -> nn.Module:
    if "module" in one:
        own = host.get_submodule(one["module"])
        stays = (*NORMS, *DROPOUTS.values())
        return own if isinstance(own, stays) else deepcopy(own)
    if "function" in one:
        _torch_function(one["function"])
        return FunctionModule(one["function"], one["args"], one["kwargs"])
    if "join" in one:
        function = _restored(one["join"], host)
        assert isinstance(function, FunctionModule)
        host.get_submodule(one["layer"])
        branch = restore_middle(one["branch"], host)
        return Join(function, one["layer"], branch, swapped=one["swapped"])
    for name in DROPOUTS.keys() & one.keys():
        return DROPOUTS[name](one[name])
    return nn.Flatten(one["flatten"])


def new_middle(middle: Iterable[nn.Module], units: int, width: int) -> Middle:
    """What lies between two layers, for new units with norms of their own."""
    return Middle(*(_for_units(module, units, width) for module in middle))


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
        return module.with_branch(new_middle(module.branch, units, width))
    return deepcopy(module)
