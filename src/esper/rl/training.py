"""Runs of `esper ppo`: recorded, saved and resumed exactly, like `esper train`.

An environment's state cannot be saved in general, so every checkpoint is a moment at
which all environments begin new episodes, with seeds that follow from the round. The
run that is never interrupted does the same, so a resumed one is equal to it to the bit
wherever `reset(seed)` decides what an environment does. Between two checkpoints nothing
is saved: a signal or a crash costs the rounds since the last one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from esper.contracts.errors import EsperError, InvalidInputError
from esper.contracts.messages import one_line, quoted, refusal
from esper.contracts.state import leaves
from esper.rl.ppo import DEFAULTS, PPO, Episode
from esper.rl.vector import Vectorization
from esper.runs.records import TEST, RoundRecord
from esper.runs.run import STORE, Run, validate_name
from esper.runs.settings import (
    Count,
    RngSeed,
    Text,
    as_toml,
    construct,
    settings,
    table_of,
)
from esper.runs.store import Store, usable_store
from esper.runs.streams import stream_seed
from esper.runs.train_config import Budget, CheckpointConfig, check_limits
from esper.simic.agent.memory import MemoryName
from esper.simic.agent.ppo import PPOConfig
from esper.training.callbacks import Checkpoint, TensorBoard, summary_writer
from esper.training.loop import Callback, TrainingLoop
from esper.training.recovery import Attempt, RunResult, train_on, train_to_end
from esper.workers.deadline import TIMEOUT

KIND: Final = "ppo"
"""What `versions.json` calls such a run."""
AGENT: Final = "agent.safetensors"
"""The file of the agent in the folder of a finished run."""
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@settings
class PPORunConfig:
    """A run of PPO in one environment."""

    env: Text = "CartPole-v1"
    """Gymnasium id of the environment."""
    total_steps: Annotated[int, Field(ge=1, le=10**12)] = 100_000
    """Total environment steps, summed over all environments."""
    memory: MemoryName = "none"
    """Memory type: mingru, gru, lstm or none."""
    num_envs: Count = 16
    """Number of parallel environments."""
    rollout_steps: Count = 128
    """Steps per environment between two updates."""
    vectorization: Vectorization = "sync"
    """Vectorization: sync (one process), async (a process per environment) or native
    (the environment's own)."""
    env_timeout: Annotated[float, Field(gt=0, le=10**6)] = TIMEOUT
    """Time limit of one environment call in seconds."""
    gamma: Fraction = 0.99
    """Discount factor per step."""
    gae_lambda: Fraction = 0.95
    """GAE lambda: 0 is one-step TD, 1 is Monte Carlo."""
    end_factor: Fraction = 0.1
    """Learning rate and entropy coefficients fall linearly to this fraction."""
    width: Count = 64
    """Width of the hidden layers and of the memory."""
    layers: Count = 1
    """Number of memory layers."""
    separate_value: bool = False
    """Use a separate encoder and memory for the value function."""
    autoregressive: bool = False
    """Condition each action head on the actions of the heads before it."""
    normalize: bool = True
    """Normalise numeric observations with running statistics."""
    ppo: PPOConfig = DEFAULTS
    """Hyperparameters of the PPO update."""
    checkpoint: CheckpointConfig = field(
        default_factory=lambda: CheckpointConfig(every=20)
    )
    """Checkpoints and logs; every checkpoint starts new episodes."""
    episodes: Count = 20
    """Episodes of the final evaluation."""
    rng_seed: RngSeed = 0
    """Random seed of the run."""
    name: Annotated[str, Field(max_length=255)] | None = None
    """Name of the run; none: a generated name."""
    runs: Text = "runs"
    """Folder that contains the runs."""

    def __post_init__(self) -> None:
        """Refuse what the fields alone let through."""
        check_limits("ppo", self.ppo)
        if self.name is not None:
            validate_name(self.name)

    def make(self) -> PPO:
        """The agent in its environments."""
        return PPO(
            self.env,
            memory=self.memory,
            num_envs=self.num_envs,
            vectorization=self.vectorization,
            seed=self.rng_seed,
            rollout_steps=self.rollout_steps,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            end_factor=self.end_factor,
            width=self.width,
            layers=self.layers,
            separate_value=self.separate_value,
            autoregressive=self.autoregressive,
            normalize=self.normalize,
            ppo=self.ppo,
            env_timeout=self.env_timeout,
        )


class PPOTrainer(TrainingLoop):
    """An agent between two rounds.

    Args:
        ppo: The agent in its environments.
        config: Of the run.
        store: Gets a row for every episode that ends.
        callbacks: Called around rounds.
        signals: Training ends after a round in which this is no longer empty.
    """

    STATE = ("ppo", "episodes", *TrainingLoop.STATE)

    def __init__(
        self,
        ppo: PPO,
        config: PPORunConfig,
        store: Store,
        callbacks: Sequence[Callback] = (),
        signals: Sequence[int] = (),
    ) -> None:
        rounds = Budget(env_steps=config.total_steps).rounds_of(
            config.num_envs * config.rollout_steps
        )
        super().__init__(rounds, None, callbacks, signals)
        self.ppo, self.config, self._store = ppo, config, store
        self.episodes = np.zeros(config.num_envs, np.int64)
        """Episodes that ended in each environment."""

    @property
    def env_steps(self) -> int:
        """Steps since the start, over all environments."""
        return self.ppo.steps_done

    @property
    def begins_anew(self) -> bool:
        """Whether all environments begin new episodes with the next round."""
        return self.round % self.config.checkpoint.every == 0

    @property
    def sound(self) -> bool:
        """Whether the state is worth going back to: no episode is under way."""
        return super().sound and (self.begins_anew or self.over)

    def play_round(self) -> RoundRecord:
        """Collect a rollout and learn from it."""
        began, ppo = monotonic(), self.ppo
        if self.begins_anew:
            ppo.forget_episodes()
        share = 1.0 - (1.0 - self.config.end_factor) * self.done
        ppo.anneal(share)
        ended, update = ppo.play_round()
        self.round += 1
        self.seconds += monotonic() - began
        if ended:
            self._store.add("episodes", round=self.round, **self._rows(ended))
        returns = [episode.total for episode in ended]
        record = RoundRecord(
            round=self.round,
            rounds=self.rounds,
            env_steps=self.env_steps,
            seconds=self.seconds,
            mean_return=float(np.mean(returns)) if returns else float("nan"),
            learning_rate=share * self.config.ppo.learning_rate,
            update=update,
        )
        self._store.add_round(record)
        return record

    def _rows(self, ended: Sequence[Episode]) -> dict[str, Any]:
        """Columns of the episodes that ended in the round that was just played."""
        numbers = []
        for episode in ended:
            self.episodes[episode.env] += 1
            numbers.append(int(self.episodes[episode.env]))
        before = (self.round - 1) * self.config.rollout_steps
        return {
            "step": [before + episode.step + 1 for episode in ended],
            "env": [episode.env for episode in ended],
            "task": self.config.env,
            "episode": numbers,
            "return": [episode.total for episode in ended],
        }

    def draw_streams_anew(self, rollbacks: int) -> None:
        """Give choices and minibatches other random streams after a rollback."""
        self.rollbacks = rollbacks
        seed, again = self.config.rng_seed, f"again {self.rollbacks}"
        self.ppo.generator.manual_seed(stream_seed(seed, f"choices, {again}"))
        self.ppo.agent.generator.manual_seed(stream_seed(seed, f"order, {again}"))


def begin_ppo(config: PPORunConfig, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Begin a run and learn until all steps are made, or a signal comes.

    Args:
        config: All settings.
        callbacks: Called besides those that record and save.
    """
    config.make().close()  # refuse what cannot be learnt before there is a folder
    if config.checkpoint.tensorboard:
        summary_writer()
    facts = {"kind": KIND, "rng_seed": config.rng_seed, "tasks": [config.env]}
    with Run.create(Path(config.runs), config.name, as_toml(config), facts) as run:
        what = (
            f"{config.env}, {config.num_envs} environments, rng_seed {config.rng_seed}"
        )
        first = (f"Learning {what}.", f"The run is in {run.path}.")
        attempt = partial(_attempt, config, run, callbacks)
        return train_to_end(run, callbacks, first, attempt)


def resume_ppo(
    path: Path,
    callbacks: Sequence[Callback] = (),
    *,
    env: str | None = None,
    trust: bool = False,
    env_timeout: float | None = None,
) -> RunResult:
    """Go on with a run from its newest good checkpoint.

    Args:
        path: The folder of the run.
        callbacks: Called besides those that record and save.
        env: The environment's id; it must be the run's own.
        trust: Import the module that the run's id names ("module:Id"); without it
            such an id must be given as `env` too, since a file must not choose code.
        env_timeout: Seconds that a call may take from now on; None: as before.
    """
    with Run.open(path) as run:
        if run.finished is not None:
            raise InvalidInputError(f"run {run.name} is complete; begin another one.")
        config = ppo_settings_of(run)
        if env not in (None, config.env):
            raise refusal(
                f"run {run.name} learns in {quoted(config.env)}, got env "
                f"{quoted(env)}; give the same or none."
            )
        if ":" in config.env and env is None and not trust:
            module = config.env.partition(":")[0]
            raise refusal(
                f"give --trust or --env {one_line(config.env, 60)} to go on: the file "
                f"of run {run.name} names a module to import, {quoted(module)}."
            )
        if env_timeout is not None:
            config = replace(config, env_timeout=env_timeout)
        first = (f"Going on with {run.name}: {config.env}.",)
        attempt = partial(_attempt, config, run, callbacks)
        return train_to_end(run, callbacks, first, attempt)


def resume_command(path: Path, env: str) -> str:
    """What to type to go on with a run."""
    again = f" --env {quote(env)}" if ":" in env else ""
    return f"esper ppo --resume {quote(str(path))}{again}"


def ppo_settings_of(run: Run) -> PPORunConfig:
    """The settings that a run was begun with."""
    if run.kind != KIND:
        raise InvalidInputError(
            f"run {run.name} is not one of esper ppo; see esper runs."
        )
    return construct(PPORunConfig, table_of(run.config_toml, PPORunConfig))


def _attempt(
    config: PPORunConfig,
    run: Run,
    callbacks: Sequence[Callback],
    signals: Sequence[int],
    trouble: str | None,
    rollbacks: int,
) -> Attempt:
    """Learn from the newest checkpoint, if there is one, to an end."""
    checkpoints = run.checkpoints(keep=config.checkpoint.last)
    facts = {"config": hashlib.sha256(run.config_toml.encode()).hexdigest()}
    agent = config.make()
    with usable_store(run.path / STORE, run.id) as store:
        own: list[Callback] = [*callbacks]
        if config.checkpoint.tensorboard:
            own.append(TensorBoard(run.path / "tensorboard"))
        own.append(Checkpoint(store, checkpoints, config.checkpoint.every, facts))
        trainer = PPOTrainer(agent, config, store, own, signals)
        try:
            found = checkpoints.latest(leaves(trainer))
            start, trouble = train_on(
                trainer, run, store, checkpoints, found, facts, trouble, rollbacks
            )
            if trouble is None and not trainer.interrupted():
                _finish(run, store, trainer)
        except EsperError as error:
            # An environment that raised, or a process that died: nothing is lost.
            saved = checkpoints.steps()
            after = f"after round {saved[-1]}" if saved else "from its beginning"
            again = resume_command(run.path, config.env)
            raise type(error)(f"{error} Go on {after} with: {again}") from error
        finally:
            trainer.call("on_close")
            agent.close()
    return start, trainer, trouble


def _finish(run: Run, store: Store, trainer: PPOTrainer) -> None:
    """Judge the agent, save it and mark the run as complete."""
    agent, episodes = trainer.ppo, trainer.config.episodes
    figures: dict[str, float] = {}
    try:
        found = agent.evaluate(episodes=episodes)
    except InvalidInputError as error:  # such as an episode that does not end
        text = f"not judged: {error}"
    else:
        figures = {"mean": found.mean, "std": found.std}
        deviation = f"deviation {found.std:.3g}"
        text = f"return of {episodes} episodes: {found.mean:.4g}, {deviation}"
    agent.save(run.path / AGENT)
    store.add_note_once(trainer.round, TEST, text)
    trainer.call("on_message", text)
    steps = {"rounds": trainer.round, "env_steps": trainer.env_steps}
    run.finish({**steps, **figures})
