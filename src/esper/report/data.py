"""Reads the data of a report from the folder of a run and its event store.

SQLite aggregates rounds into at most `MAX_BINS` bins and returns seeds of the last
episodes only, so memory does not grow with the run. All queries are one transaction,
so a run can be read while it writes.
"""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from esper.contracts.errors import InvalidInputError, StorageError
from esper.contracts.messages import short
from esper.evaluation.statistics import Floats
from esper.runs.database import DEADLINE, VIEWS, open_store, rows
from esper.runs.run import STORE, Run, is_locked
from esper.runs.settings import parse_toml

MAX_BINS: Final = 600
"""Maximum number of points of a curve."""
SHOWN_ENVS: Final = 16
"""Maximum number of environments per task whose seeds are shown."""
MAX_NAMES: Final = 1_000
"""Maximum number of slots, tasks and controllers of a run."""
MAX_INDEX: Final = 10**15
"""Maximum index of a round or decision."""
BOUNDED: Final = {
    "rounds": ("round", "env_steps"),
    "heads": ("round",),
    "events": ("round", "step", "slot"),
    "episodes": ("round", "step"),
    "evaluations": ("round",),
    "notes": ("round",),
}
"""Columns whose range is checked."""
THIRDS: Final = ("early", "middle", "late")
MEANS: Final = ("clip_fraction", "explained_variance", "steps_planned", "steps_taken")
ACTIONS: Final = ("planted", "blending", "aimed", "pruned", "kept")
"""Events that a controller causes."""

Columns = Mapping[str, Floats]
"""Values by column name, one per bin; NaN is missing."""


class StageSpan(NamedTuple):
    """One stage of a seed, in decisions since the start of its episode."""

    env: int
    slot: int
    seed: int
    blueprint: str
    stage: str
    start: int
    end: int


class SeedCounts(NamedTuple):
    """Outcomes of the seeds of one blueprint in one slot, in a third of the run."""

    third: str
    blueprint: str
    slot: int
    planted: int
    kept: int
    pruned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEpisodes:
    """Seeds of the last complete episode of each environment of a task."""

    spans: tuple[StageSpan, ...]
    lengths: Mapping[int, int]
    """Number of decisions, by environment."""
    envs: int
    """Number of environments, including those that are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """All data of a report."""

    name: str
    state: str
    """running, finished or stopped."""
    config_toml: str
    versions: Mapping[str, Any]
    attempts: tuple[Mapping[str, Any], ...]
    """Processes that wrote the run: rows of the store."""
    notes: tuple[tuple[int, str, str], ...]
    """Round, kind and text."""
    tasks: tuple[str, ...]
    last_round: int
    """0 if nothing was trained."""
    env_steps: int
    seconds: float
    refused: int
    """Number of optimiser steps that were skipped in the whole run."""
    rounds: Columns
    """`round`, `env_steps`, `seconds`, `refused` and `MEANS`."""
    heads: Mapping[str, Columns]
    """`round`, `entropy` and `kl` of each head."""
    returns: Mapping[str, Columns]
    """`round`, `return` and `added` of each task's training episodes."""
    actions: Columns
    """`round`, and each of `ACTIONS` per hundred decisions."""
    last_episodes: Mapping[str, LastEpisodes]
    seed_counts: Mapping[str, tuple[SeedCounts, ...]]
    evaluations: tuple[Mapping[str, Any], ...]
    """Rows of the store, without discarded attempts."""


def read_run(path: Path) -> RunData:
    """Read a run, which another process may be writing."""
    run, store = Run.read(path), path / STORE
    state = "stopped" if run.finished is None else "finished"
    try:
        with closing(open_store(store, run.id, seconds=DEADLINE)) as db:
            db.execute("BEGIN")
            _check_limits(db)
            found = _query(db, _configured_tasks(run.config_toml))
    except (InvalidInputError, StorageError):
        raise
    except (sqlite3.Error, ValueError, OverflowError) as error:
        why = str(error).splitlines()[0][:80] if str(error) else "no reason given"
        raise InvalidInputError(
            f"{short(store)} is damaged: {why}. Use another run."
        ) from None
    return RunData(
        name=path.resolve().name,
        state="running" if is_locked(path) else state,
        config_toml=run.config_toml,
        versions=run.versions,
        **found,
    )


def _check_limits(db: sqlite3.Connection) -> None:
    """Raise ValueError for numbers that are too large to plot."""
    for table, names in BOUNDED.items():
        asked = ", ".join(f"min({name}), max({name})" for name in names)
        ends = iter(db.execute(f"SELECT {asked} FROM live_{table}").fetchone())
        for name, low, high in zip(names, ends, ends, strict=True):
            limit = MAX_NAMES if name == "slot" else MAX_INDEX
            for end in (low or 0, high or 0):
                if not 0 <= end <= limit:
                    raise ValueError(f"{name} is {end:,}, expected 0 to {limit:,}")
    for what, table in (
        ("task", "episodes"),
        ("task", "evaluations"),
        ("controller", "evaluations"),
    ):
        query = f"SELECT count(DISTINCT {what}) FROM live_{table}"
        (count,) = db.execute(query).fetchone()
        if count > MAX_NAMES:
            raise ValueError(f"{count:,} {what}s, expected at most {MAX_NAMES:,}")


def _configured_tasks(toml: str) -> list[str]:
    try:
        tasks = parse_toml(toml).get("tasks", [])
    except InvalidInputError:
        return []
    names = tasks if isinstance(tasks, list) else [tasks]
    return [name for name in names if isinstance(name, str)]


def _query(db: sqlite3.Connection, configured: list[str]) -> dict[str, Any]:
    """All fields of `RunData` that are read from the store."""
    last, steps, seconds, refused = db.execute(
        "SELECT ifnull(max(round), 0), ifnull(max(env_steps), 0), "
        "ifnull(max(seconds), 0.0), ifnull(sum(refused), 0) FROM live_rounds"
    ).fetchone()
    seen = {
        task
        for table in ("live_episodes", "live_evaluations")
        for (task,) in db.execute(f"SELECT DISTINCT task FROM {table}")
    }
    tasks = [name for name in configured if name in seen]
    tasks += sorted(seen - {*configured})
    bin_of = f"(round - 1) * {MAX_BINS} / {max(last, MAX_BINS)}"
    means = ", ".join(f"avg({name}) AS {name}" for name in MEANS)
    rounds = _columns(
        db,
        "SELECT avg(round) AS round, max(env_steps) AS env_steps, "
        f"max(seconds) AS seconds, sum(refused) AS refused, {means} "
        f"FROM live_rounds GROUP BY {bin_of} ORDER BY 1",
    )
    counts = ", ".join(f"ifnull(sum(what = '{a}'), 0) AS {a}" for a in ACTIONS)
    actions = _columns(
        db,
        f"SELECT {counts} FROM (SELECT DISTINCT {bin_of} AS bin FROM live_rounds) "
        f"LEFT JOIN (SELECT {bin_of} AS bin, what FROM live_events) USING (bin) "
        "GROUP BY bin ORDER BY bin",
    )
    decisions = np.diff(rounds["env_steps"], prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = {name: 100.0 * count / decisions for name, count in actions.items()}
    attempts = db.execute(
        "SELECT attempt, started, resumed_after, last_round, rows, versions "
        "FROM attempts ORDER BY attempt"
    )
    names = [column[0] for column in attempts.description]
    found = [dict(zip(names, row, strict=True)) for row in attempts]
    return {
        "tasks": tuple(tasks or configured),
        "last_round": last,
        "env_steps": steps,
        "seconds": seconds,
        "refused": refused,
        "rounds": rounds,
        "heads": _grouped(db, "head", ("entropy", "kl"), "live_heads", bin_of),
        "returns": _grouped(db, "task", ("return", "added"), "live_episodes", bin_of),
        "actions": {"round": rounds["round"], **rates},
        "last_episodes": _last_episodes(db),
        "seed_counts": _seed_counts(db, last),
        "evaluations": tuple(rows(db, "live_evaluations")),
        "notes": tuple(db.execute("SELECT round, kind, text FROM live_notes")),
        "attempts": tuple(
            row | {"versions": json.loads(row["versions"])} for row in found
        ),
    }


def _columns(db: sqlite3.Connection, query: str, *values: object) -> dict[str, Floats]:
    """The result of a query as one array per column; NULL becomes NaN."""
    cursor = db.execute(query, values)
    names = [column[0] for column in cursor.description]
    table = np.array(cursor.fetchall(), dtype=np.float64).reshape(-1, len(names))
    return dict(zip(names, table.T, strict=True))


def _grouped(
    db: sqlite3.Connection, key: str, columns: tuple[str, ...], table: str, bin_of: str
) -> dict[str, Columns]:
    """Means of some columns in each bin, for each value of `key`."""
    means = ", ".join(f'avg("{column}") AS "{column}"' for column in columns)
    return {
        value: _columns(
            db,
            f"SELECT avg(round) AS round, {means} FROM {table} WHERE {key} = ? "
            f"GROUP BY {bin_of} ORDER BY 1",
            value,
        )
        for (value,) in db.execute(
            f"SELECT DISTINCT {key} FROM {table} ORDER BY 1 LIMIT {MAX_NAMES}"
        )
    }


def _last_episodes(db: sqlite3.Connection) -> dict[str, LastEpisodes]:
    # The view `seed_lives`, restricted to the last episodes for speed.
    lives = VIEWS["seed_lives"].replace("live_events", "last_events")
    found = db.execute(
        f"""WITH ends AS (
          SELECT task, env, episode, step AS over,
            lag(step, 1, 0) OVER (PARTITION BY task, env ORDER BY episode) AS before,
            max(episode) OVER (PARTITION BY task, env) AS last
          FROM live_episodes WHERE env BETWEEN 0 AND {SHOWN_ENVS - 1}),
        lasts AS MATERIALIZED (SELECT * FROM ends WHERE episode = last),
        last_events AS (
          SELECT v.* FROM live_events AS v JOIN lasts USING (task, env, episode))
        SELECT e.task, max(0, e.over - e.before), e.env, l.slot, l.seed,
          ifnull(l.blueprint, '?'), l.stage,
          max(0, min(l.from_step, e.over) - e.before),
          max(0, min(max(l.from_step, l.to_step), e.over) - e.before)
        FROM lasts AS e LEFT JOIN ({lives}) AS l USING (task, env, episode)
        ORDER BY e.task, e.env, l.slot, l.from_step"""
    ).fetchall()
    envs = db.execute("SELECT task, count(DISTINCT env) FROM live_episodes GROUP BY 1")
    return {
        task: LastEpisodes(
            spans=tuple(
                StageSpan(*row[2:])
                for row in found
                if row[0] == task and row[3] is not None
            ),
            lengths={row[2]: row[1] for row in found if row[0] == task},
            envs=count,
        )
        for task, count in envs
    }


def _seed_counts(db: sqlite3.Connection, last: int) -> dict[str, Any]:
    found: dict[str, tuple[SeedCounts, ...]] = {}
    for task, third, *counts in db.execute(
        "SELECT task, min(2, (round - 1) * 3 / max(?1, 1)), ifnull(blueprint, '?'), "
        "slot, sum(what = 'planted'), sum(what = 'kept'), sum(what = 'pruned') "
        "FROM live_events GROUP BY 1, 2, 3, 4",
        (last,),
    ):
        found[task] = (*found.get(task, ()), SeedCounts(THIRDS[third], *counts))
    return found
