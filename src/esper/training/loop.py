"""The training loop: rounds of a rollout and an update, with callbacks around them.

    trainer = Trainer(world, config, steps=16, callbacks=[...])
    trainer.run()
    trainer.policy

It knows any world by its protocol. `esper.training.train` makes runs of it.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from esper.contracts.errors import InvalidInputError, NotFiniteError
from esper.contracts.state import Stateful, leaves
from esper.contracts.world import VectorWorld
from esper.environment.mixture import Mixture
from esper.runs.records import Results, RoundRecord
from esper.runs.streams import stream_seed
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.tamiyo.rollout import concat
from esper.training.shards import (
    ShardJob,
    ShardRollout,
    first_shard,
    play_shard,
    require_played,
)
from esper.workers.jobs import Workers

if TYPE_CHECKING:
    from esper.runs.train_config import TrainConfig

PATIENCE: Final = 3
"""Failures in a row that are borne: refused checkpoints, refused updates."""
LARGEST: Final = 1e30
"""A number of this size is as good as infinite: its square is."""
BROKEN: Final = f"{PATIENCE} rounds in a row had no update that was finite"


class Callback:
    """Hooks into a training; each does nothing unless it is overridden."""

    def on_message(self, text: str, *, warning: bool = False) -> None:
        """Something to be read by people."""

    def on_progress(self, name: str, done: int, total: int, text: str) -> None:
        """One step of something that takes a while before or after the rounds."""

    def on_train_start(self, trainer: "TrainingLoop", *, resumed: bool) -> None:
        """Before the first round; `resumed`: from a checkpoint."""

    def on_rollout(self, trainer: "Trainer", rollout: Sequence[ShardRollout]) -> None:
        """After every rollout, before the update; one part for each world."""

    def on_round_end(self, trainer: "TrainingLoop", record: RoundRecord) -> None:
        """After every round."""

    def on_evaluation(self, trainer: "Trainer", results: Results) -> None:
        """After a periodic evaluation."""

    def on_close(self) -> None:
        """At the very end, also after a signal or an error."""


class OnRoundEnd(Callback):
    """Calls a function with the record of every round."""

    def __init__(self, function: Callable[[RoundRecord], object]) -> None:
        self._function = function

    def on_round_end(self, trainer: "TrainingLoop", record: RoundRecord) -> None:
        """Call it."""
        self._function(record)


class TrainingLoop(Stateful):
    """Rounds of something that learns, with callbacks around them.

    Args:
        rounds: Rounds that the budget allows for, time aside.
        minutes: Time after which it is over; None: never.
        callbacks: Called around steps and rounds.
        signals: Training ends after a round in which this is no longer empty.
    """

    relative = False
    """Whether rewards are shares of the errors of hosts that never grow."""
    STATE: ClassVar[tuple[str, ...]] = ("round", "seconds", "rollbacks")
    DERIVED: ClassVar[tuple[str, ...]] = ("refused_rounds", "stopping")

    def __init__(
        self,
        rounds: int,
        minutes: float | None = None,
        callbacks: Sequence[Callback] = (),
        signals: Sequence[int] = (),
    ) -> None:
        self.rounds, self.minutes = rounds, minutes
        self.callbacks, self._signals = tuple(callbacks), signals
        self.round = 0
        """Rounds that were played."""
        self.seconds = 0.0
        """Time that they took."""
        self.rollbacks = 0
        """How often the run went back to a checkpoint because updates were refused."""
        self.refused_rounds = 0
        """Rounds in a row, up to the last one, whose updates were all refused."""
        self.stopping = False
        """Whether a signal ends training with the last round."""

    @property
    def env_steps(self) -> int:
        """Decisions since the start, over all environments."""
        raise NotImplementedError

    @property
    def done(self) -> float:
        """Share of the budget that is used up, from 0 to 1."""
        share = self.round / max(self.rounds - 1, 1)
        if self.minutes is not None:
            share = max(share, self.seconds / (60 * self.minutes))
        return min(share, 1.0)

    @property
    def over(self) -> bool:
        """Whether the budget is used up."""
        late = self.minutes is not None and self.seconds >= 60 * self.minutes
        return late or self.round >= self.rounds

    @property
    def diverged(self) -> bool:
        """Whether so many updates in a row were refused that it should go back."""
        return self.refused_rounds >= PATIENCE

    @property
    def sound(self) -> bool:
        """Whether the state is worth going back to, or the last there will be."""
        return not self.refused_rounds or (self.over and not self.diverged)

    def interrupted(self) -> bool:
        """Whether a signal has come."""
        return bool(self._signals)

    def call(self, hook: str, *args: Any, **options: Any) -> None:  # noqa: ANN401
        """Call one hook of all callbacks, by name."""
        for callback in self.callbacks:
            getattr(callback, hook)(*args, **options)

    def run(self) -> RoundRecord | None:
        """Play rounds until the budget is used up, a signal comes or it diverges.

        Returns:
            The last round, if there was one.
        """
        record = None
        self.stopping = self.interrupted()
        while not (self.over or self.stopping or self.diverged):
            record = self.play_round()
            self.refused_rounds = self.refused_rounds + 1 if record.refused else 0
            self.stopping = self.interrupted()
            self.call("on_round_end", self, record)
        return record

    def play_round(self) -> RoundRecord:
        """Collect a rollout and learn from it."""
        raise NotImplementedError

    def draw_streams_anew(self, rollbacks: int) -> None:
        """Give choices and minibatches other random streams after a rollback."""
        raise NotImplementedError


class Trainer(TrainingLoop):
    """Worlds, the policy that acts in them and its learner, between two rounds.

    Args:
        world: Where the policy acts; it is reset.
        config: Learner, budget and random seed; the rest is not read.
        steps: Decisions per environment and rollout.
        callbacks: Called around rollouts and rounds.
        signals: Training ends after a round in which this is no longer empty.
        workers: Who plays the worlds; none: this process. It makes no difference to
            what is learned.
    """

    STATE = ("shards", "agent", *TrainingLoop.STATE)
    DERIVED = ("policy", "mixture", *TrainingLoop.DERIVED)

    def __init__(
        self,
        world: VectorWorld | Mixture,
        config: "TrainConfig",
        steps: int,
        callbacks: Sequence[Callback] = (),
        signals: Sequence[int] = (),
        workers: Workers | None = None,
    ) -> None:
        if steps < 1:
            raise InvalidInputError(f"steps must be at least 1, got {steps}.")
        mixture = world if isinstance(world, Mixture) else Mixture.of([world])
        rounds = config.budget.rounds_of(steps * mixture.num_envs)
        super().__init__(rounds, config.budget.minutes, callbacks, signals)
        self.mixture, self.config, self.steps = mixture, config, steps
        self.workers = workers or Workers()
        self.relative = config.world.relative
        learner, seed = config.learner, config.rng_seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, "weights"))
            self.policy = TamiyoPolicy(mixture.spec, learner.policy)
        buffer = TamiyoRolloutBuffer(
            mixture.num_envs,
            steps,
            mixture.spec,
            state_shape=self.policy.state_shape,
            gamma=learner.gamma,
            gae_lambda=learner.gae_lambda,
        )
        order = stream_seed(seed, "order")
        self.agent = PPOAgent(self.policy, buffer, learner.ppo, rng_seed=order)
        self.shards = [
            first_shard(mixture, number, self.policy)
            for number in range(len(mixture.counts))
        ]

    @property
    def env_steps(self) -> int:
        """Decisions since the start, over all environments."""
        return self.round * self.steps * self.mixture.num_envs

    def play_round(self) -> RoundRecord:
        """Collect a rollout and learn from it."""
        began, learner, agent = time.monotonic(), self.config.learner, self.agent
        share = 1.0 - (1.0 - learner.end_factor) * self.done
        agent.anneal(share)
        rollout = self.play_shards()
        self.shards = [played.shard for played in rollout]
        agent.buffer.join(
            [played.columns for played in rollout],
            agent.version,
            self.mixture.group_size,
        )
        finished = concat([played.finished for played in rollout])
        self.call("on_rollout", self, rollout)
        self.require_finite()  # NaN in a moment would reach the weights
        update = agent.update()
        self.require_finite()
        self.round += 1
        self.seconds += time.monotonic() - began
        return RoundRecord(
            round=self.round,
            rounds=self.rounds,
            env_steps=self.env_steps,
            seconds=self.seconds,
            mean_return=finished.mean_return(),
            mean_score=finished.mean("score"),
            added=finished.mean("added"),
            learning_rate=share * learner.ppo.learning_rate,
            update=update,
        )

    def jobs(self) -> list[ShardJob]:
        """What the next rollouts depend on, but for the policy."""
        return [
            ShardJob(
                mixture=self.mixture,
                number=number,
                round=self.round,
                shard=shard,
                policy=self.config.learner.policy,
                steps=self.steps,
                rng_seed=self.config.rng_seed,
                rollbacks=self.rollbacks,
            )
            for number, shard in enumerate(self.shards)
        ]

    def play_shards(self) -> list[ShardRollout]:
        """The rollouts of all worlds, by the present policy."""
        results = self.workers.run(
            play_shard,
            self.jobs(),
            dict(self.policy.state_dict()),
            about=lambda job: f"world {job.number + 1} in round {job.round + 1}",
            check=lambda job, played: require_played(job, self.agent.buffer, played),
        )
        return [*results]

    def require_finite(self) -> None:
        """Refuse a learner with a weight, moment or memory that is no usable number."""
        found = leaves(self.agent, "agent") | {
            f"memory of world {number + 1}": shard.live.state
            for number, shard in enumerate(self.shards)
            if shard.live is not None
        }
        for name, tensor in found.items():
            if tensor.is_floating_point() and not bool((tensor.abs() < LARGEST).all()):
                raise NotFiniteError(
                    f"{name} holds NaN, infinity or as good as that in round "
                    f"{self.round}"
                )

    def draw_streams_anew(self, rollbacks: int) -> None:
        """Give choices and minibatches other random streams after a rollback."""
        self.rollbacks = rollbacks
        again = f"order, again {rollbacks}"
        self.agent.generator.manual_seed(stream_seed(self.config.rng_seed, again))
