"""Optimiser surgery: parameters join and leave an optimiser that is in use.

A newborn is appended to the parameter group of the layer it grows beside, so every
scheduler and every hyperparameter is right at once and it learns at its group's rate;
no other state is touched.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Muon, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from esper.contracts.errors import InvalidInputError, InvalidStateError

StepCall = tuple[tuple[Any, ...], dict[str, Any]]
"""How `step` is called: with the optimiser itself and perhaps a closure."""


class OptimizerSurgery:
    """Lets parameters join and leave one optimiser over one host."""

    def __init__(
        self,
        optimizer: object,
        host: Mapping[str, nn.Parameter],
        seeds: Mapping[str, nn.Parameter] = {},
    ) -> None:
        self._host = {p: name for name, p in host.items()}
        own = {p: name for name, p in seeds.items()}
        self._optimizer = _check_optimizer(optimizer, self._host, own)
        groups = self._optimizer.param_groups
        trained = {p for group in groups for p in group["params"]}
        known = {*self._host, *own}
        outside = [p for group in groups for p in group["params"] if p not in known]
        self._outside = {p: f"outside.{n}" for n, p in enumerate(outside)}
        """Parameters of other modules, which are trained along and left alone."""
        self.joined: dict[nn.Parameter, str] = {p: own[p] for p in own if p in trained}
        """Parameters of seeds in the optimiser, and their names."""
        self.reduce: Callable[[], None] | None = None
        """Called before that; it may average gradients over ranks."""
        self.before_step: Callable[[], None] | None = None
        """Called when a step has its gradients; it may clear them."""
        self.after_step: Callable[[], None] | None = None
        """Called last after every step."""
        self._handles = (
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            register_optimizer_step_pre_hook(_watcher(ref(self))),
        )
        finalize(self, self._handles[-1].remove)

    def detach(self) -> None:
        """Take the hooks off the optimiser."""
        for handle in self._handles:
            handle.remove()

    def join(
        self, named: Mapping[str, nn.Parameter], beside: nn.Parameter | None = None
    ) -> None:
        """Append newborns to the group of the parameter they grow `beside`.

        Without one, or beside one that the optimiser was not given, that is the first
        group. The names are those that the newborns are saved under.
        """
        self._refuse_untrainable(named)
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        group = next(
            (g for g in groups if any(p is beside for p in g["params"])), groups[0]
        )
        group["params"].extend(named.values())
        if "param_names" in group:
            group["param_names"] = [*group["param_names"], *named]
        for name, parameter in named.items():
            self._register(parameter, name, group)

    def leave(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remove joined parameters from their groups and from all state."""
        leaving = {*parameters}
        for group in self._optimizer.param_groups:
            stays = [parameter not in leaving for parameter in group["params"]]
            for key in ("params", "param_names"):
                if key in group and not all(stays):
                    pairs = zip(group[key], stays, strict=True)
                    group[key] = [value for value, stay in pairs if stay]
        for parameter in leaving:
            self._forget(parameter)

    def restore_point(self) -> Callable[[], None]:
        """What puts groups and state back as they are now."""
        optimizer, joined = self._optimizer, dict(self.joined)
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
            self.joined = joined

        return put_back

    def names(self) -> list[list[str]]:
        """Names of the parameters of every group, in the optimiser's order."""
        known = {**self._host, **self.joined, **self._outside}
        groups = [group["params"] for group in self._optimizer.param_groups]
        for parameter in (p for group in groups for p in group if p not in known):
            raise InvalidInputError(
                f"the optimiser holds a parameter of shape {tuple(parameter.shape)} "
                "that was added from outside; let it join instead."
            )
        return [[known[parameter] for parameter in group] for group in groups]

    def restore(
        self,
        names: Sequence[Sequence[str]],
        named_parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Give every group the parameters of `names`, as they were when it was saved.

        Loading is then `optimizer.load_state_dict`. Parameters that are not named
        leave.
        """
        outside = {name: parameter for parameter, name in self._outside.items()}
        wanted = self._resolve(names, {**named_parameters, **outside})
        stays = {parameter for group in wanted for parameter in group}
        for parameter in [p for p in self.joined if p not in stays]:
            self._forget(parameter)
        groups = self._optimizer.param_groups
        for group, parameters, given in zip(groups, wanted, names, strict=True):
            group["params"] = parameters
            if "param_names" in group:
                group["param_names"] = list(given)
            for parameter, name in zip(parameters, given, strict=True):
                if not self._is_known(parameter):
                    self._register(parameter, name, group)

    def _is_known(self, parameter: nn.Parameter) -> bool:
        everyone = (self._host, self.joined, self._outside)
        return any(parameter in some for some in everyone)

    def refuse_damaged_state(self) -> None:
        """Refuse moments that are not finite or do not fit their parameters."""
        parts = (self._host, self.joined, self._outside)
        known = dict[Tensor, str](pair for part in parts for pair in part.items())
        for parameter, held in self._optimizer.state.items():
            for key, value in held.items():
                if not isinstance(value, Tensor) or value.numel() == 0:
                    continue
                if value.dim() > 0 and value.shape != parameter.shape:
                    wrong = f"is {[*value.shape]} for {[*parameter.shape]}"
                elif value.is_floating_point() and not value.isfinite().all():
                    wrong = "is not finite"
                else:
                    continue
                raise InvalidInputError(
                    f"{key} of {known[parameter]!r} as saved {wrong}."
                )

    def _before_step(self, _: object, args: Any, kwargs: Any) -> StepCall | None:  # noqa: ANN401
        if self.joined and isinstance(self._optimizer, SGD):
            self._complete_buffers(self._optimizer)
        given = [*args[1:], *kwargs.values()]
        if not any(map(callable, given)):
            self._verify()
            return None

        def judged(closure: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:  # noqa: ANN401
                loss = closure()
                self._verify()
                return loss

            return call

        # A closure makes the gradients, so they are judged at its end.
        wrapped = [judged(v) if callable(v) else v for v in given]
        own, named = wrapped[: len(args) - 1], wrapped[len(args) - 1 :]
        return (args[0], *own), dict(zip(kwargs, named, strict=True))

    def _verify(self) -> None:
        for call in (self.reduce, self.before_step):
            if call is not None:
                call()

    def _refuse_other(self, optimizer: Optimizer) -> None:
        """Refuse another optimiser that trains the same parameters."""
        for parameter in (p for g in optimizer.param_groups for p in g["params"]):
            name = self._host.get(parameter) or self.joined.get(parameter)
            if name:
                raise InvalidStateError(
                    f"another optimiser than the Grower's steps {name!r}; build the "
                    "Grower with the one that is used, or call detach() first."
                )

    def _after_step(self, *_: object) -> None:
        if self.after_step is not None:
            self.after_step()

    def _complete_buffers(self, optimizer: SGD) -> None:
        """Zero momentum for newborns among others: fused SGD needs all or none."""
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
                if buffer is None and parameter in self.joined:
                    zero = torch.zeros_like(parameter.detach())
                    optimizer.state[parameter]["momentum_buffer"] = zero

    def _register(
        self, parameter: nn.Parameter, name: str, group: dict[str, Any]
    ) -> None:
        self.joined[parameter] = name
        if isinstance(self._optimizer, Adagrad):
            # Its constructor makes the zero state; others make it when needed.
            start = float(self._optimizer.defaults["initial_accumulator_value"])
            alone = Adagrad(
                [parameter], initial_accumulator_value=start, fused=group["fused"]
            )
            self._optimizer.state[parameter] = alone.state[parameter]

    def _forget(self, parameter: nn.Parameter) -> None:
        del self.joined[parameter]
        self._optimizer.state.pop(parameter, None)

    def _refuse_untrainable(self, named: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in named.items():
            if isinstance(self._optimizer, Muon) and parameter.ndim != 2:
                raise InvalidInputError(
                    f"Muon trains matrices only, {name!r} has shape "
                    f"{tuple(parameter.shape)}; use another optimiser."
                )

    def _resolve(
        self,
        names: Sequence[Sequence[str]],
        named_parameters: Mapping[str, nn.Parameter],
    ) -> list[list[nn.Parameter]]:
        """The parameters that `names` mean, or a refusal before anything changed."""
        groups = self._optimizer.param_groups
        saved = [name for group in names for name in group]
        trained = [self._host.get(p) for group in groups for p in group["params"]]
        unknown = [name for name in saved if name not in named_parameters]
        missing = [name for name in trained if name is not None and name not in saved]
        problem = ""
        if len(names) != len(groups):
            problem = (
                f"{len(names)} parameter groups were saved, the optimiser has "
                f"{len(groups)}; build it with the same groups"
            )
        elif unknown:
            problem = (
                f"the optimiser was saved with a parameter {unknown[0]!r} that does "
                "not exist; rebuild the network as it was when it was saved"
            )
        elif missing:
            problem = (
                f"the saved groups lack {missing[0]!r}, which the optimiser trains; "
                "load into the optimiser that was saved"
            )
        if problem:
            raise InvalidInputError(f"{problem}.")
        wanted = {name: named_parameters[name] for name in saved}
        self._refuse_untrainable(wanted)
        return [[wanted[name] for name in group] for group in names]


def _watcher(owner: "ref[OptimizerSurgery]") -> Callable[..., None]:
    """A hook for all optimisers that does not keep its owner alive."""

    def watch(optimizer: Optimizer, args: object, kwargs: object) -> None:
        surgery = owner()
        if surgery is not None and optimizer is not surgery._optimizer:
            surgery._refuse_other(optimizer)

    return watch


def _check_optimizer(
    optimizer: object,
    host: Mapping[nn.Parameter, str],
    seeds: Mapping[nn.Parameter, str],
) -> Optimizer:
    """The optimiser, if it trains the host's parameters, and each of all once."""
    if not isinstance(optimizer, Optimizer):
        raise InvalidInputError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "build one over the host's parameters first."
        )
    if isinstance(optimizer, LBFGS):
        raise InvalidInputError(
            "LBFGS keeps one flat history of all parameters, so none can join or "
            "leave; use a first-order optimiser such as AdamW."
        )
    if isinstance(optimizer, SparseAdam):
        raise InvalidInputError(
            "SparseAdam takes sparse gradients only and newborns have dense ones; "
            "use Adam."
        )
    seen: set[Tensor] = set()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter in seen:
            name = host.get(parameter) or seeds.get(parameter) or "a parameter"
            raise InvalidInputError(
                f"{name!r} is in the optimiser twice; give it once."
            )
        seen.add(parameter)
    for parameter, name in host.items():
        if parameter.requires_grad and parameter not in seen:
            raise InvalidInputError(
                f"{name!r} is trainable but not in the optimiser; add it, or freeze "
                "it with requires_grad_(False)."
            )
    return optimizer
