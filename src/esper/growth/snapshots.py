"""Snapshots: all of a model in training, kept in memory and put back to the bit.

Parameters, buffers (those that are never saved too), the optimiser's state and its
groups' options, torch's random streams and plain data of the caller. Putting back
writes into the tensors that are there, so every reference to them stays valid; taking
again writes into the memory of the last time. Gradients are not kept.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from esper.contracts.errors import BadInput, CallOrder


class Snapshot:
    """One state of a model, its optimiser and its random streams."""

    def __init__(self) -> None:
        self._taken = False
        self._tensors: dict[str, Tensor] = {}
        self._groups: list[list[str]] = []
        self._options: list[dict[str, Any]] = []
        self._state: dict[str, dict[str, Any]] = {}
        self._random: dict[str, Tensor] = {}
        self._extra: dict[str, Any] = {}

    @property
    def size_bytes(self) -> int:
        """Memory that the kept tensors take."""
        kept = (self._tensors, self._options, self._state, self._random, self._extra)
        return sum(_bytes(tensor) for tensor in _leaves(kept))

    def take(
        self,
        modules: nn.Module,
        optimizer: Optimizer,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep everything as it is now; the last snapshot is overwritten.

        Args:
            modules: Whatever is trained; several modules in an `nn.ModuleList`.
            optimizer: Its parameters must all belong to `modules`.
            extra: Plain data to keep beside them: a scheduler's state, ages, counts.
        """
        live = _tensors_of(modules)
        groups = _names(modules, optimizer)
        kept_extra = copy.deepcopy(dict(extra or {}))
        copies = _Copies()
        self._tensors = {
            name: copies.into(self._tensors.get(name), tensor)
            for name, tensor in live.items()
        }
        self._state = {
            name: copies.mapping(self._state.get(name, {}), state)
            for name, state in _named_state(groups, optimizer).items()
        }
        before = [*self._options, *({} for _ in groups)]
        self._options = [
            copies.mapping(held, _without_parameters(group))
            for held, group in zip(before, optimizer.param_groups, strict=False)
        ]
        copies.make()
        self._groups, self._extra = groups, kept_extra
        self._random = random_state(live)
        self._taken = True

    def follow(self, modules: nn.Module, optimizer: Optimizer) -> None:
        """Let what is kept have the present topology; its values stay.

        Whoever has come is kept as it is now, whoever has left is forgotten. Call it
        after every change, or one of another name cannot be told from a newcomer.
        """
        if not self._taken:
            raise CallOrder("nothing was kept yet; call take() before follow().")
        live, groups = _tensors_of(modules), _names(modules, optimizer)
        state = _named_state(groups, optimizer)
        come = {name for name in live if name not in self._tensors}
        self._tensors = {
            name: tensor.detach().clone() if name in come else self._tensors[name]
            for name, tensor in live.items()
        }
        kept = {name: held for name, held in self._state.items() if name in live}
        born = {name: held for name, held in state.items() if name in come}
        self._state = {**kept, **copy.deepcopy(born)}
        self._groups = groups

    def restore(self, modules: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Put everything back in place and return a copy of the plain data.

        The modules and groups must be those of the snapshot: make the topology equal
        first. A difference is refused before the first bit is written.
        """
        if not self._taken:
            raise CallOrder("nothing was kept yet; call take() before restore().")
        live = _tensors_of(modules)
        groups = _names(modules, optimizer)
        self._refuse_differences(live, groups)
        copies = _Copies()
        for name, tensor in live.items():
            copies.into(tensor, self._tensors[name])
        current = _named_state(groups, optimizer)
        parameters = _parameters(groups, optimizer)
        state = {
            parameters[name]: copies.mapping(current.get(name, {}), held)
            for name, held in self._state.items()
        }
        for group, held in zip(optimizer.param_groups, self._options, strict=True):
            options = copies.mapping(_without_parameters(group), held)
            parameters_of_group = group["params"]
            group.clear()
            group.update(params=parameters_of_group, **options)
        copies.make()
        optimizer.state.clear()
        optimizer.state.update(state)
        set_random_state(self._random)
        return copy.deepcopy(self._extra)

    def _refuse_differences(
        self, live: Mapping[str, Tensor], groups: list[list[str]]
    ) -> None:
        for name in sorted({*live, *self._tensors}):
            here = _layout(live.get(name))
            kept = _layout(self._tensors.get(name))
            if here != kept:
                raise BadInput(
                    f"{name!r} was {kept} in the snapshot and is {here} now; make the "
                    "topology equal before restoring."
                )
        if groups != self._groups:
            kept_names = [name for group in self._groups for name in group]
            here_names = [name for group in groups for name in group]
            odd = sorted({*kept_names} ^ {*here_names})[:3]
            what = f"differ in {', '.join(odd)}" if odd else "are in another order"
            raise BadInput(
                f"the optimiser's parameters {what}; give its groups the parameters "
                "of the snapshot before restoring."
            )


class _Copies:
    """Pairs of tensors to copy, all at once at the end."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def into(self, target: object, source: Tensor) -> Tensor:
        """The target, if it can hold the source, else a tensor that can."""
        if isinstance(target, Tensor) and _layout(target) == _layout(source):
            into, out_of = _distinct(target, source)
            self._targets.append(into)
            self._sources.append(out_of)
            return target
        return source.detach().clone()

    def mapping(
        self, target: Mapping[str, Any], source: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The source's values, its tensors in the target's memory where they fit."""
        return {
            key: self.into(target.get(key), value)
            if isinstance(value, Tensor)
            else copy.deepcopy(value)
            for key, value in source.items()
        }

    def make(self) -> None:
        """Copy."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._sources)


def _distinct(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the repeats of an expanded axis, which cannot be written to."""
    one, other = one.detach(), other.detach()
    for axis, size in enumerate(one.shape):
        if size > 1 and 0 in (one.stride(axis), other.stride(axis)):
            one, other = one.narrow(axis, 0, 1), other.narrow(axis, 0, 1)
    return one, other


def _tensors_of(modules: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    found: dict[str, Tensor] = dict(modules.named_parameters())
    found.update(modules.named_buffers())
    for name, tensor in found.items():
        if is_lazy(tensor):
            raise BadInput(
                f"{name!r} has no shape yet; run one batch through the model first."
            )
    return found


def _names(modules: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters of every group of the optimiser."""
    names: dict[Tensor, str] = {p: name for name, p in modules.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise BadInput(
                    f"group {number} of the optimiser holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is in none of the modules; give "
                    "all that is trained."
                )
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def _parameters(groups: list[list[str]], optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        name: parameter
        for names, group in zip(groups, optimizer.param_groups, strict=True)
        for name, parameter in zip(names, group["params"], strict=True)
    }


def _named_state(
    groups: list[list[str]], optimizer: Optimizer
) -> dict[str, dict[str, Any]]:
    """State by parameter name, in the optimiser's own order."""
    names = {p: name for name, p in _parameters(groups, optimizer).items()}
    for key in optimizer.state:
        if key not in names:
            raise BadInput(
                "the optimiser keeps state of something that is in none of its "
                "groups; remove it from optimizer.state first."
            )
    return {names[key]: state for key, state in optimizer.state.items()}


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def random_state(live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Torch's own streams: the CPU's and those of the devices in use."""
    devices = {str(tensor.device) for tensor in live.values() if tensor.is_cuda}
    return {
        "cpu": torch.get_rng_state(),
        **{device: torch.cuda.get_rng_state(device) for device in sorted(devices)},
    }


def set_random_state(streams: Mapping[str, Tensor]) -> None:
    """Put torch's own streams back."""
    for device, state in streams.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def _layout(tensor: Tensor | None) -> str:
    """Shape, type and place in one word; what two tensors must share."""
    if tensor is None:
        return "absent"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}{list(tensor.shape)} on {tensor.device}"


def _leaves(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
