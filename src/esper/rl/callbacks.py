"""Callbacks of `PPO.learn`: evaluation, early stops, saved agents, videos, Optuna.

    agent.learn(1e6, callback=[EvalCallback(every=10, keep_best="best.safetensors")])

`every` counts updates. None of them changes what is learnt.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Env
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import RecordVideo

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import described, one_line, quoted
from esper.files import storage
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
        self._every, self._env = _count("every", every), env
        self._episodes = _count("episodes", episodes)
        self._file = None if keep_best is None else _file(keep_best)
        self._stop_at = stop_at
        self._patience = None if patience is None else _count("patience", patience)
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
        with _kept_streams():
            found = agent.evaluate(self._episodes, env=self._env, **self._options)  # type: ignore[arg-type]
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
        self._path, self._every = str(_file(path)), _count("every", every)

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Save it if it is time."""
        if not loop.round % self._every:
            name = self._path.replace("{steps}", str(record.env_steps))
            _save(loop.algorithm, loop, Path(name))


class VideoCallback(Callback):
    """Records an episode after every so many updates, as `steps-N.mp4`.

    Needs `moviepy`, and environments with `render_mode="rgb_array"`.

    Args:
        folder: Folder of the videos.
        every: Updates between two videos.
        env: An id, or a function that makes an environment; None: as the agent's.
        deterministic: Take the likeliest actions instead of sampling them.
        seed: Seed of the environment, the same in each video.
    """

    def __init__(
        self,
        folder: str | Path,
        every: int = 10,
        *,
        env: str | Callable[[], Env[Any, Any]] | None = None,
        deterministic: bool = True,
        seed: int = 1,
    ) -> None:
        self._folder, self._every, self._env = Path(folder), _count("every", every), env
        self._options = {"deterministic": deterministic, "seed": seed}
        if find_spec("moviepy") is None:
            raise InvalidInputError("videos need moviepy. Run pip install moviepy.")

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Try what is needed, since the first video comes late."""
        source = self._env or loop.algorithm.evaluation_source()
        self._make: Any = source
        if isinstance(source, str):
            self._make = partial(gymnasium.make, source, render_mode="rgb_array")
        try:
            env = self._make()
            if env.render_mode != "rgb_array":
                raise ValueError(f"its render_mode is {env.render_mode!r}")
            env.reset(seed=0)
            env.render()
            env.close()
        except Exception as error:  # such as pygame, which is missing
            what = one_line(f"no video can be recorded: {described(error)}").rstrip(".")
            advice = "with render_mode='rgb_array' to VideoCallback(env=...)"
            raise InvalidInputError(
                f"{what}. Give an id, or a function that makes an environment {advice}."
            ) from error

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Record an episode if it is time."""
        if loop.round % self._every and not loop.over:
            return
        with storage(self._folder, "create"):
            self._folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self._folder) as place, _kept_streams():

            def make() -> Any:
                new = str(Path(place, "new"))  # Gymnasium warns if it exists
                return RecordVideo(self._make(), new, lambda episode: episode == 0)

            loop.algorithm.evaluate(1, env=make, **self._options)
            (video,) = Path(place).glob("new/*.mp4")
            video.replace(self._folder / f"steps-{record.env_steps}.mp4")


class OptunaPruning(Callback):
    """Reports returns to an Optuna trial, and ends the training if it is pruned.

    Reports those of `EvalCallback` if there is one, else the mean of the last 100
    episodes. Raises `optuna.TrialPruned`.

    Args:
        trial: The trial of the objective that calls `learn`.
    """

    def __init__(self, trial: Any) -> None:
        self._trial, self._evaluates = trial, False

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Look for evaluations, which are no returns of training."""
        self._evaluates = any(isinstance(c, EvalCallback) for c in loop.callbacks)

    def on_metrics(self, loop: TrainingLoop, metrics: Any) -> None:
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


@contextmanager
def _kept_streams() -> Iterator[None]:
    """Leave the random numbers of Python, NumPy and PyTorch as they were."""
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(streams[0])
        np.random.set_state(streams[1])  # noqa: NPY002
        torch.set_rng_state(streams[2])


def _save(agent: PPO, loop: TrainingLoop, file: Path) -> None:
    """Save an agent that learns, with the progress of its schedules."""
    agent.progress = loop.last_progress
    agent.save(file)


def _file(path: str | Path) -> Path:
    """The path; refuses a folder, which would be noticed at the first save."""
    if str(path).endswith("/") or Path(path).is_dir():
        raise InvalidInputError(
            f"{quoted(str(path))} is a folder. Give a file in it, such as "
            "agent.safetensors."
        )
    return Path(path)


def _count(name: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or value < 1:
        raise InvalidInputError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)
