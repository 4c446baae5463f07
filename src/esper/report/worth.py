"""What everybody was worth, as figures, tables and words of one summary."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any, Final

import numpy as np

from esper.contracts.errors import BadInput
from esper.experiment.statistics import Interval, iqm_interval, mean_interval
from esper.experiment.summary import (
    BASELINE,
    ArmSummary,
    Summary,
    TaskSummary,
    is_learned,
    summarise,
)
from esper.report.arms import ArmPoint
from esper.report.curves import Judgements, Level
from esper.report.markup import Markup, element, table, together

Rows = Sequence[Mapping[str, Any]]
WATCHED: Final = 60
"""Judgements during training that a curve shows, at most."""
COLOURS: Final = {"never": "amber", "random": "purple"}
BEST: Final = "green"
HEADERS: Final = [
    "controller",
    "return",
    "test score",
    "area under curve",
    "size",
    "MACs per row",
    "training MACs",
    "seconds",
    "return above never",
    "hosts above",
    "p (Holm)",
]


class Worth:
    """Everything that can be said about the judgements of a run.

    Args:
        rows: Of the table `evaluations`.
        tasks: In which order to show them.
    """

    def __init__(self, rows: Rows, tasks: Sequence[str] = ()) -> None:
        self._rows, self._order = rows, tuple(tasks)
        self.trouble = ""
        """Why there is no summary although somebody was judged."""
        self.summary: Summary | None = None
        try:
            summary = summarise(rows)
            self.summary = summary if summary.tasks else None
        except BadInput as error:
            self.trouble = str(error)

    def judgements(self) -> dict[str, Judgements]:
        """What stands beside the learning curve of each task."""
        watched = self._watched()
        final: dict[str, Interval] = {}
        others: dict[str, list[Level]] = {}
        for task in self._tables():
            learned = [arm for arm in task.arms if arm.learned]
            if learned:
                final[task.task] = learned[-1].returns
            best = _best(task)
            others[task.task] = [
                Level(
                    f"{arm.name}, best" if arm is best else arm.name,
                    _colour(arm, best),
                    arm.returns,
                )
                for arm in task.arms
                if arm is best or arm.name in COLOURS
            ]
        return {
            task: Judgements(
                watched=watched.get(task, ()),
                final=final.get(task),
                others=others.get(task, ()),
            )
            for task in {*watched, *others}
        }

    def arms(self) -> dict[str, list[ArmPoint]]:
        """Who was judged on each task at the end."""
        return {
            task.task: [
                ArmPoint(
                    name=arm.name,
                    colour=_colour(arm, _best(task)),
                    returns=arm.returns,
                    test=arm.test,
                    parameters=self._parameters(task.task, arm),
                )
                for arm in task.arms
            ]
            for task in self._tables()
        }

    def tables(self) -> Markup:
        """A table for each task, one for all, and what they show."""
        if self.trouble:
            return element("p", f"Nothing can be compared: {self.trouble}")
        if self.summary is None:
            return together()
        found = [_table(task, task.task) for task in self._tables()]
        if self.summary.aggregate is not None:
            found.insert(0, _table(self.summary.aggregate, "All tasks together"))
        key = (
            "Return: score gained on the rows that decide, less rent. Test score: of "
            "the final network, on rows that no decision and no reward of it saw. "
            "Area: mean score over the episode. Size and multiply-adds (MACs) per row "
            "are multiples of the host's; training MACs count every look; seconds are "
            "per host."
        )
        found.append(element("p", key, classes="quiet small"))
        words = element(
            "details",
            element("summary", "In words: what this shows, and what it does not"),
            *(element("p", line) for line in self.summary.conclusions),
        )
        return together(*found, words)

    def verdict(self) -> list[str]:
        """The outcome by return, in a sentence or two for each learned arm."""
        if self.summary is None:
            return []
        whole = self.summary.aggregate
        tables = self._tables() if whole is None else (whole,)
        said = []
        for one in tables:
            where = "All tasks together" if one is whole else f"On {one.task}"
            said += [f"{where}: {line}" for line in _outcomes(one)]
        return said

    def _tables(self) -> Sequence[TaskSummary]:
        known = () if self.summary is None else self.summary.tasks
        order = {name: index for index, name in enumerate(self._order)}
        return sorted(known, key=lambda task: order.get(task.task, len(order)))

    def _watched(self) -> dict[str, list[tuple[int, Interval]]]:
        found: dict[str, dict[int, list[float]]] = defaultdict(dict)
        for row in self._rows:
            if row["stage"] == "watched" and is_learned(row["controller"]):
                value = nan if row["return"] is None else row["return"]
                found[row["task"]].setdefault(row["round"], []).append(value)
        return {
            task: [(number, _spread(rounds[number])) for number in _some(rounds)]
            for task, rounds in found.items()
        }

    def _parameters(self, task: str, arm: ArmSummary) -> Interval:
        last = max(r["round"] for r in self._rows if r["stage"] == "judged")
        added = [
            row["added"]
            for row in self._rows
            if (row["stage"], row["round"]) == ("judged", last)
            and (row["task"], row["controller"]) == (task, arm.name)
            and row["added"] is not None
        ]
        if len(added) < 2:
            return Interval(arm.parameters, arm.parameters, arm.parameters)
        return mean_interval(1.0 + np.array(added, dtype=np.float64))


def _best(task: TaskSummary) -> ArmSummary | None:
    """The best of those that do not learn, if it is neither of the two simplest."""
    others = [arm for arm in task.arms if not arm.learned]
    best = others[-1] if others else None
    return None if best is None or best.name in COLOURS else best


def _colour(arm: ArmSummary, best: ArmSummary | None) -> str:
    if arm.learned:
        return "blue"
    return BEST if arm is best else COLOURS.get(arm.name, "grey")


def _some(rounds: Mapping[int, object]) -> list[int]:
    """The rounds to show: all, or some that are evenly spread, the last with them."""
    known = sorted(rounds)
    at = np.linspace(0, len(known) - 1, min(len(known), WATCHED)).round().astype(int)
    return [known[index] for index in at.tolist()]


def _spread(values: list[float]) -> Interval:
    known = np.array([value for value in values if isfinite(value)])
    if len(known) < 2:
        mean = float(known.mean()) if len(known) else nan
        return Interval(mean, mean, mean)
    return iqm_interval(known, resamples=1_000)


def _table(task: TaskSummary, title: str) -> Markup:
    rows: list[list[object]] = []
    strong = None
    for arm in reversed(task.arms):
        above = arm.above_never
        name: object = arm.name
        if arm.panics:
            name = together(arm.name, element("small", f" {arm.panics} panicked"))
        if arm.learned:
            strong = len(rows)
        rows.append(
            [
                name,
                _range(arm.returns, ".3f"),
                _range(arm.test, ".3f"),
                _range(arm.area, ".3f"),
                _figure(arm.parameters, ".2f", "×"),
                _figure(arm.macs, ".2f", "×"),
                _engineering(arm.training_macs),
                _figure(arm.seconds, ".2f"),
                "–" if above is None else _range(above.difference, "+.3f"),
                "–" if above is None else f"{100 * above.paired.estimate:.0f} %",
                _p(arm),
            ]
        )
    hosts = f"{task.hosts} hosts{' of each task' if task.tasks > 1 else ''}"
    caption = together(
        element("strong", title),
        f", {hosts}. Interquartile means with 95 % intervals.",
    )
    return table(caption, HEADERS, rows, strong=strong)


def _range(interval: Interval, spec: str) -> Markup:
    value = element("span", _figure(interval.estimate, spec))
    if not (isfinite(interval.low) and isfinite(interval.high)):
        return value
    low, high = _figure(interval.low, spec), _figure(interval.high, spec)
    return together(value, element("small", f"{low} to {high}"))


def _figure(value: float, spec: str, unit: str = "") -> str:
    return f"{value:{spec}}{unit}".replace("-", "−") if isfinite(value) else "–"


def _engineering(value: float) -> str:
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            digits = 0 if value >= 100 * size else 1
            return f"{value / size:.{digits}f} {sign}"
    return _figure(value, ".3g")


def _p(arm: ArmSummary) -> object:
    if arm.above_never is None:
        return "–"
    shown = "shown" if arm.above_never.shown else "not shown"
    value = element("span", f"{arm.above_never.adjusted:.2g}")
    return together(value, element("small", shown))


def _outcomes(task: TaskSummary) -> list[str]:
    """One sentence for each learned arm, or one for all others beside `never`."""
    learned = list(dict.fromkeys(duel.name for duel in task.pairwise))
    if not learned:
        rows = {arm.name: arm.above_never for arm in task.arms}
        known = {name: row for name, row in rows.items() if row is not None}
        if not known:
            return []
        above = [n for n, r in known.items() if r.shown and r.difference.estimate > 0]
        below = [n for n, r in known.items() if r.shown and r.difference.estimate < 0]
        rest = [n for n in known if n not in above and n not in below]
        parts = [
            f"{_names(above)} shown to be above {BASELINE} by return" if above else "",
            f"{_names(below)} shown to be below it" if below else "",
            f"{_names(rest)} not shown to differ from {BASELINE}" if rest else "",
        ]
        return ["; ".join(filter(None, parts)) + "."]
    said = []
    for name in learned:
        duels = {
            duel.other: duel.returns for duel in task.pairwise if duel.name == name
        }
        above = [n for n, r in duels.items() if r.shown and r.difference.estimate > 0]
        below = [n for n, r in duels.items() if r.shown and r.difference.estimate < 0]
        rest = [n for n in duels if n not in above and n not in below]
        parts = [
            f"shown to be above {_names(above)}" if above else "",
            f"shown to be below {_names(below)}" if below else "",
            f"not shown to differ from {_names(rest)}" if rest else "",
        ]
        said.append(f"the return of {name} is {'; '.join(filter(None, parts))}.")
    return said


def _names(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
