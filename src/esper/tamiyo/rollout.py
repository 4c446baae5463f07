"""Whole episodes of any controller in any world."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from esper.contracts.world import Controller, Observation, StepResult, VectorWorld
from esper.simic import rollout
from esper.tamiyo.policy.action_masks import compute_masks


def play(
    world: VectorWorld,
    controller: Controller,
    generator: Generator,
    *,
    max_steps: int = 10_000,
    on_step: Callable[[Tensor, StepResult[Observation]], None] | None = None,
) -> Float[Tensor, " env"]:
    """Return of one whole episode per environment under `controller`.

    Args:
        world: Where to play; it is reset.
        controller: Who decides.
        generator: The controller's only source of randomness.
        max_steps: Decisions within which every episode must end.
        on_step: Called after every step with the actions and their result.
    """

    def decide(observation, state):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        masks = compute_masks(observation, world.spec)
        return controller.decide(observation, masks, state, generator)

    played = rollout.play(world, decide, max_steps=max_steps, on_step=on_step)
    returns = torch.zeros(world.num_envs)
    returns[played.env] = played.returns.float()
    return returns
