r"""From the rows of a campaign to figures that can be compared.

    objective  = test score - rent * parameters added
    normalised = (objective - that of never, same task and seed)
                 / (1 - mean test score of never on the task)

The share of a network's errors that growing it removes, net of rent. Its main form is
the mean over the settings of rent. Whatever has not been run is missing (NaN): a cell
counts only if every setting of it is there, and its partner `never` too.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final

import numpy as np

from esper.contracts.errors import BadInput
from esper.experiment.messages import short
from esper.experiment.statistics import Floats
from evidence.ledger import LEDGER
from evidence.protocol import Protocol, protocol_of

Row = Mapping[str, Any]
BASELINE: Final = "never"
LEARNED: Final = "tamiyo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On what terms a network may grow."""

    rent: float
    """Of the score, for as many parameters as the host has."""
    budget: float
    """Parameters that may be added, as a multiple of the host's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """One figure of everybody, `[member, seed]` by arm and task."""

    values: Mapping[tuple[str, str], Floats]
    """NaN where it is missing; seeds stand at the same place for all arms of a task."""
    seeds: Mapping[str, tuple[int, ...]]
    """By task."""
    members: Mapping[str, tuple[int, ...]]
    """By arm."""

    def at(self, arm: str, task: str) -> Floats:
        """Figures `[member, seed]` of an arm on a task."""
        missing = np.full(
            (len(self.members.get(arm, ())), len(self.seeds.get(task, ()))), nan
        )
        return self.values.get((arm, task), missing)

    def of(self, arm: str, tasks: Iterable[str]) -> list[Floats]:
        """The same for several tasks."""
        return [self.at(arm, task) for task in tasks]

    def count(self, arm: str, tasks: Iterable[str]) -> int:
        """How many cells are there."""
        return sum(int(np.isfinite(each).sum()) for each in self.of(arm, tasks))

    def done(self, arm: str, tasks: Iterable[str]) -> list[str]:
        """Tasks of which there is at least one cell."""
        return [task for task in tasks if self.count(arm, [task])]


class Readout:
    """The counted rows of a campaign, and what they say.

    Args:
        rows: Of the table of results; those of tuning are left out.
        terms: Of each setting.
        rents: The settings whose mean is the objective.
    """

    def __init__(
        self, rows: Iterable[Row], terms: Mapping[str, Terms], rents: Sequence[str]
    ) -> None:
        self.rows = [row for row in rows if row["stage"] == "counted"]
        self.terms, self.rents = dict(terms), list(rents)
        self._refuse_doubles()
        self._known: dict[tuple[str | None, tuple[str, ...]], Cells] = {}
        plain: dict[tuple[str, int], list[float]] = defaultdict(list)
        for row in self.rows:
            if row["arm"] == BASELINE:
                plain[row["task"], row["seed"]].append(earned(row, "test"))
        self._plain = {key: float(np.mean(values)) for key, values in plain.items()}
        self.baseline: dict[str, float] = {}
        """Mean test score of the networks that are not grown, by task."""
        for task in dict.fromkeys(task for task, _ in self._plain):
            scores = [v for (name, _), v in self._plain.items() if name == task]
            self.baseline[task] = float(np.mean(scores))

    @property
    def tasks(self) -> list[str]:
        """Tasks with at least one row."""
        return list(dict.fromkeys(row["task"] for row in self.rows))

    @property
    def arms(self) -> list[str]:
        """Arms with at least one row."""
        return list(dict.fromkeys(row["arm"] for row in self.rows))

    @property
    def budgets(self) -> list[str]:
        """Settings that differ in budget: those with the smallest rent."""
        smallest = min((each.rent for each in self.terms.values()), default=nan)
        found = [name for name, each in self.terms.items() if each.rent == smallest]
        return sorted(found, key=lambda name: self.terms[name].budget)

    def normalised(self, settings: Sequence[str] | None = None) -> Cells:
        """Normalised objectives, as a mean over settings; None: those of rent."""
        return self._cells(None, settings)

    def figure(self, column: str, settings: Sequence[str] | None = None) -> Cells:
        """A column of the rows as it is, as a mean over settings."""
        return self._cells(column, settings)

    def _normalised(self, row: Row) -> float:
        task, seed = row["task"], row["seed"]
        errors = 1.0 - self.baseline.get(task, nan)
        if not errors > 0.0 or (task, seed) not in self._plain:
            return nan
        rent = self.terms[row["setting"]].rent
        objective = earned(row, "test") - rent * earned(row, "added")
        return (objective - self._plain[task, seed]) / errors

    def _cells(self, column: str | None, settings: Sequence[str] | None) -> Cells:
        wanted = tuple(self.rents if settings is None else settings)
        if (column, wanted) not in self._known:
            self._known[column, wanted] = _gathered(
                [row for row in self.rows if row["setting"] in wanted],
                self._normalised if column is None else lambda row: earned(row, column),
                len(wanted),
            )
        return self._known[column, wanted]

    def _refuse_doubles(self) -> None:
        rates: dict[tuple[Any, ...], float] = {}
        for row in self.rows:
            names = ("arm", "member", "task", "setting", "seed")
            key = tuple(row[name] for name in names)
            if row["setting"] not in self.terms:
                raise BadInput(
                    f"a row of {row['arm']} has the setting {row['setting']!r:.40}, "
                    "which the protocol does not name; read the campaign with its own."
                )
            if key in rates:
                raise BadInput(
                    f"expected one counted learning rate for {row['arm']} on "
                    f"{row['task']}, got {rates[key]} and {row['rate']}; count one."
                )
            rates[key] = row["rate"]


def earned(row: Row, column: str) -> float:
    """A figure of a row; a network whose numbers blew up guesses nothing right."""
    value = row[column]
    known = value is not None and isfinite(value)
    if column in ("test", "score", "area") and row["panicked"]:
        return 0.0
    return float(value) if known else nan


def _gathered(
    rows: Sequence[Row], value: Callable[[Row], float], settings: int
) -> Cells:
    """Means over so many settings, at the place of their member and seed."""
    seeds: dict[str, set[int]] = defaultdict(set)
    members: dict[str, set[int]] = defaultdict(set)
    found: dict[tuple[str, str, int, int], list[float]] = defaultdict(list)
    for row in rows:
        arm, task, member, seed = (row[n] for n in ("arm", "task", "member", "seed"))
        seeds[task].add(seed)
        members[arm].add(member)
        found[arm, task, member, seed].append(value(row))
    which = {task: tuple(sorted(each)) for task, each in seeds.items()}
    who = {arm: tuple(sorted(each)) for arm, each in members.items()}
    values: dict[tuple[str, str], Floats] = {}
    for (arm, task, member, seed), figures in found.items():
        shape = (len(who[arm]), len(which[task]))
        array = values.setdefault((arm, task), np.full(shape, nan))
        if len(figures) == settings:
            place = who[arm].index(member), which[task].index(seed)
            array[place] = sum(figures) / settings
    return Cells(values=values, seeds=which, members=who)


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """All that a ledger holds but the recordings."""

    sha: str
    began: str
    versions: Mapping[str, Any]
    protocol: Protocol
    results: Sequence[Row]
    jobs: Sequence[Row]
    trainings: Sequence[Row]


def read_campaign(folder: Path) -> Campaign:
    """Read all but the recordings."""
    path = folder / LEDGER
    if not path.is_file():
        raise BadInput(
            f"{short(folder)} holds no {LEDGER}; name the folder of a campaign, or "
            "begin one with `python -m evidence run`."
        )
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as db:
            return _read(db)
    except sqlite3.Error as error:
        raise BadInput(f"{short(path)} is no ledger: {error}.") from None


def _read(db: sqlite3.Connection) -> Campaign:
    db.row_factory = sqlite3.Row
    known = db.execute("SELECT * FROM protocol").fetchone()
    if known is None:
        raise sqlite3.DatabaseError("it names no protocol")
    protocol = protocol_of(known["toml"].encode())

    def rows(table: str, order: str) -> list[Row]:
        found = db.execute(f"SELECT * FROM {table} ORDER BY {order}")
        return [dict(row) for row in found]

    key = "stage, arm, member, task, setting, rate, seed"
    return Campaign(
        sha=known["sha"],
        began=known["began"],
        versions=json.loads(known["versions"] or "{}"),
        protocol=protocol,
        results=rows("results", key),
        jobs=rows("jobs", "priority, id"),
        trainings=rows("trainings", "name"),
    )
