"""What is measured on a growing model: score, contributions, and the observation.

A score lies in [0, 1] and more is better. An accuracy is its own score; a loss m
becomes m0 / (m0 + m), with m0 its first value: 1/2 at the start, 1 at no loss. A seed's
contribution is the score lost by leaving it out. `Track` follows score and loss over
decisions in `[env]` tensors; `observe` is what a controller sees of one model with its
slots, relative to the host, with flags for what was not measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import inf, isfinite, nan
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotStates
from esper.contracts.stages import LIVING, Stage
from esper.contracts.world import BlueprintOffers, HostStates, Observation
from esper.growth.hooks import SlotHooks
from esper.growth.model import GrowingModel
from esper.growth.promise import promises
from esper.growth.tracing import isolated

MEMORY: Final = 0.6
"""Decay of the running slopes per decision."""

Metric = float | Callable[[], float]
"""A number, or a function that measures it."""


class MetricScorer:
    """Turns a user's metric of a growing model into scores.

    The mode is "max" for an accuracy in [0, 1], "min" for a loss.
    """

    def __init__(self, model: GrowingModel, mode: str) -> None:
        if mode not in ("max", "min"):
            raise BadInput(f"mode must be 'max' or 'min', got {mode!r}.")
        self._model, self._mode = model, mode
        self.first = nan
        """The first metric of mode "min"."""

    def measure(self, metric: Metric) -> float:
        """The metric; a function's side effects on the model are undone."""
        value: Any = metric
        if callable(metric):
            model = self._model
            with (
                model.flow.using(quiet=True),
                isolated(model, training=model.host.training),
            ):
                value = metric()
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise BadInput(f"the metric must be a number, got {value!r}.") from error

    def score(self, metric: float) -> float:
        """The metric as a score."""
        if self._mode == "max":
            if not 0.0 <= metric <= 1.0:
                raise BadInput(
                    f"the metric must lie in [0, 1], got {metric}; for a loss, build "
                    "the Grower with mode='min'."
                )
            return metric
        if not isfinite(metric) or metric < 0:
            raise BadInput(f"a loss must be finite and not negative, got {metric}.")
        if self.first != self.first:
            self.first = metric
        return self.first / max(self.first + metric, 1e-30)

    def contributions(self, metric: Metric, score: float) -> dict[int, float]:
        """Score lost without each living seed; empty if it cannot be measured.

        A seed in training is tried at alpha 1 instead of being left out.
        """
        if not callable(metric):
            return {}
        found = {}
        for slot, name in enumerate(self._model.slots):
            stage = self._model.stage(name)
            if stage is Stage.TRAINING:
                with self._model.flow.using(tried=slot):
                    found[slot] = self._score_or_zero(metric) - score
            elif stage in LIVING:
                with self._model.flow.using(left_out=slot):
                    found[slot] = score - self._score_or_zero(metric)
        return found

    def _score_or_zero(self, metric: Metric) -> float:
        """A score of 0 where a broken seed spoils the metric."""
        measured = self.measure(metric)
        return self.score(measured) if isfinite(measured) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """How hosts have done so far, by decision."""

    decisions: Int64[Tensor, " env"]
    score: Float[Tensor, " env"]
    score_slope: Float[Tensor, " env"]
    best: Float[Tensor, " env"]
    best_at: Int64[Tensor, " env"]
    """The decision at which the best score was seen."""
    first_loss: Float[Tensor, " env"]
    """The first loss that was known; NaN before."""
    loss: Float[Tensor, " env"]
    loss_slope: Float[Tensor, " env"]

    @classmethod
    def fresh(cls, envs: int, device: torch.device | str = "cpu") -> "Track":
        """Nothing seen yet."""
        real = torch.zeros(envs, device=device)
        whole = torch.zeros(envs, dtype=torch.int64, device=device)
        return cls(
            decisions=whole,
            score=real,
            score_slope=real,
            best=real - 1,
            best_at=whole,
            first_loss=real + torch.nan,
            loss=real + 1,
            loss_slope=real,
        )

    def after(
        self, score: Float[Tensor, " env"], loss: Float[Tensor, " env"]
    ) -> "Track":
        """One decision later; a loss that is not finite leaves the loss as it was."""
        new, unseen = self.decisions == 0, torch.isnan(self.first_loss)
        known = torch.isfinite(loss)
        loss = torch.where(known, loss, self.loss)
        first = torch.where(unseen & known, loss, self.first_loss)
        rise = torch.where(new, 0.0, score - self.score)
        fall = (loss - self.loss) / self.loss.abs().clamp(min=1e-12)
        fall = torch.where(unseen, 0.0, fall)
        better = score > self.best
        return Track(
            decisions=self.decisions + 1,
            score=score,
            score_slope=MEMORY * self.score_slope + (1 - MEMORY) * rise,
            best=torch.where(better, score, self.best),
            best_at=torch.where(better, self.decisions, self.best_at),
            first_loss=first,
            loss=loss,
            loss_slope=MEMORY * self.loss_slope + (1 - MEMORY) * fall,
        )


def host_states(
    track: Track,
    *,
    horizon: int | None,
    compute: Float[Tensor, " env"],
    budget_left: Float[Tensor, " env"],
    rent: Float[Tensor, " env"],
    added: Float[Tensor, " env"],
) -> HostStates:
    """Every host as a controller sees it.

    Args:
        track: How it has done.
        horizon: Decisions until the end; None if nobody knows it.
        compute: Batches of the starting host that cost as much as training so far.
        budget_left: Size that may be added, as a multiple of the starting host.
        rent: Score charged for as much size as the starting host has.
        added: Size added so far.
    """
    seen = (track.decisions - 1).clamp(min=0)
    whole = seen.clamp(min=1) if horizon is None else torch.full_like(seen, horizon)
    passed = torch.zeros_like(track.score) if horizon is None else seen / whole
    return HostStates(
        progress=passed.clamp(max=1.0),
        end_known=torch.full_like(seen, horizon is not None, dtype=torch.bool),
        compute=torch.log2(1 + compute).float(),
        budget_left=budget_left,
        rent=rent,
        added=added,
        score=track.score,
        score_slope=track.score_slope,
        loss=torch.where(
            torch.isnan(track.first_loss),
            1.0,
            track.loss / track.first_loss.abs().clamp(min=1e-12),
        ),
        loss_slope=track.loss_slope,
        plateau=((seen - track.best_at) / whole).clamp(0.0, 1.0),
    )


def observe(
    model: GrowingModel,
    track: Track,
    *,
    horizon: int | None,
    compute: float,
    budget: float,
    rent: float,
    contributions: Mapping[int, float],
) -> Observation:
    """One model before a decision; budget and rent are per multiple of the host."""
    host = model.survey.parameters
    added = model.parameters_added / host
    return Observation(
        first=track.decisions <= 1,
        host=host_states(
            track,
            horizon=horizon,
            compute=torch.tensor([compute], dtype=torch.float64),
            budget_left=torch.tensor([budget - added]),
            rent=torch.tensor([rent]),
            added=torch.tensor([added]),
        ),
        slots=slot_states(model, contributions),
        offers=offers(model, float(track.loss)),
    )


def slot_states(model: GrowingModel, contributions: Mapping[int, float]) -> SlotStates:
    """All slots of one model."""
    states, places = model.states, model.survey.places
    count = range(len(model.slots))
    widest = max(place.geometry.outlet_width for place in places)
    flows = [_gradient_flow(hooks) for hooks in model.hooks]
    total = sum(flows) or 1.0
    seeds = {
        slot: model.cost_of(slot).parameters
        for slot in count
        if f"slot_{slot}" in model.seeds
    }

    def row(values: Sequence[float]) -> Tensor:
        return torch.tensor([values], dtype=torch.float32)

    return SlotStates(
        stage=states.stage,
        age=states.age,
        alpha=states.alpha,
        alpha_target=states.alpha_target,
        alpha_settled=states.settled,
        blueprint=states.blueprint,
        style=states.style,
        parameters=row([seeds.get(s, 0) / model.survey.parameters for s in count]),
        depth=row([model.place(s).depth for s in count]),
        capacity=row([model.place(s).geometry.outlet_width / widest for s in count]),
        liveness=row([_liveness(model.hooks_of(s)) for s in count]),
        gradient_share=row([flows[s % len(places)] / total for s in count]),
        contribution=row([contributions.get(s, 0.0) for s in count]),
        contribution_measured=torch.tensor([[s in contributions for s in count]]),
    )


def offers(model: GrowingModel, loss: float) -> BlueprintOffers:
    """What every slot of one model could be planted with."""
    host, kinds, rows = model.survey, model.spec.blueprints, []
    for index, place in enumerate(host.places):
        sized = [model.sized(index, kind) for kind in kinds]
        gains = promises(model.hooks[index].samples, place.geometry, sized, loss)
        for blueprint, gain in zip(kinds, gains, strict=True):
            price = model.price(index, blueprint)
            if price is None:
                rows.append((False, 0.0, 0.0, 0.0, False))
                continue
            shares = (
                price.parameters / host.parameters,
                price.macs / max(1, host.macs),
            )
            rows.append((True, *shares, gain or 0.0, gain is not None))
    table = torch.tensor(rows, dtype=torch.float32)
    table = table.unflatten(0, (1, len(host.places), len(kinds)))
    per_place = len(model.slots) // len(host.places)
    fits, size, work, promise, measured = table.repeat(1, per_place, 1, 1).unbind(-1)
    return BlueprintOffers(
        fits=fits.bool(),
        parameters=size,
        macs=work,
        promise=promise,
        promise_known=measured.bool(),
    )


def together(records: Sequence[Any]) -> Any:  # noqa: ANN401
    """Records of several models with equally many slots, field by field as a batch."""
    if not is_dataclass(records[0]):
        return torch.cat([*records])
    kind: Any = type(records[0])
    return kind(
        **{
            field.name: together([getattr(record, field.name) for record in records])
            for field in fields(records[0])
        }
    )


def _gradient_flow(hooks: SlotHooks) -> float:
    """Activation RMS times gradient RMS: the loss's sensitivity to relative changes."""
    sampled = [s for s in hooks.samples if s.gradient is not None]
    if not sampled:
        return 1.0
    last = sampled[-1]
    assert last.gradient is not None
    size = last.outputs.float().square().mean().sqrt()
    flow = float(size * last.gradient.float().square().mean().sqrt() * last.rows)
    return flow if flow < inf else 1.0


def _liveness(hooks: SlotHooks) -> float:
    """Share of the channels at a place that vary with the input."""
    if not hooks.samples:
        return 1.0
    outputs = hooks.samples[-1].outputs.float()
    layout = hooks.place.geometry.outlet_layout
    rows = outputs.movedim(1, -1) if layout.channels_first else outputs
    spread = rows.reshape(-1, rows.shape[-1]).std(dim=0)
    return float((spread > 0.01 * spread.max()).float().mean())
