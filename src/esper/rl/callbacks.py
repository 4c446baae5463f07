"""Callbacks of `PPO.learn`: evaluation, early stops, saved agents, Optuna.

    agent.learn(1e6, callback=[EvalCallback(every=10, keep_best="best.safetensors")])

`every` counts updates. None of them changes what is learnt.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from esper.contracts.errors import InvalidInputError
from esper.rl.ppo import PPO, EpisodeReturns
from esper.rl.vector import Source
from esper.runs.records import RoundRecord
from esper.training.loop import EVALUATION, Callback, TrainingLoop


class EvalCallback(Callback):
    """Evaluates the agent in its own environments, keeps the best one, stops early.

    Args:
        every: Updates between two evaluations.
        episodes: Episodes of each.
        env: Where to play; None: new environments like those it learns in.
        keep_best: File for the agent with the highest mean return so far.
        stop_at: End the training at this mean return.
        patience: End it after this many evaluations without a higher mean return.
        deterministic: Take the likeliest actions instead of sampling them.
        seed: Seed of the environments, the same in each evaluation.
    """

    def __init__(
        self,
        every: int = 10,
        episodes: int = 20,
        *,
        env: Source | None = None,
        keep_best: str | Path | None = None,
        stop_at: float | None = None,
        patience: int | None = None,
        deterministic: bool = True,
        seed: int = 1,
    ) -> None:
        self._every, self._episodes, self._env = _count("every", every), episodes, env
        self._file = None if keep_best is None else Path(keep_best)
        self._stop_at, self._patience = stop_at, patience
        self._options = {"deterministic": deterministic, "seed": seed}
        self.best = -np.inf
        """Highest mean return so far."""
        self.history: list[tuple[int, EpisodeReturns]] = []
        """Steps and results of all evaluations."""
        self._since_best = 0

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Refuse environments that an evaluation would reset."""
        source = loop.algorithm.evaluation_source() if self._env is None else None
        if isinstance(source, VectorEnv):
            raise InvalidInputError(
                "EvalCallback would reset the vector environment that the agent learns "
                "in. Give it environments of its own: EvalCallback(env=...)."
            )

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Evaluate if it is time."""
        if loop.round % self._every and not loop.over:
            return
        agent: PPO = loop.algorithm
        streams = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        try:
            found = agent.evaluate(self._episodes, env=self._env, **self._options)  # type: ignore[arg-type]
        finally:
            random.setstate(streams[0])
            np.random.set_state(streams[1])  # noqa: NPY002
            torch.set_rng_state(streams[2])
        self.history.append((record.env_steps, found))
        loop.call("on_metrics", loop, {EVALUATION: found.mean})
        self._since_best += 1
        if found.mean > self.best:
            self.best, self._since_best = found.mean, 0
            if self._file is not None:
                _save(agent, loop, self._file)
        tired = self._patience is not None and self._since_best >= self._patience
        if tired or (self._stop_at is not None and found.mean >= self._stop_at):
            loop.stopping = True


class CheckpointCallback(Callback):
    """Saves the agent after every so many updates.

    Args:
        path: File of the agent; "{steps}" in it becomes the number of steps so far.
        every: Updates between two files.
    """

    def __init__(self, path: str | Path, every: int = 10) -> None:
        self._path, self._every = str(path), _count("every", every)

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Save it if it is time."""
        if not loop.round % self._every:
            name = self._path.replace("{steps}", str(record.env_steps))
            _save(loop.algorithm, loop, Path(name))


class OptunaPruning(Callback):
    """Reports returns to an Optuna trial, and ends the training if it is pruned.

    Reports those of `EvalCallback` if that is among the callbacks before it, else the
    mean of the last 100 episodes. Raises `optuna.TrialPruned`.

    Args:
        trial: The trial of the objective that calls `learn`.
    """

    def __init__(self, trial: Any) -> None:  # noqa: ANN401
        self._trial, self._evaluates = trial, False

    def on_metrics(self, loop: TrainingLoop, metrics: Any) -> None:  # noqa: ANN401
        """Report an evaluation."""
        if EVALUATION in metrics:
            self._evaluates = True
            self._report(metrics[EVALUATION], loop.env_steps)

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Report recent episodes."""
        if not self._evaluates and np.isfinite(record.recent_return):
            self._report(record.recent_return, record.env_steps)

    def _report(self, value: float, step: int) -> None:
        import optuna

        self._trial.report(value, step)
        if self._trial.should_prune():
            raise optuna.TrialPruned(f"return {value:.4g} after {step:,} steps")


def _save(agent: PPO, loop: TrainingLoop, file: Path) -> None:
    """Save an agent that learns, with the progress of its schedules."""
    agent.progress = loop.last_progress
    agent.save(file)


def _count(name: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or value < 1:
        raise InvalidInputError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)
