"""Runs of `esper ppo`, with records, checkpoints and exact resumption.

The state of an environment cannot be saved in general. So all environments start new
episodes at every checkpoint, with seeds that depend on the round. A resumed run is then
bit-identical to an uninterrupted one if `reset(seed)` makes an environment
deterministic. A signal or a crash loses the rounds since the last checkpoint.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Final

import numpy as np
import torch

from esper.contracts.errors import EsperError, InvalidInputError
from esper.contracts.messages import one_line, quoted, refusal
from esper.contracts.state import Stateful, leaves
from esper.rl.ppo import PPO
from esper.rl.settings import PPORunConfig, PPOSettings
from esper.runs.records import TEST
from esper.runs.run import STORE, Run
from esper.runs.settings import as_toml, construct, table_of
from esper.runs.store import Store, usable_store
from esper.runs.train_config import Budget
from esper.training.callbacks import Checkpoint, Record, TensorBoard, summary_writer
from esper.training.loop import Callback, TrainingLoop, WorldRollout
from esper.training.recovery import Attempt, RunResult, resume_and_train, train_to_end

KIND: Final = "ppo"
"""Kind of the run in `versions.json`."""
AGENT: Final = "agent.safetensors"
"""File of the agent in the folder of a finished run."""


class RecordedPPO(Stateful):
    """An agent that also returns its episodes as rows of a store."""

    STATE = ("ppo", "episodes")
    relative = False

    def __init__(self, ppo: PPO) -> None:
        self.ppo, self.agent, self.rollout_steps = ppo, ppo.agent, ppo.rollout_steps
        self.episodes = np.zeros(ppo.settings.num_envs, np.int64)
        """Number of episodes that ended in each environment."""
        self.update, self.forget_episodes = ppo.update, ppo.forget_episodes
        self.change_streams, self.memories = ppo.change_streams, ppo.memories

    @property
    def env_steps(self) -> int:
        """Steps of all environments so far."""
        return self.ppo.env_steps

    def collect(self) -> list[WorldRollout]:
        """Fill the agent's buffer and number the episodes that ended."""
        stats = self.ppo.collect()[0].stats
        numbers = []
        for env in stats.env.tolist():
            self.episodes[env] += 1
            numbers.append(int(self.episodes[env]))
        rows = {
            "index": stats.step,
            "env": stats.env,
            "episode": torch.tensor(numbers, dtype=torch.int64),
            "return": stats.returns,
        }
        return [WorldRollout({"episodes": rows} if numbers else {}, stats)]


def made(config: PPORunConfig) -> PPO:
    """A new agent with its environments."""
    names = PPOSettings.__dataclass_fields__
    values = {name: getattr(config, name) for name in names}
    return PPO(config.env, **values, device=config.device)


def begin_ppo(config: PPORunConfig, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Start a run and train until all steps are done or a signal arrives.

    `callbacks` are called in addition to those that record and save.
    """
    made(config).close()  # raises for unsupported environments before a folder exists
    if config.checkpoint.tensorboard:
        summary_writer()
    facts = {"kind": KIND, "rng_seed": config.seed, "tasks": [config.env]}
    with Run.create(Path(config.runs), config.name, as_toml(config), facts) as run:
        what = f"{config.env}, {config.num_envs} environments, seed {config.seed}"
        first = (f"Training in {what}.", f"The run is in {run.path}.")
        attempt = partial(_attempt, config, run, callbacks)
        return train_to_end(run, callbacks, first, attempt)


def resume_ppo(
    path: Path,
    callbacks: Sequence[Callback] = (),
    *,
    env: str | None = None,
    trust: bool = False,
    env_timeout: float | None = None,
    device: str | None = None,
) -> RunResult:
    """Resume a run from its newest good checkpoint.

    Args:
        path: The folder of the run.
        callbacks: Called in addition to those that record and save.
        env: The environment's id, which must be that of the run.
        trust: Import the module that the run names in an id "module:Id". Without it,
            `env` must repeat such an id, since a file must not choose code.
        env_timeout: New time limit of one call in seconds; None: as before.
        device: Device of the policy from now on; None: as before.
    """
    with Run.open(path) as run:
        if run.finished is not None:
            raise InvalidInputError(f"run {run.name} is complete. Start a new run.")
        config = ppo_settings_of(run)
        if env not in (None, config.env):
            raise refusal(
                f"run {run.name} uses {quoted(config.env)}, got env {quoted(env)}. "
                "Give the same id or none."
            )
        if ":" in config.env and env is None and not trust:
            module = config.env.partition(":")[0]
            raise refusal(
                f"use --trust or --env {one_line(config.env, 60)} to resume: the file "
                f"of run {run.name} names a module to import, {quoted(module)}."
            )
        if env_timeout is not None:
            config = replace(config, env_timeout=env_timeout)
        config = replace(config, device=device or config.device)
        first = (f"Resuming {run.name}: {config.env}.",)
        attempt = partial(_attempt, config, run, callbacks)
        return train_to_end(run, callbacks, first, attempt)


def resume_command(path: Path, env: str) -> str:
    """The command that resumes a run."""
    again = f" --env {quote(env)}" if ":" in env else ""
    return f"esper ppo --resume {quote(str(path))}{again}"


def ppo_settings_of(run: Run) -> PPORunConfig:
    """The settings of a run."""
    if run.kind != KIND:
        raise InvalidInputError(
            f"run {run.name} was not started by esper ppo. See esper runs."
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
    """Train from the newest checkpoint, or from the start, to the end."""
    checkpoints = run.checkpoints(keep=config.checkpoint.last)
    facts = {"config": hashlib.sha256(run.config_toml.encode()).hexdigest()}
    agent = made(config)
    with usable_store(run.path / STORE, run.id) as store:
        own: list[Callback] = [Record(store, [config.env]), *callbacks]
        if config.checkpoint.tensorboard:
            own.append(TensorBoard(run.path / "tensorboard"))
        own.append(Checkpoint(store, checkpoints, config.checkpoint.every, facts))
        rollout = config.num_envs * config.rollout_steps
        trainer = TrainingLoop(
            RecordedPPO(agent),
            Budget(env_steps=config.total_steps).rounds_of(rollout),
            None,
            config.factors,
            own,
            signals,
            fresh_every=config.checkpoint.every,
        )
        try:
            found = checkpoints.latest(leaves(trainer))
            start, trouble = resume_and_train(
                trainer, run, store, checkpoints, found, facts, trouble, rollbacks
            )
            if trouble is None and not trainer.interrupted():
                _finish(run, store, trainer, config)
        except EsperError as error:
            # Also if an environment raised or its process died, the run can resume.
            saved = checkpoints.steps()
            after = f"after round {saved[-1]}" if saved else "from the start"
            again = resume_command(run.path, config.env)
            raise type(error)(f"{error} Resume {after} with: {again}") from error
        finally:
            trainer.call("on_close")
            agent.close()
    return start, trainer, trouble


def _finish(
    run: Run, store: Store, trainer: TrainingLoop, config: PPORunConfig
) -> None:
    """Evaluate the agent, save it and mark the run as complete."""
    agent, episodes = trainer.algorithm.ppo, config.episodes
    figures: dict[str, float] = {}
    try:
        found = agent.evaluate(episodes=episodes)
    except InvalidInputError as error:  # such as an episode that does not end
        text = f"not evaluated: {error}"
    else:
        figures = {"mean": found.mean, "std": found.std}
        mean, std = f"{found.mean:.4g}", f"{found.std:.3g}"
        text = f"return of {episodes} episodes: {mean}, standard deviation {std}"
    agent.save(run.path / AGENT)
    store.add_note_once(trainer.round, TEST, text)
    trainer.call("on_message", text)
    steps = {"rounds": trainer.round, "env_steps": trainer.env_steps}
    run.finish({**steps, **figures})
