"""Rollouts: the one place where controllers and worlds meet.

`collect` fills a buffer with a learning policy's steps; `play` has any controller play
one episode everywhere. Both run all environments at once, in any world.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Generator, Tensor

from esper.contracts.errors import InvalidStateError
from esper.contracts.world import (
    Controller,
    ControllerState,
    EpisodeReport,
    Observation,
    StepResult,
    VectorWorld,
)
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import compute_features

if TYPE_CHECKING:
    from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
    from esper.tamiyo.policy.network import TamiyoPolicy


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where every environment stands between two rollouts."""

    observation: Observation
    state: Float[Tensor, "env layer state"]
    """The policy's memory; of another episode where `observation.first`."""
    returns: Float[Tensor, " env"]
    """Rewards of the running episodes so far."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of every environment."""

    observation: Observation
    actions: Int64[Tensor, "env head"]
    result: StepResult
    returns: Float[Tensor, " env"]
    """Rewards of the episode, this step's included."""


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """The episodes that ended in one rollout."""

    episodes: Float[Tensor, ""]
    total_return: Float[Tensor, ""]
    reports: tuple[EpisodeReport, ...] = ()
    """Their networks, where the world has any."""

    def mean_return(self) -> float:
        """Mean return of the episodes that ended; NaN if none did (reads)."""
        return float(self.total_return / self.episodes)

    def mean(self, name: str) -> float | None:
        """Mean of a figure of their networks; None if there are none (reads)."""
        if not self.reports:
            return None
        return float(torch.cat([getattr(each, name) for each in self.reports]).mean())


def concat(parts: Sequence[EpisodeStats]) -> EpisodeStats:
    """The episodes of several rollouts."""
    return EpisodeStats(
        torch.stack([part.episodes for part in parts]).sum(),
        torch.stack([part.total_return for part in parts]).sum(),
        tuple(report for part in parts for report in part.reports),
    )


def start(world: VectorWorld, policy: "TamiyoPolicy") -> RolloutState:
    """Begin a new episode everywhere, with empty memory."""
    observation = world.reset()
    device = observation.episode_start.device
    return RolloutState(
        observation,
        policy.initial_state(world.num_envs),
        torch.zeros(world.num_envs, device=device),
    )


@torch.inference_mode()
def collect(
    world: VectorWorld,
    policy: "TamiyoPolicy",
    buffer: "TamiyoRolloutBuffer",
    live: RolloutState,
    generator: Generator,
    *,
    policy_version: int,
    on_step: Callable[[Transition], None] | None = None,
) -> tuple[RolloutState, EpisodeStats]:
    """Fill a buffer with steps of a policy.

    Args:
        world: Where the policy acts.
        policy: Decides.
        buffer: Stores the steps; it must be empty.
        live: Where the environments stand: what `start` or the last call returned.
        generator: The only source of randomness.
        policy_version: `PPOAgent.version` of the policy.
        on_step: Called after every step.

    Returns:
        Where the environments stand now, and the episodes that ended.
    """
    observation, state, returns = live.observation, live.state, live.returns
    spec = world.spec
    buffer.begin(state, policy_version, world.group_size)
    episodes = total = torch.zeros((), device=returns.device)
    reports: list[EpisodeReport] = []
    for _ in range(buffer.max_steps):
        features = compute_features(observation, spec)
        masks = compute_masks(observation, spec)
        decision = policy.act(
            features, masks, observation.episode_start, state, generator
        )
        result = world.step(decision.actions)
        returns = returns + result.reward
        if on_step is not None:
            on_step(Transition(observation, decision.actions, result, returns))
        final_values = None
        if result.final is not None:
            final_values = policy.value(
                compute_features(result.final, spec),
                torch.zeros_like(observation.episode_start),
                decision.state,
            )
        buffer.add(
            features=features,
            episode_start=observation.episode_start,
            masks=decision.masks,
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
        episodes = episodes + ended.sum()
        total = total + torch.where(ended, returns, 0.0).sum()
        returns = torch.where(ended, 0.0, returns)
        if result.report is not None:
            reports.append(result.report)
        observation, state = result.observation, decision.state
    last = policy.value(
        compute_features(observation, spec), observation.episode_start, state
    )
    buffer.finish(last)
    return (
        RolloutState(observation, state, returns),
        EpisodeStats(episodes, total, tuple(reports)),
    )


@torch.inference_mode()
def play(
    world: VectorWorld,
    controller: Controller,
    generator: Generator,
    *,
    max_steps: int = 10_000,
    on_step: Callable[[Tensor, StepResult], None] | None = None,
) -> Float[Tensor, " env"]:
    """Return of one whole episode per environment under `controller`.

    Args:
        world: Where to play; it is reset.
        controller: Who decides.
        generator: The controller's only source of randomness.
        max_steps: Decisions within which every episode must end.
        on_step: Called after every step with the actions and their result.
    """
    observation = world.reset()
    returns = torch.zeros(world.num_envs, device=observation.episode_start.device)
    running = torch.ones_like(observation.episode_start)
    state: ControllerState = None
    for _ in range(max_steps):
        masks = compute_masks(observation, world.spec)
        actions, state = controller.decide(observation, masks, state, generator)
        result = world.step(actions)
        if on_step is not None:
            on_step(actions, result)
        returns = returns + torch.where(running, result.reward, 0.0)
        running = running & ~(result.terminated | result.truncated)
        observation = result.observation
        if not bool(running.any()):
            return returns
    raise InvalidStateError(f"some episode did not end within {max_steps} steps.")
