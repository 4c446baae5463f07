"""What a controller is shown of a growing model, for one model or many.

`Track` follows a host's score and loss over decisions: `[env]` tensors and one pure
step. `observe` shows one model with its slots and what each could be planted with;
`together` puts several into one batch. Everything is relative to the host, and what
was not measured says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.observation import BlueprintOffers, HostStates, Observation
from esper.contracts.slots import SlotStates
from esper.growth.junction import Junction
from esper.growth.model import GrowingModel
from esper.growth.promise import promises

MEMORY = 0.6
"""How much of a slope is of earlier decisions."""


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

    def replaced(self, where: Bool[Tensor, " env"], other: "Track") -> "Track":
        """This track, or the other where the mask is set."""
        return Track(
            **{
                field.name: torch.where(
                    where, getattr(other, field.name), getattr(self, field.name)
                )
                for field in fields(Track)
            }
        )


def host_states(
    track: Track,
    *,
    horizon: int,
    budget_left: Float[Tensor, " env"],
    rent: Float[Tensor, " env"],
    added: Float[Tensor, " env"],
) -> HostStates:
    """Every host as a controller sees it."""
    seen = (track.decisions - 1).clamp(min=0)
    return HostStates(
        progress=(seen / horizon).clamp(max=1.0),
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
        plateau=((seen - track.best_at) / horizon).clamp(0.0, 1.0),
    )


def observe(
    model: GrowingModel,
    track: Track,
    *,
    horizon: int,
    budget: float,
    rent: float,
    contributions: Mapping[int, float],
) -> Observation:
    """One model before a decision.

    Args:
        model: What grows.
        track: How it has done.
        horizon: Decisions of the whole training.
        budget: Parameters that may be added in all, as a multiple of the host's.
        rent: Score charged per added multiple of the host's parameters.
        contributions: Score lost without a seed, by slot; only what was measured.
    """
    host = model.survey.parameters
    added = model.parameters_added / host
    return Observation(
        first=track.decisions <= 1,
        host=host_states(
            track,
            horizon=horizon,
            budget_left=torch.tensor([budget - added]),
            rent=torch.tensor([rent]),
            added=torch.tensor([added]),
        ),
        slots=slot_states(model, contributions),
        offers=offers(model, float(track.loss)),
    )


def slot_states(model: GrowingModel, contributions: Mapping[int, float]) -> SlotStates:
    """All slots of one model."""
    lives, places = model.lives, model.survey.places
    count = range(len(model.slots))
    widest = max(place.geometry.outlet_width for place in places)
    flows = [_flow(junction) for junction in model.junctions]
    total = sum(flows) or 1.0
    seeds = {
        slot: sum(p.numel() for p in model.seeds[f"slot_{slot}"].parameters())
        for slot in count
        if f"slot_{slot}" in model.seeds
    }

    def row(values: Sequence[float]) -> Tensor:
        return torch.tensor([values], dtype=torch.float32)

    return SlotStates(
        stage=lives.stage,
        age=lives.age,
        alpha=lives.alpha,
        alpha_target=lives.alpha_target,
        alpha_settled=lives.settled,
        blueprint=lives.blueprint,
        style=lives.style,
        parameters=row([seeds.get(s, 0) / model.survey.parameters for s in count]),
        depth=row([model.place(s).depth for s in count]),
        capacity=row([model.place(s).geometry.outlet_width / widest for s in count]),
        liveness=row([_liveness(model.junction(s)) for s in count]),
        gradient_share=row([flows[s % len(places)] / total for s in count]),
        contribution=row([contributions.get(s, 0.0) for s in count]),
        contribution_measured=torch.tensor([[s in contributions for s in count]]),
    )


def offers(model: GrowingModel, loss: float) -> BlueprintOffers:
    """What every slot of one model could be planted with."""
    places, kinds = model.survey.places, model.spec.blueprints
    shape = (len(places), len(kinds))
    fits = torch.zeros(shape, dtype=torch.bool)
    parameters, macs, promise = (torch.zeros(shape) for _ in range(3))
    known = torch.zeros(shape, dtype=torch.bool)
    host = model.survey
    for index, place in enumerate(places):
        said = promises(model.junctions[index].samples, place.geometry, kinds, loss)
        for kind, blueprint in enumerate(kinds):
            cost = model.price(index, blueprint)
            if cost is None:
                continue
            fits[index, kind] = True
            parameters[index, kind] = cost[0] / host.parameters
            macs[index, kind] = cost[1] / max(1, host.macs)
            gain = said[kind]
            if gain is not None:
                promise[index, kind], known[index, kind] = gain, True
    per_place = len(model.slots) // len(places)

    def spread(values: Tensor) -> Tensor:
        return values.repeat(per_place, 1).unsqueeze(0)

    return BlueprintOffers(
        fits=spread(fits),
        parameters=spread(parameters),
        macs=spread(macs),
        promise=spread(promise),
        promise_known=spread(known),
    )


def together(observations: Sequence[Observation]) -> Observation:
    """Several models with equally many slots as one batch."""
    return _together(observations)  # type: ignore[no-any-return]


def _together(records: Sequence[Any]) -> Any:  # noqa: ANN401
    if not is_dataclass(records[0]):
        return torch.cat([*records])
    kind: Any = type(records[0])
    return kind(
        **{
            field.name: _together([getattr(record, field.name) for record in records])
            for field in fields(records[0])
        }
    )


def _flow(junction: Junction) -> float:
    """How much of the loss hangs on relative changes of a place's tensor."""
    came = [s for s in junction.samples if s.gradient is not None]
    if not came:
        return 1.0
    last = came[-1]
    assert last.gradient is not None
    size = last.answer.float().square().mean().sqrt()
    flow = float(size * last.gradient.float().square().mean().sqrt() * last.rows)
    return flow if flow < float("inf") else 1.0


def _liveness(junction: Junction) -> float:
    """Share of the channels at a place that respond to its inputs."""
    if not junction.samples:
        return 1.0
    answer = junction.samples[-1].answer.float()
    layout = junction.place.geometry.outlet_layout
    rows = answer.movedim(1, -1) if layout.channels_first else answer
    spread = rows.reshape(-1, rows.shape[-1]).std(dim=0)
    return float((spread > 0.01 * spread.max()).float().mean())
