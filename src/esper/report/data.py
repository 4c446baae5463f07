"""All that a report shows of a run, read from its folder and its event store.

SQLite does the sums, so reading hardly grows with the run: rounds come in at most
`POINTS` bins, and seeds only of the last episodes. All queries see the store as of one
moment, also while a run writes.
"""

import json
import sqlite3
import tomllib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from esper.contracts.errors import BadInput
from esper.experiment.database import VIEWS, open_store, rows
from esper.experiment.files import is_locked
from esper.experiment.messages import short
from esper.experiment.run import Run
from esper.experiment.statistics import Floats

STORE: Final = "events.sqlite"
POINTS: Final = 600
"""Bins of rounds, and so points of a curve, at most."""
SHOWN_ENVS: Final = 16
"""Environments of a task whose seeds are shown, at most."""
THIRDS: Final = ("early", "middle", "late")
MEANS: Final = (
    "mean_return",
    "clip_fraction",
    "explained_variance",
    "kl",
    "grad_norm",
    "learning_rate",
    "steps_planned",
    "steps_taken",
)
ACTIONS: Final = ("planted", "blending", "aimed", "pruned", "kept")
"""Events that a controller causes; the others follow by themselves."""

Columns = Mapping[str, Floats]
"""Figures by name, one for each bin; NaN is missing."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One stage of a seed, in decisions since its episode began."""

    env: int
    slot: int
    seed: int
    blueprint: str
    stage: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEpisodes:
    """The seeds of the last complete episode of each environment of a task."""

    spans: tuple[StageSpan, ...]
    lengths: Mapping[int, int]
    """Decisions of that episode, by environment."""
    envs: int
    """Environments of the task, shown or not."""


@dataclass(frozen=True, slots=True)
class SeedCounts:
    """What became of the seeds of one blueprint in one slot, in a third of the run."""

    third: str
    blueprint: str
    slot: int
    planted: int
    kept: int
    pruned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """All that a page shows of a run."""

    name: str
    state: str
    """running, finished or stopped."""
    config_toml: str
    versions: Mapping[str, Any]
    attempts: tuple[Mapping[str, Any], ...]
    """Rows of the store: processes that wrote the run."""
    notes: tuple[tuple[int, str, str], ...]
    """Round, kind and text of each."""
    tasks: tuple[str, ...]
    last_round: int
    """0: nothing was trained."""
    env_steps: int
    seconds: float
    refused: int
    """Optimiser steps that were refused, over the whole run."""
    rounds: Columns
    """`round`, `env_steps`, `seconds`, `refused` and `MEANS`."""
    heads: Mapping[str, Columns]
    """`round`, `entropy` and `kl` of each head."""
    returns: Mapping[str, Columns]
    """`round`, `return` and `added` of each task's training episodes."""
    actions: Columns
    """Each of `ACTIONS` per hundred decisions, and `round`."""
    last_episodes: Mapping[str, LastEpisodes]
    seed_counts: Mapping[str, tuple[SeedCounts, ...]]
    evaluations: tuple[Mapping[str, Any], ...]
    """Rows of the store that count."""


def read_run(path: Path) -> RunData:
    """Read a run, also while another process is at work in it."""
    run = Run.read(path)
    state = "stopped" if run.finished is None else "finished"
    store = path / STORE
    try:
        with closing(open_store(store)) as db:
            db.execute("BEGIN")  # all answers as of one moment
            found = _query(db, _configured_tasks(run.config_toml))
    except (sqlite3.Error, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        why = str(error).splitlines()[0][:80] if str(error) else "no reason given"
        raise BadInput(
            f"{short(store)} is damaged or of another version: {why}; report another "
            "run."
        ) from None
    return RunData(
        name=path.resolve().name,
        state="running" if is_locked(path) else state,
        config_toml=run.config_toml,
        versions=run.versions,
        **found,
    )


def _configured_tasks(toml: str) -> list[str]:
    try:
        tasks = tomllib.loads(toml).get("tasks", [])
    except (ValueError, RecursionError):
        return []
    names = tasks if isinstance(tasks, list) else [tasks]
    return [name for name in names if isinstance(name, str)]


def _query(db: sqlite3.Connection, configured: list[str]) -> dict[str, Any]:
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
    bin_of = f"(round - 1) * {POINTS} / {max(last, POINTS)}"
    means = ", ".join(f"avg({name})" for name in MEANS)
    rounds = _columns(
        ["round", "env_steps", "seconds", "refused", *MEANS],
        db.execute(
            "SELECT avg(round), max(env_steps), max(seconds), sum(refused), "
            f"{means} FROM live_rounds GROUP BY {bin_of} ORDER BY 1"
        ).fetchall(),
    )
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
        "returns": _grouped(db, "task", ('"return"', "added"), "live_episodes", bin_of),
        "actions": _actions(db, bin_of, rounds),
        "last_episodes": _last_episodes(db),
        "seed_counts": _seed_counts(db, last),
        "evaluations": tuple(rows(db, "live_evaluations")),
        "notes": tuple(db.execute("SELECT round, kind, text FROM live_notes")),
        "attempts": tuple(
            row | {"versions": json.loads(row["versions"])} for row in found
        ),
    }


def _columns(names: list[str], rows: list[tuple[Any, ...]]) -> dict[str, Floats]:
    """Rows as one array for each name; NULL is NaN."""
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
    return {name: table[:, index] for index, name in enumerate(names)}


def _grouped(
    db: sqlite3.Connection, key: str, figures: tuple[str, ...], table: str, bin_of: str
) -> dict[str, Columns]:
    """Means of some figures in each bin, for each value of a column."""
    means = ", ".join(f"avg({figure})" for figure in figures)
    found = db.execute(
        f"SELECT {key}, avg(round), {means} FROM {table} "
        f"GROUP BY {key}, {bin_of} ORDER BY {key}, 2"
    ).fetchall()
    names = ["round", *(figure.strip('"') for figure in figures)]
    return {
        value: _columns(names, [row[1:] for row in found if row[0] == value])
        for value in dict.fromkeys(row[0] for row in found)
    }


def _actions(db: sqlite3.Connection, bin_of: str, rounds: Columns) -> Columns:
    counts = ", ".join(f"sum(what = '{action}')" for action in ACTIONS)
    found = db.execute(f"SELECT {bin_of}, {counts} FROM live_events GROUP BY 1")
    known = {row[0]: row[1:] for row in found.fetchall()}
    bins = db.execute(f"SELECT {bin_of} FROM live_rounds GROUP BY 1 ORDER BY 1")
    none = (0,) * len(ACTIONS)
    table = _columns([*ACTIONS], [known.get(index, none) for (index,) in bins])
    decisions = np.diff(rounds["env_steps"], prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = {name: 100.0 * count / decisions for name, count in table.items()}
    return {"round": rounds["round"], **shares}


def _last_episodes(db: sqlite3.Connection) -> dict[str, LastEpisodes]:
    # The view, but only over the episodes that are shown: else all of a long run.
    lives = VIEWS["seed_lives"].replace("live_events", "last_events")
    found = db.execute(
        f"""WITH ends AS (
          SELECT task, env, episode, step AS over,
            lag(step, 1, 0) OVER (PARTITION BY task, env ORDER BY episode) AS before,
            max(episode) OVER (PARTITION BY task, env) AS last
          FROM live_episodes WHERE env < {SHOWN_ENVS}),
        lasts AS MATERIALIZED (SELECT * FROM ends WHERE episode = last),
        last_events AS (
          SELECT v.* FROM live_events AS v JOIN lasts USING (task, env, episode))
        SELECT e.task, e.env, e.over - e.before, l.slot, l.seed, l.blueprint, l.stage,
          l.from_step - e.before, l.to_step - e.before
        FROM lasts AS e LEFT JOIN ({lives}) AS l USING (task, env, episode)
        ORDER BY e.task, e.env, l.slot, l.from_step"""
    ).fetchall()
    envs = dict(db.execute("SELECT task, max(env) + 1 FROM live_episodes GROUP BY 1"))
    return {
        task: LastEpisodes(
            spans=tuple(
                StageSpan(env, slot, seed, blueprint or "?", stage, start, end)
                for name, env, _, slot, seed, blueprint, stage, start, end in found
                if name == task and slot is not None
            ),
            lengths={row[1]: row[2] for row in found if row[0] == task},
            envs=envs[task],
        )
        for task in dict.fromkeys(row[0] for row in found)
    }


def _seed_counts(db: sqlite3.Connection, last: int) -> dict[str, Any]:
    found = db.execute(
        "SELECT task, min(2, (round - 1) * 3 / max(?1, 1)), blueprint, slot, "
        "sum(what = 'planted'), sum(what = 'kept'), sum(what = 'pruned') "
        "FROM live_events GROUP BY 1, 2, 3, 4",
        (last,),
    ).fetchall()
    return {
        task: tuple(
            SeedCounts(THIRDS[third], blueprint or "?", *counts)
            for name, third, blueprint, *counts in found
            if name == task
        )
        for task in dict.fromkeys(row[0] for row in found)
    }
