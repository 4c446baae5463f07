"""What is measured on a growing model: its score, and what a controller sees of it.

A score lies in [0, 1] and more is better. An accuracy is its own score; a loss m
becomes m0 / (m0 + m), with m0 its first value: 1/2 at the start, 1 at no loss. Where a
metric leaves [0, 1] or a loss falls below 0, all of a run become 1/2 + g / (2 |g| + 2 +
2 |m0|), with g what was gained since the first. `Track` follows score and loss over
decisions in `[env]` tensors; `observe` is what a controller sees of one model with its
slots, relative to the host. What slots contribute or promise is not measured: it was
found not to predict what pruning or planting brings.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from typing import Any, Final, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from esper.contracts.errors import InvalidInputError
from esper.contracts.slots import SlotStates
from esper.contracts.stages import Stage
from esper.contracts.world import BlueprintOffers, HostStates, Observation
from esper.growth.analysis.tracing import isolated
from esper.growth.model import GrowingModel

MEMORY: Final = 0.6
"""Decay of the running slopes per decision."""

Mode = Literal["max", "min"]
MODES: Final = get_args(Mode)
Metric = float | Callable[[], float]
"""A number, or a function that measures it."""


class MetricScorer:
    """Turns a user's metric of a growing model into scores.

    The mode is "max" if more is better, "min" for a loss.
    """

    def __init__(self, model: GrowingModel, mode: str) -> None:
        if mode not in MODES:
            raise InvalidInputError(f"mode must be 'max' or 'min', got {mode!r}.")
        self._model, self._mode = model, mode

    def measure(self, metric: Metric) -> float:
        """The metric; a function's side effects on the model are undone."""
        value: Any = metric
        if callable(metric):
            with isolated(self._model, training=self._model.host.training):
                value = metric()
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"the metric must be a number, got {value!r}."
            ) from error

    def score(self, metric: float, earlier: Sequence[float] = ()) -> float:
        """The metric as a score; refuses one that is not finite.

        Args:
            metric: The newest one.
            earlier: All before it, which decide on the scale with it.
        """
        if not isfinite(metric):
            raise InvalidInputError(f"the metric must be finite, got {metric}.")
        return self.scores([*earlier, metric])[-1]

    def scores(self, metrics: Sequence[float]) -> list[float]:
        """All metrics of a run as scores on one scale."""
        first, least, most = metrics[0], min(metrics), max(metrics)
        if self._mode == "max" and least >= 0 and most <= 1:
            return [*metrics]
        if self._mode == "min" and first > 0 and least >= 0:
            return [first / (first + metric) for metric in metrics]
        sign = 1 if self._mode == "max" else -1
        gains = [sign * (metric - first) for metric in metrics]
        return [0.5 + g / (2 * abs(g) + 2 + 2 * abs(first)) for g in gains]


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

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Track":
        """As it was saved; refuses what is no track of one host."""
        fresh = cls.fresh(1)
        for field in fields(cls):
            value, like = saved.get(field.name), getattr(fresh, field.name)
            if not isinstance(value, Tensor) or value.shape != like.shape:
                raise InvalidInputError(
                    f"the saved track has no {field.name!r} of one host."
                )
        return cls(**saved)

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
) -> Observation:
    """One model before a decision; budget and rent are per multiple of the host."""
    host = model.analysis.parameters
    added = model.parameters_added / host
    return Observation(
        episode_start=track.decisions <= 1,
        host=host_states(
            track,
            horizon=horizon,
            compute=torch.tensor([compute], dtype=torch.float64),
            budget_left=torch.tensor([budget - added]),
            rent=torch.tensor([rent]),
            added=torch.tensor([added]),
        ),
        slots=slot_states(model),
        offers=offers(model),
    )


def slot_states(model: GrowingModel) -> SlotStates:
    """All slots of one model."""
    states, count = model.states, range(len(model.slots))
    units = [float(_units(model, slot)) for slot in count]
    seeds = {
        slot: model.cost_of(slot).parameters
        for slot in count
        if f"slot_{slot}" in model.seeds
    }

    def row(values: Sequence[float]) -> Tensor:
        return torch.tensor([values], dtype=torch.float32)

    none = torch.zeros_like(states.alpha)
    return SlotStates(
        stage=states.stage,
        age=states.age,
        alpha=states.alpha,
        alpha_target=states.alpha_target,
        alpha_settled=states.settled,
        blueprint=states.blueprint,
        style=states.style,
        parameters=row([seeds.get(s, 0) / model.analysis.parameters for s in count]),
        depth=row(_depths(model)),
        capacity=row([width / max(units) for width in units]),
        units=row(units),
        # As in the world that controllers are trained in.
        liveness=none + 1,
        gradient_share=none + 1,
        contribution=none,
        contribution_measured=none.bool(),
    )


def _depths(model: GrowingModel) -> list[float]:
    """Ranks of the places by depth, in (0, 1]."""
    places = model.analysis.places
    order = sorted(range(len(places)), key=lambda place: places[place].depth)
    ranks = [(order.index(place) + 1) / len(places) for place in range(len(places))]
    return ranks * (len(model.slots) // len(places))


def _units(model: GrowingModel, slot: int) -> int:
    geometry = model.place(slot).geometry
    return model.seeds.width(slot) if geometry.spans else geometry.outlet_width


def offers(model: GrowingModel) -> BlueprintOffers:
    """What every slot of one model could be planted with.

    The first free slot of every place is offered, as where controllers are trained:
    slots of a place are all the same.
    """
    host, kinds = model.analysis, model.spec.blueprints
    prices = [
        model.price(place, kind) for place in range(len(host.places)) for kind in kinds
    ]
    rows = [
        (price.parameters / host.parameters, price.macs / max(1, host.macs), 1.0)
        if price
        else (0.0, 0.0, 0.0)
        for price in prices
    ]
    table = torch.tensor(rows).unflatten(0, (1, len(host.places), len(kinds)))
    per_place = len(model.slots) // len(host.places)
    size, work, fits = table.repeat(1, per_place, 1, 1).unbind(-1)
    unknown = torch.zeros_like(size)
    free = (model.states.stage == Stage.DORMANT).unflatten(1, (per_place, -1))
    first = (free & (free.cumsum(dim=1) == 1)).flatten(1)
    return BlueprintOffers(
        fits=fits.bool() & first[:, :, None],
        parameters=size,
        macs=work,
        promise=unknown,
        promise_known=unknown.bool(),
    )


def concat(records: Sequence[Any]) -> Any:  # noqa: ANN401
    """Records of several models with equally many slots, field by field as a batch."""
    if not is_dataclass(records[0]):
        return torch.cat([*records])
    kind: Any = type(records[0])
    return kind(
        **{
            field.name: concat([getattr(record, field.name) for record in records])
            for field in fields(records[0])
        }
    )
