"""Where a campaign keeps what it has found: one SQLite file, one protocol.

A job is written in one transaction with all its rows, and synchronised with the disk: a
job that counts as done has everything, one that was interrupted has nothing. Numbers
are float64; recordings are arrays of int8 and float32, as bytes.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from esper.contracts.errors import BadInput
from esper.experiment.database import transaction
from esper.experiment.messages import short
from evidence.protocol import sha

LEDGER: Final = "campaign.sqlite"
PATIENCE: Final = 10.0
"""Seconds to wait for somebody else's lock."""
TABLES: Final = """
CREATE TABLE protocol(sha TEXT PRIMARY KEY, toml TEXT, began TEXT, versions TEXT);
CREATE TABLE results(
  stage TEXT, arm TEXT, member INTEGER, task TEXT, setting TEXT, rate REAL,
  seed INTEGER, score REAL, test REAL, added REAL, macs REAL, training_macs REAL,
  area REAL, seconds REAL, panicked INTEGER, planted INTEGER,
  PRIMARY KEY(stage, arm, member, task, setting, rate, seed));
CREATE TABLE jobs(
  id TEXT PRIMARY KEY, priority INTEGER, kind TEXT, state TEXT, seconds REAL,
  ended TEXT, note TEXT);
CREATE TABLE recordings(
  arm TEXT, member INTEGER, task TEXT, setting TEXT, seed INTEGER, actions BLOB,
  stages BLOB, blueprints BLOB, alphas BLOB, scores BLOB, shape TEXT,
  PRIMARY KEY(arm, member, task, setting, seed));
CREATE TABLE trainings(
  name TEXT PRIMARY KEY, arm TEXT, member INTEGER, env_steps INTEGER, seconds REAL,
  run TEXT, facts TEXT);
"""

Bytes8 = NDArray[np.int8]
Floats32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one host under one arm."""

    stage: str
    """tuning or counted."""
    arm: str
    member: int
    """Which of several controllers; -1: there is but one."""
    task: str
    setting: str
    rate: float
    """Learning rate, against the task's own."""
    seed: int
    score: float
    test: float
    added: float
    macs: float
    training_macs: float
    area: float
    seconds: float
    panicked: int
    planted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """All that was done with one host."""

    arm: str
    member: int
    task: str
    setting: str
    seed: int
    actions: Bytes8
    """[decision, head]"""
    stages: Bytes8
    """[decision, slot]"""
    blueprints: Bytes8
    """[decision, slot]; -1: none"""
    alphas: Floats32
    """[decision, slot]"""
    scores: Floats32
    """[decision]"""
    slots: tuple[str, ...]
    """What the slots are called."""
    names: tuple[str, ...]
    """What the blueprints are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training, the search or the fit of the bandit took, and found."""

    name: str
    arm: str
    member: int
    env_steps: int
    seconds: float
    run: str
    """Its folder, within the campaign's; empty: none."""
    facts: str
    """Anything else, as JSON."""


class Ledger:
    """The open file of a campaign.

    Args:
        path: The file, which is made if it is not there.
        toml: The protocol's bytes.
        versions: What a new ledger is begun with.
    """

    def __init__(self, path: Path, toml: bytes, versions: Mapping[str, Any]) -> None:
        self._db = _open(path)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            with transaction(self._db):
                self._begin(path, toml, versions)
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                raise BadInput(f"{short(path)} is no ledger: {error}.") from None
            raise

    def _begin(self, path: Path, toml: bytes, versions: Mapping[str, Any]) -> None:
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables:
            for statement in filter(str.strip, TABLES.split(";")):
                self._db.execute(statement)
            began = datetime.now(UTC).isoformat(timespec="seconds")
            facts = json.dumps(dict(versions), sort_keys=True)
            row = (sha(toml), toml.decode(), began, facts)
            self._db.execute("INSERT INTO protocol VALUES (?, ?, ?, ?)", row)
            return
        (known,) = self._db.execute("SELECT sha FROM protocol").fetchone()
        if known != sha(toml):
            raise BadInput(
                f"{short(path)} was begun with protocol {known[:12]}, this one is "
                f"{sha(toml)[:12]}; changing the protocol starts a new table: use "
                "another folder."
            )

    def states(self) -> dict[str, str]:
        """Every job that was tried, and what came of it."""
        return dict(self._db.execute("SELECT id, state FROM jobs").fetchall())

    def plan(self, jobs: Iterable[tuple[str, int, str]]) -> None:
        """Note jobs by id, priority and kind, which were not tried yet."""
        with transaction(self._db):
            self._db.executemany(
                "INSERT INTO jobs VALUES (?, ?, ?, 'waiting', NULL, NULL, '') "
                "ON CONFLICT(id) DO UPDATE SET priority = excluded.priority",
                list(jobs),
            )

    def finish(
        self,
        job: str,
        seconds: float,
        *,
        results: Sequence[Result] = (),
        recordings: Sequence[Recorded] = (),
        trained: Trained | None = None,
        note: str = "",
    ) -> None:
        """Write all that a job has found."""
        with transaction(self._db):
            _insert(self._db, "results", [astuple(row) for row in results])
            _insert(self._db, "recordings", [_packed(each) for each in recordings])
            if trained is not None:
                _insert(self._db, "trainings", [astuple(trained)])
            self._end(job, "done", seconds, note)

    def fail(self, job: str, seconds: float, note: str) -> None:
        """Write why a job could not be done."""
        with transaction(self._db):
            self._end(job, "failed", seconds, note)

    def _end(self, job: str, state: str, seconds: float, note: str) -> None:
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        self._db.execute(
            "UPDATE jobs SET state = ?, seconds = ?, ended = ?, note = ? WHERE id = ?",
            (state, seconds, ended, note, job),
        )

    def results(self, **wanted: str | int | float) -> list[Result]:
        """Rows whose columns have these values, by seed and member."""
        names = [item.name for item in fields(Result)]
        where = " AND ".join(f"{name} = ?" for name in wanted) or "1"
        found = self._db.execute(
            f"SELECT {', '.join(names)} FROM results WHERE {where} "
            "ORDER BY task, setting, member, rate, seed",
            (*wanted.values(),),
        )
        return [Result(**dict(zip(names, row, strict=True))) for row in found]

    def recordings(
        self, arm: str, member: int, task: str, setting: str
    ) -> dict[int, Recorded]:
        """What was done with the hosts of a task, by seed."""
        found = self._db.execute(
            "SELECT * FROM recordings WHERE (arm, member, task, setting) = "
            "(?, ?, ?, ?) ORDER BY seed",
            (arm, member, task, setting),
        )
        return {row[4]: _unpacked(row) for row in found}

    def trained(self, name: str) -> Trained | None:
        """What came of a training."""
        names = [item.name for item in fields(Trained)]
        row = self._db.execute(
            f"SELECT {', '.join(names)} FROM trainings WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else Trained(**dict(zip(names, row, strict=True)))

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def known_states(path: Path) -> tuple[dict[str, str], dict[str, float]]:
    """States and seconds of the jobs in a ledger, which is not changed."""
    if not path.is_file():
        return {}, {}
    with closing(_open(path)) as db:
        try:
            found = db.execute("SELECT id, state, seconds FROM jobs").fetchall()
        except sqlite3.Error as error:
            raise BadInput(f"{short(path)} is no ledger: {error}.") from None
    done = {job: seconds for job, state, seconds in found if state == "done"}
    return {job: state for job, state, _ in found}, done


def _unpacked(row: Sequence[Any]) -> Recorded:
    """A row of the table of recordings as arrays."""
    *key, actions, stages, kinds, alphas, scores, text = row
    shape = json.loads(text)
    decisions, heads = shape["decisions"], shape["heads"]
    slots = len(shape["slots"])

    def whole(data: bytes, columns: int) -> Bytes8:
        return np.frombuffer(data, np.int8).reshape(decisions, columns)

    arm, member, task, setting, seed = key
    return Recorded(
        arm=arm,
        member=member,
        task=task,
        setting=setting,
        seed=seed,
        actions=whole(actions, heads),
        stages=whole(stages, slots),
        blueprints=whole(kinds, slots),
        alphas=np.frombuffer(alphas, np.float32).reshape(decisions, slots),
        scores=np.frombuffer(scores, np.float32),
        slots=tuple(shape["slots"]),
        names=tuple(shape["blueprints"]),
    )


def _packed(one: Recorded) -> tuple[Any, ...]:
    decisions, heads = one.actions.shape
    shape = {
        "decisions": decisions,
        "heads": heads,
        "slots": one.slots,
        "blueprints": one.names,
    }
    arrays = (one.actions, one.stages, one.blueprints, one.alphas, one.scores)
    key = (one.arm, one.member, one.task, one.setting, one.seed)
    return (*key, *(array.tobytes() for array in arrays), json.dumps(shape))


def _insert(db: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    if rows:
        holes = ", ".join("?" * len(rows[0]))
        db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({holes})", rows)


def _open(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    except sqlite3.Error as error:
        raise BadInput(f"{short(path)} cannot be opened: {error}.") from None
