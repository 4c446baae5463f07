"""A run: a training that is recorded, kept, and can be gone on with to the bit.

    round  ->  rows in the store  ->  every so often: flush, then a checkpoint

A checkpoint of round r is published after all rows up to r are durable, so a store is
never behind the checkpoint that a run goes on from. A signal ends the run after its
round: rows and state are saved first.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from math import ceil, isfinite
from pathlib import Path
from types import FrameType
from typing import Any, Final

from torch import Tensor

from esper.contracts.errors import BadInput
from esper.contracts.observation import Observation
from esper.contracts.state import Stateful, load, save
from esper.contracts.step import StepResult, VectorWorld
from esper.environment.growing import GrowingWorld
from esper.environment.instances import HORIZON
from esper.environment.mixture import Mixture
from esper.environment.simulated import SimulatedWorld
from esper.environment.terms import Terms, as_range
from esper.experiment.config import SIMULATED, TrainConfig, as_toml, digest, from_toml
from esper.experiment.loop import LoopConfig, RoundRecord, Training
from esper.experiment.recording import Recorder
from esper.experiment.run import Run, versions_now
from esper.experiment.store import Store
from esper.experiment.streams import stream_seed
from esper.experiment.study import HIDDEN_SHARE
from esper.tasks.catalogue import task as find_task
from esper.tasks.task import Task

STORE: Final = "events.sqlite"
MAY_BE_NAN: Final = ("*first_loss",)
"""Unknown before the first loss of an episode."""
ENDLESS: Final = 1_000_000
"""Rounds of a training that only time ends."""

Tell = Callable[[RoundRecord], None]


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a run is, and why it ended."""

    path: Path
    rounds: int
    """Rounds that it has played."""
    signal: int | None
    """The signal that ended it early, if one did."""


def begin_run(config: TrainConfig, tell: Tell = lambda record: None) -> Ending:
    """Begin a run and train until its budget is used up, or a signal comes."""
    facts = {"rng_seed": config.rng_seed, "tasks": [*config.tasks]}
    root = Path(config.runs)
    with Run.create(root, config.name, as_toml(config), facts) as run:
        return _train(config, run, tell)


def resume_run(path: Path, tell: Tell = lambda record: None) -> Ending:
    """Go on with a run from its newest good checkpoint."""
    with Run.open(path) as run:
        if run.finished is not None:
            raise BadInput(f"run {run.name} is complete; begin another one.")
        return _train(from_toml(run.config_toml), run, tell)


class Trainer(Stateful):
    """All of a run that changes.

    Args:
        config: The run's.
        store: Where rows go.
    """

    STATE = ("training", "recorders")

    def __init__(self, config: TrainConfig, store: Store) -> None:
        self.worlds = worlds_of(config)
        names = list(config.tasks)
        self.recorders = [
            Recorder(store, name, world.spec, world.num_envs)
            for name, world in zip(names, self.worlds, strict=True)
        ]
        whole = self.worlds[0] if len(self.worlds) == 1 else Mixture(self.worlds)
        self.training = Training(whole, loop_of(config, whole), self._record)

    def _record(self, seen: Observation, actions: Tensor, result: StepResult) -> None:
        """Tell every world's recorder of its share of a step."""
        start, number = 0, self.training.round + 1
        for world, recorder in zip(self.worlds, self.recorders, strict=True):
            here = slice(start, start + world.num_envs)
            start += world.num_envs
            recorder.add(
                number,
                cut(seen, here),
                actions[here],
                cut(result, here),
                illegal=getattr(world, "illegal", None),
                report=getattr(world, "ended", None),
            )


def _train(config: TrainConfig, run: Run, tell: Tell) -> Ending:
    keeping, budget = config.keeping, config.budget
    checkpoints = run.checkpoints(keep=keeping.last, may_be_nan=MAY_BE_NAN)
    toml = as_toml(config)
    with Store(run.path / STORE) as store, _listening() as heard:
        trainer = Trainer(config, store)
        training = trainer.training
        found = checkpoints.latest()
        if found is not None:
            load(trainer, found.tensors)
        store.begin_attempt(
            None if found is None else training.round, versions_now(toml)
        )
        for line in () if found is None else found.rejected:
            store.add_note(training.round, "rejected", line)
        while training.round < training.config.rounds and not heard:
            record = training.play_round()
            store.add_round(record)
            tell(record)
            spent = budget.minutes is not None and training.seconds >= (
                60 * budget.minutes
            )
            last = spent or training.round == training.config.rounds
            if last or heard or training.round % keeping.every == 0:
                store.flush()
                checkpoints.publish(
                    training.round,
                    save(trainer),
                    {"config": digest(config)},
                    score=_known(record.mean_return),
                )
            if last:
                run.finish({"rounds": training.round, "env_steps": record.env_steps})
                break
        return Ending(run.path, training.round, heard[0] if heard else None)


def worlds_of(config: TrainConfig) -> list[VectorWorld]:
    """The worlds that a run lives in, one for each task."""
    if SIMULATED in config.tasks:
        seed = stream_seed(config.rng_seed, "world")
        return [SimulatedWorld(config.envs, seed, hidden_share=HIDDEN_SHARE)]
    return [_world(config, task) for task in map(find_task, config.tasks)]


def _world(config: TrainConfig, task: Task) -> GrowingWorld:
    own, settings = config.world, {}
    for name in ("horizon", "decision_every"):
        if getattr(own, name) is not None:
            settings[name] = getattr(own, name)
    return GrowingWorld(
        replace(task, **settings),
        config.envs,
        stream_seed(config.rng_seed, f"world, {task.name}"),
        blueprints=own.blueprints,
        seeds_per_slot=own.seeds_per_slot,
        terms=Terms(
            rent=as_range("rent", own.rent),
            budget=as_range("budget", own.budget),
            rate=as_range("rate", own.rate),
        ),
        measure_every=own.measure_every,
        penalty=own.penalty,
    )


def loop_of(config: TrainConfig, world: VectorWorld) -> LoopConfig:
    """How to train: a rollout is about one episode of every environment."""
    learner, budget = config.learner, config.budget
    steps = HORIZON
    if SIMULATED not in config.tasks:
        horizons = [find_task(name).horizon for name in config.tasks]
        steps = config.world.horizon or max(horizons)
    rounds = [ENDLESS if budget.rounds is None else budget.rounds]
    if budget.env_steps is not None:
        rounds.append(ceil(budget.env_steps / (steps * world.num_envs)))
    return LoopConfig(
        rounds=min(rounds),
        steps=steps,
        rng_seed=config.rng_seed,
        gamma=learner.gamma,
        gae_lambda=learner.gae_lambda,
        final_share=learner.final_share,
        ppo=learner.ppo,
        policy=learner.policy,
    )


def cut(record: Any, here: slice) -> Any:  # noqa: ANN401
    """Some environments of a record of tensors."""
    if record is None:
        return None
    if isinstance(record, Tensor):
        return record[here]
    assert is_dataclass(record)
    assert not isinstance(record, type)
    parts = {f.name: cut(getattr(record, f.name), here) for f in fields(record)}
    return replace(record, **parts)


@contextmanager
def _listening() -> Iterator[list[int]]:
    """Signals that ask for an end, as they come; the second one is not waited for."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise KeyboardInterrupt

    kinds = (signal.SIGINT, signal.SIGTERM)
    before: Sequence[Any] = [signal.signal(kind, hear) for kind in kinds]
    try:
        yield heard
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
