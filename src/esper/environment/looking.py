"""Looking at hosts between trainings: what seeds contribute, what places promise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.errors import CallOrder
from esper.contracts.stages import Stage
from esper.environment.cohort import Cohort, Pass, Plan
from esper.environment.promising import promises
from esper.growth.lifecycle import Lives
from esper.growth.observe import LIVING
from esper.tasks.task import accuracy


@dataclass(frozen=True, slots=True)
class Seen:
    """What a batch showed of every place."""

    promise: Float[Tensor, "env place blueprint"]
    flow: Float[Tensor, "env place"]
    """Share of the loss that hangs on relative changes of the place's tensor."""
    lively: Float[Tensor, "env place"]
    """Share of the channels that respond to inputs."""


def see_places(last: Pass, sizes: Sequence[int]) -> Seen:
    """What the last batch of a decision says of every place."""
    if last.gradients is None:
        raise CallOrder("the pass kept no gradients; train with keep=True.")
    found, flows, lively = [], [], []
    for place, gradient in enumerate(last.gradients[: len(last.inputs) - 1]):
        given, answer = last.inputs[place].detach(), last.outputs[place + 1].detach()
        found.append(promises(given, answer, gradient, last.losses, sizes))
        size = answer.square().mean(dim=(1, 2)).sqrt()
        flows.append(size * gradient.square().mean(dim=(1, 2)).sqrt())
        spread = answer.std(dim=1)
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
    plan: Plan,
    x: Float[Tensor, "*env row inputs"],
    y: Int64[Tensor, "*env row"],
) -> tuple[Float[Tensor, "env slot"], Bool[Tensor, "env slot"]]:
    """Score lost without each living seed, and where there is one.

    A seed in training is tried at alpha 1 instead of being left out. One look at all
    environments per slot that anybody uses.
    """
    stages = torch.tensor(LIVING, device=lives.stage.device)
    living = (lives.stage[..., None] == stages).any(dim=2)
    training = lives.stage == Stage.TRAINING
    base = accuracy(cohort.answer(x, plan.felt), y)
    gain = torch.zeros_like(lives.alpha)
    for slot in torch.nonzero(living.any(dim=0)).flatten().tolist():
        here = torch.zeros_like(living)
        here[:, slot] = True
        turned = replace(
            lives,
            alpha=torch.where(here, training.float(), lives.alpha),
            stage=torch.where(here & training, int(Stage.HOLDING), lives.stage),
        )
        other = accuracy(cohort.answer(x, cohort.feel(turned, shadow=False)), y)
        gain[:, slot] = torch.where(training[:, slot], other - base, base - other)
    return gain, living
