"""Keep broken numbers out of a growing model: detect, refuse, roll back, remove.

Every optimiser step is checked before it runs:

    not finite    loss, gradient norm or a buffer is NaN or infinite
    spike         x > m + (k - 1) max(|m|, q, |first|, rare)
    diverged      `patience` bad batches in a row
    guessing      at a decision, the window's median is back above the first window's

with m the median and q the interquartile range of the last `window` healthy batches,
and `rare` the median of spikes that recur within a window (hard or rare data). A bad
batch is skipped: gradients are dropped and buffers restored. If the model is damaged,
or after `patience` bad batches, weights, buffers, optimiser state and random streams
return to the last healthy snapshot. Seeds that caused it are removed.
"""

import copy
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median_low
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.contracts.checks import require_int
from esper.contracts.errors import EsperWarning, InvalidInputError, NumericsError
from esper.contracts.stages import Stage
from esper.growth.analysis.tracing import random_state, set_random_state
from esper.growth.model import GrowingModel
from esper.growth.optimiser import Optimizers

WARM_UP: Final = 8  # healthy batches before medians are used
LIMITS_EVERY: Final = 8  # batches between two updates of the limits: sorting is slow
RECURRING: Final = 3  # spikes within a window after which they count as normal
MAX_ROLLBACKS: Final = 3  # roll-backs to one snapshot before the statistics restart
SLACK: Final = 0.5  # tolerated rise, as a fraction of the first median loss
UNLEARNT_RISE: Final = 0.5  # relative rise above the first window's median loss
OVERFLOW_LIMIT: Final = 1e30  # the square of a larger weight or buffer is infinite
REMOVABLE: Final = (Stage.BLENDING, Stage.HOLDING)  # active, and not kept for good
FLOAT32_MAX: Final = torch.finfo(torch.float32).max


class Verdict(IntEnum):
    """Health of a batch, worst last."""

    HEALTHY = 0
    NON_FINITE = 1
    SPIKE = 2
    DIVERGED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorConfig:
    """Limits on loss and gradient norm, relative to their running medians."""

    spike: float = 1000.0
    """Largest gradient norm of an accepted batch, as a multiple of the median."""
    loss_spike: float = 20.0
    """Largest loss of an accepted batch, as a multiple of the median."""
    window: int = 32
    """Healthy batches in the running statistics."""
    patience: int = 3
    """Bad batches in a row after which the run counts as diverged."""

    def __post_init__(self) -> None:
        """Validate the limits."""
        for name in ("spike", "loss_spike"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 1.0):
                raise InvalidInputError(
                    f"{name} must be finite and above 1, got {value}."
                )
        require_int("window", self.window, least=WARM_UP)
        require_int("patience", self.patience)


class HealthMonitor:
    """Running statistics of loss and gradient norm of healthy batches."""

    def __init__(self, config: GovernorConfig) -> None:
        self.config = config
        self.recent: list[list[float]] = []
        """Loss and norm of the last `window` healthy batches."""
        self.limits = [math.inf, math.inf]
        self.first = [math.nan, math.nan]
        """First medians of loss and norm."""
        self.first_window = math.nan
        """Median loss of the first full window."""
        self.best = math.inf
        """Lowest median loss of any full window."""
        self.spikes: list[list[float]] = []
        """Batch number, loss and norm of every spike within the last window."""
        self.rare = [0.0, 0.0]
        """Loss and norm of recurring spikes."""
        self.streak = 0
        """Bad batches since the last healthy one."""
        self.batches = 0
        self.over: list[int] = []
        """Limits that the last batch exceeded: 0 for the loss, 1 for the norm."""

    def check(self, loss: float | None, norm: float, *, finite: bool) -> Verdict:
        """Classify a batch before its step, and record it if it is healthy.

        The first eight batches can only be NON_FINITE. A loss of None is ignored.
        """
        verdict, known = Verdict.HEALTHY, loss is None or math.isfinite(loss)
        within = norm <= self.limits[1] and (loss is None or loss <= self.limits[0])
        self.over = [] if within else self._beyond(loss, norm)
        if not (finite and known and math.isfinite(norm)):
            verdict = Verdict.NON_FINITE
        elif self.over and not self._recurs(loss, norm):
            verdict = Verdict.SPIKE
        if verdict is Verdict.HEALTHY:
            self.streak = 0
            self.recent.append([math.nan if loss is None else loss, norm])
            if len(self.recent) > self.config.window:
                del self.recent[0]
        else:
            self.streak += 1
            if math.isfinite(self.limits[1]) and self.streak >= self.config.patience:
                verdict = Verdict.DIVERGED
        self.batches += 1
        if self.batches % LIMITS_EVERY == 0 and len(self.recent) >= WARM_UP:
            self._renew()
        return verdict

    def has_unlearnt(self, loss: float | None) -> bool:
        """Whether a loss has fallen and is now above that of the first window."""
        if loss is None:
            return False
        start = self.first_window
        limit = start + UNLEARNT_RISE * abs(start) + SLACK * abs(self.first[0])
        return self.best < start and loss > limit

    def medians(self) -> list[float]:
        """Medians of loss and norm; NaN if unknown."""
        return [self._quartiles(row)[1][1] for row in (0, 1)]

    def state_dict(self) -> dict[str, Any]:
        """Copy of all statistics."""
        unsaved = ("config", "over")
        return copy.deepcopy({k: v for k, v in vars(self).items() if k not in unsaved})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved statistics."""
        known = HealthMonitor(self.config).state_dict()
        added = {name: known[name] for name in ("spikes", "rare")}  # not in old ones
        state = {**added, **state}
        if state.keys() != known.keys() or len(state["recent"]) > self.config.window:
            raise InvalidInputError(
                "the governor's statistics are not of this window. Load a state that "
                "was saved with the same configuration."
            )
        for name, value in copy.deepcopy(dict(state)).items():
            setattr(self, name, value)

    def describe(
        self, verdict: Verdict, loss: float | None, norm: float, *, finite: bool
    ) -> str:
        """Reason for a verdict in one line."""
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
        """Limits that a batch exceeds."""
        over = [] if loss is None or loss <= self.limits[0] else [0]
        return over if norm <= self.limits[1] else [*over, 1]

    def _recurs(self, loss: float | None, norm: float) -> bool:
        """Whether such spikes recur often enough to be normal; not those in a row."""
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
        self.over = self._beyond(loss, norm)
        return not self.over

    def _renew(self) -> None:
        """Compute the limits from the recent batches."""
        factors = (self.config.loss_spike, self.config.spike)
        for row, factor in enumerate(factors):
            count, (low, median, high) = self._quartiles(row)
            if count < WARM_UP:
                continue
            if math.isnan(self.first[row]):
                self.first[row] = median
            usual = abs(median), high - low, abs(self.first[row]), self.rare[row]
            self.limits[row] = median + (factor - 1) * max(usual)
            if row == 0 and count == self.config.window:
                if math.isnan(self.first_window):
                    self.first_window = median
                self.best = min(self.best, median)

    def _quartiles(self, row: int) -> tuple[int, list[float]]:
        """Number and quartiles of recent losses (row 0) or norms (row 1)."""
        known = [pair[row] for pair in self.recent if pair[row] == pair[row]]  # no NaN
        ordered, last = sorted(known) or [math.nan], max(0, len(known) - 1)
        return len(known), [ordered[last * quarter // 4] for quarter in (1, 2, 3)]


class Snapshot:
    """Copy of a model's tensors, the optimiser state and the random streams."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | Optimizers) -> None:
        self._model, self._optimizer = model, optimizer
        self.take()

    def take(self) -> None:
        """Copy the current state."""
        self.tensors = {name: t.detach().clone() for name, t in self._live().items()}
        self.state = copy.deepcopy(self._state())
        self.random = random_state(self._model)

    def follow_topology(self) -> None:
        """Add tensors that are new or resized and drop those that left the model."""
        live, state = self._live(), self._state()
        known = {
            name: held
            for name, held in self.tensors.items()
            if name in live and held.shape == live[name].shape
        }
        self.tensors = {
            name: known[name] if name in known else tensor.detach().clone()
            for name, tensor in live.items()
        }
        kept = {name: held for name, held in self.state.items() if name in known}
        born = {name: held for name, held in state.items() if name not in known}
        self.state = {**kept, **copy.deepcopy(born)}

    def restore(self) -> None:
        """Copy everything back into the model's own tensors."""
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
        state, named = self._optimizer.state, self._model.named_parameters()
        return {name: state[p] for name, p in named if p in state}


class Safety:
    """Checks every optimiser step of a growing model and undoes bad ones.

    Without a config it only removes seeds whose own code raises.
    """

    def __init__(self, model: GrowingModel, config: GovernorConfig | None) -> None:
        assert model.surgery is not None
        self.incidents: list[str] = []
        """Refused batches, roll-backs and removed seeds since the last decision."""
        self.rollbacks = 0
        """How often the current snapshot was restored."""
        self._model, self._ranks = model, model.ranks
        self._optimizer = model.surgery.optimizer
        self._members = self._optimizer.members
        self._shadow_failures = 0
        self._refused = 0
        """Batches refused since the last healthy one."""
        self._last_reason = ""
        self._has_warned = False
        self._due = False
        self._loss: Tensor | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        """Buffers, and their values before the batch."""
        self._checked_buffers: list[Tensor] = []
        self.monitor: HealthMonitor | None = None
        if config is None:
            return
        for name, parameter in self._model.host.named_parameters():
            if not all_finite([parameter], OVERFLOW_LIMIT):
                raise InvalidInputError(
                    f"{name!r} is not finite. Only a host with finite weights can grow."
                )
        self.monitor = HealthMonitor(config)
        self._constants = self._find_constants()
        self.snapshot = Snapshot(self._model, self._optimizer)
        self._healthy = self.monitor.state_dict()
        model.surgery.before_step = self._before_step

    def _find_constants(self) -> set[int]:
        """Ids of buffers that are not finite: a mask of -inf is no error."""
        buffers = self._model.host.buffers()
        return {id(b) for b in buffers if not all_finite([b], OVERFLOW_LIMIT)}

    def host_changed(self) -> None:
        """Take a snapshot of a host whose tensors have other names, and new ones."""
        if self.monitor is not None:
            self._constants = self._find_constants()
            self.snapshot.take()

    def take_snapshot(self) -> bool:
        """Save the current state if it is finite; returns whether it is."""
        if self.monitor is None:
            return False
        healthy = self._is_finite()
        if healthy:
            self.snapshot.take()
            self._healthy = self.monitor.state_dict()
            self._due, self.rollbacks, self._refused = False, 0, 0
        return healthy

    def topology_changed(self) -> None:
        """Update the snapshot's tensors; take a new one at the next healthy batch."""
        if self.monitor is not None:
            self.snapshot.follow_topology()
            self._due = True

    def before_batch(self) -> None:
        """Save the buffers before the first batch of a step."""
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
            self._checked_buffers = [
                b for b in _inexact(live) if id(b) not in self._constants
            ]
        elif live:
            torch._foreach_copy_([held for _, held in self._buffers], live)

    def after_batch(self, loss: Tensor) -> None:
        """Keep the worst loss of a step until its gradients are checked."""
        loss = loss.reshape(()) if loss.dim() else loss
        if self._loss is not None:
            # A non-finite loss here is of a step that the user or a GradScaler skipped.
            # If its gradients are still there, the gradient norm shows them.
            worst = torch.maximum(self._loss, loss)
            loss = torch.where(self._loss.isfinite(), worst, loss)
        self._loss = loss

    def check_decision(self) -> bool:
        """Roll back if the model is damaged or got worse; returns whether it did."""
        if self.monitor is None:
            return False
        reason, usual = "", self.monitor.medians()[0]
        if not self._is_finite():
            reason = "a weight, buffer or moment of the model is not finite"
        elif self.monitor.has_unlearnt(usual):
            reason = (
                f"the median loss is {usual:.4g} now, worse than the "
                f"{self.monitor.first_window:.4g} at the start; what was learnt is lost"
            )
        if reason:
            self._roll_back(reason)
        return bool(reason)

    def refuse_untrained(self) -> None:
        """Raise if all recent batches were refused."""
        if self.monitor is None:
            return
        if self._refused > MAX_ROLLBACKS * self.monitor.config.patience:
            raise NumericsError(
                f"the last {self._refused} batches were all refused, so nothing is "
                f"learnt: {self._last_reason}. Check the data for NaN and the "
                "learning rate; governor=None switches the checks off."
            )

    def remove_failed_seeds(self, *, together: bool = False) -> None:
        """Remove seeds whose own code raised.

        With several ranks this needs `together`: all of them must call it.
        """
        failed = self._model.seeds.flow.failed
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
            if not self._ranks.all_agree(all_finite(tensors, OVERFLOW_LIMIT)):
                self._remove(slot, "its weights are not finite")

    def _remove(self, slot: int, reason: str) -> None:
        self._model.remove(slot, reason)
        self.incidents.append(f"removed {self._model.slots[slot]}: {reason}")
        self.topology_changed()

    def _before_step(self) -> None:
        """Check loss, gradients and buffers; clear the gradients of a bad batch."""
        assert self.monitor is not None
        if self._ranks.many:
            self.remove_failed_seeds(together=True)
        groups: Sequence[Any] = [g for o in self._members for g in o.param_groups]
        own = [
            g for group in groups for p in group["params"] if (g := p.grad) is not None
        ]
        if not own:
            return
        of_seeds: Sequence[Tensor] = ()
        shadow: Collection[int] = ()
        if self._model.seeds._modules and (shadow := self._training_tensors()):
            # These do not affect the host: its norm is without them.
            trained = [
                p for group in groups for p in group["params"] if id(p) in shadow
            ]
            of_seeds = [p.grad for p in trained if p.grad is not None]
            known = {id(gradient) for gradient in of_seeds}
            own = [gradient for gradient in own if id(gradient) not in known]
        loss, norm, finite, seeds_finite = self._measured(own, of_seeds, shadow)
        self._loss = None
        due = self._due and not self.monitor.has_unlearnt(loss)
        verdict = self.monitor.check(loss, norm, finite=finite)
        if verdict is not Verdict.HEALTHY:
            reason = self.monitor.describe(verdict, loss, norm, finite=finite)
            self._refuse(verdict, reason)
            return
        self._refused = 0
        if seeds_finite:
            self._shadow_failures = 0
        else:
            self._refuse_shadow(shadow)
        if due:
            self.take_snapshot()

    def _measured(
        self,
        own: Sequence[Tensor],
        of_seeds: Sequence[Tensor],
        shadow: Collection[int],
    ) -> tuple[float | None, float, bool, bool]:
        """Loss if known, gradient norm, whether buffers and seed gradients are finite.

        One read from the device; with several ranks, the worst of all.
        """
        buffers = self._checked_buffers
        if shadow:
            buffers = [b for b in buffers if id(b) not in shadow]
        tensors = [*own, *of_seeds, *buffers]
        try:
            found = torch._foreach_norm(tensors)
        except NotImplementedError:  # of sparse tensors
            tensors = [t.coalesce().values() if t.is_sparse else t for t in tensors]
            found = torch._foreach_norm(tensors)
        if self._loss is not None:  # without `grower.loss` it is unknown
            found = (*found, self._loss)
        if tensors[0].is_cpu:  # where single reads are faster than stacking
            read = [number.item() for number in found]
        else:
            read = torch.stack([n.to(tensors[0].device) for n in found]).tolist()
        loss = None if self._loss is None else read.pop()
        norm = math.hypot(*read[: len(own)])
        seeds_finite = finite = True
        if len(read) > len(own):
            del read[: len(own)]
            seeds_finite = all(map(math.isfinite, read[: len(of_seeds)]))
            finite = all(n <= OVERFLOW_LIMIT for n in read[len(of_seeds) :])
            finite = finite or all_finite(buffers, OVERFLOW_LIMIT)
        if self._ranks.many:
            bad = [float(not finite), float(not seeds_finite)]
            shown = -math.inf if loss is None else loss  # on all ranks or on none
            mine = torch.tensor([shown, norm, *bad], device=tensors[0].device)
            shown, norm, *bad = self._ranks.worst(mine).tolist()
            loss = None if loss is None else shown
            finite, seeds_finite = (not flag for flag in bad)
        return loss, norm, finite, seeds_finite

    def _refuse(self, verdict: Verdict, reason: str) -> None:
        """Skip the step; roll back if the model itself is damaged."""
        # A GradScaler that lowers its scale skips steps of fused optimisers this way.
        members = self._optimizer.members
        is_skipped = any(bool(getattr(one, "found_inf", None)) for one in members)
        self._refused += not is_skipped
        self._last_reason = reason.removesuffix("; the step was refused")
        self._undo()
        sound = self._ranks.all_agree(all_finite(self._active(), OVERFLOW_LIMIT))
        if verdict is Verdict.DIVERGED or not sound:
            self._roll_back(reason)
        else:
            self.incidents.append(f"refused: {reason}")
        if not is_skipped and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a batch was refused: {self._last_reason}. grower.summary() counts "
                "further ones; governor=None switches the checks off.",
                EsperWarning,
                stacklevel=2,
            )

    def _refuse_shadow(self, shadow: Collection[int]) -> None:
        """Drop non-finite gradients of training seeds; remove seeds that repeat it."""
        assert self.monitor is not None
        self._undo(shadow)
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
        """Restore the snapshot and remove seeds whose output is not finite.

        The second roll-back to a snapshot clears the moments. The third one removes the
        newest seed and restarts the statistics: a lasting high loss may be a new task.
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
            spoilers = [s for s in slots if self._is_finite_with(left_out=[s])]
        for slot in spoilers:
            self._remove(slot, "its output is not finite")
        stages, ages = (
            self._model.seeds.states.stage[0],
            self._model.seeds.states.age[0],
        )
        active = [slot for slot in slots if int(stages[slot]) in REMOVABLE]
        if active and not spoilers and self.rollbacks >= MAX_ROLLBACKS:
            newest = min(active, key=lambda slot: int(ages[slot]))
            self._remove(newest, "training kept failing with it")
        if self.rollbacks >= MAX_ROLLBACKS:
            fresh = HealthMonitor(self.monitor.config)
            self._healthy = fresh.state_dict()
            self.monitor.load_state_dict(self._healthy)

    def _is_finite_with(self, **seeds: int | Collection[int]) -> bool:
        """Whether the output is finite with one seed `tried` or some `left_out`."""
        with self._model.seeds.flow.using(**seeds):
            fine = all_finite(self._model.example_outputs())
        return self._ranks.all_agree(fine)

    def _undo(self, only: Collection[int] | None = None) -> None:
        """Drop gradients and restore buffers; all, or those with the ids `only`."""
        for parameter in (p for g in self._optimizer.param_groups for p in g["params"]):
            if only is None or id(parameter) in only:
                parameter.grad = None
        with torch.no_grad():
            for buffer, held in self._buffers:
                if only is None or id(buffer) in only:
                    buffer.copy_(held)

    def _training_tensors(self) -> set[int]:
        """Ids of parameters and buffers of seeds in TRAINING."""
        modules, _ = self._model.parts()
        held = (home for m in modules for home in (m._parameters, m._buffers))
        return {id(tensor) for home in held for tensor in home.values()}

    def _active(self) -> list[Tensor]:
        """Parameters and buffers that affect the host's output."""
        skip = self._training_tensors() | self._constants
        everything = (*self._model.parameters(), *self._model.buffers())
        return [tensor for tensor in everything if id(tensor) not in skip]

    def _moments(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Tensors in the optimiser state of some parameters."""
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
        fine = all_finite([*active, *self._moments(active)], OVERFLOW_LIMIT)
        return self._ranks.all_agree(fine)


def all_finite(tensors: Sequence[Tensor], limit: float = math.inf) -> bool:
    """Whether no value is NaN, infinite or larger than the limit."""
    norms = _norms(tensors)
    # A norm bounds the largest value and is fast, but it may overflow.
    if not norms or bool((torch.stack(norms) <= min(limit, FLOAT32_MAX)).all()):
        return True
    largest = torch.stack(_norms(tensors, torch.inf))
    return bool((torch.isfinite(largest) & (largest <= limit)).all())


def _norms(tensors: Sequence[Tensor], order: float = 2.0) -> tuple[Tensor, ...]:
    numbers = [tensor.detach() for tensor in _inexact(tensors)]
    return torch._foreach_norm(numbers, order) if numbers else ()


def _inexact(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Non-empty tensors of floating-point or complex numbers."""
    return [
        t for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())
    ]


def _unexpanded(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The tensor with expanded axes narrowed to 1, since those cannot be written."""
    strides = (tensor if like is None else like).stride()
    tensor = tensor.detach()
    for axis, stride in enumerate(strides):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
