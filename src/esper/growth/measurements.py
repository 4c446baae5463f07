"""Scores of a growing model, and the observation of its controller.

A score lies in [0, 1]; higher is better. An accuracy is its own score. A loss m becomes
m0 / (m0 + m), with m0 its first value. If a metric leaves [0, 1] or a loss is negative,
all metrics of the run become 1/2 + g / (2 |g| + 2 + 2 |m0|), with g the gain since the
first. `Track` follows score and loss over decisions in `[env]` tensors. `observe`
returns the observation of one model, without contribution and promise of slots.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, Final, Literal, TypeVar, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from esper.contracts.errors import InvalidInputError
from esper.contracts.slots import SlotStates
from esper.contracts.stages import Stage
from esper.contracts.world import BlueprintOffers, HostStates, Observation
from esper.growth.analysis.tracing import isolated
from esper.growth.model import GrowingModel
from esper.growth.seed_modules import slot_number

SLOPE_DECAY: Final = 0.6
"""Decay of the running slopes per decision."""

Mode = Literal["max", "min"]
MODES: Final = get_args(Mode)
Metric = float | Callable[[], float]
"""A number, or a function that returns it."""


class MetricScorer:
    """Turns a user's metric into scores; `mode` is "max", or "min" for a loss."""

    def __init__(self, model: GrowingModel, mode: str) -> None:
        if mode not in MODES:
            raise InvalidInputError(f"mode must be 'max' or 'min', got {mode!r}.")
        self._model, self._mode = model, mode

    def measure(self, metric: Metric) -> float:
        """Value of the metric; side effects of a function on the model are undone."""
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
        """Score of a metric, on one scale with the `earlier` ones."""
        if not isfinite(metric):
            raise InvalidInputError(f"the metric must be finite, got {metric}.")
        return self.scores([*earlier, metric])[-1]

    def scores(self, metrics: Sequence[float]) -> list[float]:
        """Scores of all metrics of a run, on one scale."""
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
    """Scores and losses of hosts up to a decision."""

    decisions: Int64[Tensor, " env"]
    score: Float[Tensor, " env"]
    score_slope: Float[Tensor, " env"]
    best: Float[Tensor, " env"]
    best_at: Int64[Tensor, " env"]
    """Decision of the best score."""
    first_loss: Float[Tensor, " env"]
    """First finite loss; NaN before it."""
    loss: Float[Tensor, " env"]
    loss_slope: Float[Tensor, " env"]

    @classmethod
    def fresh(cls, envs: int, device: torch.device | str = "cpu") -> "Track":
        """Track before the first decision."""
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
        """Track from saved tensors; raises unless it is of one host."""
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
        """Track after one more decision; a non-finite loss is ignored."""
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
            score_slope=SLOPE_DECAY * self.score_slope + (1 - SLOPE_DECAY) * rise,
            best=torch.where(better, score, self.best),
            best_at=torch.where(better, self.decisions, self.best_at),
            first_loss=first,
            loss=loss,
            loss_slope=SLOPE_DECAY * self.loss_slope + (1 - SLOPE_DECAY) * fall,
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
    """Observation of every host; sizes are multiples of the starting host.

    Args:
        track: Scores and losses so far.
        horizon: Number of decisions; None if unknown.
        compute: Training compute so far, in batches of the starting host.
        budget_left: Size that may still be added.
        rent: Score charged per size.
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


Record = TypeVar("Record", SlotStates, BlueprintOffers)


def observe(
    model: GrowingModel,
    track: Track,
    *,
    horizon: int | None,
    compute: float,
    budget: float,
    rent: float,
) -> Observation:
    """Observation of one model; budget and rent are per multiple of the host."""
    host = model.first_cost.parameters
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
        slots=_decided(model, slot_states(model)),
        offers=_decided(model, offers(model)),
    )


def _decided(model: GrowingModel, record: Record) -> Record:
    """A record of all slots without those that follow another one."""
    if len(model.decided) == len(model.slots):
        return record
    values = {one.name: getattr(record, one.name) for one in fields(record)}
    return replace(record, **{n: v[:, model.decided] for n, v in values.items()})


def slot_states(model: GrowingModel) -> SlotStates:
    """Observation of all slots of one model."""
    states, count = model.seeds.states, range(len(model.slots))
    units = [float(_units(model, slot)) for slot in count]
    seeds = {
        slot_number(name): sum(p.numel() for p in seed.parameters())
        for name, seed in model.seeds.items()
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
        parameters=row([seeds.get(s, 0) / model.first_cost.parameters for s in count]),
        depth=row(_depths(model)),
        capacity=row([width / max(units) for width in units]),
        units=row(units),
        # Constants, as in the training of controllers.
        liveness=none + 1,
        gradient_share=none + 1,
        contribution=none,
        contribution_measured=none.bool(),
    )


def _depths(model: GrowingModel) -> list[float]:
    """Ranks of the places by depth, in (0, 1]."""
    places = model.seeds.places
    order = sorted(range(len(places)), key=lambda place: places[place].depth)
    ranks = [(order.index(place) + 1) / len(places) for place in range(len(places))]
    return ranks * (len(model.slots) // len(places))


def _units(model: GrowingModel, slot: int) -> int:
    geometry = model.seeds.place(slot).geometry
    return model.seeds.width(slot) if geometry.spans else geometry.outlet_width


def offers(model: GrowingModel) -> BlueprintOffers:
    """Blueprints that can be planted in every slot, and their costs.

    Only the first free slot of a place is offered, since its slots are equivalent.
    """
    host, kinds = model.first_cost, model.spec.blueprints
    places = len(model.seeds.places)
    prices = [model.price(place, kind) for place in range(places) for kind in kinds]
    rows = [
        (price.parameters / host.parameters, price.macs / max(1, host.macs), 1.0)
        if price
        else (0.0, 0.0, 0.0)
        for price in prices
    ]
    table = torch.tensor(rows).unflatten(0, (1, places, len(kinds)))
    per_place = len(model.slots) // places
    size, work, fits = table.repeat(1, per_place, 1, 1).unbind(-1)
    unknown = torch.zeros_like(size)
    free = (model.seeds.states.stage == Stage.DORMANT).unflatten(1, (per_place, -1))
    first = (free & (free.cumsum(dim=1) == 1)).flatten(1)
    return BlueprintOffers(
        fits=fits.bool() & first[:, :, None],
        parameters=size,
        macs=work,
        promise=unknown,
        promise_known=unknown.bool(),
    )
