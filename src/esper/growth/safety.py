"""Keep broken numbers out of a growing model: detect, refuse, roll back, remove.

Every optimiser step is judged before it is taken:

    not finite    loss, gradient norm or a buffer is NaN or infinite
    spike         x > m + (k - 1) max(|m|, q, |first|, rare)
    diverged      `patience` bad batches in a row
    guessing      at a decision, the window's median is back above the first window's

with m the median and q the interquartile range of the last `window` healthy batches,
and `rare` the median of spikes that have come back within a window: data that is hard
or seldom, which must be learnt. A bad batch is refused: its gradients are dropped and
the buffers go back to what they were before it. If the model itself is damaged, or bad
batches follow each other, weights, buffers, optimiser state and random streams go back
to the last healthy snapshot together; learning rates stay with the user's schedule.
Seeds that caused it are removed. One small tensor is read from the device per step.
"""

import copy
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median_low
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.contracts.errors import EsperWarning, InvalidInputError, NumericsError
from esper.contracts.stages import Stage
from esper.growth.analysis.tracing import random_state, set_random_state
from esper.growth.topology import Topology

WARM_UP: Final = 8  # healthy batches before a median means anything
RENEWAL: Final = 8  # batches between two sorts of the ring, which cost time
RECURRING: Final = 3
"""Spikes within a window, not in a row, from which they are usual."""
FORGIVEN: Final = 3
"""Roll-backs to one snapshot from which what was usual is forgotten."""
SLACK: Final = 0.5
"""Rise that is never unlearnt, as a share of the first median loss."""
GUESSING: Final = 0.5
"""Rise of the median loss above the first window's that undoes all learning."""
LARGEST: Final = 1e30
"""A weight or buffer beyond this is as good as infinite: its square is."""
REMOVABLE: Final = (Stage.BLENDING, Stage.HOLDING)
"""Stages of a seed that changes the output and can still be removed."""


_MOST: Final = torch.finfo(torch.float32).max


class Verdict(IntEnum):
    """Judgement of a batch, worst last."""

    HEALTHY = 0
    NON_FINITE = 1
    SPIKE = 2
    DIVERGED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorConfig:
    """How far from its own past a healthy run may go."""

    spike: float = 1000.0
    """Gradient norm, against its running median, from which a batch is refused."""
    loss_spike: float = 20.0
    """Loss, against its running median, from which a batch is refused."""
    window: int = 32
    """Healthy batches in the running statistics."""
    patience: int = 3
    """Bad batches in a row that make a run diverged."""

    def __post_init__(self) -> None:
        """Refuse limits that a healthy run would cross."""
        for name in ("spike", "loss_spike"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 1.0):
                raise InvalidInputError(
                    f"{name} must be finite and above 1, got {value}."
                )
        if self.window < WARM_UP:
            raise InvalidInputError(
                f"window must be at least {WARM_UP}, got {self.window}."
            )
        if self.patience < 1:
            raise InvalidInputError(
                f"patience must be at least 1, got {self.patience}."
            )


class HealthMonitor:
    """Running statistics of loss and gradient norm, and verdicts from them.

    A bad batch never enters the statistics.
    """

    def __init__(self, config: GovernorConfig) -> None:
        self.config = config
        self.recent: list[list[float]] = []
        """Loss and norm of the last healthy batches, at most a window of them."""
        self.limits = [math.inf, math.inf]
        self.first = [math.nan, math.nan]
        """The first medians that were known."""
        self.first_window = math.nan
        """Median loss of the first full window."""
        self.best = math.inf
        """Lowest median loss of any full window."""
        self.spikes: list[list[float]] = []
        """When a spike came, its loss and its norm, within the last window."""
        self.rare = [0.0, 0.0]
        """Loss and norm of spikes that came back."""
        self.streak = 0
        """Bad batches since the last healthy one."""
        self.batches = 0
        self.over: list[int] = []
        """Limits that the last batch was beyond: 0 the loss's, 1 the norm's."""

    def judge(self, loss: float | None, norm: float, *, finite: bool) -> Verdict:
        """The verdict on a batch before its step; healthy ones are recorded.

        Until eight healthy batches were seen, only NON_FINITE is possible. A loss that
        is not known (None) is not judged.
        """
        verdict, known = Verdict.HEALTHY, loss is None or math.isfinite(loss)
        if not (finite and known and math.isfinite(norm)):
            verdict = Verdict.NON_FINITE
        elif self._beyond(loss, norm) and not self._recurs(loss, norm):
            verdict = Verdict.SPIKE
        self.over = self._beyond(loss, norm)
        if verdict is Verdict.HEALTHY:
            self.streak = 0
            self.recent.append([math.nan if loss is None else loss, norm])
            del self.recent[: -self.config.window]
        else:
            self.streak += 1
            if math.isfinite(self.limits[1]) and self.streak >= self.config.patience:
                verdict = Verdict.DIVERGED
        self.batches += 1
        if self.batches % RENEWAL == 0 and len(self.recent) >= WARM_UP:
            self._renew()
        return verdict

    def has_unlearnt(self, loss: float | None) -> bool:
        """Whether a loss is above that of the first window, after it had fallen."""
        if loss is None:
            return False
        start = self.first_window
        limit = start + GUESSING * abs(start) + SLACK * abs(self.first[0])
        return self.best < start and loss > limit

    def medians(self) -> list[float]:
        """Medians of loss and norm; NaN if none is known."""
        return [self._quartiles(row)[1] for row in (0, 1)]

    def state_dict(self) -> dict[str, Any]:
        """All statistics."""
        unsaved = ("config", "over")
        mine = {key: value for key, value in vars(self).items() if key not in unsaved}
        return copy.deepcopy(mine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved statistics."""
        known = HealthMonitor(self.config).state_dict()
        added = {name: known[name] for name in ("spikes", "rare")}  # not in old ones
        state = {**added, **state}
        if state.keys() != known.keys() or len(state["recent"]) > self.config.window:
            raise InvalidInputError(
                "the governor's statistics are not of this window; load a state that "
                "was saved with the same configuration."
            )
        for name, value in copy.deepcopy(dict(state)).items():
            setattr(self, name, value)

    def describe(
        self, verdict: Verdict, loss: float | None, norm: float, *, finite: bool
    ) -> str:
        """The reason of a verdict in one line."""
        usual = self.medians()
        names = ("loss", "gradient norm")
        values = (usual[0] if loss is None else loss, norm)
        wild = [row for row in (0, 1) if not math.isfinite(values[row])]
        if wild:
            why = f"the {names[wild[0]]} is not finite ({values[wild[0]]})"
        elif not finite:
            why = "a buffer of the model is not finite"
        else:
            far = [values[row] / max(abs(usual[row]), 1e-30) for row in (0, 1)]
            row = max(self.over or (0, 1), key=lambda at: far[at])
            why = f"the {names[row]} is {values[row]:.4g}, usually {usual[row]:.4g}"
        if verdict is Verdict.DIVERGED:
            return f"{self.streak} bad batches in a row; at the last, {why}"
        return f"{why}; the step was refused"

    def _beyond(self, loss: float | None, norm: float) -> list[int]:
        """The limits that a batch is beyond."""
        values = (-math.inf if loss is None else loss, norm)
        return [row for row in (0, 1) if values[row] > self.limits[row]]

    def _recurs(self, loss: float | None, norm: float) -> bool:
        """Whether spikes like this one have come back often enough to be usual.

        Those in a row are left to `streak`: they may be the model's fault.
        """
        self.spikes.append([self.batches, math.nan if loss is None else loss, norm])
        first = self.batches - self.config.window
        self.spikes = [spike for spike in self.spikes if spike[0] > first]
        in_a_row = self.streak + 1 >= self.config.patience
        if in_a_row or len(self.spikes) < RECURRING:
            return False
        for row in (0, 1):
            values = [spike[1 + row] for spike in self.spikes]
            known = [value for value in values if not math.isnan(value)]
            if known:
                self.rare[row] = max(self.rare[row], median_low(known))
        self._renew()
        return not self._beyond(loss, norm)

    def _renew(self) -> None:
        """Limits from the batches that are held now."""
        factors = (self.config.loss_spike, self.config.spike)
        for row, factor in enumerate(factors):
            if self._known(row) < WARM_UP:
                continue
            low, interlayer, high = self._quartiles(row)
            if math.isnan(self.first[row]):
                self.first[row] = interlayer
            usual = abs(interlayer), high - low, abs(self.first[row]), self.rare[row]
            self.limits[row] = interlayer + (factor - 1) * max(usual)
        if self._known(0) == self.config.window:
            interlayer = self._quartiles(0)[1]
            if math.isnan(self.first_window):
                self.first_window = interlayer
            self.best = min(self.best, interlayer)

    def _known(self, row: int) -> int:
        """How many of the losses (row 0) or norms (row 1) that are held are known."""
        return sum(not math.isnan(pair[row]) for pair in self.recent)

    def _quartiles(self, row: int) -> list[float]:
        """Of the losses (row 0) or norms (row 1) that are held and known."""
        values = [pair[row] for pair in self.recent]
        known = [value for value in values if not math.isnan(value)]
        ordered = sorted(known) or [math.nan]
        return [ordered[(len(ordered) - 1) * quarter // 4] for quarter in (1, 2, 3)]


class Snapshot:
    """A copy of a model's tensors, its optimiser's state and the random streams."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.take()

    def take(self) -> None:
        """Copy everything as it is now."""
        self.tensors = {name: t.detach().clone() for name, t in self._live().items()}
        self.state = copy.deepcopy(self._state())
        self.random = random_state(self._model)

    def follow_topology(self) -> None:
        """Add what has joined the model as it is now, forget what has left it."""
        known, live, state = self.tensors, self._live(), self._state()
        self.tensors = {
            name: known[name] if name in known else tensor.detach().clone()
            for name, tensor in live.items()
        }
        kept = {name: held for name, held in self.state.items() if name in live}
        born = {name: held for name, held in state.items() if name not in known}
        self.state = {**kept, **copy.deepcopy(born)}

    def restore(self) -> None:
        """Write everything back; the model's tensors stay the same objects."""
        with torch.no_grad():
            for name, tensor in self._live().items():
                _unexpanded(tensor).copy_(_unexpanded(self.tensors[name], tensor))
        parameters = dict(self._model.named_parameters())
        for parameter in parameters.values():
            self._optimizer.state.pop(parameter, None)
        for name, held in self.state.items():
            self._optimizer.state[parameters[name]] = copy.deepcopy(held)
        set_random_state(self.random)

    def _live(self) -> dict[str, Tensor]:
        named = dict(self._model.named_parameters())
        return {**named, **dict(self._model.named_buffers())}

    def _state(self) -> dict[str, dict[str, Any]]:
        """Optimiser state by parameter name."""
        state = self._optimizer.state
        named = self._model.named_parameters()
        return {name: state[p] for name, p in named if p in state}


class Safety:
    """Judges every step of an optimiser over a growing model, and acts on it.

    Without a config nothing is judged, and only seeds whose own code raises are
    removed.
    """

    def __init__(self, topology: Topology, config: GovernorConfig | None) -> None:
        self.incidents: list[str] = []
        """What was refused, rolled back or removed since the last decision."""
        self.rollbacks = 0
        """How often the present snapshot was restored."""
        self._topology, self._model = topology, topology.model
        self._ranks = topology.ranks
        self._optimizer = topology.optimizer
        self._shadow_failures = 0
        self._refused = 0
        """Batches refused since the last healthy one."""
        self._last_reason = ""
        self._has_warned = False
        self._due = False
        self._loss: Tensor | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        """Buffers, and what they were before the batch."""
        self._numbers: list[Tensor] = []
        """Buffers that are judged."""
        self.monitor: HealthMonitor | None = None
        if config is None:
            return
        for name, parameter in self._model.host.named_parameters():
            if not all_finite([parameter], LARGEST):
                raise InvalidInputError(
                    f"{name!r} is not finite; a host must be healthy to be grown."
                )
        self.monitor = HealthMonitor(config)
        # A mask of -inf is a constant, not a sign of trouble.
        buffers = self._model.host.buffers()
        self._constants = {id(b) for b in buffers if not all_finite([b], LARGEST)}
        self.snapshot = Snapshot(self._model, self._optimizer)
        self._healthy = self.monitor.state_dict()
        topology.surgery.before_step = self._before_step

    def take_snapshot(self) -> bool:
        """Keep the present state if it is finite; else the last one stays."""
        if self.monitor is None:
            return False
        healthy = self._is_finite()
        if healthy:
            self.snapshot.take()
            self._healthy = self.monitor.state_dict()
            self._due, self.rollbacks, self._refused = False, 0, 0
        return healthy

    def topology_changed(self) -> None:
        """Follow a change of topology; a snapshot is due at the next good batch."""
        if self.monitor is not None:
            self.snapshot.follow_topology()
            self._due = True

    def before_batch(self) -> None:
        """Keep the buffers as they are before the first batch of a step."""
        if self.monitor is None or self._loss is not None:  # gradients accumulate
            return
        live = [
            buffer
            for part in self._model.parts()
            for module in part
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        if [id(b) for b in live] != [id(b) for b, _ in self._buffers]:
            self._buffers = [(buffer, buffer.clone()) for buffer in live]
            self._numbers = [
                b for b in _fractions(live) if id(b) not in self._constants
            ]
        elif live:
            torch._foreach_copy_([held for _, held in self._buffers], live)

    def after_batch(self, loss: Tensor) -> None:
        """Remember the worst loss of a step; it is judged with its gradients."""
        loss = loss.reshape(()) if loss.dim() else loss
        if self._loss is not None:
            # A batch whose step was left out, by its user or a GradScaler, is over;
            # what a broken one left in gradients that add up is seen there.
            worst = torch.maximum(self._loss, loss)
            loss = torch.where(self._loss.isfinite(), worst, loss)
        self._loss = loss

    def check_decision(self) -> bool:
        """Judge what was learnt so far; returns whether all was rolled back."""
        if self.monitor is None:
            return False
        reason, usual = "", self.monitor.medians()[0]
        if not self._is_finite():
            reason = "a weight, buffer or moment of the model is not finite"
        elif self.monitor.has_unlearnt(usual):
            reason = (
                f"the loss is usually {usual:.4g} now, worse than the "
                f"{self.monitor.first_window:.4g} it began with; what was learnt is "
                "lost"
            )
        if reason:
            self._roll_back(reason)
        return bool(reason)

    def refuse_untrained(self) -> None:
        """Raise if no batch is let through, so that nothing is ever learnt.

        A loss that only stays high is forgiven before that; one that is not finite
        never is.
        """
        if self.monitor is None:
            return
        if self._refused > FORGIVEN * self.monitor.config.patience:
            raise NumericsError(
                f"the last {self._refused} batches were all refused, so nothing is "
                f"learnt: {self._last_reason}. Look for NaN in the data and at the "
                "learning rate; governor=None switches the checks off."
            )

    def remove_failed_seeds(self, *, together: bool = False) -> None:
        """Remove seeds whose own code raised; with other ranks, all of them together.

        Until then a seed that failed here is not active here.
        """
        failed = self._model.flow.failed
        if self._ranks.many:
            if not together:
                return
            like = next(self._model.host.parameters())
            flags = torch.zeros(len(self._model.slots), device=like.device)
            flags[[*failed]] = 1.0
            for slot in self._ranks.worst(flags).nonzero().flatten().tolist():
                failed.setdefault(slot, "it failed on another rank")
        for slot, reason in [*failed.items()]:
            self._remove(slot, reason)

    def remove_broken_seeds(self) -> None:
        """Remove training seeds with non-finite weights, buffers or moments."""
        if self.monitor is None:
            return
        for slot, seed in self._model.training_seeds().items():
            weights = [*seed.parameters()]
            tensors = [*weights, *seed.buffers(), *self._moments(weights)]
            if not self._ranks.all_agree(all_finite(tensors, LARGEST)):
                self._remove(slot, "its weights are not finite")

    def _remove(self, slot: int, reason: str) -> None:
        self._topology.remove(slot, reason)
        self.incidents.append(f"removed {self._model.slots[slot]}: {reason}")
        self.topology_changed()

    def _before_step(self) -> None:
        """Judge loss, gradients and buffers; clear the gradients of a bad batch."""
        assert self.monitor is not None
        if self._ranks.many:
            self.remove_failed_seeds(together=True)
        shadow = self._training_tensors()
        parameters = [p for o in self._optimizer.param_groups for p in o["params"]]
        # Training seeds do not affect the host, so they have no part in its norm.
        hosts = [p for p in parameters if id(p) not in shadow] if shadow else parameters
        seeds = [p for p in parameters if id(p) in shadow] if shadow else []
        # Once, since every look at a gradient makes an object of it.
        own, beside = (
            [g for p in part if (g := p.grad) is not None] for part in (hosts, seeds)
        )
        if not own and not beside:
            return
        loss, norm, finite, seeds_finite = self._measured(own, beside, shadow)
        self._loss = None
        due = self._due and not self.monitor.has_unlearnt(loss)
        verdict = self.monitor.judge(loss, norm, finite=finite)
        if verdict is not Verdict.HEALTHY:
            reason = self.monitor.describe(verdict, loss, norm, finite=finite)
            self._refuse(parameters, verdict, reason)
            return
        self._refused = 0
        if seeds_finite:
            self._shadow_failures = 0
        else:
            self._refuse_shadow(parameters, shadow)
        if due:
            self.take_snapshot()

    def _measured(
        self, own: Sequence[Tensor], beside: Sequence[Tensor], shadow: set[int]
    ) -> tuple[float | None, float, bool, bool]:
        """Loss, if known; gradient norm; are buffers, and seeds' gradients, finite?

        All of it is read from the device at once; over ranks it is the worst of all.
        """
        buffers = [b for b in self._numbers if id(b) not in shadow]
        judged = [
            x.coalesce().values() if x.is_sparse else x
            for x in (*own, *beside, *buffers)
        ]
        found = [*torch._foreach_norm(judged)]
        if self._loss is not None:  # without `grower.loss` it is unknown
            found.append(self._loss)
        if judged[0].is_cpu:  # where reading one by one is quicker than stacking
            read = [number.item() for number in found]
        else:
            read = torch.stack([n.to(judged[0].device) for n in found]).tolist()
        loss = None if self._loss is None else read.pop()
        norm = math.hypot(*read[: len(own)])
        held = read[len(own) + len(beside) :]
        seeds_finite = all(map(math.isfinite, read[len(own) :][: len(beside)]))
        finite = all(n <= LARGEST for n in held) or all_finite(buffers, LARGEST)
        if self._ranks.many:
            bad = [float(not finite), float(not seeds_finite)]
            shown = -math.inf if loss is None else loss  # on all ranks or on none
            mine = torch.tensor([shown, norm, *bad], device=judged[0].device)
            shown, norm, *bad = self._ranks.worst(mine).tolist()
            loss = None if loss is None else shown
            finite, seeds_finite = (not flag for flag in bad)
        return loss, norm, finite, seeds_finite

    def _refuse(self, parameters: list[Tensor], verdict: Verdict, reason: str) -> None:
        """Let the step change nothing; roll back if the model itself is damaged."""
        # A GradScaler that lowers its scale skips the steps of fused optimisers so.
        found_inf = getattr(self._optimizer, "found_inf", None)
        is_skipped = found_inf is not None and bool(found_inf)
        self._refused += not is_skipped
        self._last_reason = reason.removesuffix("; the step was refused")
        self._undo(parameters, {id(buffer) for buffer, _ in self._buffers})
        sound = self._ranks.all_agree(all_finite(self._active(), LARGEST))
        if verdict is Verdict.DIVERGED or not sound:
            self._roll_back(reason)
        else:
            self.incidents.append(f"refused: {reason}")
        if not is_skipped:
            self._warn_once()

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a batch was refused: {self._last_reason}. grower.summary() counts "
                "further ones; governor=None switches the checks off.",
                EsperWarning,
                stacklevel=2,
            )

    def _refuse_shadow(self, parameters: list[Tensor], shadow: set[int]) -> None:
        """Drop non-finite gradients of training seeds; repeated ones remove seeds."""
        assert self.monitor is not None
        self._undo([p for p in parameters if id(p) in shadow], shadow)
        reason = "the gradients of a training seed are not finite"
        self._shadow_failures += 1
        if self._shadow_failures < self.monitor.config.patience:
            self.incidents.append(f"refused: {reason}; only its step was refused")
            return
        self._shadow_failures = 0
        training = [*self._model.training_seeds()]
        broken = [slot for slot in training if not self._is_finite_with(tried=slot)]
        for slot in broken or training:
            self._remove(slot, reason)

    def _roll_back(self, reason: str) -> None:
        """Restore the snapshot and remove the seeds that spoil the output.

        Repeated failures from one snapshot clear the moments, then remove the newest
        seed and forget what was usual: a loss that stays high may be another task.
        """
        assert self.monitor is not None
        self.snapshot.restore()
        self.monitor.load_state_dict(self._healthy)
        self.monitor.streak = 0
        self.rollbacks += 1
        if self.rollbacks > 1:
            for moment in self._moments(self._optimizer.state):
                moment.zero_()
        self.incidents.append(f"rolled back: {reason}")
        slots = range(len(self._model.slots))
        spoilers = []
        if not self._is_finite_with():
            spoilers = [s for s in slots if self._is_finite_with(left_out=s)]
        for slot in spoilers:
            self._remove(slot, "its output is not finite")
        stages, ages = self._model.states.stage[0], self._model.states.age[0]
        active = [slot for slot in slots if int(stages[slot]) in REMOVABLE]
        if active and not spoilers and self.rollbacks >= FORGIVEN:
            newest = min(active, key=lambda slot: int(ages[slot]))
            self._remove(newest, "training kept failing with it")
        if self.rollbacks >= FORGIVEN:
            fresh = HealthMonitor(self.monitor.config)
            self._healthy = fresh.state_dict()
            self.monitor.load_state_dict(self._healthy)

    def _is_finite_with(self, **seeds: int) -> bool:
        """Whether the output is finite with a seed tried or left out."""
        with self._model.flow.using(**seeds):
            fine = all_finite(self._model.example_outputs())
        return self._ranks.all_agree(fine)

    def _undo(self, parameters: Iterable[Tensor], buffers: set[int]) -> None:
        """Drop gradients and put buffers back to before the batch."""
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad():
            for buffer, held in self._buffers:
                if id(buffer) in buffers:
                    buffer.copy_(held)

    def _training_tensors(self) -> set[int]:
        """Ids of parameters and buffers of the seeds that learn in shadow passes."""
        modules, _ = self._model.parts()
        if not modules:
            return set()
        homes = (home for m in modules for home in (m._parameters, m._buffers))
        return {id(tensor) for home in homes for tensor in home.values()}

    def _active(self) -> list[Tensor]:
        """Parameters and buffers that the host's output depends on."""
        skip = self._training_tensors() | self._constants
        everything = (*self._model.parameters(), *self._model.buffers())
        return [tensor for tensor in everything if id(tensor) not in skip]

    def _moments(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Optimiser state of some parameters."""
        state = self._optimizer.state
        return [
            value
            for parameter in parameters
            if parameter in state
            for value in state[parameter].values()
            if isinstance(value, Tensor)
        ]

    def _is_finite(self) -> bool:
        active = self._active()
        fine = all_finite([*active, *self._moments(active)], LARGEST)
        return self._ranks.all_agree(fine)


def all_finite(tensors: Sequence[Tensor], limit: float = math.inf) -> bool:
    """Whether no number is NaN, infinite or beyond the limit."""
    norms = _norms(tensors)
    # A norm is at least the largest number and quickly computed, but it may overflow.
    if not norms or bool((torch.stack(norms) <= min(limit, _MOST)).all()):
        return True
    largest = torch.stack(_norms(tensors, torch.inf))
    return bool((torch.isfinite(largest) & (largest <= limit)).all())


def _norms(tensors: Sequence[Tensor], order: float = 2.0) -> tuple[Tensor, ...]:
    """Norms of the tensors that hold fractions."""
    numbers = [tensor.detach() for tensor in _fractions(tensors)]
    return torch._foreach_norm(numbers, order) if numbers else ()


def _fractions(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that hold numbers which can be broken."""
    return [
        tensor
        for tensor in tensors
        if tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())
    ]


def _unexpanded(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """A tensor without the repeats of an expanded axis, which cannot be written."""
    strides = (tensor if like is None else like).stride()
    tensor = tensor.detach()
    for axis, stride in enumerate(strides):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
