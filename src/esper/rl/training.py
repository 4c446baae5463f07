"""Runs of `esper ppo`, with records, checkpoints and exact resumption.

The state of an environment cannot be saved in general. So all environments start new
episodes at every checkpoint, with seeds that depend on the round. A resumed run is then
bit-identical to an uninterrupted one if `reset(seed)` makes an environment
deterministic. A signal or a crash loses the rounds since the last checkpoint.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Final

from esper.contracts.errors import EsperError, InvalidInputError, RunLockedError
from esper.contracts.messages import one_line, quoted, refusal, short
from esper.contracts.state import leaves
from esper.rl.ppo import PPO
from esper.rl.settings import SETTINGS_BEFORE, PPORunConfig, PPOSettings
from esper.runs.records import TEST
from esper.runs.run import STORE, Run, versions_now
from esper.runs.settings import as_toml, construct, table_of
from esper.runs.sinks import Loggers, require_loggers, resumed_loggers, split_loggers
from esper.runs.store import Store, usable_store
from esper.runs.train_config import Budget
from esper.training.callbacks import Checkpoint, Log, Record
from esper.training.loop import Callback, TrainingLoop, WorldRollout
from esper.training.recovery import Attempt, RunResult, resume_and_train, train_to_end

KIND: Final = "ppo"
"""Kind of the run in `versions.json`."""
LEARN: Final = "learn"
"""Kind of a run that `PPO.learn` wrote, which has no checkpoints."""
AGENT: Final = "agent.safetensors"
"""File of the agent in the folder of a finished run."""


class RecordEpisodes(Record):
    """Writes rounds and the episodes of each environment into a store."""

    _episodes: Counter[int]

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Count the episodes that the store has."""
        query = "SELECT env, max(episode) FROM live_episodes GROUP BY env"
        self._episodes = Counter(dict(self._store.fetch(query)))

    def on_rollout(self, loop: TrainingLoop, rollout: Sequence[WorldRollout]) -> None:
        """Add the rows of the episodes that ended."""
        stats, numbers = rollout[0].stats, []
        for env in stats.env.tolist():
            self._episodes[env] += 1
            numbers.append(self._episodes[env])
        rows = {
            "index": stats.step,
            "env": stats.env,
            "episode": numbers,
            "return": stats.returns,
        }
        played = WorldRollout({"episodes": rows} if numbers else {}, stats)
        super().on_rollout(loop, [played])


class RunFolder(RecordEpisodes):
    """The folder of a run of `PPO.learn`: a store and, at the end, the agent.

    A further call of `learn` goes on in the same folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = ExitStack()

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Create the folder, or open that of an earlier call."""
        agent, path = loop.algorithm, self._path
        env = one_line(agent.world.name)
        facts = {"kind": LEARN, "rng_seed": agent.settings.seed, "tasks": [env]}
        run = Run.create_or_open(path, as_toml(agent.settings), facts)
        self._run = self._opened.enter_context(run)
        store = self._opened.enter_context(Store(path / STORE, run.id))
        query = "SELECT round, env_steps FROM live_rounds ORDER BY round DESC LIMIT 1"
        known, steps = (store.fetch(query) or [(0, loop.env_steps)])[0]
        if steps != loop.env_steps:
            raise RunLockedError(
                f"{short(path)} has another training. Give another folder."
            )
        run.go_on()
        store.begin_attempt(known or None, versions_now(run.config_toml))
        RecordEpisodes.__init__(self, store, [env], known)
        super().on_train_start(loop, resumed=resumed)

    def on_train_end(self, loop: TrainingLoop) -> None:
        """Save the agent and mark the run as complete."""
        agent = loop.algorithm
        agent.save(self._path / AGENT)
        self._run.finish({"rounds": agent.rounds, "env_steps": agent.env_steps})

    def on_close(self) -> None:
        """Close the store and release the folder."""
        self._opened.close()


def log_callbacks(agent: PPO, given: Loggers) -> list[Callback]:
    """Callbacks for the loggers of `PPO.learn`."""
    loggers = require_loggers(given)
    folders, folder, others = split_loggers(loggers)
    log = Log(others, folder.name, folder, agent.settings)
    return [*map(RunFolder, folders), log] if loggers else []


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
    require_loggers(config.logger)
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
    logger: Sequence[str] | None = None,
) -> RunResult:
    """Resume a run from its newest good checkpoint; None leaves a setting as before.

    Without `trust`, `env` must repeat an id "module:Id", since a file must not choose
    code. `callbacks` are called in addition to those that record and save.
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
        loggers = resumed_loggers(config.logger, logger)
        config = replace(config, device=device or config.device, logger=loggers)
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
    table = table_of(run.config_toml, PPORunConfig)
    return construct(PPORunConfig, {**SETTINGS_BEFORE, **table})


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
        own: list[Callback] = [
            RecordEpisodes(store, [config.env]),
            *callbacks,
            Log(config.logger, run.name, run.path, config),
        ]
        own.append(Checkpoint(store, checkpoints, config.checkpoint.every, facts))
        rollout = config.num_envs * config.rollout_steps
        trainer = TrainingLoop(
            agent,
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
            trainer.close()
            agent.close()
    return start, trainer, trouble


def _finish(
    run: Run, store: Store, trainer: TrainingLoop, config: PPORunConfig
) -> None:
    """Evaluate the agent, save it and mark the run as complete."""
    agent, episodes = trainer.algorithm, config.episodes
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
