"""Training of a run from its newest checkpoint to its end.

    round  ->  rows in the store  ->  every few rounds: flush, then a checkpoint

A checkpoint of round r is published after all rows up to r are durable, so the store is
never behind the checkpoint. After a signal, the run saves rows and state at the end of
the round and stops. If weights, moments, memories or rewards are not finite, or three
rounds in a row have no finite update, the run returns to its last checkpoint with new
random streams.
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
"""Round of the checkpoint that it started from, the loop, and what was not finite."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The folder of a run and how it ended."""

    path: Path
    rounds: int
    """Number of completed rounds."""
    signal: int | None
    """The signal that stopped it early, if any."""


def train_to_end(
    run: Run,
    callbacks: Sequence[Callback],
    first: Sequence[str],
    attempt: Callable[[Sequence[int], str | None, int], Attempt],
) -> RunResult:
    """Train to the end; return to a checkpoint whenever training diverges.

    `attempt` trains from the newest checkpoint. Its arguments are the received signals,
    what was not finite in the last attempt, and how many attempts have failed.
    """
    for callback in callbacks:
        for text in first:
            callback.on_message(text)
    failure, rollbacks, starts = None, 0, list[int]()
    with caught_signals() as signals:
        # The limit counts attempts from one checkpoint; a newer one starts at zero.
        while starts.count(max(starts, default=0)) <= PATIENCE:
            start, loop, failure = attempt(signals, failure, rollbacks)
            if failure is None:
                signal = signals[0] if signals else None
                return RunResult(run.path, loop.round, signal)
            rollbacks = loop.rollbacks + 1
            starts.append(start)
    raise NumericsError(
        f"run {run.name}: {failure}. {PATIENCE} returns to a checkpoint did not help. "
        f"Lower its learning_rate, or correct its environment; see {DIAGNOSIS}."
    )


def resume_and_train(
    loop: TrainingLoop,
    run: Run,
    store: Store,
    checkpoints: CheckpointFolder,
    found: Loaded | None,
    facts: Mapping[str, Any],
    failure: str | None,
    rollbacks: int,
    begin: Callable[[], object] = lambda: None,
) -> tuple[int, str | None]:
    """Load a checkpoint, if there is one, and train until the run ends or diverges.

    Without a checkpoint, `begin` is called first. A checkpoint with other `facts` is
    refused. `failure` says what was not finite in the last attempt, if it failed.

    Returns:
        The round of the checkpoint, and what was not finite.
    """
    versions, notes = versions_now(run.config_toml), []
    if found is None:
        begin()
    else:
        for name, value in facts.items():
            if found.manifest.facts.get(name) != value:
                raise InvalidInputError(
                    f"the {name} of run {run.name} changed since its last checkpoint. "
                    "Restore it, or start a new run."
                )
        load(loop, checkpoints.load(found.manifest.step, leaves(loop)).tensors)
        notes = [("rejected", line) for line in found.rejected] + [
            ("inexact", f"{line}; later results may differ in the last bits.")
            for line in changes_since(run.versions, versions)
        ]
    store.begin_attempt(None if found is None else loop.round, versions)
    notes += [("store", line) for line in store.warnings]
    start = loop.round
    if failure is not None:
        loop.change_streams(rollbacks)
        text = f"{failure}; restarting from round {start} with new random numbers."
        notes.append(("refused", text))
    for kind, text in notes:
        store.add_note(start, kind, text)
        loop.call("on_message", text, warning=True)
    loop.stopping = loop.interrupted()
    loop.call("on_train_start", loop, resumed=found is not None)
    last, failure = None, None
    try:
        last = loop.run()
        failure = BROKEN if loop.diverged else None
    except NotFiniteError as error:
        failure = str(error).rstrip(".")
    if failure is not None:
        run.write(DIAGNOSIS, {"trouble": failure, "last": str(last)})
    return start, failure
