"""Callbacks of a training: store, console, evaluation, loggers, checkpoints.

`begin_run` calls the store before the callbacks that it is given; evaluation, loggers
and checkpoints after them. So a checkpoint is saved last.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from esper.contracts.errors import StorageError
from esper.contracts.state import save
from esper.runs.checkpoint import CheckpointFolder
from esper.runs.progress import Progress, duration, print_line, sparkline
from esper.runs.records import (
    ENDLESS,
    VALIDATION,
    Results,
    RoundRecord,
    iqm_return,
    mean_return,
)
from esper.runs.settings import as_flat
from esper.runs.sinks import RunInfo, Sinks, SupportsLog
from esper.runs.store import Store
from esper.simic.agent.metrics import HeadRecord, UpdateRecord
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.training.loop import (
    EVALUATION,
    EVALUATION_IQM,
    PATIENCE,
    Callback,
    TrainingLoop,
    WorldRollout,
)

MAX_LOG_LINES: Final = 16
"""Lines about rounds in the output, if it is not a terminal."""
SECONDS_PER_LINE: Final = 15
"""Minimum time between two of them, if only time limits the training."""
LEARNED: Final = "Tamiyo"
"""Name of the policy in tables."""
UNLOGGED: Final = ("round", "rounds", "env_steps", "update", "heads")
"""Fields of records that are no metrics."""


class Record(Callback):
    """Writes rounds, steps, episodes, lifecycle events and evaluations into a store.

    Args:
        store: Where to write.
        tasks: Name of each world.
        before: Rounds of earlier loops.
    """

    def __init__(self, store: Store, tasks: Sequence[str], before: int = 0) -> None:
        self._store, self._tasks, self._before = store, tasks, before

    def on_rollout(self, loop: TrainingLoop, rollout: Sequence[WorldRollout]) -> None:
        """Add the rows of all steps."""
        rounds = self._before + loop.round
        before = rounds * loop.algorithm.rollout_steps
        for task, played in zip(self._tasks, rollout, strict=True):
            for table, columns in played.rows.items():
                rows = {**columns}
                step = rows.pop("index") + before + 1
                self._store.add(table, round=rounds + 1, step=step, task=task, **rows)

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Add the row of the round."""
        self._store.add_round(replace(record, round=self._before + record.round))

    def on_evaluation(self, loop: TrainingLoop, results: Results) -> None:
        """Add the rows of the evaluation."""
        add = partial(self._store.add_evaluation, round=loop.round, stage=VALIDATION)
        for task, result in results.items():
            add(result, controller=LEARNED, task=task)


class Log(Callback):
    """Writes the metrics of every round to loggers, by environment steps.

    Args:
        loggers: Names, or objects with `log(values, step)`.
        name: Name of the run in trackers of experiments.
        folder: Folder of loggers that have none of their own.
        settings: A tree of dataclasses.
    """

    def __init__(
        self,
        loggers: Sequence[str | SupportsLog],
        name: str,
        folder: Path,
        settings: object,
    ) -> None:
        self._info = RunInfo(name=name, folder=folder, settings=as_flat(settings))
        self._loggers, self._sinks = loggers, Sinks((), self._info)
        self._more: dict[str, float] = {}

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Open the loggers; metrics after the checkpoint are written again."""
        info = replace(self._info, step=loop.env_steps, resumed=resumed)
        self._sinks = Sinks(self._loggers, info)
        if self._more:  # of the initial policy
            self._flush({}, loop.env_steps)

    def on_metrics(self, loop: TrainingLoop, metrics: Mapping[str, float]) -> None:
        """Keep them for the end of the round."""
        self._more |= metrics

    def on_evaluation(self, loop: TrainingLoop, results: Results) -> None:
        """Keep mean and interquartile mean for the end of the round."""
        self._more[EVALUATION] = mean_return(results)
        self._more[EVALUATION_IQM] = iqm_return(results)

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Write the metrics of the round."""
        self._flush(dict(scalars(record)), record.env_steps)

    def on_close(self) -> None:
        """Close the loggers."""
        self._sinks.close()

    def _flush(self, values: dict[str, float], step: int) -> None:
        more, self._more = self._more, {}
        self._sinks.log(values | more, step)


class ConsoleProgress(Callback):
    """Prints the progress of a run.

    Args:
        console: Output; None: the terminal.
        details: Whether to print metrics of the learner, such as KL and entropy.
    """

    def __init__(
        self, console: Console | None = None, *, details: bool = False
    ) -> None:
        self._console, self._details = console or Console(), details
        self._progress = Progress(console=self._console)
        self._returns: list[float] = []
        self._last = 0.0

    def on_message(self, text: str, *, warning: bool = False) -> None:
        """Print the message."""
        print_line(self._console, f"{'warning: ' if warning else ''}{text}")

    def on_progress(self, name: str, done: int, total: int, text: str) -> None:
        """Update the progress bar."""
        self._progress.update(name, done, total, text)

    def on_evaluation(self, loop: TrainingLoop, results: Results) -> None:
        """Print the results."""
        mean, iqm = mean_return(results), iqm_return(results)
        figure = f"return {mean:+.4f} (IQM {iqm:+.4f})"
        if loop.algorithm.relative:
            figure = f"{mean:+.1%} (IQM {iqm:+.1%}) of the errors removed, net of rent"
        self.on_message(f"round {loop.round}  validation hosts: {figure}")
        if self._details:
            parts = [
                f"{task} {result.returns.mean():+.4f} (score {result.score.mean():.3f})"
                for task, result in results.items()
            ]
            self.on_message(f"  {', '.join(parts)}")

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Update the progress bar, or print a line from time to time."""
        self._returns.append(record.mean_return)
        minutes, endless = loop.minutes, record.rounds == ENDLESS
        left = f"{time_left(record, minutes)} left"
        if self._console.is_terminal:
            done: tuple[str, float, float] = ("training", record.round, record.rounds)
            if endless and minutes is not None:
                done = "training, minutes", round(record.seconds / 60, 1), minutes
            line = sparkline(self._returns)
            text = f"{left}  return {record.mean_return:+.4f} {line}"
            self._progress.update(*done, text)
            return
        due = record.round % max(record.rounds // MAX_LOG_LINES, 1) == 0
        if endless:
            due = record.seconds - self._last >= SECONDS_PER_LINE
        if due or record.round == 1:
            self._last = record.seconds
            total = "" if endless else f"/{record.rounds}"
            relative = loop.algorithm.relative
            text = record.headline(relative=relative, details=self._details)
            self.on_message(f"round {record.round}{total}  {text}  {left}")

    def on_close(self) -> None:
        """Close the progress bar."""
        self._progress.close()


def time_left(record: RoundRecord, minutes: float | None) -> str:
    """Remaining training time, as text."""
    seconds = record.seconds / record.round * (record.rounds - record.round)
    if minutes is not None:
        seconds = min(seconds, max(60 * minutes - record.seconds, 0.0))
    return duration(seconds)


class Evaluate(Callback):
    """Evaluates the policy on the validation hosts every few rounds."""

    def __init__(self, every: int, evaluate: Callable[[TamiyoPolicy], Results]) -> None:
        self._every, self._evaluate = every, evaluate

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Evaluate the initial policy."""
        if not resumed and not loop.stopping:
            loop.call("on_evaluation", loop, self._evaluate(loop.algorithm.policy))

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Evaluate if due; never early because of a signal, so results stay equal."""
        due = record.round % self._every == 0 or loop.over
        if due and loop.sound:
            loop.call("on_evaluation", loop, self._evaluate(loop.algorithm.policy))


class Checkpoint(Callback):
    """Flushes the store and saves the loop every few rounds.

    If saving fails, it is tried again at the next checkpoint, up to three times.
    """

    def __init__(
        self,
        store: Store,
        folder: CheckpointFolder,
        every: int,
        facts: Mapping[str, Any],
    ) -> None:
        self._store, self._folder = store, folder
        self._every, self._facts = every, dict(facts)
        self._failures = 0
        self._score: float | None = None

    def on_evaluation(self, loop: TrainingLoop, results: Results) -> None:
        """Keep the score for the next checkpoint."""
        self._score = mean_return(results)

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Save the initial state; after a resume, remove unfinished files."""
        if resumed:
            with suppress(StorageError):
                self._folder.prune(loop.round)
        elif not loop.stopping:
            self._save(loop, last=False)

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Save if due and if the state is worth returning to."""
        last = loop.over or loop.stopping
        due = last or self._score is not None or record.round % self._every == 0
        if due and loop.sound:
            self._save(loop, last=last)

    def _save(self, loop: TrainingLoop, *, last: bool) -> None:
        score, self._score = self._score, None
        try:
            self._store.flush()
            self._folder.publish(loop.round, save(loop), self._facts, score=score)
            self._failures = 0
        except StorageError as error:
            self._failures += 1
            if last or self._failures == PATIENCE:
                raise
            loop.call("on_message", f"{error} Training continues.", warning=True)


def scalars(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """The metrics of a round by name, without those that are NaN or None."""
    named = {f"round/{name}": value for name, value in _metrics(record)}
    named |= {f"update/{name}": value for name, value in _metrics(record.update)}
    for head, metrics in record.update.heads.items():
        named |= {f"{name}/{head}": value for name, value in _metrics(metrics)}
    for name, value in named.items():
        if value is not None and not isnan(value):
            yield name, float(value)


def _metrics(
    record: RoundRecord | UpdateRecord | HeadRecord,
) -> Iterator[tuple[str, float | None]]:
    for field in fields(record):
        if field.name not in UNLOGGED:
            yield field.name, getattr(record, field.name)
