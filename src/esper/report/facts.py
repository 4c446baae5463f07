"""What a run says of itself, asked of its folder and its store in few questions.

However long the run, the store adds up: rounds come in at most `POINTS` portions, and
lives only of the last episodes that ended. All questions see the store as of one
moment, also while somebody writes.
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
from esper.experiment.reading import rows
from esper.experiment.run import Run
from esper.experiment.statistics import Floats
from esper.experiment.storage.database import open_store
from esper.experiment.storage.disk import short
from esper.experiment.storage.lock import is_locked
from esper.experiment.storage.schema import VIEWS

STORE: Final = "events.sqlite"
POINTS: Final = 600
"""Portions of rounds, and so points of a curve, at most."""
SHOWN: Final = 16
"""Environments of a task whose seeds are shown, at most."""
THIRDS: Final = ("early", "between", "late")

Columns = Mapping[str, Floats]
"""Figures by name, one for each portion; NaN is missing."""

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
DEEDS: Final = ("planted", "blending", "aimed", "pruned", "kept")
"""What a controller does to seeds; the rest follows by itself."""


@dataclass(frozen=True, slots=True)
class Life:
    """One stage of a seed's life, in decisions since its episode began."""

    env: int
    slot: int
    seed: int
    blueprint: str
    stage: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """The seeds of the last episode that ended, of each environment of a task."""

    bars: tuple[Life, ...]
    lengths: Mapping[int, int]
    """Decisions of that episode, by environment."""
    envs: int
    """Environments of the task, shown or not."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What happened to one blueprint in one slot, in one third of the rounds."""

    third: str
    blueprint: str
    slot: int
    planted: int
    kept: int
    pruned: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process that wrote the run."""

    number: int
    started: str
    resumed_after: int | None
    last_round: int | None
    rows: int
    versions: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a page shows of a run."""

    name: str
    state: str
    """running, finished or stopped."""
    config_toml: str
    versions: Mapping[str, Any]
    attempts: tuple[Attempt, ...]
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
    """`round`, `env_steps`, `seconds` and the means of each portion."""
    heads: Mapping[str, Columns]
    """`round`, `entropy` and `kl` of each head."""
    returns: Mapping[str, Columns]
    """`round`, `return` and `added` of each task's own episodes."""
    deeds: Columns
    """Each of `DEEDS` per hundred decisions, and `round`."""
    lives: Mapping[str, Lives]
    choices: Mapping[str, tuple[Choice, ...]]
    evaluations: tuple[Mapping[str, Any], ...]
    """Rows of the store that count."""


def read_facts(path: Path) -> Facts:
    """Look at a run, also while another process is at work in it."""
    run = Run.read(path)
    toml, versions = run.config_toml, run.versions
    if is_locked(path):
        state = "running"
    else:
        state = "stopped" if run.finished is None else "finished"
    store = path / STORE
    try:
        with closing(open_store(store)) as db:
            db.execute("BEGIN")  # all answers as of one moment
            answers = _ask(db, _asked_for(toml))
    except (sqlite3.Error, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        why = str(error).splitlines()[0][:80] if str(error) else "no reason given"
        raise BadInput(
            f"{short(store)} is damaged or of another version: {why}; report another "
            "run."
        ) from None
    return Facts(
        name=path.resolve().name,
        state=state,
        config_toml=toml,
        versions=versions,
        **answers,
    )


def _asked_for(toml: str) -> list[str]:
    """The tasks that a configuration names, if it can be read."""
    try:
        tasks = tomllib.loads(toml).get("tasks", [])
    except (ValueError, RecursionError):
        return []
    names = tasks if isinstance(tasks, list) else [tasks]
    return [name for name in names if isinstance(name, str)]


def _ask(db: sqlite3.Connection, named: list[str]) -> dict[str, Any]:
    last, steps, seconds, refused = db.execute(
        "SELECT ifnull(max(round), 0), ifnull(max(env_steps), 0), "
        "ifnull(max(seconds), 0.0), ifnull(sum(refused), 0) FROM live_rounds"
    ).fetchone()
    seen = {
        task
        for table in ("live_episodes", "live_evaluations")
        for (task,) in db.execute(f"SELECT DISTINCT task FROM {table}")
    }
    tasks = [name for name in named if name in seen] + sorted(seen - {*named})
    portion = f"(round - 1) * {POINTS} / {max(last, POINTS)}"
    rounds = _rounds(db, portion)
    return {
        "tasks": tuple(tasks or named),
        "last_round": last,
        "env_steps": steps,
        "seconds": seconds,
        "refused": refused,
        "rounds": rounds,
        "heads": _by_name(db, "head", ("entropy", "kl"), "live_heads", portion),
        "returns": _by_name(
            db, "task", ('"return"', "added"), "live_episodes", portion
        ),
        "deeds": _deeds(db, portion, rounds),
        "lives": _lives(db),
        "choices": _choices(db, last),
        "evaluations": tuple(rows(db, "live_evaluations")),
        "notes": tuple(db.execute("SELECT round, kind, text FROM live_notes")),
        "attempts": tuple(_attempts(db)),
    }


def _columns(names: list[str], rows: list[tuple[Any, ...]]) -> dict[str, Floats]:
    """Rows as one array for each name; NULL is NaN."""
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
    return {name: table[:, index] for index, name in enumerate(names)}


def _rounds(db: sqlite3.Connection, portion: str) -> dict[str, Floats]:
    means = ", ".join(f"avg({name})" for name in MEANS)
    found = db.execute(
        "SELECT avg(round), max(env_steps), max(seconds), sum(refused), "
        f"{means} FROM live_rounds GROUP BY {portion} ORDER BY 1"
    ).fetchall()
    return _columns(["round", "env_steps", "seconds", "refused", *MEANS], found)


def _by_name(
    db: sqlite3.Connection, key: str, figures: tuple[str, ...], table: str, portion: str
) -> dict[str, Columns]:
    """Means of some figures in each portion, for each value of a column."""
    means = ", ".join(f"avg({figure})" for figure in figures)
    found = db.execute(
        f"SELECT {key}, avg(round), {means} FROM {table} "
        f"GROUP BY {key}, {portion} ORDER BY {key}, 2"
    ).fetchall()
    names = ["round", *(figure.strip('"') for figure in figures)]
    return {
        value: _columns(names, [row[1:] for row in found if row[0] == value])
        for value in dict.fromkeys(row[0] for row in found)
    }


def _deeds(db: sqlite3.Connection, portion: str, rounds: Columns) -> dict[str, Floats]:
    counts = ", ".join(f"sum(what = '{deed}')" for deed in DEEDS)
    found = db.execute(
        f"SELECT {portion}, {counts} FROM live_events GROUP BY 1"
    ).fetchall()
    order = db.execute(f"SELECT {portion} FROM live_rounds GROUP BY 1 ORDER BY 1")
    known = {row[0]: row[1:] for row in found}
    nothing = (0,) * len(DEEDS)
    table = _columns([*DEEDS], [known.get(part, nothing) for (part,) in order])
    decisions = np.diff(rounds["env_steps"], prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = {deed: 100.0 * count / decisions for deed, count in table.items()}
    return {"round": rounds["round"], **shares}


def _lives(db: sqlite3.Connection) -> dict[str, Lives]:
    # The view, but only over the episodes that are shown: else all of a long run.
    lives = VIEWS["seed_lives"].replace("live_events", "last_events")
    found = db.execute(
        f"""WITH ends AS (
          SELECT task, env, episode, step AS over,
            lag(step, 1, 0) OVER (PARTITION BY task, env ORDER BY episode) AS before,
            max(episode) OVER (PARTITION BY task, env) AS last
          FROM live_episodes WHERE env < {SHOWN}),
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
        task: Lives(
            bars=tuple(
                Life(env, slot, seed, blueprint or "?", stage, start, end)
                for name, env, _, slot, seed, blueprint, stage, start, end in found
                if name == task and slot is not None
            ),
            lengths={row[1]: row[2] for row in found if row[0] == task},
            envs=envs[task],
        )
        for task in dict.fromkeys(row[0] for row in found)
    }


def _choices(db: sqlite3.Connection, last: int) -> dict[str, tuple[Choice, ...]]:
    counts = ", ".join(
        f"sum(what = '{deed}')" for deed in ("planted", "kept", "pruned")
    )
    found = db.execute(
        "SELECT task, min(2, (round - 1) * 3 / max(?1, 1)), blueprint, slot, "
        f"{counts} FROM live_events GROUP BY 1, 2, 3, 4",
        (last,),
    ).fetchall()
    return {
        task: tuple(
            Choice(THIRDS[third], blueprint or "?", *row)
            for name, third, blueprint, *row in found
            if name == task
        )
        for task in dict.fromkeys(row[0] for row in found)
    }


def _attempts(db: sqlite3.Connection) -> list[Attempt]:
    found = db.execute(
        "SELECT attempt, started, resumed_after, last_round, rows, versions "
        "FROM attempts ORDER BY attempt"
    )
    return [
        Attempt(number, started, resumed, last, rows, json.loads(versions))
        for number, started, resumed, last, rows, versions in found
    ]
