"""Training: collect, update, tell; round after round.

The loop knows neither what the world is nor who listens. A round is one rollout and one
update; what it did is handed to `on_round` as a record.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from esper.contracts.errors import BadInput
from esper.contracts.state import Stateful
from esper.contracts.step import VectorWorld
from esper.experiment.collect import Listener, collect, start
from esper.experiment.streams import stream, stream_seed
from esper.simic.agent.metrics import UpdateRecord
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How long, how wide, and with which settings to train."""

    rounds: int = 200
    """Rollouts, each followed by an update."""
    steps: int = 16
    """Decisions per environment and rollout."""
    rng_seed: int = 0
    """Start of every random stream of the run."""
    gamma: float = 1.0
    """Discount per decision; 1 makes the return the final score minus rent."""
    gae_lambda: float = 0.95
    """Trace decay of the advantages: 0 is one-step TD, 1 is Monte Carlo."""
    final_share: float = 0.1
    """Share of learning rate and entropy weight that is left in the last round."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)

    def __post_init__(self) -> None:
        """Refuse a loop that would do nothing."""
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0.0 <= self.final_share <= 1.0:
            raise BadInput(f"final_share must lie in [0, 1], got {self.final_share}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """What one round did."""

    round: int
    """Counted from 1."""
    rounds: int
    env_steps: int
    """Decisions taken since the start, over all environments."""
    seconds: float
    """Time since the start."""
    mean_return: float
    """Mean return of the episodes that ended in this rollout; NaN if none did."""
    learning_rate: float
    """Of the update."""
    mean_score: float | None = None
    """Mean final score of the episodes that ended, where the world knows one."""
    added: float | None = None
    """Parameters that they added, as a multiple of the host's, mean."""
    update: UpdateRecord


def train(
    world: VectorWorld,
    config: LoopConfig,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
) -> TamiyoPolicy:
    """Train a new policy in `world` and return it."""
    training = Training(world, config)
    while training.round < config.rounds:
        on_round(training.play_round())
    return training.policy


class Training(Stateful):
    """A world, the policy that lives in it and its learner, between two rounds.

    Args:
        world: Where the policy lives; it is reset.
        config: How to train.
        on_step: Is told of every step, see `collect`.
    """

    STATE = ("world", "agent", "live", "generator", "round", "seconds")

    def __init__(
        self,
        world: VectorWorld,
        config: LoopConfig,
        on_step: Listener | None = None,
    ) -> None:
        self.world, self.config, self._on_step = world, config, on_step
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(config.rng_seed, "weights"))
            policy = TamiyoPolicy(world.spec, config.policy)
        self.generator = stream(config.rng_seed, "choices")
        buffer = TamiyoRolloutBuffer(
            world.num_envs,
            config.steps,
            world.spec,
            state_shape=policy.state_shape,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        order = stream_seed(config.rng_seed, "order")
        self.agent = PPOAgent(policy, buffer, config.ppo, rng_seed=order)
        self.live = start(world, policy)
        self.round = 0
        """Rounds that were played."""
        self.seconds = 0.0
        """Time that they took."""

    @property
    def policy(self) -> TamiyoPolicy:
        """The policy that is trained."""
        policy = self.agent.policy
        assert isinstance(policy, TamiyoPolicy)
        return policy

    def play_round(self, done: float | None = None) -> RoundRecord:
        """Collect a rollout and learn from it.

        Args:
            done: Share of the training that lies behind, which sets learning rate and
                entropy; None: that of the rounds.
        """
        began, config, agent = time.monotonic(), self.config, self.agent
        if done is None:
            done = self.round / max(config.rounds - 1, 1)
        share = 1.0 - (1.0 - config.final_share) * done
        agent.anneal(share)
        if self.world.redraws:
            self.world.begin_round()
            self.live = start(self.world, self.policy)
        self.live, finished = collect(
            self.world,
            agent.policy,
            agent.buffer,
            self.live,
            self.generator,
            policy_version=agent.version,
            on_step=self._on_step,
        )
        update = agent.update()
        self.round += 1
        self.seconds += time.monotonic() - began
        return RoundRecord(
            round=self.round,
            rounds=config.rounds,
            env_steps=self.round * config.steps * self.world.num_envs,
            seconds=self.seconds,
            mean_return=finished.mean_return(),
            learning_rate=share * config.ppo.learning_rate,
            update=update,
        )
