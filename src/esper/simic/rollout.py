"""Rollouts: a policy steps a vector of environments, in any kind of world.

`collect` fills a buffer with the steps of a policy that learns. `play` plays whole
episodes with anything that decides. Environments run on the CPU; the policy and the
buffer may live on another device. Each step then copies what the policy reads to the
device, and the actions back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Generator, Tensor

from esper.contracts.devices import to_device
from esper.contracts.errors import InvalidInputError
from esper.contracts.world import EpisodeReport, StepResult, World
from esper.simic.agent.distribution import Policy
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where all environments are between two rollouts."""

    observation: Any
    state: Float[Tensor, "env layer state"]
    """The policy's memory; of another episode where `observation.episode_start`."""
    returns: Float[Tensor, " env"]
    """Rewards of the running episodes so far, in float64."""
    lengths: Int64[Tensor, " env"]
    """Their steps so far."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of all environments."""

    observation: Any
    actions: Shaped[Tensor, "env head"]
    result: StepResult[Any]
    returns: Float[Tensor, " env"]
    """Rewards of the episode, including this step."""


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """The episodes that ended in some steps, in order."""

    env: Int64[Tensor, " episode"]
    step: Int64[Tensor, " episode"]
    """Step of the rollout in which it ended, from 0."""
    returns: Float[Tensor, " episode"]
    lengths: Int64[Tensor, " episode"]
    env_steps: int
    """Steps of all environments, also of episodes that have not ended."""
    reports: tuple[EpisodeReport, ...] = ()
    """Results of their networks, if the world has any."""

    def mean_return(self) -> float:
        """Mean return of the episodes that ended; NaN if none did."""
        return float(self.returns.mean())

    def mean(self, name: str) -> float | None:
        """Mean of a figure of the networks; None if there are none."""
        if not self.reports:
            return None
        return float(torch.cat([getattr(each, name) for each in self.reports]).mean())


def concat(parts: Sequence[EpisodeStats]) -> EpisodeStats:
    """The episodes of several rollouts."""
    return EpisodeStats(
        torch.cat([part.env for part in parts]),
        torch.cat([part.step for part in parts]),
        torch.cat([part.returns for part in parts]),
        torch.cat([part.lengths for part in parts]),
        sum(part.env_steps for part in parts),
        tuple(report for part in parts for report in part.reports),
    )


class Episodes:
    """Counts rewards and steps of running episodes, and keeps those that end."""

    def __init__(self, returns: Tensor, lengths: Tensor) -> None:
        self.returns, self.lengths = returns.clone(), lengths.clone()
        self._ended: list[tuple[Tensor, ...]] = []
        self._reports: list[EpisodeReport] = []
        self._steps = self._env_steps = 0

    @classmethod
    def none(cls, envs: int) -> "Episodes":
        """New episodes everywhere."""
        zeros = torch.zeros(envs, dtype=torch.int64)
        return cls(zeros.double(), zeros)

    def add(self, acts: Tensor | None, result: StepResult[Any]) -> Tensor:
        """Count one step; returns the rewards so far, this step included."""
        acted = torch.ones_like(result.terminated) if acts is None else acts
        self.returns += torch.where(acted, result.reward, 0.0)
        self.lengths += acted
        self._env_steps += int(acted.sum())
        so_far = self.returns.clone()
        ended = (result.terminated | result.truncated) & acted
        if bool(ended.any()):
            env = ended.nonzero().flatten()
            step = torch.full_like(env, self._steps)
            self._ended.append((env, step, self.returns[env], self.lengths[env]))
            self.returns[env], self.lengths[env] = 0.0, 0
        if result.report is not None:
            self._reports.append(result.report)
        self._steps += 1
        return so_far

    def stats(self) -> EpisodeStats:
        """All that ended."""
        nothing = torch.zeros(0, dtype=torch.int64)
        ended = self._ended or [(nothing, nothing, nothing.double(), nothing)]
        env, step, returns, lengths = map(torch.cat, zip(*ended, strict=True))
        reports = tuple(self._reports)
        return EpisodeStats(env, step, returns, lengths, self._env_steps, reports)


def start(world: World[Any], policy: Policy) -> RolloutState:
    """Start a new episode everywhere, with empty memory."""
    fresh = Episodes.none(world.num_envs)
    memory = policy.initial_state(world.num_envs)
    return RolloutState(world.reset(), memory, fresh.returns, fresh.lengths)


@torch.inference_mode()
def collect(
    policy: Policy,
    world: World[Any],
    state: RolloutState,
    buffer: TamiyoRolloutBuffer,
    generator: Generator,
    *,
    policy_version: int = 0,
    on_step: Callable[[Transition], None] | None = None,
) -> tuple[RolloutState, EpisodeStats]:
    """Fill a buffer with steps of a policy.

    Args:
        policy: Decides.
        world: Where the policy acts.
        state: Where the environments are: what `start` or the last call returned.
        buffer: Stores the steps; it must be empty.
        generator: The only source of randomness.
        policy_version: `PPOAgent.version` of the policy.
        on_step: Called after every step.

    Returns:
        Where the environments are now, and the episodes that ended.
    """
    seen, memory = state.observation, state.state
    episodes = Episodes(state.returns, state.lengths)
    device = buffer.device
    buffer.begin(memory, policy_version, world.group_size)
    for _ in range(buffer.max_steps):
        inputs = (*policy.read(seen), seen.episode_start)
        features, masks, first = to_device(inputs, device)
        decision = policy.act(features, masks, first, memory, generator)
        result = world.step(decision.actions.cpu())
        so_far = episodes.add(seen.acts, result)
        if on_step is not None:
            on_step(Transition(seen, decision.actions, result, so_far))
        final = None if result.final is None else policy.read(result.final)[0]
        ends = (result.reward, result.terminated, result.truncated)
        final, ends, acted = to_device((final, ends, seen.acts), device)
        final_values = None
        if final is not None:
            going_on = torch.zeros_like(first)
            final_values = policy.value(final, going_on, decision.state)
        buffer.add(
            decision,
            features=features,
            episode_start=first,
            rewards=ends[0],
            terminated=ends[1],
            truncated=ends[2],
            final_values=final_values,
            acted=acted,
        )
        seen, memory = result.observation, decision.state
    last = (policy.read(seen)[0], seen.episode_start)
    features, first = to_device(last, device)
    buffer.finish(policy.value(features, first, memory))
    after = RolloutState(seen, memory, episodes.returns, episodes.lengths)
    return after, episodes.stats()


@torch.inference_mode()
def play(
    world: World[Any],
    decide: Callable[[Any, Any], tuple[Shaped[Tensor, "env head"], Any]],
    quota: Int64[Tensor, " env"] | None = None,
    *,
    max_steps: int = 10_000,
    on_step: Callable[[Tensor, Any], None] | None = None,
) -> EpisodeStats:
    """Play whole episodes without learning.

    Args:
        world: Where to play; it is reset.
        decide: Actions and the next memory, from what is seen and the memory; the
            memory is None at first.
        quota: Episodes to play in each environment, so that short ones are not
            preferred; None: one each.
        max_steps: Steps within which all of them must end.
        on_step: Called after every step with the actions and their result.

    Returns:
        The first `quota` episodes of every environment, in the order of their ends.
    """
    left = torch.ones(world.num_envs, dtype=torch.int64) if quota is None else quota
    left = left.clone()
    seen, memory = world.reset(), None
    episodes, kept = Episodes.none(world.num_envs), list[int]()
    counted = 0
    for _ in range(max_steps):
        actions, memory = decide(seen, memory)
        result = world.step(actions)
        if on_step is not None:
            on_step(actions, result)
        episodes.add(seen.acts, result)
        ended = result.terminated | result.truncated
        ended = ended if seen.acts is None else ended & seen.acts
        for env in ended.nonzero().flatten().tolist():
            if left[env] > 0:
                left[env] -= 1
                kept.append(counted)
            counted += 1
        seen = result.observation
        if not bool(left.any()):
            all_, of = episodes.stats(), torch.tensor(kept, dtype=torch.int64)
            return replace(
                all_,
                env=all_.env[of],
                step=all_.step[of],
                returns=all_.returns[of],
                lengths=all_.lengths[of],
            )
    raise InvalidInputError(
        f"some episode did not end within {max_steps} steps. Set a time limit, such as "
        "max_episode_steps of gymnasium.make, or raise max_steps."
    )
