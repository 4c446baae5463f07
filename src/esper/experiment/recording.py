"""From the steps of a world to rows of a store.

A recorder goes along with the environments of one task: it counts their decisions and
episodes, sums rewards, and sees what happened to seeds. It belongs to the state of a
run, so that a resumed run goes on counting where the checkpoint was.
"""

from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.observation import Observation
from esper.contracts.state import Stateful
from esper.contracts.step import EpisodeReport, StepResult
from esper.experiment.storage.lifecycle_events import events_between
from esper.experiment.store import Store


class Recorder(Stateful):
    """Tells a store of every step of the environments of one task.

    Args:
        store: Where to.
        task: What the environments learn.
        spec: What can be said to them.
        num_envs: How many there are.
        device: Where their tensors live.
    """

    STATE = ("step", "episode", "returns")

    def __init__(
        self,
        store: Store,
        task: str,
        spec: ActionSpec,
        num_envs: int,
        device: str = "cpu",
    ) -> None:
        self._store, self._task = store, task
        self._blueprints = [blueprint.name for blueprint in spec.blueprints]
        self.step = 0
        """Decisions since the start."""
        self.episode = torch.ones(num_envs, dtype=torch.int64, device=device)
        """The running episode of every environment, from 1."""
        self.returns = torch.zeros(num_envs, device=device)
        """Rewards of the running episodes so far."""

    def begin_anew(self) -> None:
        """Episodes that were running are given up, and others begin everywhere."""
        if self.step:
            self.returns = torch.zeros_like(self.returns)
            self.episode = self.episode + 1

    def add(
        self,
        round: int,
        seen: Observation,
        actions: Int64[Tensor, "env head"],
        result: StepResult,
        *,
        illegal: Bool[Tensor, " env"] | None = None,
        report: EpisodeReport | None = None,
    ) -> None:
        """Tell of one step.

        Args:
            round: Of the run.
            seen: What was seen before the decision.
            actions: What was said.
            result: What the world answered.
            illegal: Where the sentence was not carried out, if the world says so.
            report: What became of the episodes that ended, if the world says so.
        """
        self.step += 1
        where: dict[str, Any] = {"round": round, "step": self.step, "task": self._task}
        ended = result.terminated | result.truncated
        changes = events_between(
            seen.slots,
            result.observation.slots,
            ended=ended,
            actions=actions,
            illegal=illegal,
        )
        self._store.add_steps(
            **where,
            episode=self.episode,
            reward=result.reward,
            score=seen.host.score,
            loss=seen.host.loss,
            added=seen.host.added,
            budget_left=seen.host.budget_left,
        )
        self._store.add_events(
            changes, **where, episode=self.episode, blueprints=self._blueprints
        )
        self.returns = self.returns + result.reward
        env = torch.nonzero(ended).flatten() if report is None else report.env
        if len(env):
            names = ("score", "test", "added", "macs", "panicked")
            figures: dict[str, Any] = {
                name: getattr(report, name, None) for name in names
            }
            self._store.add_episodes(
                **where,
                env=env,
                episode=self.episode[env],
                returns=self.returns[env],
                **figures,
            )
        self.returns = torch.where(ended, 0.0, self.returns)
        self.episode = self.episode + ended
