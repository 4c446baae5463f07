"""Callbacks of a training: record, TensorBoard, console, evaluation, checkpoints.

`begin_run` puts its own around those it is given: rows and TensorBoard before them,
evaluation and checkpoints after them, so that a round is known everywhere when it is
saved.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from esper.contracts.errors import InvalidInputError, StorageError
from esper.contracts.state import save
from esper.runs.checkpoint import CheckpointFolder
from esper.runs.progress import Progress, print_line, sparkline
from esper.runs.records import (
    ENDLESS,
    VALIDATION,
    Results,
    RoundRecord,
    mean_return,
)
from esper.runs.store import Store
from esper.simic.agent.metrics import HeadRecord, UpdateRecord
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.training.loop import PATIENCE, Callback, TrainingLoop, WorldRollout

LINES: Final = 16
"""Lines about rounds, where there is no terminal."""
SECONDS: Final = 15
"""Between two of them, if time ends the training."""
LEARNED: Final = "Tamiyo"
"""What the policy is called in tables."""


class Record(Callback):
    """Writes rounds, steps, episodes, lifecycle events and evaluations into a store.

    Args:
        store: Where to.
        tasks: What is learnt in each of the worlds.
    """

    def __init__(self, store: Store, tasks: Sequence[str]) -> None:
        self._store, self._tasks = store, tasks

    def on_rollout(self, loop: TrainingLoop, rollout: Sequence[WorldRollout]) -> None:
        """The rows of all steps."""
        before = loop.round * loop.algorithm.rollout_steps
        for task, played in zip(self._tasks, rollout, strict=True):
            for table, columns in played.rows.items():
                rows = {**columns}
                step = rows.pop("index") + before + 1
                round = loop.round + 1
                self._store.add(table, round=round, step=step, task=task, **rows)

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """The rows of one round."""
        self._store.add_round(record)

    def on_evaluation(self, loop: TrainingLoop, results: Results) -> None:
        """The rows of a periodic evaluation."""
        for task, judged in results.items():
            self._store.add_evaluation(
                judged,
                round=loop.round,
                stage=VALIDATION,
                controller=LEARNED,
                task=task,
            )


class TensorBoard(Callback):
    """Writes the figures of every round for TensorBoard, by env-steps.

    Args:
        folder: What `tensorboard --logdir` is pointed at.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = str(folder)
        self._writer: Any = None

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Open the files; figures beyond a checkpoint are no longer shown."""
        later = loop.env_steps + 1 if resumed else None
        self._writer = summary_writer()(self._folder, purge_step=later)

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Write the figures of one round."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.env_steps)

    def on_close(self) -> None:
        """Finish writing."""
        if self._writer is not None:
            self._writer.close()


class ConsoleProgress(Callback):
    """Shows a run from its beginning to its end.

    Args:
        console: Where to.
        details: Whether to show what only people who tune a learner read.
    """

    def __init__(
        self, console: Console | None = None, *, details: bool = False
    ) -> None:
        self._console, self._details = console or Console(), details
        self._progress = Progress(console=self._console)
        self._returns: list[float] = []
        self._last = 0.0

    def on_message(self, text: str, *, warning: bool = False) -> None:
        """Print it."""
        print_line(self._console, f"{'warning: ' if warning else ''}{text}")

    def on_progress(self, name: str, done: int, total: int, text: str) -> None:
        """Show how far something is."""
        self._progress.update(name, done, total, text)

    def on_evaluation(self, loop: TrainingLoop, results: Results) -> None:
        """Print the results."""
        mean = mean_return(results)
        figure = f"return {mean:+.4f}"
        if loop.algorithm.relative:
            figure = f"{mean:+.1%} of the errors removed, net of rent"
        self.on_message(f"round {loop.round}  validation hosts: {figure}")
        if self._details:
            parts = [
                f"{task} {judged.returns.mean():+.4f} (score {judged.score.mean():.3f})"
                for task, judged in results.items()
            ]
            self.on_message(f"  {', '.join(parts)}")

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Show one round."""
        self._returns.append(record.mean_return)
        minutes, endless = loop.minutes, record.rounds == ENDLESS
        left = f"{time_left(record, minutes)} left"
        if self._console.is_terminal:
            done: tuple[str, float, float] = ("training", record.round, record.rounds)
            if endless and minutes is not None:
                done = "training, minutes", round(record.seconds / 60, 1), minutes
            text = (
                f"{left}  return {record.mean_return:+.4f} {sparkline(self._returns)}"
            )
            self._progress.update(*done, text)
            return
        due = record.round % max(record.rounds // LINES, 1) == 0
        if endless:
            due = record.seconds - self._last >= SECONDS
        if due or record.round == 1:
            self._last = record.seconds
            total = "" if endless else f"/{record.rounds}"
            text = record.headline(
                relative=loop.algorithm.relative, details=self._details
            )
            self.on_message(f"round {record.round}{total}  {text}  {left}")

    def on_close(self) -> None:
        """Leave the terminal."""
        self._progress.close()


def time_left(record: RoundRecord, minutes: float | None) -> str:
    """How long training will go on, in words."""
    seconds = record.seconds / record.round * (record.rounds - record.round)
    if minutes is not None:
        seconds = min(seconds, max(60 * minutes - record.seconds, 0.0))
    if seconds >= 3_600:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


class Evaluate(Callback):
    """Evaluates the policy every so often on the same hosts.

    They choose the best checkpoint, so the final evaluation has others.

    Args:
        every: Rounds between two evaluations.
        evaluate: Results of a policy.
    """

    def __init__(self, every: int, evaluate: Callable[[TamiyoPolicy], Results]) -> None:
        self._every, self._evaluate = every, evaluate

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Where it starts from."""
        if not resumed and not loop.stopping:
            loop.call("on_evaluation", loop, self._evaluate(loop.algorithm.policy))

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """If it is time to; a signal must not choose another best checkpoint."""
        due = record.round % self._every == 0 or loop.over
        if due and loop.sound:
            loop.call("on_evaluation", loop, self._evaluate(loop.algorithm.policy))


class Checkpoint(Callback):
    """Saves the trainer every so often: rows first, then its state.

    A disk that refuses is tried again at the next checkpoint, three times in a row.

    Args:
        store: Made durable before each checkpoint, so it is never behind one.
        folder: Where checkpoints go.
        every: Rounds between two checkpoints.
        facts: Written into each; see `CheckpointFolder.publish`.
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
        """Remember how good the policy is."""
        self._score = mean_return(results)

    def on_train_start(self, loop: TrainingLoop, *, resumed: bool) -> None:
        """Save where it starts from, or remove what a death left behind."""
        if resumed:
            with suppress(StorageError):
                self._folder.prune(loop.round)
        elif not loop.stopping:
            self._save(loop, last=False)

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Save if it is time to."""
        last = loop.over or loop.stopping
        due = last or self._score is not None or record.round % self._every == 0
        # What is gone back to, or gone on from, should be sound.
        if due and loop.sound:
            self._save(loop, last=last)

    def _save(self, loop: TrainingLoop, *, last: bool) -> None:
        score, self._score = self._score, None
        try:
            self._store.flush()
            self._folder.publish(loop.round, save(loop), self._facts, score=score)
            self._failures = 0
        except StorageError as trouble:
            self._failures += 1
            if last or self._failures == PATIENCE:
                raise
            loop.call("on_message", f"{trouble} Training goes on.", warning=True)


def scalars(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """The figures of a round by name; what is NaN or missing is left out."""
    named = {"round/mean_return": record.mean_return, "round/seconds": record.seconds}
    update = record.update
    named |= {
        f"update/{field.name}": getattr(update, field.name)
        for field in fields(UpdateRecord)
        if field.name != "heads"
    }
    named |= {
        f"{field.name}/{head}": getattr(figures, field.name)
        for head, figures in update.heads.items()
        for field in fields(HeadRecord)
    }
    for name, value in named.items():
        if value is not None and not isnan(value):
            yield name, float(value)


def summary_writer() -> Any:  # noqa: ANN401
    """The class that writes for TensorBoard; refuses if it is not installed."""
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        raise InvalidInputError(
            "TensorBoard is not installed: pip install 'esper-lite[tensorboard]'."
        ) from None
