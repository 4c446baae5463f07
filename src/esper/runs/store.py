"""The event store of a run: one SQLite database with one writer and many readers.

Every row except those of `attempts` has (attempt, seq): seq counts the rows of an
attempt over all tables, from 1 without gaps. A run that resumes after round r begins
another attempt. Rows of later rounds from earlier attempts stay but no longer count:
`live_NAME` shows the rows of NAME that count.

Rows are queued and written in one transaction: by `flush`, every thousand rows, or
with the first row after a second, so that readers see them soon. If the database cannot
be written, they stay in the queue. A durable flush survives a loss of power, so it
precedes each checkpoint.

SQLite stores NaN as NULL. NULL means missing, unless the column's name is in `nans`.
"""

import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib import import_module
from operator import ne
from pathlib import Path
from time import monotonic
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import InvalidInputError, InvalidStateError, StorageError
from esper.contracts.messages import one_line, short
from esper.files import storage
from esper.runs.database import (
    COMPANIONS,
    DEADLINE,
    TABLES,
    DamagedStoreError,
    columns_of,
    open_store,
    open_writer,
    patiently,
    rows,
    transaction,
)
from esper.runs.records import EvalResult, RoundRecord

FLUSH_ROWS: Final = 1_000
"""Number of queued rows that starts a write."""
FLUSH_SECONDS: Final = 1.0
"""Seconds after a write from which on the next row starts another."""
MAX_TEXT: Final = 10_000
"""Maximum length of a text; the rest is cut."""
DUCKDB_TYPES: Final = {"INTEGER": "BIGINT", "REAL": "DOUBLE", "TEXT": "VARCHAR"}

Format = Literal["parquet", "csv"]
Column = Tensor | NDArray[Any] | Sequence[Any] | str | float | int | None
"""One value for each row, or one for all."""
Row = tuple[Any, ...]


UNSTORED: Final = (
    *("episodes", "mean_length", "recent_return", "recent_length", "iqm_return"),
)
"""Figures of a round that follow from the table of episodes."""


class Store:
    """Writes the events of a run; call `begin_attempt` first."""

    def __init__(self, path: Path | str, run: str | None = None) -> None:
        self.path, self._run = Path(path), run
        self.warnings: list[str] = []
        """Warnings for the user, one line each."""
        self._queue: list[tuple[str, list[Row]]] = []
        self._waiting, self._retry_at = 0, FLUSH_ROWS
        self._due = monotonic() + FLUSH_SECONDS
        self._attempt = self._seq = 0
        self._db = open_writer(self.path, run)
        self._file = os.stat(self.path).st_ino
        self._columns = {name: columns_of(self._db, name) for name in TABLES}

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin_attempt(
        self, resume_round: int | None = None, versions: Mapping[str, str] | None = None
    ) -> int:
        """Start an attempt and return its number, from 1.

        Earlier rows of rounds after `resume_round` no longer count. None: no row does.
        """
        keeps = -1 if resume_round is None else resume_round
        started = datetime.now(UTC).isoformat(timespec="seconds")
        about = {**(versions or {})} | ({"run": self._run} if self._run else {})

        def begin() -> tuple[int, int]:
            self._db.execute("PRAGMA synchronous = FULL")
            with transaction(self._db):
                self._db.execute(
                    "UPDATE attempts SET last_round = min(ifnull(last_round, ?1), ?1)",
                    (keeps,),
                )
                found = self._db.execute(
                    "INSERT INTO attempts (started, resumed_after, rows, versions) "
                    "VALUES (?, ?, 0, ?) RETURNING attempt",
                    (started, resume_round, json.dumps(about, sort_keys=True)),
                ).fetchall()
                known = self._db.execute("SELECT count(*) FROM live_rounds").fetchone()
                return int(found[0][0]), int(known[0])

        try:
            self._attempt, known = patiently(begin)
            self._seq = 0
        except sqlite3.DatabaseError as error:
            raise self._error(error) from None
        if (lost := keeps - known) > 0:
            text = f"{lost} of the rounds 1 to {keeps} are not in this store"
            self.add_note(keeps, "gap", text)
            self.warnings.append(f"{text}; they will be missing in the report.")
        return self._attempt

    def add(self, table: str, **columns: Column) -> None:
        """Queue rows of one table: one value per row and column, or one for all rows.

        None and absent columns are missing values.
        """
        if not self._attempt:
            raise InvalidStateError("call begin_attempt() before adding rows.")
        unknown = columns.keys() - self._columns[table].keys()
        if unknown:
            raise InvalidInputError(
                f"the table {table} has no column {min(unknown)!r}."
            )
        rows = self._rows(table, columns)
        self._queue.append((table, rows))
        self._waiting += len(rows)
        if self._waiting >= self._retry_at or monotonic() >= self._due:
            self.flush(durable=False)

    def add_round(self, record: RoundRecord) -> None:
        """Add a round and its update, head by head."""
        figures = asdict(record)
        for name in ("rounds", *UNSTORED):
            del figures[name]
        update = figures.pop("update")
        heads: Mapping[str, Mapping[str, float]] = update.pop("heads")
        self.add("rounds", **figures, **update)
        if heads:
            names = next(iter(heads.values()))
            each = {name: [head[name] for head in heads.values()] for name in names}
            self.add("heads", round=record.round, head=[*heads], **each)

    def add_evaluation(
        self, result: EvalResult, *, round: int, stage: str, controller: str, task: str
    ) -> None:
        """Add the result of one controller, host by host."""
        figures = {item.name: getattr(result, item.name) for item in fields(result)}
        figures["return"] = figures.pop("returns")
        del figures["stops"]
        self.add(
            "evaluations",
            host=range(len(result.returns)),
            round=round,
            stage=stage,
            controller=controller,
            task=task,
            **figures,
        )

    def add_note(self, round: int, kind: str, text: str) -> None:
        """Add a remark in words."""
        self.add("notes", round=round, kind=kind, text=text)

    def add_note_once(self, round: int, kind: str, text: str) -> None:
        """Add a remark durably, unless an earlier attempt has added one of its kind."""
        query = "SELECT count(*) FROM live_notes WHERE kind = ?"
        if not self.fetch(query, kind)[0][0]:
            self.add_note(round, kind, text)
            self.flush()

    def fetch(self, query: str, *values: object) -> list[Row]:
        """All rows of a query, without the rows that are still in the queue."""
        try:
            return patiently(lambda: self._db.execute(query, values).fetchall())
        except sqlite3.DatabaseError as error:
            raise self._error(error) from None

    def flush(self, *, durable: bool = True) -> int:
        """Write all queued rows; return the number of rows of this attempt.

        A durable flush survives a loss of power, and raises StorageError if the rows
        cannot be written. They stay in the queue then.
        """
        try:
            if durable:
                patiently(lambda: self._write(durable=True))
            else:
                self._write(durable=False)
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.DatabaseError, OSError) as error:
            self._retry_at = self._waiting + FLUSH_ROWS
            self._due = monotonic() + FLUSH_SECONDS
            if durable:
                raise self._error(error) from None
        return self._seq

    def close(self) -> None:
        """Flush durably and close the database."""
        try:
            if self._attempt:
                self.flush()
        finally:
            self._db.close()

    def _rows(self, table: str, columns: Mapping[str, Column]) -> list[Row]:
        """Rows in the order of the table's columns, without attempt and seq."""
        given = {name: _listed(value) for name, value in columns.items()}
        counts = [len(value) for value in given.values() if isinstance(value, list)]
        count = counts[0] if counts else 1
        marks: list[list[str]] = [[] for _ in range(count)]
        for name, values in given.items():
            if not isinstance(values, list):
                given[name] = values = [values] * count
            if any(map(ne, values, values)):  # only NaN differs from itself
                for mark, value in zip(marks, values, strict=True):
                    if value != value:
                        mark.append(name)
        given["nans"] = [" ".join(mark) or None for mark in marks]
        missing = [None] * count
        _, _, *names = self._columns[table]
        return [*zip(*(given.get(name, missing) for name in names), strict=True)]

    def _write(self, *, durable: bool) -> None:
        """Write the queue in one transaction; a full sync makes it durable."""
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
            # An empty transaction would not be synced; this changes a page.
            self._db.execute(
                "UPDATE attempts SET rows = ? WHERE attempt = ?", (seq, self._attempt)
            )
        self._seq = seq
        self._queue.clear()
        self._waiting, self._retry_at = 0, FLUSH_ROWS
        self._due = monotonic() + FLUSH_SECONDS

    def _error(self, error: Exception) -> StorageError:
        return StorageError(
            f"cannot write {self.path}: {error}; {self._waiting} rows wait. Free disk "
            "space, or stop other processes that use the file."
        )


def _listed(value: Column) -> Any:  # noqa: ANN401
    """A list with a value for each row, or the one value of all."""
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Sequence):
        return [_clean(each) if isinstance(each, str) else each for each in value]
    return value


def _clean(text: str) -> str:
    # SQLite refuses lone surrogates.
    if len(text) <= MAX_TEXT and text.isascii():
        return text
    return text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")


def usable_store(path: Path, run: str | None) -> Store:
    """The store of a resumed run; a damaged one is renamed and replaced."""
    try:
        return Store(path, run)
    except DamagedStoreError as error:
        number = 1
        while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
            number += 1
        with storage(path, "move"):
            for end in ("", *COMPANIONS):
                if os.path.lexists(f"{path}{end}"):
                    os.replace(f"{path}{end}", f"{aside}{end}")
        store = Store(path, run)
        text = f"{error} It was renamed to {aside.name}; a new store was started."
        store.warnings.append(text)
        return store


def export(
    path: Path | str, folder: Path | str, kind: Format = "parquet"
) -> list[Path]:
    """Write the rows that count of every table to a file of its own.

    The folder is created; it must not contain files of these names. Parquet needs
    DuckDB.
    """
    duckdb: Any = None
    if kind == "parquet":
        try:
            duckdb = import_module("duckdb")
        except ImportError:
            raise InvalidInputError(
                "Parquet needs DuckDB: pip install '.[query]', or export CSV."
            ) from None
    folder, db = Path(folder), open_store(path, seconds=DEADLINE)
    try:
        files = [folder / f"{table}.{kind}" for table in TABLES]
        taken = [file.name for file in files if file.exists()]
        if taken:
            raise InvalidInputError(
                f"{folder} already has {taken[0]}; name another folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
        db.execute("BEGIN")  # one snapshot for all tables
        for table, file in zip(TABLES, files, strict=True):
            draft = folder / f".{table}.csv"
            types = _write_csv(db, table, draft)
            if duckdb is not None:
                packed = folder / f".{table}.parquet"
                _pack(duckdb, draft, packed, types)
                draft.unlink()
                draft = packed
            os.replace(draft, file)
    except OSError as error:
        why = error.strerror or error
        raise StorageError(f"cannot export to {folder}: {why}.") from None
    except (sqlite3.Error, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        why = one_line(str(error), 99)
        raise StorageError(f"cannot read {short(Path(path))}: {why}.") from None
    finally:
        db.close()
    return files


def _write_csv(db: sqlite3.Connection, table: str, file: Path) -> dict[str, str]:
    """Write one table; return its columns and their types."""
    types = columns_of(db, table)
    del types["nans"]
    with file.open("w", encoding="utf-8", newline="") as out:
        out.write(",".join(types) + "\n")
        for row in rows(db, f"live_{table}"):
            out.write(",".join(map(_cell, row.values())) + "\n")
    return types


def _cell(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace('"', '""') + '"'
    return "" if value is None else repr(value)


def _pack(duckdb: Any, csv: Path, parquet: Path, types: dict[str, str]) -> None:  # noqa: ANN401
    """Convert a CSV file to Parquet with DuckDB."""
    kinds = ", ".join(f"'{name}': '{DUCKDB_TYPES[t]}'" for name, t in types.items())
    source, target = (str(file).replace("'", "''") for file in (csv, parquet))
    try:
        duckdb.sql(
            f"COPY (SELECT * FROM read_csv('{source}', header=true, auto_detect=false, "
            f"delim=',', quote='\"', escape='\"', nullstr='', "
            f"allow_quoted_nulls=false, columns={{{kinds}}})) "
            f"TO '{target}' (FORMAT parquet)",
            connection=duckdb.connect(),
        )
    except duckdb.Error as error:
        why = str(error).splitlines()[0]
        raise StorageError(f"cannot write {parquet}: {why}") from None
