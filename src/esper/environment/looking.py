"""Looking at hosts between trainings: what seeds contribute, what places promise."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.stages import LIVING, Stage
from esper.environment.cohort import Cohort, Place, Plan
from esper.environment.promising import promises
from esper.growth.lifecycle import Lives


@dataclass(frozen=True, slots=True)
class Seen:
    """What a batch showed of every place."""

    promise: Float[Tensor, "env place blueprint"]
    flow: Float[Tensor, "env place"]
    """Share of the loss that hangs on relative changes of the place's tensor."""
    lively: Float[Tensor, "env place"]
    """Share of the channels that respond to inputs."""


def see_places(
    places: Sequence[Place],
    losses: Float[Tensor, " env"],
    blueprints: Sequence[Blueprint],
) -> Seen:
    """What the last batch of a decision says of every place."""
    sizes = [blueprint.size for blueprint in blueprints]
    biased = [blueprint.form is not Form.LOW_RANK for blueprint in blueprints]
    found, flows, lively = [], [], []
    for place in places:
        answer, gradient = place.answer.flatten(3), place.gradient.flatten(3)
        if place.plain:
            rows = (answer.squeeze(3), gradient.squeeze(3))
            found.append(promises(place.given, *rows, losses, sizes, biased))
        else:
            found.append(losses.new_full((len(losses), len(sizes)), torch.nan))
        size = answer.square().mean(dim=(1, 2, 3)).sqrt()
        flows.append(size * gradient.square().mean(dim=(1, 2, 3)).sqrt())
        spread = answer.transpose(1, 2).flatten(2).std(dim=2)
        top = spread.amax(dim=1, keepdim=True)
        lively.append((spread > 0.01 * top).float().mean(dim=1))
    flow = torch.stack(flows, dim=1)
    return Seen(
        promise=torch.stack(found, dim=1),
        flow=flow / flow.sum(dim=1, keepdim=True).clamp(min=1e-30),
        lively=torch.stack(lively, dim=1),
    )


def contributions(
    cohort: Cohort,
    lives: Lives,
    due: Bool[Tensor, " env"],
    x: Float[Tensor, "_ row input"],
    y: Int64[Tensor, "_ row"],
) -> tuple[Float[Tensor, "env slot"], Bool[Tensor, "env slot"]]:
    """Score lost without each living seed, and where that was looked at.

    A seed in training is tried at alpha 1 instead of being left out. Only environments
    that are due and have a seed in the slot are asked.
    """
    stages = torch.tensor(LIVING, device=lives.stage.device)
    living = (lives.stage[..., None] == stages).any(dim=2) & due[:, None]
    training = lives.stage == Stage.TRAINING
    felt, rows = Plan.of(lives).felt, y.shape[1]
    base = cohort.count(x, y, felt, living.any(dim=1))
    gain = torch.zeros_like(lives.alpha)
    for slot in torch.nonzero(living.any(dim=0)).flatten().tolist():
        turned = felt.clone()
        turned[:, slot] = training[:, slot].to(felt.dtype)
        other = cohort.count(x, y, turned, living[:, slot])
        lost = torch.where(training[:, slot], other - base, base - other)
        gain[:, slot] = lost / rows
    return gain, living
