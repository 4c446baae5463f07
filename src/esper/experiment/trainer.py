"""A run: a training that is recorded, watched, kept, and gone on with to the bit.

    round  ->  rows in the store  ->  every so often: flush, then a checkpoint

A checkpoint of round r is published after all rows up to r are durable, so a store is
never behind the checkpoint that a run goes on from. A signal ends the run after its
round: rows and state are saved first. A disk that refuses is tried again at the next
checkpoint, three times in a row. Three rounds in a row whose updates are all refused
take the run back to its last checkpoint, with chances drawn anew.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from esper.contracts.errors import BadInput, NumericsTrouble
from esper.contracts.observation import Observation
from esper.contracts.state import Stateful, load
from esper.contracts.step import StepResult, VectorWorld
from esper.environment.mixture import Mixture
from esper.experiment.checkpoint import Loaded
from esper.experiment.conclusion import conclude
from esper.experiment.config import (
    IMITATION,
    SIMULATED,
    WARM,
    TrainConfig,
    as_toml,
    from_toml,
)
from esper.experiment.imitation import imitated_policy, imitation_steps
from esper.experiment.learned import MAY_BE_NAN, find_controller
from esper.experiment.loop import RoundRecord, Training
from esper.experiment.news import News, Said
from esper.experiment.recording import Recorder
from esper.experiment.run import STORE, Run, changes_since, versions_now
from esper.experiment.saving import PATIENCE, Saving, require_same
from esper.experiment.signals import listening
from esper.experiment.sinks import TensorBoardSink, summary_writer
from esper.experiment.store import Store
from esper.experiment.streams import stream_seed
from esper.experiment.warm import warm_policy
from esper.experiment.worlds import loop_of, tasks_of, world_for, world_of
from esper.tasks.task import Task

KIND: Final = "training"
"""What a run is, among others."""
DIAGNOSIS: Final = "diagnosis.json"
"""What a run leaves behind when numbers gave up."""

BROKEN: Final = f"{PATIENCE} rounds in a row had no update that was finite"

Tell = Callable[[RoundRecord], None]
Hear = Callable[[News], None]


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a run is, and why it ended."""

    path: Path
    rounds: int
    """Rounds that it has played."""
    signal: int | None
    """The signal that ended it early, if one did."""


def begin_run(
    config: TrainConfig,
    tell: Tell = lambda record: None,
    hear: Hear = lambda news: None,
) -> Ending:
    """Begin a run and train until its budget is used up, or a signal comes.

    Args:
        config: All that decides how it goes.
        tell: Told of every round.
        hear: Told of what else there is to know.
    """
    facts = {"kind": KIND, "rng_seed": config.rng_seed, "tasks": [*config.tasks]}
    root = Path(config.runs)
    _check(config, root)
    with Run.create(root, config.name, as_toml(config), facts) as run:
        hear(Said(f"The run is in {run.path}."))
        return _carry_on(config, run, tell, hear)


def _check(config: TrainConfig, root: Path) -> None:
    """Refuse what cannot be begun before anything is made."""
    if SIMULATED not in config.tasks:
        Mixture([_one_host(config, task) for task in tasks_of(config)])
    if config.start_from not in (None, WARM, IMITATION):
        learned = find_controller(str(config.start_from), root)
        if learned.config != config.learner.policy:
            raise BadInput(
                f"start_from is {learned.name!r:.60}, whose policy is of another size "
                "than learner.policy; give the same sizes."
            )
    if config.keeping.tensorboard:
        summary_writer()


def _one_host(config: TrainConfig, task: Task) -> VectorWorld:
    task.splits(config.rng_seed)
    return world_of(task, 1, 0, config.world)


def resume_run(
    path: Path,
    tell: Tell = lambda record: None,
    hear: Hear = lambda news: None,
) -> Ending:
    """Go on with a run from its newest good checkpoint."""
    with Run.open(path) as run:
        if run.finished is not None:
            raise BadInput(f"run {run.name} is complete; begin another one.")
        return _carry_on(settings_of(run), run, tell, hear)


def settings_of(run: Run) -> TrainConfig:
    """The settings that a training was begun with."""
    if run.versions.get("kind", KIND) != KIND:
        raise BadInput(f"run {run.name} is no training, so there is nothing to resume.")
    return from_toml(run.config_toml)


class Trainer(Stateful):
    """All of a run that changes.

    Args:
        config: The run's.
        store: Where rows go.
    """

    STATE = ("training", "recorders", "times")
    DERIVED = ("_ended", "_seen")  # of the round that is being played

    def __init__(self, config: TrainConfig, store: Store) -> None:
        names = [*config.tasks]
        if SIMULATED not in names:
            names = [task.name for task in tasks_of(config)]
        whole = world_for(config)
        self.recorders = [
            Recorder(store, name, whole.spec, config.envs) for name in names
        ]
        self.training = Training(whole, loop_of(config, whole), self._record)
        self._minutes = config.budget.minutes
        self.times = 0
        """How often the run went back to a checkpoint because numbers broke."""
        self._ended: list[tuple[Tensor, Tensor]] = []
        self._seen: list[Observation] | None = None

    def play_round(self) -> RoundRecord:
        """One round; the record has what became of the hosts too."""
        self._ended.clear()
        self._seen = None
        if self.training.world.redraws:
            for recorder in self.recorders:
                recorder.begin_anew()
        record = self.training.play_round(self.done)
        if not self._ended:
            return record
        score, added = (torch.cat(parts) for parts in zip(*self._ended, strict=True))
        return replace(
            record, mean_score=float(score.mean()), added=float(added.mean())
        )

    @property
    def env_steps(self) -> int:
        """Decisions since the start, over all environments."""
        training = self.training
        return training.round * training.config.steps * training.world.num_envs

    @property
    def done(self) -> float:
        """Share of the budget that is used up, from 0 to 1."""
        training = self.training
        share = training.round / max(training.config.rounds - 1, 1)
        if self._minutes is not None:
            share = max(share, training.seconds / (60 * self._minutes))
        return min(share, 1.0)

    @property
    def over(self) -> bool:
        """Whether the budget is used up."""
        training = self.training
        late = self._minutes is not None and training.seconds >= 60 * self._minutes
        return late or training.round >= training.config.rounds

    def go_back(self, times: int) -> None:
        """Give choices and minibatches other chances, after going back so often."""
        self.times = times = max(self.times, times)
        seed, training = self.training.config.rng_seed, self.training
        training.generator.manual_seed(stream_seed(seed, f"choices, again {times}"))
        training.agent.generator.manual_seed(stream_seed(seed, f"order, again {times}"))

    def _record(self, seen: Observation, actions: Tensor, result: StepResult) -> None:
        """Tell every world's recorder of its share of a step."""
        whole, number = self.training.world, self.training.round + 1
        results, worlds = whole.split(result), whole.parts()
        counts = [world.num_envs for world in worlds]
        if self._seen is None:  # the first step of a round
            ends = list(accumulate(counts))
            places = [slice(e - n, e) for e, n in zip(ends, counts, strict=True)]
            self._seen = [cut(seen, here) for here in places]
        for world, recorder, before, said, after in zip(
            worlds,
            self.recorders,
            self._seen,
            actions.split(counts),
            results,
            strict=True,
        ):
            report = world.ended
            if report is not None:
                self._ended.append((report.score, report.added))
            recorder.add(
                number, before, said, after, illegal=world.illegal, report=report
            )
        self._seen = [each.observation for each in results]


def _carry_on(config: TrainConfig, run: Run, tell: Tell, hear: Hear) -> Ending:
    """Train, go back and draw anew if numbers break, then judge."""
    times = 0
    with listening() as heard:
        while times <= PATIENCE:
            ending = _train(config, run, tell, hear, heard, times)
            if isinstance(ending, Ending):
                return ending
            times = ending + 1
    raise NumericsTrouble(
        f"run {run.name}: updates were refused as not finite, also after going back "
        f"{PATIENCE} times; lower learner.ppo.learning_rate. See {DIAGNOSIS} there."
    )


def _train(
    config: TrainConfig, run: Run, tell: Tell, hear: Hear, heard: list[int], times: int
) -> Ending | int:
    """Train to the end or a signal; if numbers break, how often they did before."""
    checkpoints = run.checkpoints(keep=config.keeping.last, may_be_nan=MAY_BE_NAN)
    with Store(run.path / STORE) as store:
        trainer = Trainer(config, store)
        training = trainer.training
        found = checkpoints.latest()
        if found is not None:
            require_same(run, config, training, found)
            load(trainer, found.tensors)
        elif config.start_from is not None:
            _start_from(config, training, hear, lambda: bool(heard))
        if times:
            trainer.go_back(times)
        versions = versions_now(as_toml(config))
        kept = None if found is None else training.round
        store.begin_attempt(kept, versions)
        if found is not None:
            _note_changes(run, versions, found, store, hear)
        if times:
            text = f"{BROKEN}; back to round {training.round}, with chances drawn anew."
            store.add_note(training.round, "refused", text)
            hear(Said(text, warning=True))
        saving = Saving(config, trainer, training, store, checkpoints, hear)
        if kept is None and not heard:
            saving.save(0, saving.watch(0), last=False)
        refused = 0
        with _sink(config, run, None if kept is None else trainer.env_steps) as sink:
            while not trainer.over and not heard:
                record = trainer.play_round()
                store.add_round(record)
                sink(record)
                tell(record)
                update = record.update
                broken = update.refused > 0 and update.steps_taken == 0
                refused = refused + 1 if broken else 0
                if refused == PATIENCE:
                    run.write(DIAGNOSIS, {"trouble": BROKEN, "last": str(record)})
                    return trainer.times
                # What is gone back to, or gone on from, should be sound.
                if trainer.over or not broken:
                    saving.after(record, over=trainer.over, last=bool(heard))
        if not heard:
            conclude(config, run, store, training.round, hear, lambda: bool(heard))
        if not heard:
            steps = trainer.env_steps
            run.finish(
                {
                    "rounds": training.round,
                    "env_steps": steps,
                    "imitation_steps": imitation_steps(config),
                }
            )
        return Ending(run.path, training.round, heard[0] if heard else None)


def _start_from(
    config: TrainConfig, training: Training, hear: Hear, stop: Callable[[], bool]
) -> None:
    """Give a new policy the weights that the run was told to start from."""
    assert config.start_from is not None
    if SIMULATED in config.tasks and config.start_from == WARM:
        return  # that is where it is going anyway
    if config.start_from == WARM:
        weights = warm_policy(config, hear, stop)
    elif config.start_from == IMITATION:
        weights = imitated_policy(config, hear, stop)
    else:
        weights = find_controller(config.start_from, Path(config.runs)).weights
    policy = training.agent.policy
    # Statistics of returns belong to a world: another's are of no use here.
    own = {"value_mean": policy.value_mean, "value_scale": policy.value_scale}
    if weights is not None:
        load(policy, {**weights, **own})


def _note_changes(
    run: Run,
    versions: Mapping[str, Any],
    found: Loaded,
    store: Store,
    hear: Hear,
) -> None:
    """Say and store why a run may not go on to the bit, or from where it was."""
    changed = [
        f"{line}; what follows may differ in some bits."
        for line in changes_since(run.versions, versions)
    ]
    for kind, lines in (("rejected", found.rejected), ("inexact", changed)):
        for line in lines:
            store.add_note(found.manifest.step, kind, line)
            hear(Said(line, warning=True))


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
def _sink(config: TrainConfig, run: Run, steps: int | None) -> Iterator[Tell]:
    """TensorBoard's files, if they are wanted, from a number of env-steps on."""
    if not config.keeping.tensorboard:
        yield lambda record: None
        return
    sink = TensorBoardSink(run.path / "tensorboard", steps)
    try:
        yield sink.add_round
    finally:
        sink.close()
