"""Add parameters to and remove them from an optimiser during training.

A new parameter joins the parameter group of a neighbouring layer, so schedulers and
hyperparameters apply to it at once. The state of other parameters does not change. A
host may have several optimisers, each with a part of the parameters.
"""

from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from functools import partial
from typing import Any, Final
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Muon, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.growth.saving.folding import Reading, Tensors

MOMENTS: Final = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "grad_avg", "exp_inf", "prev"), 1),
    "step_size": -1,
    "ax": -1,
    "acc_delta": -2,  # of weights or their changes
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), 2),
}
"""Power of the gradient in entries of an optimiser's state."""
CORRECTED: Final = {"exp_avg": 0, "exp_avg_sq": 1, "max_exp_avg_sq": 1}
"""Entries that Adam divides by 1 - beta^step, and the index of their beta."""
StepCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of `step`: the optimiser, and possibly a closure."""


class Optimizers(MutableMapping[Tensor, Any]):
    """Several optimisers as one; a mapping from parameters to their state."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimisers."""
        return [group for one in self.members for group in one.param_groups]

    @property
    def state(self) -> "Optimizers":
        """The state of every parameter."""
        return self

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters."""
        for one in self.members:
            one.zero_grad()

    def step(self) -> None:
        """Take a step of every optimiser, in their order."""
        for one in self.members:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of all optimisers."""
        return {"members": [one.state_dict() for one in self.members]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        for one, held in zip(self.members, state["members"], strict=True):
            one.load_state_dict(held)

    def owner(self, group: Mapping[str, Any]) -> Optimizer:
        """The optimiser of a group."""
        return next(o for o in self.members if any(g is group for g in o.param_groups))

    def __getitem__(self, parameter: Tensor) -> Any:  # noqa: ANN401
        held = (one.state for one in self.members if parameter in one.state)
        state = next(held, None)
        if state is None:
            raise KeyError(parameter)
        return state[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:  # noqa: ANN401
        for group in self.param_groups:
            if any(parameter is other for other in group["params"]):
                self.owner(group).state[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        for one in self.members:
            one.state.pop(parameter, None)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for one in self.members for parameter in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self.members)


class OptimizerSurgery:
    """Adds and removes parameters of seeds in the optimisers of one host."""

    def __init__(
        self,
        optimizer: object,
        host: Mapping[str, nn.Parameter],
        seeds: Mapping[str, nn.Parameter] = {},
    ) -> None:
        self._host = {p: name for name, p in host.items()}
        own = {p: name for name, p in seeds.items()}
        self.optimizer = Optimizers(_check_optimizers(optimizer, self._host, own))
        groups = self.optimizer.param_groups
        trained = {p for group in groups for p in group["params"]}
        known = {*self._host, *own}
        outside = [p for group in groups for p in group["params"] if p not in known]
        self._outside = {p: f"outside.{n}" for n, p in enumerate(outside)}
        """Parameters of other modules in the optimiser; they stay as they are."""
        self.joined: dict[nn.Parameter, str] = {p: own[p] for p in own if p in trained}
        """Parameters of seeds in the optimiser, and their names."""
        self.reduce: Callable[[], None] | None = None
        """Called before `before_step`; may average gradients over ranks."""
        self.before_step: Callable[[], None] | None = None
        """Called when the gradients of a step are ready; may clear them."""
        self.after_step: Callable[[], None] | None = None
        """Called after every step."""
        self._checked: dict[Optimizer, tuple[Tensor, int]] = {}
        """Optimisers that have not stepped since their gradients were checked."""
        members = self.optimizer.members
        self._handles = (
            *(one.register_step_pre_hook(self._before_step) for one in members),
            *(one.register_step_post_hook(self._after_step) for one in members),
            register_optimizer_step_pre_hook(_step_guard(ref(self), members)),
        )
        finalize(self, self._handles[-1].remove)

    def detach(self) -> None:
        """Remove the hooks from the optimiser."""
        for handle in self._handles:
            handle.remove()

    def join(
        self, named: Mapping[str, nn.Parameter], near: Iterable[nn.Parameter] = ()
    ) -> None:
        """Append parameters to the group of the first trained one of `near`.

        They join the first group that can train them if none of those is trained.
        """
        groups = self.optimizer.param_groups
        homes = {p: group for group in groups for p in group["params"]}
        wanted = [*(homes[p] for p in near if p in homes), *groups]
        fits = (g for g in wanted if not self._why_untrainable(named, g))
        group = next(fits, groups[0])
        if why := self._why_untrainable(named, group):
            raise InvalidInputError(why)
        group["params"].extend(named.values())
        if "param_names" in group:
            group["param_names"] = [*group["param_names"], *named]
        for name, parameter in named.items():
            self._register(parameter, name, group)

    def take_over(
        self,
        host: Mapping[str, nn.Parameter],
        seeds: Mapping[str, nn.Parameter],
        origins: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        """Follow a host whose parameters have other names, and new ones.

        Args:
            host: Parameters of the host by name.
            seeds: Parameters of its seeds by name.
            origins: The parameter whose group each new one joins; one whose origin
                is not trained joins none.
        """
        groups, was = self.optimizer.param_groups, self._known
        trained = {p for group in groups for p in group["params"]}
        now: dict[Tensor, str] = {p: n for n, p in (*host.items(), *seeds.items())}
        renamed = {name: now[p] for p, name in was.items() if p in now}
        for group in groups:
            if "param_names" in group:
                names = group["param_names"]
                group["param_names"] = [renamed.get(name, name) for name in names]
        for parameter, origin in origins.items():
            if origin in trained:
                self.join({now[parameter]: parameter}, [origin])
        self._host = {p: name for name, p in host.items()}
        own = {p: name for name, p in seeds.items()}
        self.joined = {p: own[p] for p in self.joined if p in own}

    def leave(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remove parameters of seeds from their groups and from the state."""
        leaving = {*parameters}
        for group in self.optimizer.param_groups:
            stays = [parameter not in leaving for parameter in group["params"]]
            for key in ("params", "param_names"):
                if key in group and not all(stays):
                    pairs = zip(group[key], stays, strict=True)
                    group[key] = [value for value, stay in pairs if stay]
        for parameter in leaving:
            del self.joined[parameter]
            self.optimizer.state.pop(parameter, None)

    def moments(self) -> dict[str, Reading]:
        """How to fold each entry of the state that has the shape of its parameter.

        Adam has one step per parameter and seeds are younger, so their moments are
        read after the bias correction. A new entry of a second moment is the mean of
        the others: with zero, its first steps would be too large.
        """
        state = self.optimizer.state
        keys = {
            key
            for parameter, held in state.items()
            for key, value in held.items()
            if isinstance(value, Tensor) and value.dim()
            if value.shape == parameter.shape
        }
        return {
            key: Reading(
                partial(self._read_moment, key),
                power=-MOMENTS.get(key, 0),
                fills_mean=MOMENTS.get(key) == 2,
            )
            for key in sorted(keys)
        }

    def _read_moment(self, key: str, parameter: Tensor) -> Tensor | None:
        value = self.optimizer.state.get(parameter, {}).get(key)
        return None if value is None else value / self._correction(key, parameter)

    def _correction(self, key: str, parameter: Tensor) -> float:
        """Adam's bias correction of an entry; 1 for other entries and optimisers."""
        step = float(self.optimizer.state[parameter].get("step", 0))
        groups = self.optimizer.param_groups
        group = next(g for g in groups if any(p is parameter for p in g["params"]))
        if key not in CORRECTED or "betas" not in group or not step:
            return 1.0
        beta: float = group["betas"][CORRECTED[key]]
        return float(1.0 - beta**step)

    def put_moments(
        self, parameters: Iterable[nn.Parameter], moments: Mapping[str, Tensors]
    ) -> None:
        """Set the folded state of parameters that have changed their shape.

        Entries that have the new shape already stay. Factored moments, as those of
        Adafactor, start again.
        """
        found = {
            (key, getattr(module, name)): value
            for key, tensors in moments.items()
            for (module, name), value in tensors.items()
        }
        state = self.optimizer.state
        for parameter in (p for p in parameters if p in state):
            held = state[parameter]
            sized = [k for k, v in held.items() if isinstance(v, Tensor) and v.dim()]
            new = {
                key: (found[key, parameter] * self._correction(key, parameter)).to(
                    held[key]
                )
                for key in sized
                if (key, parameter) in found
            }
            fits = [k for k in sized if {**held, **new}[k].shape == parameter.shape]
            if fits == sized:
                state[parameter] = {**held, **new}
            else:
                del state[parameter]

    def restore_point(self) -> Callable[[], None]:
        """Return a function that restores groups and state."""
        optimizer, joined, host = self.optimizer, dict(self.joined), self._host
        groups = [dict(group) for group in optimizer.param_groups]
        lists = [[*group["params"]] for group in optimizer.param_groups]
        state = dict(optimizer.state)

        def put_back() -> None:
            for live, group, params in zip(
                optimizer.param_groups, groups, lists, strict=True
            ):
                live.update(group)
                live["params"][:] = params
            optimizer.state.clear()
            optimizer.state.update(state)
            self.joined, self._host = joined, host

        return put_back

    def names(self) -> list[list[str]]:
        """Names of the parameters of every group."""
        known = self._known
        groups = [group["params"] for group in self.optimizer.param_groups]
        for parameter in (p for group in groups for p in group if p not in known):
            raise InvalidInputError(
                f"the optimiser holds a parameter of shape {tuple(parameter.shape)} "
                "that was added later. Build the Grower after adding it."
            )
        return [[known[parameter] for parameter in group] for group in groups]

    def restore(
        self,
        names: Sequence[Sequence[str]],
        named_parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Give every group the saved parameters, and remove all others.

        Call `optimizer.load_state_dict` afterwards.
        """
        outside = {name: parameter for parameter, name in self._outside.items()}
        wanted = self._resolve(names, {**named_parameters, **outside})
        stays = {parameter for group in wanted for parameter in group}
        self.leave([p for p in self.joined if p not in stays])
        groups, known = self.optimizer.param_groups, self._known
        for group, parameters, given in zip(groups, wanted, names, strict=True):
            group["params"] = parameters
            if "param_names" in group:
                group["param_names"] = list(given)
            for parameter, name in zip(parameters, given, strict=True):
                if parameter not in known:
                    self._register(parameter, name, group)

    @property
    def _known(self) -> dict[Tensor, str]:
        """Names of all parameters."""
        return {**self._host, **self.joined, **self._outside}

    def refuse_damaged_state(self) -> None:
        """Raise if moments are not finite or have another shape than parameters."""
        known = self._known
        for parameter, held in self.optimizer.state.items():
            for key, value in held.items():
                if not isinstance(value, Tensor) or value.numel() == 0:
                    continue
                sizes = {*zip(value.shape, parameter.shape, strict=False)}
                factored = value.dim() == parameter.dim() and all(
                    size in (1, full) for size, full in sizes
                )  # the moments of Adafactor
                if value.dim() > 0 and not factored:
                    wrong = f"is {[*value.shape]} for {[*parameter.shape]}"
                elif value.is_floating_point() and not value.isfinite().all():
                    wrong = "is not finite"
                else:
                    continue
                raise InvalidInputError(
                    f"{key} of {known[parameter]!r} as saved {wrong}."
                )

    def _before_step(
        self,
        optimizer: Optimizer,
        args: Any,  # noqa: ANN401
        kwargs: Any,  # noqa: ANN401
    ) -> StepCall | None:
        if isinstance(optimizer, SGD):
            self._complete_buffers(optimizer)
        given = [*args[1:], *kwargs.values()]
        if not given or not any(map(callable, given)):
            if len(self.optimizer.members) == 1:
                self._verify()
                return None
            known, now = self._checked.pop(optimizer, None), _mark(optimizer)
            if not (known and now and known[0] is now[0] and known[1] == now[1]):
                self._verify()  # the gradients of all
                others = {o: _mark(o) for o in self.optimizer.members}
                self._checked = {
                    o: mark for o, mark in others.items() if mark and o is not optimizer
                }
            return None

        def checked(closure: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:  # noqa: ANN401
                loss = closure()
                self._verify()
                return loss

            return call

        # A closure computes the gradients, so they are checked at its end.
        wrapped = [checked(v) if callable(v) else v for v in given]
        own, named = wrapped[: len(args) - 1], wrapped[len(args) - 1 :]
        return (args[0], *own), dict(zip(kwargs, named, strict=True))

    def _verify(self) -> None:
        if self.reduce is not None:
            self.reduce()
        if self.before_step is not None:
            self.before_step()

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self.after_step is not None and optimizer is self.optimizer.members[-1]:
            self.after_step()

    def _complete_buffers(self, optimizer: SGD) -> None:
        """Add missing momentum, as zeros: fused SGD needs all buffers or none."""
        for group in optimizer.param_groups:
            if not group["fused"] or group["momentum"] == 0.0:
                continue
            kept = {
                parameter: optimizer.state.get(parameter, {}).get("momentum_buffer")
                for parameter in group["params"]
                if parameter.requires_grad
            }
            if all(buffer is None for buffer in kept.values()):
                continue
            for parameter, buffer in kept.items():
                if buffer is None:
                    zero = torch.zeros_like(parameter.detach())
                    optimizer.state[parameter]["momentum_buffer"] = zero

    def _register(
        self, parameter: nn.Parameter, name: str, group: dict[str, Any]
    ) -> None:
        self.joined[parameter] = name
        optimizer = self.optimizer.owner(group)
        if isinstance(optimizer, Adagrad):
            # Its constructor creates the state; other optimisers do so in `step`.
            start = float(optimizer.defaults["initial_accumulator_value"])
            alone = Adagrad(
                [parameter], initial_accumulator_value=start, fused=group["fused"]
            )
            optimizer.state[parameter] = alone.state[parameter]

    def _why_untrainable(
        self, named: Mapping[str, nn.Parameter], group: Mapping[str, Any]
    ) -> str:
        """Why a group's optimiser cannot train some parameters; empty if it can."""
        muon = isinstance(self.optimizer.owner(group), Muon)
        wrong = [name for name, p in named.items() if muon and p.ndim != 2]
        if not wrong:
            return ""
        return (
            f"Muon trains matrices only, {wrong[0]!r} has shape "
            f"{tuple(named[wrong[0]].shape)}. Use another optimiser for it too."
        )

    def _resolve(
        self,
        names: Sequence[Sequence[str]],
        named_parameters: Mapping[str, nn.Parameter],
    ) -> list[list[nn.Parameter]]:
        """Parameters of the saved `names`; raises before anything changes."""
        groups = self.optimizer.param_groups
        saved = [name for group in names for name in group]
        trained = [self._host.get(p) for group in groups for p in group["params"]]
        unknown = [name for name in saved if name not in named_parameters]
        missing = [name for name in trained if name is not None and name not in saved]
        problem = ""
        if len(names) != len(groups):
            problem = (
                f"{len(names)} parameter groups were saved, the optimiser has "
                f"{len(groups)}. Build it with the same groups"
            )
        elif unknown:
            problem = (
                f"the optimiser was saved with a parameter {unknown[0]!r} that does "
                "not exist. Build the network as it was when it was saved"
            )
        elif missing:
            problem = (
                f"the saved groups lack {missing[0]!r}, which the optimiser trains. "
                "Load into the optimiser that was saved"
            )
        if problem:
            raise InvalidInputError(f"{problem}.")
        wanted = [{name: named_parameters[name] for name in group} for group in names]
        for group, held in zip(groups, wanted, strict=True):
            if why := self._why_untrainable(held, group):
                raise InvalidInputError(why)
        return [[*held.values()] for held in wanted]


def _mark(optimizer: Optimizer) -> tuple[Tensor, int] | None:
    """The first gradient of an optimiser and its version; every batch changes them."""
    held = (p.grad for group in optimizer.param_groups for p in group["params"])
    first = next((gradient for gradient in held if gradient is not None), None)
    return None if first is None else (first, first._version)


def _step_guard(
    owner: "ref[OptimizerSurgery]", members: Sequence[Optimizer]
) -> Callable[..., None]:
    """Hook for all optimisers that refuses others that train the same parameters.

    It holds only a weak reference.
    """
    own = {id(one) for one in members}  # alive as long as their owner

    def guard(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if id(optimizer) in own or (surgery := owner()) is None:
            return
        for parameter in (p for g in optimizer.param_groups for p in g["params"]):
            name = surgery._host.get(parameter) or surgery.joined.get(parameter)
            if name:
                raise InvalidStateError(
                    f"another optimiser than the Grower's steps {name!r}. Build the "
                    "Grower with the one that is used, or call detach() first."
                )

    return guard


def _check_optimizers(
    given: object,
    host: Mapping[nn.Parameter, str],
    seeds: Mapping[nn.Parameter, str],
) -> tuple[Optimizer, ...]:
    """Check that optimisers train every parameter of the host exactly once."""
    members = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not members:
        raise InvalidInputError("expected an optimiser, got an empty list.")
    seen: dict[Tensor, Optimizer] = {}
    for optimizer in members:
        kind, problem = type(optimizer).__name__, ""
        if hasattr(optimizer, "base_optimizer"):
            problem = f"{kind} wraps another optimiser; pass its base optimizer."
        elif isinstance(optimizer, LBFGS | SparseAdam):
            problem = (
                f"no parameter can be added to {kind}. Use a first-order optimiser for "
                "dense gradients, such as AdamW."
            )
        if problem or not isinstance(optimizer, Optimizer):
            raise InvalidInputError(
                problem
                or f"expected a torch.optim.Optimizer, got {kind}. Build one over the "
                "host's parameters first."
            )
        for parameter in (p for g in optimizer.param_groups for p in g["params"]):
            if parameter in seen:
                name = host.get(parameter) or seeds.get(parameter) or "a parameter"
                twice = seen[parameter] is optimizer
                where = "the optimiser twice" if twice else "two optimisers"
                raise InvalidInputError(f"{name!r} is in {where}. Pass it once.")
            seen[parameter] = optimizer
    for parameter, name in host.items():
        if parameter.requires_grad and parameter not in seen:
            raise InvalidInputError(
                f"{name!r} is trainable but not in the optimiser. Add it, or freeze "
                "it with requires_grad_(False)."
            )
    return tuple(one for one in members if isinstance(one, Optimizer))
