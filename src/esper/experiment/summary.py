"""What the judged hosts of a run's store show: all tables and words, from its rows.

    summary = summarise(rows(open_store(run / "events.sqlite"), "live_evaluations"))

Figures are interquartile means over hosts with intervals of 95 %. Arms are compared
host by host, first of all with `never`; every learned arm also with every other. Each
table (of a task, or of all) and each figure (return, test score) is one family of
comparisons, over which p-values are corrected.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from typing import Any, Final

import numpy as np

from esper.experiment.config import STATIC
from esper.experiment.static import reference_of
from esper.experiment.statistics import Floats, Interval, stratified_bootstrap
from esper.experiment.verdict import (
    LEVEL,
    Against,
    compare_pairs,
    told,
)
from esper.tamiyo.registry import CONTROLLERS

BASELINE: Final = "never"
"""Whom everybody is measured against."""
FEW: Final = 10
"""Hosts below which intervals are narrower than they should be."""
DRAWS: Final = 4_000
"""How often hosts are drawn anew."""
FIGURES: Final = ("return", "test", "area")
Row = Mapping[str, Any]
Family = dict[tuple[str, str], Against]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One row of a table."""

    name: str
    returns: Interval
    """Score gained on the decision rows, less rent."""
    test: Interval
    """Share of test rows that are guessed right."""
    area: Interval
    """Mean share of decision rows that were guessed right, over the decisions."""
    parameters: float
    """Of the final network, as a multiple of the host's; mean."""
    macs: float
    """Multiply-adds per row of the final network, the same way."""
    training_macs: float
    """Multiply-adds that the training took, with all looks; mean."""
    seconds: float
    """That the training took, hosts side by side; mean."""
    panics: int
    """Hosts whose numbers were no longer finite."""
    above_never: Against | None
    """By return; None for `never` itself, or if there is none to compare with."""
    test_above_never: Against | None
    """By test score."""

    @property
    def learned(self) -> bool:
        """Whether it is a trained controller."""
        return is_learned(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """A learned arm against another one."""

    name: str
    other: str
    returns: Against
    test: Against


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """One table: everybody on one task, or on all of them."""

    task: str
    """Its name; of all tasks, their names in one line."""
    tasks: int
    hosts: int
    """Of each task."""
    arms: tuple[ArmSummary, ...]
    """Lowest return first."""
    duels: tuple[Duel, ...]

    @property
    def smallest_p(self) -> float:
        """The smallest adjusted p that so many pairs and arms can give."""
        pairs, count = self.tasks * self.hosts, max(1, len(self.arms) - 1)
        return min(1.0, count * 2.0 ** (1 - pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All that was judged."""

    tasks: tuple[TaskSummary, ...]
    aggregate: TaskSummary | None
    """Over all tasks; None if there is one, or if they do not have the same arms."""
    words: tuple[str, ...]
    """What it shows and what it does not, one paragraph each."""

    def as_data(self) -> dict[str, Any]:
        """Everything in words and numbers that JSON knows."""
        plain = _plain(asdict(self))
        assert isinstance(plain, dict)
        return plain


def summarise(rows: Iterable[Row], *, draws: int = DRAWS) -> Summary:
    """Tables and words of what was judged last.

    Args:
        rows: Of the table `evaluations`; those that were only watched do not count.
        draws: How often hosts are drawn anew.
    """
    judged = [row for row in rows if row["stage"] == "judged"]
    last = max((row["round"] for row in judged), default=0)
    found: dict[str, dict[str, list[Row]]] = {}
    for row in judged:
        if row["round"] == last:
            arms = found.setdefault(row["task"], {})
            arms.setdefault(row["controller"], []).append(row)
    # The order in which rows came is chance: processes end when they do.
    found = {
        task: {
            name: sorted(found[task][name], key=lambda row: row["host"])
            for name in sorted(found[task])
        }
        for task in sorted(found)
    }
    tasks = tuple(_table(name, {name: found[name]}, draws) for name in found)
    whole = None
    if len(tasks) > 1 and _alike(found.values()):
        whole = _table(", ".join(found), found, draws)
    return Summary(tasks=tasks, aggregate=whole, words=tuple(_words(tasks, whole)))


def is_learned(name: str) -> bool:
    """Whether an arm of this name is a trained controller."""
    return name not in CONTROLLERS and name not in STATIC


def _table(
    title: str, found: Mapping[str, Mapping[str, Sequence[Row]]], draws: int
) -> TaskSummary:
    """One table of some tasks, which have the same arms."""
    names = [*next(iter(found.values()))]
    scores = {
        figure: {
            name: np.array(
                [[row[figure] for row in arms[name]] for arms in found.values()],
                dtype=np.float64,
            )
            for name in names
        }
        for figure in FIGURES
    }
    hosts = min(values.shape[1] for values in scores["return"].values())
    above, duels = {}, {}
    for figure in ("return", "test"):
        above[figure] = _family(
            scores[figure], [(name, BASELINE) for name in names], draws
        )
        learned = [name for name in names if is_learned(name)]
        # What is said against the baseline is said once, in one family.
        others = [name for name in names if name != BASELINE]
        duels[figure] = {
            pair: row for pair, row in above[figure].items() if pair[0] in learned
        } | _family(
            scores[figure], [(ours, name) for ours in learned for name in others], draws
        )
    arms = [
        _arm(
            name,
            [row for each in found.values() for row in each[name]],
            {figure: _spread(values[name], draws) for figure, values in scores.items()},
            {figure: family.get((name, BASELINE)) for figure, family in above.items()},
        )
        for name in names
    ]
    return TaskSummary(
        task=title,
        tasks=len(found),
        hosts=hosts,
        arms=tuple(sorted(arms, key=lambda arm: arm.returns.estimate)),
        duels=tuple(
            Duel(name=ours, other=other, returns=row, test=duels["test"][ours, other])
            for (ours, other), row in duels["return"].items()
        ),
    )


def _arm(
    name: str,
    rows: Sequence[Row],
    spread: Mapping[str, Interval],
    above: Mapping[str, Against | None],
) -> ArmSummary:
    def mean(figure: str) -> float:
        values = [nan if row[figure] is None else row[figure] for row in rows]
        return float(np.mean(values))

    return ArmSummary(
        name=name,
        returns=spread["return"],
        test=spread["test"],
        area=spread["area"],
        parameters=1.0 + mean("added"),
        macs=mean("macs"),
        training_macs=mean("training_macs"),
        seconds=mean("seconds"),
        panics=sum(bool(row["panicked"]) for row in rows),
        above_never=above["return"],
        test_above_never=above["test"],
    )


def _family(
    scores: Mapping[str, Floats], pairs: Iterable[tuple[str, str]], draws: int
) -> Family:
    """Comparisons of those that are there and have the same hosts."""
    wanted = {}
    for ours, other in pairs:
        if ours != other and other in scores:
            x, y = scores[ours], scores[other]
            if x.shape == y.shape and x.shape[1] > 1:
                wanted[ours, other] = (x, y)
    return compare_pairs(wanted, draws=draws)


def _spread(values: Floats, draws: int) -> Interval:
    """The interquartile mean; of a single host, without a range."""
    if values.shape[1] < 2:
        return Interval(float(values.mean()), nan, nan)
    return stratified_bootstrap(values, draws=draws)


def _alike(tasks: Iterable[Mapping[str, Sequence[Row]]]) -> bool:
    """Whether all tasks have the same arms with as many hosts each."""
    shapes = [{name: len(rows) for name, rows in arms.items()} for arms in tasks]
    return all(shape == shapes[0] for shape in shapes)


def _words(tasks: Sequence[TaskSummary], whole: TaskSummary | None) -> list[str]:
    tables = [*tasks, *([] if whole is None else [whole])]
    said = []
    for table in tables:
        title = "All tasks together" if table is whole else table.task
        said += _paragraphs(title, table)
    names = list(dict.fromkeys(arm.name for table in tables for arm in table.arms))
    return [*said, *_limits(tables, names)] if tables else []


def _paragraphs(title: str, table: TaskSummary) -> list[str]:
    """One paragraph for each figure of a table, and one for each learned arm."""
    said = []
    families = {
        "return": {arm.name: arm.above_never for arm in table.arms},
        "test score": {arm.name: arm.test_above_never for arm in table.arms},
    }
    for figure, rows in families.items():
        known = {name: row for name, row in rows.items() if row is not None}
        if known:
            said.append(f"{title}, {figure}: {_against_never(known)}")
    for ours in dict.fromkeys(duel.name for duel in table.duels):
        own = [duel for duel in table.duels if duel.name == ours]
        for word in ("return", "test score"):
            duels = {
                duel.other: duel.returns if word == "return" else duel.test
                for duel in own
            }
            said.append(f"{title}, {word} of {ours!r}: {_of_learned(ours, duels)}")
    return said


def _against_never(rows: Mapping[str, Against]) -> str:
    return _sides(
        rows,
        f" {BASELINE!r}:",
        f"This does not show a difference from {BASELINE!r}, nor that there is none, "
        "for {}.",
    )


def _of_learned(ours: str, rows: Mapping[str, Against]) -> str:
    """Whom a learned arm is shown to be above, below, or neither."""
    open_ones = f"This does not show that {ours!r} differs from {{}}, nor that it does "
    return _sides(rows, "", f"{open_ones}not.")


def _sides(rows: Mapping[str, Against], than: str, open_words: str) -> str:
    """Who is shown above and below, and of whom nothing is shown."""
    sides = told(rows, "+.4f")
    shown = [
        f"shown {side}{than} {', '.join(sides[side])}"
        for side in ("above", "below")
        if sides[side]
    ]
    said = [f"{'; '.join(shown)}."] if shown else []
    if sides["open"]:
        # Names may hold braces, so they are put in and not formatted.
        said.append(open_words.replace("{}", ", ".join(sides["open"])))
    return " ".join(said)


def _limits(tables: Sequence[TaskSummary], names: Sequence[str]) -> list[str]:
    """What holds of everything above."""
    said = []
    for table in tables:
        if table.smallest_p >= LEVEL and len(table.arms) > 1:
            said.append(
                f"{table.task}: with {table.tasks * table.hosts} hosts and "
                f"{len(table.arms) - 1} comparisons no adjusted p can be below "
                f"{table.smallest_p:.2g}, so nothing could have been shown: judge more "
                "hosts."
            )
    hosts = min(table.hosts for table in tables)
    narrow = "; intervals of so few are narrower than they should be"
    said.append(
        f"A difference is shown if its p-value, corrected for all comparisons of its "
        f"table, is below {LEVEL:g}, its interval leaves out 0 and most hosts agree. "
        f"This rests on {hosts} hosts of each task"
        f"{narrow if hosts < FEW else ''}; it says nothing about other tasks, other "
        "hosts or longer training. Hosts of one task share a split of its rows (not on "
        "teacher), so the luck of the split is not in the intervals."
    )
    learned = [name for name in names if is_learned(name)]
    if learned:
        said.append(
            f"{_listed(learned)}: one training each. Intervals are over hosts, so they "
            "say nothing about controllers that are trained anew."
        )
    static = [name for name in names if name in STATIC]
    if static:
        said.append(
            f"{_listed(static)}: measured by what {reference_of(names)!r} ended with. "
            "Every arm has the task's own learning rate, which was tuned for the plain "
            "host alone: a rate of its own might make each of them better."
        )
    return said


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _plain(value: object) -> object:
    """The same without what JSON does not know."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
