"""From a run's newest checkpoint to its end, whatever is trained in it.

    round  ->  rows in the store  ->  every so often: flush, then a checkpoint

A checkpoint of round r is published after all rows up to r are durable, so a store is
never behind the checkpoint that a run resumes from. A signal ends the run after its
round: rows and state are saved first. A weight, moment, memory or reward that is not
finite, and three rounds in a row whose updates are all refused as such, take the run
back to its last checkpoint, with new random streams.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from esper.contracts.errors import InvalidInputError, NotFiniteError, NumericsError
from esper.contracts.state import leaves, load
from esper.runs.checkpoint import CheckpointFolder, Loaded
from esper.runs.run import Run, changes_since, versions_now
from esper.runs.store import Store
from esper.training.loop import BROKEN, PATIENCE, Callback, TrainingLoop
from esper.workers.jobs import caught_signals

DIAGNOSIS: Final = "diagnosis.json"
"""File in the folder of a run whose updates were not finite."""
Attempt = tuple[int, TrainingLoop, str | None]
"""The round that it began after; the trainer; what was not finite and ended it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run is, and why it ended."""

    path: Path
    rounds: int
    """Rounds that it has played."""
    signal: int | None
    """The signal that ended it early, if one did."""


def train_to_end(
    run: Run,
    callbacks: Sequence[Callback],
    first: Sequence[str],
    attempt: Callable[[Sequence[int], str | None, int], Attempt],
) -> RunResult:
    """Train to the end; go back to a checkpoint as often as it diverges.

    Args:
        run: Where it is recorded.
        callbacks: Get the first lines.
        first: Lines to be read by people.
        attempt: Trains from the newest checkpoint until an end; it gets signals as
            they come, what ended the attempt before it, and how often the run went
            back for that.
    """
    for callback in callbacks:
        for text in first:
            callback.on_message(text)
    trouble, rollbacks, starts = None, 0, list[int]()
    with caught_signals() as signals:
        # From one checkpoint it is tried a few times; who gets further may go on.
        while starts.count(max(starts, default=0)) <= PATIENCE:
            start, trainer, trouble = attempt(signals, trouble, rollbacks)
            if trouble is None:
                signal = signals[0] if signals else None
                return RunResult(run.path, trainer.round, signal)
            rollbacks = trainer.rollbacks + 1
            starts.append(start)
    raise NumericsError(
        f"run {run.name}: numbers were not finite, even after {PATIENCE} returns to a "
        f"checkpoint. Lower its ppo.learning_rate; see {DIAGNOSIS} in its folder."
    )


def train_on(
    trainer: TrainingLoop,
    run: Run,
    store: Store,
    checkpoints: CheckpointFolder,
    found: Loaded | None,
    facts: Mapping[str, Any],
    trouble: str | None,
    rollbacks: int,
    begin: Callable[[], object] = lambda: None,
) -> tuple[int, str | None]:
    """Train from a checkpoint, or from the beginning, until an end.

    Args:
        trainer: Made as it was in the beginning.
        run: Where it is recorded.
        store: Of that run.
        checkpoints: Of that run.
        found: The newest of them, if there is one.
        facts: What must not have changed since.
        trouble: What was not finite and ended the attempt before this one.
        rollbacks: How often the run went back for that.
        begin: Called before anything else where there is no checkpoint.

    Returns:
        The round that it began after, and what was not finite and ended it.
    """
    versions, notes = versions_now(run.config_toml), []
    if found is None:
        begin()
    else:
        for name, value in facts.items():
            if found.manifest.facts.get(name) != value:
                raise InvalidInputError(
                    f"the {name} of run {run.name} changed since its last checkpoint; "
                    "restore it, or start a new run."
                )
        load(trainer, checkpoints.load(found.manifest.step, leaves(trainer)).tensors)
        notes = [("rejected", line) for line in found.rejected] + [
            ("inexact", f"{line}; later results may differ in the last bits.")
            for line in changes_since(run.versions, versions)
        ]
    store.begin_attempt(None if found is None else trainer.round, versions)
    notes += [("store", line) for line in store.warnings]
    start = trainer.round
    if trouble is not None:
        trainer.change_streams(rollbacks)
        text = f"{trouble}; restarting from round {start} with new random numbers."
        notes.append(("refused", text))
    for kind, text in notes:
        store.add_note(trainer.round, kind, text)
        trainer.call("on_message", text, warning=True)
    trainer.stopping = trainer.interrupted()
    trainer.call("on_train_start", trainer, resumed=found is not None)
    last, trouble = None, None
    try:
        last = trainer.run()
        trouble = BROKEN if trainer.diverged else None
    except NotFiniteError as error:
        trouble = str(error).rstrip(".")
    if trouble is not None:
        run.write(DIAGNOSIS, {"trouble": trouble, "last": str(last)})
    return start, trouble
