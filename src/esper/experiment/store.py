"""The event store of a run: one SQLite database, written by one process, read by any.

Every row but those of `attempts` has (attempt, seq): seq counts the rows of an attempt
over all tables, from 1 and without holes. `round` is the round that a row belongs to.
A run that resumes after round r begins another attempt; what earlier attempts wrote of
rounds beyond r stays, but no longer counts: `live_NAME` shows what counts of NAME.

Rows are queued and written in one transaction when `flush` is called or a thousand of
them wait; while the database cannot be written they go on waiting. After a durable
flush they survive a loss of power, so that a checkpoint that is published after it
never knows more than the store.

SQLite has no NaN: it stores NULL. So NULL means missing, unless `nans`, the names of
columns parted by spaces, has the column's name: then the number was NaN.

Readers cannot write, and so never checkpoint the log: before SQLite 3.51.3, two
connections that do so at the same moment can damage a database.
"""

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib import import_module
from math import nan
from operator import ne
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import BadInput, CallOrder, StorageTrouble
from esper.experiment.records import Judged, RoundRecord

BATCH: Final = 1_000
"""Rows that wait before they are written unasked."""
MAX_TEXT: Final = 10_000
"""Characters of a text that are kept."""
TIMEOUT: Final = 1.0
"""Seconds to wait for the lock of another connection."""
OLDEST: Final = (3, 37, 0)
"""SQLite that knows strict tables."""
VERSION: Final = 1
"""Of the schema; kept in `PRAGMA user_version`."""
APPLICATION: Final = 0x45535052
"""Tells a store from other databases; kept in `PRAGMA application_id`."""
DUCKDB_TYPES: Final = {"INTEGER": "BIGINT", "REAL": "DOUBLE", "TEXT": "VARCHAR"}

Format = Literal["parquet", "csv"]
Column = Tensor | NDArray[Any] | Sequence[Any] | str | float | int | None
"""One value for each row, or one for all."""
Row = tuple[Any, ...]

ATTEMPTS: Final = """
CREATE TABLE attempts (
  attempt INTEGER PRIMARY KEY,   -- from 1
  started TEXT NOT NULL,         -- UTC
  resumed_after INTEGER,         -- the round it goes on from; NULL: from the start
  last_round INTEGER,            -- the last round of it that counts; NULL: all do
  rows INTEGER NOT NULL,         -- rows written, which is the highest seq
  versions TEXT NOT NULL         -- what it ran on, as JSON
) STRICT
"""

COLUMNS: Final = {
    "rounds": """
  env_steps INTEGER NOT NULL,    -- decisions since the start, over all environments
  seconds REAL,                  -- since the start
  mean_return REAL,              -- of the episodes that ended in this round
  mean_score REAL,               -- of the episodes that ended in this round
  added REAL,                    -- parameters added, as a multiple of the host's, mean
  learning_rate REAL,
  policy_loss REAL, value_loss REAL, clip_fraction REAL, clamped REAL, grad_norm REAL,
  kl REAL, last_kl REAL, explained_variance REAL,
  steps_planned INTEGER, steps_taken INTEGER, stopped_at INTEGER, refused INTEGER""",
    "heads": """
  head TEXT NOT NULL,            -- one row for each head in each round
  kl REAL, entropy REAL, openness REAL, grad_norm REAL""",
    "steps": """
  step INTEGER NOT NULL,         -- decision of the environment since the run's start
  env INTEGER NOT NULL,          -- among the environments of its task
  task TEXT NOT NULL,
  episode INTEGER NOT NULL,      -- of the environment, from 1
  reward REAL,                   -- for this decision
  score REAL, loss REAL, added REAL, budget_left REAL -- seen before this decision""",
    "events": """
  step INTEGER NOT NULL, env INTEGER NOT NULL, task TEXT NOT NULL,
  episode INTEGER NOT NULL,
  slot INTEGER NOT NULL,
  what TEXT NOT NULL,            -- planted, blending, holding, kept, pruned, cleared,
                                 -- aimed (another alpha to go to), jumped (all else)
  stage_from TEXT NOT NULL, stage_to TEXT NOT NULL,
  blueprint TEXT,
  alpha REAL                     -- weight of the seed in its host afterwards""",
    "episodes": """
  step INTEGER NOT NULL,         -- the decision that ended it
  env INTEGER NOT NULL, task TEXT NOT NULL, episode INTEGER NOT NULL,
  "return" REAL,                 -- sum of its rewards
  score REAL, test REAL, added REAL, macs REAL, -- of the network at the end
  panicked INTEGER               -- 1: its numbers were no longer finite""",
    "evaluations": """
  stage TEXT NOT NULL,           -- watched: while the policy trained, on fixed hosts;
                                 -- judged: at the end, on hosts that decided nothing
  controller TEXT NOT NULL, task TEXT NOT NULL,
  host INTEGER NOT NULL,         -- the same number is the same host for everybody
  "return" REAL,
  score REAL,                    -- on decision rows, at the end
  test REAL,                     -- on test rows, at the end
  area REAL,                     -- mean score on decision rows, over the decisions
  added REAL, macs REAL,         -- of the network at the end, relative to the host
  training_macs REAL,            -- multiply-adds that its training took
  seconds REAL,                  -- of its training, hosts side by side
  panicked INTEGER""",
    "notes": """
  kind TEXT NOT NULL,            -- one word, such as dropped or gap
  text TEXT NOT NULL""",
}
"""What the rows of each table have of their own."""

TABLES: Final = tuple(COLUMNS)

LANE: Final = "PARTITION BY task, env, episode, slot ORDER BY attempt, seq"
"""The events of one slot in one episode, in order, over all attempts."""

VIEWS: Final = {
    "all_rows": "-- Every row of every table, counting or not: for audits.\n"
    + " UNION ALL ".join(
        f"SELECT attempt, seq, round, '{name}' AS kind FROM {name}" for name in TABLES
    ),
    "learning_curve": """-- One row for each round: how the training goes.
SELECT round, env_steps, seconds, mean_return, mean_score, added, learning_rate, kl,
  explained_variance, ifnull(episodes, 0) AS episodes
FROM live_rounds LEFT JOIN
  (SELECT round, count(*) AS episodes FROM live_episodes GROUP BY round) USING (round)
ORDER BY round""",
    "head_entropy": """-- How undecided each head is, and how far an update moved it.
SELECT round, head, entropy, kl, openness FROM live_heads ORDER BY round, seq""",
    "episode_ends": """-- How each episode ended.
SELECT round, step, task, env, episode, "return", score, test, added, macs,
  CASE panicked WHEN 1 THEN 'panicked' WHEN 0 THEN 'in time' END AS how
FROM live_episodes ORDER BY attempt, seq""",
    "seed_lives": f"""-- One bar of a swimlane for each stage of each seed's life,
-- from one decision to another; to_step NULL: it goes on.
WITH moves AS (
  SELECT *, lead(step) OVER lane AS next_step, sum(what = 'planted') OVER lane AS seed
  FROM live_events WHERE stage_from <> stage_to WINDOW lane AS ({LANE}))
SELECT m.task, m.env, m.episode, m.slot, m.seed, m.blueprint, m.stage_to AS stage,
  m.step AS from_step, coalesce(m.next_step, e.step) AS to_step
FROM moves AS m LEFT JOIN live_episodes AS e USING (task, env, episode)
WHERE m.stage_to <> 'DORMANT' ORDER BY m.task, m.env, m.slot, m.attempt, m.seq""",
    "choices": f"""-- What was planted where and when, and what became of it.
WITH seeds AS (
  SELECT *, sum(what = 'planted') OVER lane AS seed
  FROM live_events WINDOW lane AS ({LANE}))
SELECT min(round) AS round, min(step) AS step, task, env, episode, slot, seed,
  max(blueprint) AS blueprint, max(step) AS last_step,
  CASE WHEN sum(what = 'kept') THEN 'kept' WHEN sum(what = 'pruned') THEN 'pruned'
    ELSE 'neither' END AS became
FROM seeds WHERE seed > 0 GROUP BY task, env, episode, slot, seed
ORDER BY min(step), task, env, slot""",
}
"""What people ask, by name; each can be read like a table."""


class Store:
    """Writes what a run does; `begin_attempt` comes first.

    Args:
        path: The database; it is made if there is none.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._queue: list[tuple[str, list[Row]]] = []
        self._waiting, self._retry_at = 0, BATCH
        self._attempt = self._seq = 0
        self._db = open_writer(self.path)
        self._file = os.stat(self.path).st_ino
        self._columns = {name: columns_of(self._db, name) for name in TABLES}

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
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
        keeps = -1 if resume_round is None else resume_round
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
        self._attempt = int(found[0][0])
        if (lost := keeps - known[0]) > 0:
            text = f"{lost} of the rounds 1 to {keeps} are not in this store"
            self.add_note(keeps, "gap", text)
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
        rows = self._rows(table, columns)
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
        del figures["stops"]
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
                the rows go on waiting.

        Returns:
            Rows of this attempt that are written.
        """
        if not self._attempt:
            raise CallOrder("flush() before begin_attempt(); call that first.")
        try:
            self._write(durable=durable)
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.DatabaseError, OSError) as error:
            self._retry_at = self._waiting + BATCH
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

    def _trouble(self, error: Exception) -> StorageTrouble:
        return StorageTrouble(
            f"cannot write {self.path}: {error}; {self._waiting} rows wait. Make room "
            "or end whoever else writes there."
        )


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


def open_writer(path: Path) -> sqlite3.Connection:
    """The connection that writes; the store is made if there is none."""
    if sqlite3.sqlite_version_info < OLDEST:
        needed, got = ".".join(map(str, OLDEST)), sqlite3.sqlite_version
        raise BadInput(f"SQLite {needed} or later is needed, got {got}; update Python.")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadInput(
            f"{path} cannot be a store: name a file in a folder that exists."
        )

    def make(db: sqlite3.Connection) -> None:
        if not _tables(db) and db.execute("PRAGMA user_version").fetchone() == (0,):
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                if not _tables(db):  # else somebody was faster
                    for statement in _statements():
                        db.execute(statement)

    db = _opened(path, "", make)
    db.execute("PRAGMA journal_mode = WAL")
    return db


def open_store(path: Path | str) -> sqlite3.Connection:
    """A connection that can only read, also while somebody writes.

    Args:
        path: The database of a run.
    """
    path = Path(path).absolute()
    if not path.is_file():
        raise BadInput(f"there is no store at {path}; name the database of a run.")
    return _opened(path, "?mode=ro", lambda db: None)


def _opened(
    path: Path, mode: str, make: Callable[[sqlite3.Connection], None]
) -> sqlite3.Connection:
    """A connection; refuses a database that is no store, or one of another schema."""
    db = None
    try:
        uri = f"{path.absolute().as_uri()}{mode}"
        db = sqlite3.connect(uri, uri=True, timeout=TIMEOUT, isolation_level=None)
        make(db)
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise BadInput(f"{path} is a database but no store of Esper; name another.")
        if version != VERSION:
            age = "a newer Esper" if version > VERSION else "the Esper that wrote it"
            raise BadInput(
                f"{path} has schema {version}, this Esper reads {VERSION}; use {age}."
            )
    except (sqlite3.Error, BadInput) as error:
        if db is not None:
            db.close()
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            f"{path} cannot be used as a store: {error}; name another file."
        ) from None
    return db


def columns_of(db: sqlite3.Connection, table: str) -> dict[str, str]:
    """Names and types of the columns of a table or view, in order."""
    found = db.execute("SELECT name, type FROM pragma_table_info(?)", (table,))
    return dict(found.fetchall())


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; the lock for writing is taken at once."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def rows(db: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    """The rows of a table or `live_` view in order, NaN where it was NaN.

    Args:
        db: From `open_store`.
        table: A table of the store, or `live_` and its name.
    """
    if table.removeprefix("live_") not in TABLES:
        raise BadInput(f"the store has no table {table!r}; known: {', '.join(TABLES)}.")
    names = [*columns_of(db, table)]
    for values in db.execute(f"SELECT * FROM {table} ORDER BY attempt, seq"):
        row = dict(zip(names, values, strict=True))
        marks = row.pop("nans")
        yield row | dict.fromkeys(marks.split(), nan) if marks else row


def export(
    path: Path | str, folder: Path | str, kind: Format = "parquet"
) -> list[Path]:
    """Write what counts of every table to a file of its own.

    Args:
        path: The database of a run.
        folder: Where to; it is made, and must not hold files of these names.
        kind: "parquet" (needs DuckDB) or "csv".

    Returns:
        The files.
    """
    if kind not in ("parquet", "csv"):
        raise BadInput(f"kind must be 'parquet' or 'csv', got {kind!r}.")
    duckdb = _duckdb() if kind == "parquet" else None
    folder, db = Path(folder), open_store(path)
    try:
        files = [folder / f"{table}.{kind}" for table in TABLES]
        taken = [file.name for file in files if file.exists()]
        if taken:
            raise BadInput(f"{folder} already has {taken[0]}; name another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        db.execute("BEGIN")  # all tables as of one moment
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
        raise StorageTrouble(f"cannot export to {folder}: {why}.") from None
    except sqlite3.Error as error:
        raise StorageTrouble(f"cannot read {path}: {error}.") from None
    finally:
        db.close()
    return files


def _write_csv(db: sqlite3.Connection, table: str, file: Path) -> dict[str, str]:
    """Write one table; return its columns with their types."""
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
    """Have DuckDB read one file and write the other."""
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
        raise StorageTrouble(f"cannot write {parquet}: {why}") from None


def _duckdb() -> Any:  # noqa: ANN401
    try:
        return import_module("duckdb")
    except ImportError:
        raise BadInput(
            "Parquet needs DuckDB: pip install 'esper-lite[query]', or export CSV."
        ) from None


def _statements() -> list[str]:
    """SQL that makes an empty database a store."""
    made = [ATTEMPTS]
    for name, own in COLUMNS.items():
        made.append(
            f"CREATE TABLE {name} (\n  attempt INTEGER NOT NULL, seq INTEGER NOT NULL, "
            f"round INTEGER NOT NULL,{own}\n  , nans TEXT,\n"
            "  PRIMARY KEY (attempt, seq)\n) STRICT, WITHOUT ROWID"
        )
        made.append(
            f"CREATE VIEW live_{name} AS SELECT t.* FROM {name} AS t "
            "JOIN attempts AS a USING (attempt) "
            "WHERE a.last_round IS NULL OR t.round <= a.last_round"
        )
    made += [f"CREATE VIEW {name} AS\n{sql}" for name, sql in VIEWS.items()]
    made.append(f"PRAGMA application_id = {APPLICATION}")
    made.append(f"PRAGMA user_version = {VERSION}")
    return made


def _tables(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
