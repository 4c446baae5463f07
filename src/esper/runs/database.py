"""The database of an event store: its schema, and connections that verify it.

The schema must be exactly this one, SQLite must find no damage, and its attempts must
name the run. Queries have a time limit. Anything else is refused in one line.

Readers cannot write, so they never checkpoint the log: before SQLite 3.51.3, two
connections that do so at the same moment can damage a database.
"""

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

from esper.contracts.errors import InvalidInputError, StorageError
from esper.contracts.messages import one_line, quoted, short
from esper.files import FORMAT, require_readable

TIMEOUT: Final = 1.0
"""Seconds to wait for the lock of another connection, if rows can be queued."""
LOCK_PATIENCE: Final = 60.0
"""Seconds to wait for it, if they cannot."""
DEADLINE: Final = 60.0
"""Time limit in seconds of all queries of a reader."""
MAX_VALUE_BYTES: Final = 1 << 24
"""Maximum size of one value or row."""
MIN_SQLITE: Final = (3, 37, 0)
"""The first SQLite with strict tables."""
APPLICATION: Final = 0x45535052
"""Identifies a store among databases, in `PRAGMA application_id`."""
READ_ONLY: Final = "?mode=ro"

T = TypeVar("T")
DISK_ERRORS: Final = frozenset(
    (
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY),
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
    )
)
"""Errors of the disk or a lock, not of the database."""
COMPANIONS: Final = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps next to a database."""

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
  stage TEXT NOT NULL,           -- validation: during training, on fixed hosts;
                                 -- test: at the end, on hosts of no selection
  controller TEXT NOT NULL, task TEXT NOT NULL,
  host INTEGER NOT NULL,         -- the same number is the same host for all arms
  "return" REAL,
  score REAL,                    -- on the validation split, at the end
  test REAL,                     -- on the test split, at the end
  area REAL,                     -- mean score on the validation split, over time
  added REAL, macs REAL,         -- of the network at the end, relative to the host
  training_macs REAL,            -- multiply-adds that its training took
  seconds REAL,                  -- of its training, per host
  panicked INTEGER""",
    "layers": """
  step INTEGER NOT NULL, env INTEGER NOT NULL, task TEXT NOT NULL,
  episode INTEGER NOT NULL,
  layer INTEGER NOT NULL,        -- position in the network, from 0
  name TEXT NOT NULL,
  width INTEGER NOT NULL         -- units from this decision on""",
    "decisions": """
  step INTEGER NOT NULL, env INTEGER NOT NULL, task TEXT NOT NULL,
  episode INTEGER NOT NULL,
  action TEXT NOT NULL,          -- in words
  value REAL,                    -- return that the controller expected
  features TEXT,                 -- what the controller saw, as JSON
  heads TEXT                     -- probabilities of each head, as JSON""",
    "notes": """
  kind TEXT NOT NULL,            -- one word, such as dropped or gap
  text TEXT NOT NULL""",
}
"""Columns of each table, in addition to attempt, seq and round."""

TABLES: Final = tuple(COLUMNS)
ROWLESS: Final = ", WITHOUT ROWID"
LONG: Final = ("decisions",)
"""Tables with rows of 1,000 bytes, each of which would take a page without a rowid."""

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
"""Prepared queries, by name; each can be read like a table."""


class DamagedStoreError(InvalidInputError):
    """A store that is damaged, tampered with, or of another run."""


def patiently(write: Callable[[], T]) -> T:
    """The result of a write, tried again while the store is locked."""
    until = monotonic() + LOCK_PATIENCE
    while True:
        try:
            return write()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or monotonic() > until:
                raise


def open_writer(path: Path, run: str | None = None) -> sqlite3.Connection:
    """The connection that writes; the store is created if there is none."""
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        needed, got = ".".join(map(str, MIN_SQLITE)), sqlite3.sqlite_version
        raise InvalidInputError(
            f"SQLite {needed} or later is needed, got {got}; update Python."
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidInputError(
            f"{path} cannot be a store: name a file in a folder that exists."
        )

    def make(db: sqlite3.Connection) -> None:
        if not _tables(db) and db.execute("PRAGMA user_version").fetchone() == (0,):
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                if not _tables(db):  # else another process was faster
                    for statement in _statements():
                        db.execute(statement)

    return _opened(path, "", make, run)


def open_store(
    path: Path | str, run: str | None = None, *, seconds: float | None = None
) -> sqlite3.Connection:
    """A read-only connection, also while another process writes.

    `run` is the id that the store must name. All queries together may take `seconds`.
    """
    path = Path(path).absolute()
    if not os.path.lexists(path):
        raise InvalidInputError(
            f"there is no store at {path}; name the database of a run."
        )
    return _opened(path, READ_ONLY, lambda db: None, run, seconds)


def _opened(
    path: Path,
    mode: str,
    make: Callable[[sqlite3.Connection], None],
    run: str | None,
    seconds: float | None = None,
) -> sqlite3.Connection:
    """A connection; refuses other files, schemas and runs, and damage."""
    _require_files(path)
    db = None
    try:
        uri = f"{path.absolute().as_uri()}{mode}"
        db = sqlite3.connect(uri, uri=True, timeout=TIMEOUT, isolation_level=None)
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        db.execute("PRAGMA trusted_schema = OFF")
        _limit_time(db, DEADLINE)
        patiently(lambda: make(db))
        _verify(db, path, run)
        if mode != READ_ONLY:
            patiently(lambda: db.execute("PRAGMA journal_mode = WAL"))
        _limit_time(db, seconds)
    except (sqlite3.Error, ValueError) as error:  # also invalid UTF-8
        if db is not None:
            db.close()
        if isinstance(error, InvalidInputError):
            raise
        why = one_line(str(error), 99)
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in DISK_ERRORS:
            raise StorageError(f"cannot use {short(path)}: {why}.") from None
        raise DamagedStoreError(
            f"{short(path)} cannot be used as a store: {why}; name another file."
        ) from None
    return db


def _require_files(path: Path) -> None:
    """Refuse links and pipes, which lead elsewhere or block."""
    for end in ("", *COMPANIONS):
        file = Path(f"{path}{end}")
        if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
            raise DamagedStoreError(f"{short(file)} is not a regular file; remove it.")


def _verify(db: sqlite3.Connection, path: Path, run: str | None) -> None:
    """Refuse a database that is no intact store of this schema and run."""
    name = short(path)
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise DamagedStoreError(
            f"{name} is a database but no store of Esper; name another."
        )
    require_readable(name, found, "Start a new run.")
    if _schema(db) != _own_schema():
        raise DamagedStoreError(
            f"{name} has other tables than a store; it was tampered with."
        )
    if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise DamagedStoreError(f"{name} is damaged: {quoted(found)}; use another.")
    if run is not None:
        query = "SELECT DISTINCT json_extract(versions, '$.run') FROM attempts"
        strange = {known for (known,) in db.execute(query)} - {run}
        if strange:
            raise DamagedStoreError(f"{name} belongs to another run; put its own back.")


def _limit_time(db: sqlite3.Connection, seconds: float | None) -> None:
    """Interrupt all queries of a connection after some seconds from now."""
    if seconds is None:
        db.set_progress_handler(None, 0)
    else:
        until = monotonic() + seconds
        db.set_progress_handler(lambda: monotonic() > until, 100_000)


def _schema(db: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Type, name and SQL of everything in a database."""
    return {*db.execute("SELECT type, name, sql FROM sqlite_schema LIMIT 100")}


@cache
def _own_schema() -> set[tuple[str, str, str]]:
    """The schema of a store."""
    with closing(sqlite3.connect(":memory:")) as db:
        for statement in _statements():
            db.execute(statement)
        return _schema(db)


def columns_of(db: sqlite3.Connection, table: str) -> dict[str, str]:
    """Names and types of the columns of a table or view, in order."""
    found = db.execute("SELECT name, type FROM pragma_table_info(?)", (table,))
    return dict(found.fetchall())


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """A transaction that takes the write lock at once."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def rows(db: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    """The rows of a table or its `live_` view in order, NaN where it was NaN."""
    names = [*columns_of(db, table)]
    for values in db.execute(f"SELECT * FROM {table} ORDER BY attempt, seq"):
        row = dict(zip(names, values, strict=True))
        marks = row.pop("nans")
        yield row | dict.fromkeys(marks.split(), nan) if marks else row


def _statements() -> list[str]:
    """SQL that turns an empty database into a store."""
    made = [ATTEMPTS]
    for name, own in COLUMNS.items():
        made.append(
            f"CREATE TABLE {name} (\n  attempt INTEGER NOT NULL, seq INTEGER NOT NULL, "
            f"round INTEGER NOT NULL,{own}\n  , nans TEXT,\n"
            "  PRIMARY KEY (attempt, seq)\n) STRICT" + ("" if name in LONG else ROWLESS)
        )
        made.append(
            f"CREATE VIEW live_{name} AS SELECT t.* FROM {name} AS t "
            "JOIN attempts AS a USING (attempt) "
            "WHERE a.last_round IS NULL OR t.round <= a.last_round"
        )
    made += [f"CREATE VIEW {name} AS\n{sql}" for name, sql in VIEWS.items()]
    made.append(f"PRAGMA application_id = {APPLICATION}")
    made.append(f"PRAGMA user_version = {FORMAT}")
    return made


def _tables(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
