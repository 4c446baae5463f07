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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from operator import ne
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import BadInput, CallOrder, StorageTrouble
from esper.experiment.database import TABLES, columns_of, open_writer, transaction
from esper.experiment.records import Judged, RoundRecord

BATCH: Final = 1_000
"""Rows that wait before they are written unasked."""
LIMIT: Final = 100_000
"""Rows that may wait while the store cannot be written."""
MAX_TEXT: Final = 10_000
"""Characters of a text that are kept."""
DROPPABLE: Final = frozenset({"steps", "heads"})

Column = Tensor | NDArray[Any] | Sequence[Any] | str | float | int | None
"""One value for each row, or one for all."""
Row = tuple[Any, ...]


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
        self._queue: deque[tuple[str, list[Row]]] = deque()
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
        rows = self._rows(table, columns)
        self._round = whole("round", columns["round"])
        self._queue.append((table, rows))
        self._waiting += len(rows)
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
            **figures,
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
            note: dict[str, Column] = {
                "round": self._round,
                "kind": "dropped",
                "text": text,
            }
            self._queue.append(("notes", self._rows("notes", note)))
            self._waiting += 1
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

    def _rows(self, table: str, columns: Mapping[str, Column]) -> list[Row]:
        """Rows in the order of the table's columns, but for attempt and seq."""
        given = {name: _listed(name, value) for name, value in columns.items()}
        counts = [len(value) for value in given.values() if isinstance(value, list)]
        count = counts[0] if counts else 1
        marks: list[list[str]] = [[] for _ in range(count)]
        for name, values in given.items():
            if not isinstance(values, list):
                given[name] = values = [values] * count
            if len(values) != count:
                raise BadInput(f"{name} must have {count} values, got {len(values)}.")
            if any(map(ne, values, values)):  # only NaN differs from itself
                for mark, value in zip(marks, values, strict=True):
                    if value != value:
                        mark.append(name)
        given["nans"] = [" ".join(mark) or None for mark in marks]
        missing = [None] * count
        _, _, *names = self._columns[table]
        return [*zip(*(given.get(name, missing) for name in names), strict=True)]

    def _write(self, *, durable: bool) -> None:
        """One transaction with all that waits; a full sync makes it durable."""
        if durable and os.stat(self.path).st_ino != self._file:
            raise OSError("it was replaced by another file")
        rows: dict[str, list[Row]] = {}
        seq = self._seq
        for table, batch in self._queue:
            lines = rows.setdefault(table, [])
            for row in batch:
                seq += 1
                lines.append((self._attempt, seq, *row))
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
        kept = deque[tuple[str, list[Row]]]()
        for table, batch in self._queue:
            if self._waiting > self._limit and table in DROPPABLE:
                self._waiting -= len(batch)
                self.dropped += len(batch)
                self._unreported += len(batch)
            else:
                kept.append((table, batch))
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


def _listed(name: str, value: Column) -> Any:  # noqa: ANN401
    """A list with a value for each row, or the one value of all."""
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim != 1:
            raise BadInput(f"{name} must have one axis, got shape {(*value.shape,)}.")
        return value.tolist()
    if isinstance(value, Sequence):
        return [_clean(each) if isinstance(each, str) else each for each in value]
    return value


def _clean(text: str) -> str:
    # SQLite takes no lone surrogates, and nobody reads a novel in a column.
    if len(text) <= MAX_TEXT and text.isascii():
        return text
    return text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")
