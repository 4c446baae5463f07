"""Where every simulated environment is, what that is worth, and what is seen of it.

`Setting` stays the same during an episode, `Seeds` changes with every step; a `Scene`
is both, weighed: phi, parameters, and what could be planted. `observe` shows all of it
but hidden gains, damage and the tempo of a training seed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.observation import BlueprintOffers, HostStates, Observation
from esper.contracts.slots import SlotStates
from esper.environment.instances import Instances
from esper.environment.slot_life import SlotTables


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same during an episode, ready for lookups."""

    instances: Instances
    offers: BlueprintOffers
    nature: Int64[Tensor, "env slot"]
    wants_half: Int64[Tensor, "env slot"]
    gain: Float[Tensor, "env slot kind"]
    """Gain by blueprint, after a zero for the empty slot."""
    parameters: Float[Tensor, "env slot kind"]
    """Parameters by blueprint, after a zero for the empty slot."""
    empty: Int64[Tensor, "env slot"]
    """Where the zero of each slot stands in the two flat tables."""
    still: Float[Tensor, " env"]
    """Slopes and plateau: nothing of the host's own training is seen here."""
    score: Float[Tensor, " env"]
    loss: Float[Tensor, " env"]

    @classmethod
    def of(cls, instances: Instances) -> "Setting":
        """Prepare the instances."""
        gain = torch.nn.functional.pad(instances.gain, (1, 0))
        first = torch.arange(0, gain.numel(), gain.shape[2], device=gain.device)
        return cls(
            instances=instances,
            offers=BlueprintOffers(
                fits=instances.fits,
                parameters=instances.parameters,
                macs=instances.parameters,
                promise=instances.promise,
                promise_known=instances.promise_known,
            ),
            nature=instances.nature,
            wants_half=instances.wants_half,
            gain=gain,
            parameters=torch.nn.functional.pad(instances.parameters, (1, 0)),
            empty=first.view(gain.shape[:2]),
            still=torch.zeros_like(instances.rent),
            score=torch.full_like(instances.rent, 0.5),
            loss=torch.ones_like(instances.rent),
        )


class Seeds(NamedTuple):
    """What is in every slot."""

    life: Int64[Tensor, "env slot"]
    blueprint: Int64[Tensor, "env slot"]
    style: Int64[Tensor, "env slot"]

    @classmethod
    def first(cls, instances: Instances) -> "Seeds":
        """What the instances start with."""
        return cls(instances.life, instances.blueprint, instances.style)

    def replaced(self, where: Bool[Tensor, " env"], others: "Seeds") -> "Seeds":
        """These seeds, or the others where the mask is set."""
        there = where.unsqueeze(1)
        return Seeds(
            *(
                torch.where(there, other, own)
                for own, other in zip(self, others, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """Where every environment is, and what that is worth."""

    setting: Setting
    seeds: Seeds
    contribution: Float[Tensor, "env slot"]
    parameters: Float[Tensor, "env slot"]
    added: Float[Tensor, " env"]
    budget_left: Float[Tensor, " env"]
    plantable: Bool[Tensor, "env slot blueprint"]
    """What fits and can be afforded, whether or not the slot is empty."""
    phi: Float[Tensor, " env"]


def appraise(setting: Setting, seeds: Seeds, tables: SlotTables) -> Scene:
    """Weigh the seeds."""
    instances = setting.instances
    entry = setting.empty + seeds.blueprint + 1
    share = tables.worth.take(2 * seeds.life + setting.wants_half)
    contribution = share * setting.gain.take(entry)
    parameters = setting.parameters.take(entry)
    added = parameters.sum(dim=1)
    budget_left = instances.budget - added
    return Scene(
        setting=setting,
        seeds=seeds,
        contribution=contribution,
        parameters=parameters,
        added=added,
        budget_left=budget_left,
        plantable=instances.fits & (instances.parameters <= budget_left[:, None, None]),
        phi=contribution.sum(dim=1) - instances.rent * added,
    )


def observe(
    scene: Scene,
    tables: SlotTables,
    progress: Float[Tensor, " env"],
    first: Bool[Tensor, " env"],
) -> Observation:
    """What is seen of a scene."""
    setting, seeds = scene.setting, scene.seeds
    instances, life = setting.instances, seeds.life
    measured = tables.measured.take(life)
    return Observation(
        first=first,
        host=HostStates(
            progress=progress,
            budget_left=scene.budget_left,
            rent=instances.rent,
            added=scene.added,
            score=setting.score,
            score_slope=setting.still,
            loss=setting.loss,
            loss_slope=setting.still,
            plateau=setting.still,
        ),
        slots=SlotStates(
            stage=tables.stage.take(life),
            age=tables.age.take(life),
            alpha=tables.alpha.take(life),
            alpha_target=tables.target.take(life),
            alpha_settled=tables.settled.take(life),
            blueprint=seeds.blueprint,
            style=seeds.style,
            parameters=scene.parameters,
            depth=instances.depth,
            capacity=instances.capacity,
            liveness=instances.liveness,
            gradient_share=instances.gradient_share,
            contribution=torch.where(measured, scene.contribution, 0.0),
            contribution_measured=measured,
        ),
        offers=setting.offers,
    )
