"""Shards: one world of a training each, stepped in this or in another process.

    weights, state of the world, random stream  ->  rollout, rows, state of the world

The result depends on nothing else, so any worker can repeat a lost shard and gets the
same bits. The key of the random stream has the run, the shard and the round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from esper.contracts.errors import InvalidInputError
from esper.contracts.slots import SlotStates
from esper.contracts.state import Tensors, load
from esper.contracts.world import VectorWorld
from esper.environment.mixture import Mixture
from esper.runs.seed_events import events_between
from esper.runs.streams import stream
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rollout import RolloutState, Transition, collect, start
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.training.loop import WorldRollout

REPORT_COLUMNS = ("score", "test", "added", "macs", "panicked")
"""Fields of `EpisodeReport` that the store has."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The state of one world between two rounds."""

    episodes: Int64[Tensor, " env"]
    """Number of episodes with at least one step."""
    live: RolloutState | None = None
    """None if every round starts new episodes."""
    world: Tensors | None = None
    """The state of the world; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """All that the rollout of a shard depends on, except for the weights."""

    mixture: Mixture = field(repr=False)
    number: int
    round: int
    """Counted from 0."""
    shard: Shard = field(repr=False)
    policy: PolicyConfig
    steps: int
    rng_seed: int
    rollbacks: int
    """Number of rollbacks; changes the random stream."""


@dataclass(frozen=True, slots=True)
class ShardRollout(WorldRollout):
    """The rollout of one shard and its state afterwards."""

    shard: Shard
    columns: Mapping[str, Tensor]
    """Result of `TamiyoRolloutBuffer.columns`."""


def first_shard(mixture: Mixture, number: int, policy: TamiyoPolicy) -> Shard:
    """The state of a world before the first round."""
    episodes = torch.zeros(mixture.counts[number], dtype=torch.int64)
    if mixture.redrawn:
        return Shard(episodes)
    world = mixture.world(number)
    live = start(world, policy)
    return Shard(episodes, live, mixture.keep(number, world))


def play_shard(weights: Tensors, job: ShardJob) -> ShardRollout:
    """Step one world for a round, with a policy of these weights."""
    shard, mixture, number = job.shard, job.mixture, job.number
    with torch.random.fork_rng(devices=[]):  # initial weights use random numbers
        policy = TamiyoPolicy(mixture.spec, job.policy)
    load(policy, weights)
    world = mixture.world(number, job.round, shard.world)
    live = shard.live or start(world, policy)
    buffer = TamiyoRolloutBuffer.for_policy(policy, world.num_envs, job.steps)
    choices = f"choices, {number}, {job.round}, {job.rollbacks}"
    steps: list[Transition] = []
    generator = stream(job.rng_seed, choices)
    live, stats = collect(policy, world, live, buffer, generator, on_step=steps.append)
    first = torch.stack([step.observation.episode_start for step in steps])
    episode = shard.episodes + first.cumsum(dim=0)
    kept = None if mixture.redrawn else live
    after = Shard(episode[-1], kept, mixture.keep(number, world))
    rows = rows_of(steps, episode, world)
    return ShardRollout(rows, stats, after, buffer.columns())


def require_played(job: ShardJob, buffer: TamiyoRolloutBuffer, played: object) -> None:
    """Refuse a result of a worker that is not a rollout of this job."""
    if not isinstance(played, ShardRollout):
        raise InvalidInputError(f"expected a rollout, got {type(played).__name__}.")
    buffer.require_columns(played.columns, job.mixture.counts[job.number])


def rows_of(
    steps: Sequence[Transition],
    episode: Int64[Tensor, "time env"],
    world: VectorWorld,
) -> dict[str, dict[str, Any]]:
    """Rows for the store by table; `episode` counts from 1."""

    def flat(values: Sequence[Tensor]) -> Tensor:
        """The values of all steps, `[time * env, ...]`."""
        return torch.stack([*values]).flatten(0, 1)

    def where(cells: Tensor) -> dict[str, Tensor]:
        """Columns with the step and the episode of each row."""
        return {
            "index": cells // world.num_envs,
            "env": cells % world.num_envs,
            "episode": episode.flatten()[cells],
        }

    results = [step.result for step in steps]
    host = [step.observation.host for step in steps]
    returns = flat([step.returns for step in steps])
    ended = flat([result.terminated | result.truncated for result in results])
    rows: dict[str, dict[str, Any]] = {
        "steps": {
            **where(torch.arange(len(returns))),
            "reward": flat([result.reward for result in results]),
            "score": flat([each.score for each in host]),
            "loss": flat([each.loss for each in host]),
            "added": flat([each.added for each in host]),
            "budget_left": flat([each.budget_left for each in host]),
        }
    }
    illegal = [result.illegal for result in results if result.illegal is not None]
    before, after = (
        SlotStates(
            **{
                each.name: flat([getattr(slots, each.name) for slots in seen])
                for each in fields(SlotStates)
            }
        )
        for seen in (
            [step.observation.slots for step in steps],
            [result.observation.slots for result in results],
        )
    )
    changes = events_between(
        before,
        after,
        ended=ended,
        actions=flat([step.actions for step in steps]),
        illegal=flat(illegal) if len(illegal) == len(steps) else None,
    )
    if changes["env"]:
        names = [*(each.name for each in world.spec.blueprints), None]
        changes["blueprint"] = [names[kind] for kind in changes["blueprint"]]
        rows["events"] = {**changes, **where(torch.tensor(changes["env"]))}
    if bool(ended.any()):
        cells = ended.nonzero().flatten()
        rows["episodes"] = {**where(cells), "return": returns[cells]}
        reports = [result.report for result in results if result.report is not None]
        if reports:  # one entry per ended episode, in the same order
            rows["episodes"] |= {
                name: torch.cat([getattr(each, name) for each in reports])
                for name in REPORT_COLUMNS
            }
    return rows
