"""PPO of a controller over many worlds, each of which is a shard.

    weights, state of the world, random stream  ->  rollout, rows, state of the world

A rollout is one job per world, here or in workers. Its result depends on nothing else,
so any worker can repeat a lost shard and gets the same bits. The key of the random
stream has the run, the shard and the round. The buffer joins the shards in order, and
one update follows. Worlds are played on the CPU; `config.device` holds the learner's
policy and buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int64
from torch import Tensor

from esper.contracts.devices import usable_device
from esper.contracts.errors import InvalidInputError
from esper.contracts.state import Stateful, Tensors, load, save
from esper.contracts.world import VectorWorld
from esper.environment.mixture import Mixture
from esper.runs.streams import stream, stream_seed
from esper.simic.agent.metrics import UpdateRecord
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rollout import RolloutState, Transition, collect, start
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.training.loop import Callback, TrainingLoop, WorldRollout
from esper.training.rows import decision_rows, recorded_hosts, rows_of
from esper.workers.jobs import Workers

if TYPE_CHECKING:
    from esper.runs.train_config import TrainConfig


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
    columns = buffer.columns()
    hosts = min(recorded_hosts(number, len(mixture.counts)), world.num_envs)
    rows = rows_of(steps, episode, world)
    rows |= decision_rows(steps, episode, world, columns, hosts)
    return ShardRollout(rows, stats, after, columns)


def require_played(job: ShardJob, buffer: TamiyoRolloutBuffer, played: object) -> None:
    """Refuse a result of a worker that is not a rollout of this job."""
    if not isinstance(played, ShardRollout):
        raise InvalidInputError(f"expected a rollout, got {type(played).__name__}.")
    buffer.require_columns(played.columns, job.mixture.counts[job.number])


class ControllerPPO(Stateful):
    """Worlds, the policy that acts in them and its learner, between two rounds.

    Args:
        world: Where the policy acts; it is reset.
        config: Learner, device and random seed; the rest is not read.
        rollout_steps: Decisions per environment and rollout.
        workers: Who plays the worlds; None: this process.
    """

    STATE = ("shards", "agent", "round", "rollbacks")
    DERIVED = ("policy", "mixture")

    def __init__(
        self,
        world: VectorWorld | Mixture,
        config: "TrainConfig",
        rollout_steps: int,
        workers: Workers | None = None,
    ) -> None:
        mixture = world if isinstance(world, Mixture) else Mixture.of([world])
        self.mixture, self.config = mixture, config
        self.relative = config.world.relative
        self.rollout_steps, self.workers = rollout_steps, workers or Workers()
        self.round = 0
        """Rollouts so far."""
        self.rollbacks = 0
        """How often the run went back; another number gives other random streams."""
        learner, seed = config.learner, config.rng_seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, "weights"))
            self.policy = TamiyoPolicy(mixture.spec, learner.policy)
        self.shards = []
        for number, count in enumerate(mixture.counts):
            live, kept = None, None
            if not mixture.redrawn:
                first = mixture.world(number)
                live = start(first, self.policy)
                kept = mixture.keep(number, first)
            episodes = torch.zeros(count, dtype=torch.int64)
            self.shards.append(Shard(episodes, live, kept))
        device = usable_device(config.device)
        self.policy.to(device)
        buffer = TamiyoRolloutBuffer.for_policy(
            self.policy,
            mixture.num_envs,
            rollout_steps,
            gamma=learner.gamma,
            gae_lambda=learner.gae_lambda,
            device=device,
        )
        order = stream_seed(seed, "order")
        self.agent = PPOAgent(self.policy, buffer, learner.ppo, rng_seed=order)

    @property
    def env_steps(self) -> int:
        """Decisions since the start, over all environments."""
        return self.round * self.rollout_steps * self.mixture.num_envs

    def collect(self) -> list[ShardRollout]:
        """Fill the agent's buffer; one part for each world."""
        rollout = self.play_shards()
        self.shards = [played.shard for played in rollout]
        columns = [played.columns for played in rollout]
        self.agent.buffer.join(columns, self.agent.version, self.mixture.group_size)
        self.round += 1
        return rollout

    def play_shards(self) -> list[ShardRollout]:
        """The rollouts of all worlds, by the present policy; changes nothing here."""
        found = self.workers.run(
            play_shard,
            self.jobs(),
            save(self.policy),
            about=lambda job: f"world {job.number + 1} in round {job.round + 1}",
            check=lambda job, played: require_played(job, self.agent.buffer, played),
        )
        return [*found]

    def jobs(self) -> list[ShardJob]:
        """What the next rollouts depend on, except for the policy."""
        return [
            ShardJob(
                mixture=self.mixture,
                number=number,
                round=self.round,
                shard=shard,
                policy=self.config.learner.policy,
                steps=self.rollout_steps,
                rng_seed=self.config.rng_seed,
                rollbacks=self.rollbacks,
            )
            for number, shard in enumerate(self.shards)
        ]

    def update(self) -> UpdateRecord:
        """Learn from what was collected."""
        return self.agent.update()

    def memories(self) -> dict[str, Tensor]:
        """The policy's memory in running episodes, by names for errors."""
        return {
            f"memory of world {number + 1}": shard.live.state
            for number, shard in enumerate(self.shards)
            if shard.live is not None
        }

    def forget_episodes(self) -> None:
        """Nothing: the state of these worlds is saved."""

    def change_streams(self, rollbacks: int) -> None:
        """Use other random numbers after a rollback."""
        self.rollbacks = rollbacks
        again = f"order, again {rollbacks}"
        self.agent.generator.manual_seed(stream_seed(self.config.rng_seed, again))


def controller_loop(
    world: VectorWorld | Mixture,
    config: "TrainConfig",
    rollout_steps: int,
    callbacks: Sequence[Callback] = (),
    signals: Sequence[int] = (),
    workers: Workers | None = None,
) -> TrainingLoop:
    """The training of a controller that settings describe."""
    algorithm = ControllerPPO(world, config, rollout_steps, workers)
    budget, end = config.budget, config.learner.end_factor
    rounds = budget.rounds_of(rollout_steps * algorithm.mixture.num_envs)

    def factors(progress: float) -> tuple[float, float]:
        return 1.0 + (end - 1.0) * progress, 1.0

    return TrainingLoop(algorithm, rounds, budget.minutes, factors, callbacks, signals)
