"""The event store of a run: one SQLite database, written by one process.

Rows are queued and written in one transaction when `flush` is called or a thousand of
them wait. After a durable flush they survive a loss of power, so that a checkpoint that
is published after it never knows more than the store. A store that cannot be written
does not stop a run: rows wait, and when too many do, the oldest figures of steps and
heads are dropped and counted. What happened to seeds is never dropped.

Readers use `database.open_store`: only this connection ever writes or checkpoints.
"""

import json
import os
import sqlite3
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from operator import ne
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import BadInput, CallOrder, StorageTrouble
from esper.contracts.stages import Stage
from esper.experiment.database import TABLES, columns_of, open_writer, transaction
from esper.experiment.records import Judged, RoundRecord
from esper.experiment.seed_events import EVENTS, Changes

BATCH: Final = 1_000
"""Rows that wait before they are written unasked."""
LIMIT: Final = 100_000
"""Rows that may wait while the store cannot be written: about 50 MiB."""
MAX_TEXT: Final = 10_000
"""Characters of a text that are kept."""
DROPPABLE: Final = frozenset({"steps", "heads"})

Column = Tensor | NDArray[Any] | Sequence[Any] | str | float | int | None
"""One value for each row, or one for all."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one table that came together, column by column, until they are written.

    Columns are kept as they came, tensors on their device or as arrays.
    """

    table: str
    count: int
    columns: Mapping[str, Column]

    def rows(
        self, names: Iterable[str], attempt: int, seq: int
    ) -> Iterable[tuple[Any, ...]]:
        """Rows in the order of the table's columns; what was not given is missing.

        Args:
            names: The columns of the table.
            attempt: Who writes.
            seq: Number of the first row.
        """
        count = self.count
        given = {name: _values(own, count) for name, own in self.columns.items()}
        given["nans"] = _nans(given, count)
        given["attempt"] = [attempt] * count
        given["seq"] = range(seq, seq + count)
        missing = [None] * count
        return zip(*(given.get(name, missing) for name in names), strict=True)


class Store:
    """Writes what a run does; `begin_attempt` comes first.

    Args:
        path: The database; it is made if there is none.
        limit: Rows that may wait while it cannot be written.
    """

    def __init__(self, path: Path | str, *, limit: int = LIMIT) -> None:
        self.path, self._limit = Path(path), limit
        self.dropped = 0
        """Rows that were given up since the store was opened."""
        self.failures = 0
        """Times that waiting rows could not be written."""
        self._queue: deque[Batch] = deque()
        self._waiting, self._retry_at = 0, BATCH
        self._attempt, self._seq, self._round, self._unreported = 0, 0, 0, 0
        self._db = open_writer(self.path)
        self._file = os.stat(self.path).st_ino
        self._columns = {name: columns_of(self._db, name) for name in TABLES}

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin_attempt(
        self,
        resume_round: int | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> int:
        """Start to write; what others wrote beyond `resume_round` no longer counts.

        Args:
            resume_round: The round that the run goes on from; None: from the start.
            versions: What it runs on.

        Returns:
            The number of the attempt, from 1.
        """
        if self._attempt:
            raise CallOrder("begin_attempt() was called before; open another Store.")
        keeps = -1 if resume_round is None else whole("resume_round", resume_round)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        about = json.dumps(dict(versions or {}), sort_keys=True)
        try:
            self._db.execute("PRAGMA synchronous = FULL")
            with transaction(self._db):
                self._db.execute(
                    "UPDATE attempts SET last_round = min(ifnull(last_round, ?1), ?1)",
                    (keeps,),
                )
                found = self._db.execute(
                    "INSERT INTO attempts (started, resumed_after, rows, versions) "
                    "VALUES (?, ?, 0, ?) RETURNING attempt",
                    (started, resume_round, about),
                ).fetchall()
                known = self._db.execute("SELECT count(*) FROM live_rounds").fetchone()
        except sqlite3.DatabaseError as error:
            raise self._trouble(error) from None
        self._attempt, self._round = int(found[0][0]), max(keeps, 0)
        if known[0] < keeps:
            lost = (
                f"{keeps - known[0]} of the rounds 1 to {keeps} are not in this store"
            )
            self.add_note(self._round, "gap", lost)
        return self._attempt

    def add(self, table: str, **columns: Column) -> None:
        """Queue rows of one table; refuses before anything is changed.

        Args:
            table: One of `database.TABLES`.
            columns: `round` and others of the table's columns: a value for each row,
                or one for all; None, like a column that is left out, is missing.
        """
        if not self._attempt:
            raise CallOrder("rows came before begin_attempt(); call that first.")
        unknown = columns.keys() - self._columns[table].keys()
        if unknown:
            raise BadInput(f"the table {table} has no column {min(unknown)!r}.")
        for name in columns.keys() & {"round", "step"}:
            whole(name, columns[name])
        counts = [len(value) for value in columns.values() if _is_column(value)]
        count = counts[0] if counts else 1
        kept = {name: _kept(name, value, count) for name, value in columns.items()}
        self._round = whole("round", columns["round"])
        self._put(Batch(table, count, kept))
        if self._waiting >= self._retry_at:
            self.flush(durable=False)

    def add_round(self, record: RoundRecord) -> None:
        """One round and its update, head by head."""
        figures = asdict(record)
        del figures["rounds"]
        update = figures.pop("update")
        heads: Mapping[str, Mapping[str, float]] = update.pop("heads")
        self.add("rounds", **figures, **update)
        if heads:
            names = next(iter(heads.values()))
            each = {name: [head[name] for head in heads.values()] for name in names}
            self.add("heads", round=record.round, head=[*heads], **each)

    def add_events(
        self, changes: Changes, blueprints: Sequence[str], **columns: Column
    ) -> None:
        """What happened to seeds in one step.

        Args:
            changes: As `events_between` found them.
            blueprints: Names of the run's blueprints.
            columns: Round, step, task and episode; `env` if it is not as in `changes`.
        """
        if not len(changes):
            return
        stages = [stage.name for stage in Stage]
        names = [*blueprints, None]  # index -1: no seed
        found: dict[str, Column] = {
            "env": changes.env,
            "slot": changes.slot,
            "what": [EVENTS[index] for index in changes.what.tolist()],
            "stage_from": [stages[index] for index in changes.before.tolist()],
            "stage_to": [stages[index] for index in changes.after.tolist()],
            "blueprint": [names[index] for index in changes.blueprint.tolist()],
            "alpha": changes.alpha,
        }
        self.add("events", **(found | columns))

    def add_evaluation(
        self, judged: Judged, *, round: int, stage: str, controller: str, task: str
    ) -> None:
        """What became of every host under one controller."""
        figures = {item.name: getattr(judged, item.name) for item in fields(judged)}
        figures["return"] = figures.pop("returns")
        self.add(
            "evaluations",
            host=range(len(judged.returns)),
            round=round,
            stage=stage,
            controller=controller,
            task=task,
            **{name: torch.from_numpy(values) for name, values in figures.items()},
        )

    def add_note(self, round: int, kind: str, text: str) -> None:
        """Something worth saying in words."""
        self.add("notes", round=round, kind=kind, text=text)

    def flush(self, *, durable: bool = True) -> int:
        """Write all that waits.

        Args:
            durable: Whether it must survive a loss of power. Raises StorageTrouble if
                it cannot; nothing is lost then, and may be tried again. If not durable,
                trouble is counted and the rows go on waiting.

        Returns:
            Rows of this attempt that are written.
        """
        if not self._attempt:
            raise CallOrder("flush() before begin_attempt(); call that first.")
        if self._unreported:
            text = f"{self._unreported} rows of steps or heads were dropped"
            self._unreported = 0
            note: dict[str, Column] = {"kind": "dropped", "text": text}
            self._put(Batch("notes", 1, {"round": self._round, **note}))
        try:
            self._write(durable=durable)
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.DatabaseError, OSError) as error:
            self.failures += 1
            self._retry_at = self._waiting + BATCH
            self._shed()
            if durable:
                raise self._trouble(error) from None
        return self._seq

    def close(self) -> None:
        """Write all that waits, durably, and let go of the file."""
        try:
            if self._attempt:
                self.flush()
        finally:
            self._db.close()

    def _put(self, batch: Batch) -> None:
        self._queue.append(batch)
        self._waiting += batch.count

    def _write(self, *, durable: bool) -> None:
        """One transaction with all that waits; a full sync makes it durable."""
        if durable and os.stat(self.path).st_ino != self._file:
            raise OSError("it was replaced by another file")
        rows: dict[str, list[tuple[Any, ...]]] = {}
        seq = self._seq
        for batch in self._queue:
            made = batch.rows(self._columns[batch.table], self._attempt, seq + 1)
            rows.setdefault(batch.table, []).extend(made)
            seq += batch.count
        # In WAL mode FULL syncs the log at every commit, NORMAL does not.
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        with transaction(self._db):
            for table, lines in rows.items():
                marks = ", ".join("?" * len(self._columns[table]))
                self._db.executemany(f"INSERT INTO {table} VALUES ({marks})", lines)
            # Changes a page even if nothing waits: no commit, no sync.
            self._db.execute(
                "UPDATE attempts SET rows = ? WHERE attempt = ?", (seq, self._attempt)
            )
        self._seq = seq
        self._queue.clear()
        self._waiting, self._retry_at = 0, BATCH

    def _shed(self) -> None:
        """Give up the oldest figures until what waits is bearable."""
        excess, kept = self._waiting - self._limit, deque[Batch]()
        for batch in self._queue:
            if excess > 0 and batch.table in DROPPABLE:
                excess -= batch.count
                self._waiting -= batch.count
                self.dropped += batch.count
                self._unreported += batch.count
            else:
                kept.append(batch)
        self._queue = kept

    def _trouble(self, error: Exception) -> StorageTrouble:
        return StorageTrouble(
            f"cannot write {self.path}: {error}; {self._waiting} rows wait. Make room "
            "or end whoever else writes there."
        )


def whole(name: str, value: object) -> int:
    """A number that can be counted to; refuses others."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise BadInput(f"{name} must be a whole number from 0, got {value!r}.")
    return value


def _kept(name: str, value: Column, count: int) -> Column:
    """A column as it is queued; refuses one that has not a value for each row."""
    if isinstance(value, Tensor):
        if tuple(value.shape) != (count,):
            raise BadInput(
                f"{name} must have shape ({count},), got {tuple(value.shape)}."
            )
        # Worlds go on writing into theirs.
        value = value.detach()
        return value.numpy().copy() if value.device.type == "cpu" else value.clone()
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, Sequence):
        if len(value) != count:
            raise BadInput(f"{name} must have {count} values, got {len(value)}.")
        if isinstance(value, range):
            return value
        return [_clean(each) if isinstance(each, str) else each for each in value]
    return value


def _is_column(value: Column) -> TypeGuard[Tensor | NDArray[Any] | Sequence[Any]]:
    """Whether there is a value for each row."""
    if isinstance(value, str):
        return False
    return isinstance(value, Tensor | np.ndarray | Sequence)


def _clean(text: str) -> str:
    # SQLite takes no lone surrogates, and nobody reads a novel in a column.
    if len(text) <= MAX_TEXT and text.isascii():
        return text
    return text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")


def _values(column: Column, count: int) -> Sequence[Any]:
    """One value for each row."""
    if isinstance(column, Tensor | np.ndarray):
        values: list[Any] = column.tolist()
        return values
    if isinstance(column, Sequence) and not isinstance(column, str):
        return column
    return [column] * count


def _nans(columns: Mapping[str, Sequence[Any]], count: int) -> list[str | None]:
    """Names of the columns that are NaN, for each row; None if there are none."""
    marks: list[str | None] = [None] * count
    for name, values in columns.items():
        if not any(map(ne, values, values)):  # only NaN differs from itself
            continue
        for row, value in enumerate(values):
            if value != value:
                mark = marks[row]
                marks[row] = name if mark is None else f"{mark} {name}"
    return marks
