"""The governor: whether training is still healthy, judged from what it has seen.

    not finite    loss, gradient norm or a buffer is NaN or infinite
    spike         x > m + (k - 1) max(|m|, q) + slack |first|
    diverged      `patience` bad batches in a row
    guessing      at a decision, the window's median is back above the first window's

with m the median and q the interquartile range of the last `window` batches; for an
ordinary loss, q < m and the spike is x > k m + slack. The range serves losses that
cross zero, the slack those that come near it. Limits are renewed every eighth batch; a
bad batch never enters the figures: an older one keeps its place. Everything is over
[env] and nothing is read from the device.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.errors import BadInput

WARM_UP: Final = 8  # healthy batches before a median means anything
RENEWAL: Final = 8  # batches between two looks at the ring: sorting costs time
_LARGEST: Final = torch.finfo(torch.float32).max


class Verdict(IntEnum):
    """What the governor thinks of one environment, worst last."""

    HEALTHY = 0
    NON_FINITE = 1
    SPIKE = 2
    DIVERGED = 3
    WORSE_THAN_GUESSING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorConfig:
    """How far from its own past a healthy run may go."""

    spike: float = 1000.0
    """Gradient norm, against its running median, from which a batch is refused."""
    loss_spike: float = 20.0
    """Loss, against its running median, from which a batch is refused."""
    window: int = 32
    """Healthy batches that the running figures look back on."""
    patience: int = 3
    """Bad batches in a row that make a run diverged."""
    guessing: float = 1.5
    """Median loss, against that of the first window, that undoes all learning."""
    slack: float = 0.5
    """Rise that is never a spike, as a share of the first figures."""

    def __post_init__(self) -> None:
        """Refuse limits that a healthy run would cross."""
        for name in ("spike", "loss_spike", "guessing"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 1.0):
                raise BadInput(f"{name} must be finite and above 1, got {value}.")
        if not (math.isfinite(self.slack) and self.slack >= 0.0):
            raise BadInput(f"slack must be finite and not negative, got {self.slack}.")
        if self.window < WARM_UP:
            raise BadInput(f"window must be at least {WARM_UP}, got {self.window}.")
        if self.patience < 1:
            raise BadInput(f"patience must be at least 1, got {self.patience}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Running figures; `figure` 0 is the loss and 1 the gradient norm."""

    ring: Float[Tensor, "figure env window"]
    """The last batches that were healthy; infinite where there was none yet."""
    limits: Float[Tensor, "figure env"]
    """What a figure may not exceed; infinite before eight batches were seen."""
    first: Float[Tensor, "figure env"]
    """The first medians that were known; NaN before."""
    first_window: Float[Tensor, " env"]
    """Median loss of the first full window; NaN before."""
    best: Float[Tensor, " env"]
    """Lowest median loss of any full window; infinite before."""
    streak: Int64[Tensor, " env"]
    """Bad batches since the last healthy one."""
    batches: int
    """Batches judged so far, good and bad."""

    @classmethod
    def fresh(
        cls, envs: int, window: int, device: torch.device | str = "cpu"
    ) -> "Record":
        """A record of nothing."""
        return cls(
            ring=torch.full((2, envs, window), torch.inf, device=device),
            limits=torch.full((2, envs), torch.inf, device=device),
            first=torch.full((2, envs), torch.nan, device=device),
            first_window=torch.full((envs,), torch.nan, device=device),
            best=torch.full((envs,), torch.inf, device=device),
            streak=torch.zeros(envs, dtype=torch.int64, device=device),
            batches=0,
        )

    def after(
        self,
        loss: Float[Tensor, " env"],
        grad_norm: Float[Tensor, " env"],
        verdict: Int64[Tensor, " env"],
        config: GovernorConfig,
    ) -> "Record":
        """The record once this batch has been judged; only healthy ones enter."""
        healthy = verdict == 0
        ring = self.ring.clone()
        place = ring.select(-1, self.batches % ring.shape[-1])
        place.copy_(torch.where(healthy, _figures(loss, grad_norm), place))
        after = replace(
            self,
            ring=ring,
            streak=(self.streak + 1).masked_fill(healthy, 0),
            batches=self.batches + 1,
        )
        return after if after.batches % RENEWAL else after._renewed(config)

    def where(self, chosen: Bool[Tensor, " env"], other: "Record") -> "Record":
        """The other record in the `chosen` environments, this one elsewhere."""
        return Record(
            ring=torch.where(chosen[:, None], other.ring, self.ring),
            limits=torch.where(chosen, other.limits, self.limits),
            first=torch.where(chosen, other.first, self.first),
            first_window=torch.where(chosen, other.first_window, self.first_window),
            best=torch.where(chosen, other.best, self.best),
            streak=torch.where(chosen, other.streak, self.streak),
            batches=self.batches,
        )

    def _renewed(self, config: GovernorConfig) -> "Record":
        """Medians and limits from what the ring holds now."""
        (low, middle, high), filled = _quartiles(self.ring)
        seen, full = filled >= WARM_UP, filled >= config.window
        first = torch.where(self.first.isnan() & seen, middle, self.first)
        start = self.first_window
        scale = torch.maximum(middle.abs(), high - low)
        loss, norm = scale.unbind()
        far = torch.stack([loss * (config.loss_spike - 1), norm * (config.spike - 1)])
        limits = middle + far + config.slack * first.abs()
        return replace(
            self,
            limits=torch.where(seen, limits.clamp(max=_LARGEST), torch.inf),
            first=first,
            first_window=torch.where(start.isnan() & full, middle[0], start),
            best=torch.where(full, torch.minimum(self.best, middle[0]), self.best),
        )


def judge_batch(
    loss: Float[Tensor, " env"],
    grad_norm: Float[Tensor, " env"],
    buffers_finite: Bool[Tensor, " env"],
    record: Record,
    config: GovernorConfig,
) -> Int64[Tensor, " env"]:
    """The `Verdict` on one batch, before its step is taken.

    Until eight healthy batches were seen, only NON_FINITE is possible. Finite means
    finite in single precision.
    """
    figures = _figures(loss, grad_norm)
    finite = (figures.abs() <= _LARGEST).all(dim=0) & buffers_finite
    spike = (figures > record.limits).any(dim=0)
    verdict = torch.where(finite, spike * int(Verdict.SPIKE), int(Verdict.NON_FINITE))
    known = record.limits[0] <= _LARGEST
    last = (record.streak >= config.patience - 1) & known & (verdict > 0)
    return verdict.masked_fill(last, int(Verdict.DIVERGED))


def judge_decision(record: Record, config: GovernorConfig) -> Int64[Tensor, " env"]:
    """WORSE_THAN_GUESSING where what was learnt is lost again, else HEALTHY."""
    (_, middle, _), _ = _quartiles(record.ring[:1])
    lost = unlearnt(middle[0], record, config)
    return torch.where(lost, int(Verdict.WORSE_THAN_GUESSING), 0)


def unlearnt(
    loss: Float[Tensor, " env"], record: Record, config: GovernorConfig
) -> Bool[Tensor, " env"]:
    """Where a loss is back above that of the first window, after it had fallen."""
    start = record.first_window
    limit = start + (config.guessing - 1.0) * start.abs()
    limit = limit + config.slack * record.first[0].abs()
    return (record.best < start) & (loss > limit)


class Governor:
    """Watches N runs: judges, and remembers what was healthy."""

    def __init__(
        self,
        envs: int = 1,
        config: GovernorConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if envs < 1:
            raise BadInput(f"envs must be at least 1, got {envs}.")
        self.config = GovernorConfig() if config is None else config
        self.record = Record.fresh(envs, self.config.window, device)

    def batch(
        self,
        loss: Float[Tensor, " env"],
        grad_norm: Float[Tensor, " env"],
        buffers_finite: Bool[Tensor, " env"],
    ) -> Int64[Tensor, " env"]:
        """Judge one batch and remember it if it is healthy."""
        with torch.no_grad():
            verdict = judge_batch(
                loss, grad_norm, buffers_finite, self.record, self.config
            )
            self.record = self.record.after(loss, grad_norm, verdict, self.config)
        return verdict

    def decision(self) -> Int64[Tensor, " env"]:
        """Judge what was learnt so far."""
        return judge_decision(self.record, self.config)

    def forgive(self, chosen: Bool[Tensor, " env"]) -> None:
        """Start counting bad batches anew where a run was rolled back."""
        streak = torch.where(chosen, 0, self.record.streak)
        self.record = replace(self.record, streak=streak)

    def reset(self, chosen: Bool[Tensor, " env"]) -> None:
        """Forget everything of the `chosen` runs: others begin in their place."""
        ring = self.record.ring
        fresh = Record.fresh(ring.shape[1], ring.shape[2], ring.device)
        self.record = self.record.where(chosen, fresh)

    def figures(
        self,
        loss: float,
        grad_norm: float,
        *,
        buffers_finite: bool = True,
        env: int = 0,
    ) -> "Figures":
        """What `describe` tells of one run; reads the device, so only for an event."""
        record = self.record
        (_, middle, _), _ = _quartiles(record.ring)
        return Figures(
            loss=loss,
            grad_norm=grad_norm,
            buffers_finite=buffers_finite,
            usual_loss=float(middle[0, env]),
            usual_norm=float(middle[1, env]),
            first_loss=float(record.first_window[env]),
            streak=int(record.streak[env]),
        )

    def state_dict(self) -> dict[str, Any]:
        """The record, as tensors of its own."""
        return copy.deepcopy({f.name: getattr(self.record, f.name) for f in _FIELDS})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a record that was saved."""
        now = {f.name: getattr(self.record, f.name) for f in _FIELDS}
        for name, value in now.items():
            wanted, came = _shape(value), _shape(state.get(name))
            if wanted != came:
                raise BadInput(
                    f"the governor's {name} must be {wanted}, got {came}; load a "
                    "state of the same envs and window."
                )
        self.record = Record(
            **{
                name: state[name].to(value, copy=True)
                if isinstance(value, Tensor)
                else state[name]
                for name, value in now.items()
            }
        )


_FIELDS: Final = fields(Record)


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return type(value).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The numbers behind one verdict on one run."""

    loss: float
    grad_norm: float
    buffers_finite: bool
    usual_loss: float
    """Running median of the loss."""
    usual_norm: float
    """Running median of the gradient norm."""
    first_loss: float
    """Median loss of the first window."""
    streak: int
    """Bad batches in a row."""


def describe(verdict: Verdict, figures: Figures) -> str:
    """The plain sentence for the event."""
    match verdict:
        case Verdict.HEALTHY:
            return f"training is healthy (loss {figures.loss:.4g})"
        case Verdict.NON_FINITE:
            return f"{_not_finite(figures)}; the step was refused"
        case Verdict.SPIKE:
            return f"{_far_off(figures)}; the step was refused"
        case Verdict.DIVERGED:
            larger = max(figures.loss, figures.grad_norm, key=_magnitude)
            finite = _magnitude(larger) <= _LARGEST and figures.buffers_finite
            why = _far_off if finite else _not_finite
            return f"{figures.streak} bad batches in a row; at the last, {why(figures)}"
        case Verdict.WORSE_THAN_GUESSING:
            return (
                f"the loss is usually {figures.usual_loss:.4g} now, worse than the "
                f"{figures.first_loss:.4g} it began with; what was learnt is lost"
            )


def all_finite(tensors: Sequence[Tensor], limit: float = math.inf) -> Bool[Tensor, ""]:
    """Whether no number is NaN, infinite or beyond the limit; one small result."""
    numbers = [
        tensor.detach()
        for tensor in tensors
        if tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())
    ]
    if not numbers:
        return torch.ones((), dtype=torch.bool)
    # The largest magnitude cannot overflow, as a sum of squares would.
    largest = torch.stack(torch._foreach_norm(numbers, torch.inf))
    return (torch.isfinite(largest) & (largest <= limit)).all()


def _magnitude(value: float) -> float:
    return math.inf if math.isnan(value) else abs(value)


def _not_finite(figures: Figures) -> str:
    if not abs(figures.loss) <= _LARGEST:
        return f"the loss is not finite ({figures.loss})"
    if not abs(figures.grad_norm) <= _LARGEST:
        return f"the gradient norm is not finite ({figures.grad_norm})"
    return "a buffer of the model is not finite"


def _far_off(figures: Figures) -> str:
    loss = (figures.loss, figures.usual_loss, "loss")
    norm = (figures.grad_norm, figures.usual_norm, "gradient norm")
    # The one further from its median is the reason a reader looks for.
    value, usual, name = max(loss, norm, key=lambda f: f[0] / max(abs(f[1]), 1e-30))
    return f"the {name} is {value:.4g}, usually {usual:.4g}"


def _figures(
    loss: Float[Tensor, " env"], grad_norm: Float[Tensor, " env"]
) -> Float[Tensor, "2 env"]:
    return torch.stack([loss.detach().float(), grad_norm.detach().float()])


def _quartiles(
    ring: Float[Tensor, "figure env window"],
) -> tuple[tuple[Tensor, ...], Int64[Tensor, " env"]]:
    """Quartiles, each [figure, env], of the filled places, and how many they are."""
    ordered = ring.sort(dim=-1).values  # the empty places are infinite, so last
    filled = (ring[0] <= _LARGEST).sum(dim=-1)
    last = (filled - 1).clamp(min=0)[:, None]
    places = last * torch.arange(1, 4, device=ring.device) // 4  # [env, 3]
    values = ordered.gather(-1, places.expand(ring.shape[0], -1, -1))
    return values.unbind(-1), filled
