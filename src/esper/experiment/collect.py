"""Decisions become experience: the one place where controllers and worlds meet.

`collect` fills a buffer with a learning policy's steps; `play` lets any controller live
through one episode everywhere. Both run all environments at once, and neither knows
which world it is in.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from esper.contracts.controller import Controller, ControllerState
from esper.contracts.errors import CallOrder
from esper.contracts.observation import Observation
from esper.contracts.step import StepResult, VectorWorld
from esper.simic.agent.policy import Policy
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import compute_features

Listener = Callable[[Observation, Tensor, StepResult], None]


@dataclass(frozen=True, slots=True)
class Live:
    """Where every environment stands between two rollouts."""

    observation: Observation
    state: Float[Tensor, "env layer state"]
    """What the policy remembers; of another episode where `observation.first`."""
    returns: Float[Tensor, " env"]
    """Rewards of the running episodes so far."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The episodes that ended in one rollout."""

    episodes: Float[Tensor, ""]
    total_return: Float[Tensor, ""]

    def mean_return(self) -> float:
        """Mean return of the episodes that ended; NaN if none did (reads)."""
        return float(self.total_return / self.episodes)


def start(world: VectorWorld, policy: Policy) -> Live:
    """Begin a new episode everywhere, remembering nothing."""
    observation = world.reset()
    return Live(
        observation,
        policy.initial_state(world.num_envs),
        torch.zeros(world.num_envs, device=observation.first.device),
    )


@torch.inference_mode()
def collect(
    world: VectorWorld,
    policy: Policy,
    buffer: TamiyoRolloutBuffer,
    live: Live,
    generator: Generator,
    *,
    policy_version: int,
    on_step: Listener | None = None,
) -> tuple[Live, Finished]:
    """Fill `buffer` with steps of `policy` and go on from where `live` stands.

    `on_step` is told of every step: what was seen, what was said, what came of it.
    """
    observation, state, returns = live.observation, live.state, live.returns
    spec = world.spec
    # Worlds whose environments share their chances say so; others need not.
    buffer.begin(state, policy_version, world.group_size)
    episodes = total = torch.zeros((), device=returns.device)
    for _ in range(buffer.max_steps):
        features = compute_features(observation, spec)
        masks = compute_masks(observation, spec)
        decision = policy.act(features, masks, observation.first, state, generator)
        result = world.step(decision.actions)
        if on_step is not None:
            on_step(observation, decision.actions, result)
        final_values = None
        if result.final is not None:
            final_values = policy.value(
                compute_features(result.final, spec),
                torch.zeros_like(observation.first),
                decision.state,
            )
        buffer.add(
            features=features,
            first=observation.first,
            rows=decision.rows,
            actions=decision.actions,
            log_probs=decision.log_probs,
            distribution=decision.distribution,
            values=decision.values,
            rewards=result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            final_values=final_values,
        )
        ended = result.terminated | result.truncated
        returns = returns + result.reward
        episodes = episodes + ended.sum()
        total = total + torch.where(ended, returns, 0.0).sum()
        returns = torch.where(ended, 0.0, returns)
        observation, state = result.observation, decision.state
    last = policy.value(compute_features(observation, spec), observation.first, state)
    buffer.cut(last)
    return Live(observation, state, returns), Finished(episodes, total)


@torch.inference_mode()
def play(
    world: VectorWorld,
    controller: Controller,
    generator: Generator,
    *,
    max_steps: int = 10_000,
    on_end: Callable[[Bool[Tensor, " env"]], None] | None = None,
) -> Float[Tensor, " env"]:
    """Return of one whole episode per environment under `controller`.

    Args:
        world: Where to play; it is reset.
        controller: Who decides.
        generator: The controller's only source of chance.
        max_steps: Decisions within which every episode must end.
        on_end: Told, right after such a step, whose episode has just ended; each
            environment once, though worlds go on with another episode.
    """
    observation = world.reset()
    returns = torch.zeros(world.num_envs, device=observation.first.device)
    running = torch.ones_like(observation.first)
    state: ControllerState = None
    for _ in range(max_steps):
        masks = compute_masks(observation, world.spec)
        actions, state = controller.decide(observation, masks, state, generator)
        result = world.step(actions)
        returns = returns + torch.where(running, result.reward, 0.0)
        ended = running & (result.terminated | result.truncated)
        if on_end is not None and bool(ended.any()):
            on_end(ended)
        running = running & ~ended
        observation = result.observation
        if not bool(running.any()):
            return returns
    raise CallOrder(f"some episode did not end within {max_steps} steps.")
