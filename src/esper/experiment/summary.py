"""Tables and sentences of judged hosts, from the rows of a run's event store.

    summary = summarise(rows(open_store(run / "events.sqlite"), "live_evaluations"))

Figures are interquartile means over hosts with 95 % intervals. Arms are compared host
by host: all with the baseline `never`, and every learned arm with every other arm. Each
table (one task, or all) and each figure (return, test score) is one family of
comparisons, over which p-values are corrected.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from typing import Any, Final

import numpy as np

from esper.experiment.records import STATIC
from esper.experiment.statistics import (
    LEVEL,
    Comparison,
    Floats,
    Interval,
    bootstrap,
    compare_pairs,
    iqm_interval,
)
from esper.tamiyo.registry import CONTROLLERS

BASELINE: Final = "never"
RESAMPLES: Final = 4_000
FEW_HOSTS: Final = 10
"""Hosts below which intervals are narrower than they should be."""
FEW_ROUNDS: Final = 8
"""Rounds in a fifth of a run below which an interval over them is too narrow."""
BARS: Final = "▁▂▃▄▅▆▇█"
COLUMNS: Final = 60
"""Bars of a sparkline, at most."""
Row = Mapping[str, Any]
Comparisons = dict[tuple[str, str], Comparison]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One row of a table."""

    name: str
    returns: Interval
    """Score gained on the decision rows, less rent."""
    test: Interval
    """Accuracy on test rows."""
    area: Interval
    """Mean accuracy on decision rows over the episode."""
    parameters: float
    """Of the final network, as a multiple of the host's; mean."""
    macs: float
    """Multiply-adds per row of the final network, the same way."""
    training_macs: float
    """Multiply-adds of the training, measurements included; mean."""
    seconds: float
    """Of the training; mean."""
    panics: int
    """Hosts whose numbers were no longer finite."""
    above_never: Comparison | None
    """By return; None for `never` itself, or if there is none to compare with."""
    test_above_never: Comparison | None
    """By test score."""

    @property
    def learned(self) -> bool:
        """Whether it is a trained controller."""
        return is_learned(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairwiseComparison:
    """A learned arm less another one."""

    name: str
    other: str
    returns: Comparison
    test: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """One table: all arms on one task, or on all tasks together."""

    task: str
    """Its name; of all tasks, their names in one line."""
    tasks: int
    hosts: int
    """Of each task."""
    arms: tuple[ArmSummary, ...]
    """Lowest return first."""
    pairwise: tuple[PairwiseComparison, ...]

    @property
    def learned(self) -> list[str]:
        """Learned arms that are compared with others."""
        return list(dict.fromkeys(pair.name for pair in self.pairwise))

    def against(self, name: str, figure: str) -> dict[str, Comparison]:
        """Comparisons of a learned arm by `returns` or `test`, by the other's name."""
        pairs = [pair for pair in self.pairwise if pair.name == name]
        return {pair.other: getattr(pair, figure) for pair in pairs}

    @property
    def smallest_p(self) -> float:
        """The smallest adjusted p that so many pairs and arms can give."""
        pairs, count = self.tasks * self.hosts, max(1, len(self.arms) - 1)
        return min(1.0, count * 2.0 ** (1 - pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All tables of the last judgement."""

    tasks: tuple[TaskSummary, ...]
    aggregate: TaskSummary | None
    """Over all tasks; None if there is one, or if they do not have the same arms."""
    conclusions: tuple[str, ...]
    """What is shown, what is not, and the limits; one paragraph each."""

    def as_data(self) -> dict[str, Any]:
        """The same in types that JSON has; a figure that is not finite is None."""
        text = json.dumps(asdict(self))
        data: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
        return data


def summarise(rows: Iterable[Row], *, resamples: int = RESAMPLES) -> Summary:
    """Tables and conclusions of the last judgement.

    Args:
        rows: Of the table `evaluations`; those made during training do not count.
        resamples: How often hosts are drawn.
    """
    judged = [row for row in rows if row["stage"] == "judged"]
    last = max((row["round"] for row in judged), default=0)
    by_arm: dict[str, dict[str, list[Row]]] = {}
    # Processes write their rows in any order.
    for row in sorted(judged, key=lambda r: (r["task"], r["controller"], r["host"])):
        if row["round"] == last:
            arms = by_arm.setdefault(row["task"], {})
            arms.setdefault(row["controller"], []).append(row)
    tasks = tuple(_table(task, {task: by_arm[task]}, resamples) for task in by_arm)
    shapes = [{n: len(rows) for n, rows in arms.items()} for arms in by_arm.values()]
    aggregate = None
    if len(tasks) > 1 and all(shape == shapes[0] for shape in shapes):
        aggregate = _table(", ".join(by_arm), by_arm, resamples)
    conclusions = [line for table in tasks for line in _findings(table.task, table)]
    if aggregate is not None:
        conclusions += _findings("All tasks together", aggregate)
    conclusions += _limits([*tasks, *filter(None, [aggregate])])
    return Summary(tasks=tasks, aggregate=aggregate, conclusions=tuple(conclusions))


def is_learned(name: str) -> bool:
    """Whether an arm of this name is a trained controller."""
    return name not in CONTROLLERS and name not in STATIC


def reference_of(names: Iterable[str]) -> str | None:
    """The arm that static ones are measured by: the first learned one, else `early`."""
    known = list(names)
    return min(filter(is_learned, known), default="early" if "early" in known else None)


def headline(summary: Summary) -> list[str]:
    """The outcome by return, one paragraph for each learned arm.

    Over all tasks if they can be added up, else task by task. Without a learned arm,
    all arms are held against `never`.
    """
    lines = []
    for table in [summary.aggregate] if summary.aggregate else summary.tasks:
        where = f"{table.hosts} unseen hosts of {'each of ' * (table.tasks > 1)}"
        where += table.task
        returns = {arm.name: arm.returns for arm in table.arms}
        for name in table.learned:
            outcomes = _outcomes(table.against(name, "returns"))
            line = f"{name}'s return on {where}: {returns[name]:.3f}; {outcomes}"
            lines.append(line)
        above = {arm.name: arm.above_never for arm in table.arms if arm.above_never}
        if above and not table.learned:
            outcomes = _outcomes(above, f" {BASELINE!r}:")
            lines.append(f"By return on {where}: {outcomes}")
    return lines


def return_trend(returns: Sequence[float]) -> str:
    """Whether the return rose in training: the last fifth of rounds less the first.

    Args:
        returns: Mean return of every round, NaN where no episode ended.
    """
    known = _finite(returns)
    fifth = len(known) // 5
    if fifth < FEW_ROUNDS:
        return (
            f"Too few rounds to tell whether the return rose: {len(known)}, and "
            f"{5 * FEW_ROUNDS} are needed."
        )
    first, last = known[:fifth], known[-fifth:]
    rise = bootstrap(
        [fifth, fifth],
        lambda early, late: (late @ last - early @ first) / fifth,
        student=True,
    )
    clear = rise.low > 0 or rise.high < 0
    change = (
        "did not change clearly" if not clear else "rose" if rise.low > 0 else "fell"
    )
    return (
        f"The return {change}: {first.mean():.4f} in the first {fifth} rounds, "
        f"{last.mean():.4f} in the last {fifth}, by {rise:+.4f} (95 % over rounds)."
    )


def sparkline(values: Sequence[float]) -> str:
    """Values as bars from the least to the largest; neighbours share a bar."""
    known = _finite(values)
    if not len(known):
        return ""
    parts = np.array_split(known, min(COLUMNS, len(known)))
    means = np.array([part.mean() for part in parts])
    share = (means - means.min()) / max(float(np.ptp(means)), 1e-12)  # all may be equal
    return "".join(BARS[round(level * (len(BARS) - 1))] for level in share.tolist())


def _table(
    title: str, by_arm: Mapping[str, Mapping[str, Sequence[Row]]], resamples: int
) -> TaskSummary:
    """One table of some tasks, which have the same arms."""
    names = [*next(iter(by_arm.values()))]
    scores = {
        figure: {
            name: np.array(
                [[row[figure] for row in arms[name]] for arms in by_arm.values()],
                dtype=np.float64,
            )
            for name in names
        }
        for figure in ("return", "test", "area")
    }
    learned = [name for name in names if is_learned(name)]
    others = [name for name in names if name != BASELINE]
    baseline, pairwise = {}, {}
    for figure in ("return", "test"):
        with_never = [(name, BASELINE) for name in names]
        baseline[figure] = _compare(scores[figure], with_never, resamples)
        own = [(name, other) for name in learned for other in others]
        # A comparison with the baseline belongs to the family of the baseline only.
        pairwise[figure] = {
            pair: row for pair, row in baseline[figure].items() if pair[0] in learned
        } | _compare(scores[figure], own, resamples)
    arms = []
    for name in names:
        rows = [row for arms in by_arm.values() for row in arms[name]]
        spread = {
            figure: iqm_interval(values[name], resamples=resamples)
            for figure, values in scores.items()
        }
        arms.append(
            ArmSummary(
                name=name,
                returns=spread["return"],
                test=spread["test"],
                area=spread["area"],
                parameters=1.0 + _mean(rows, "added"),
                macs=_mean(rows, "macs"),
                training_macs=_mean(rows, "training_macs"),
                seconds=_mean(rows, "seconds"),
                panics=sum(bool(row["panicked"]) for row in rows),
                above_never=baseline["return"].get((name, BASELINE)),
                test_above_never=baseline["test"].get((name, BASELINE)),
            )
        )
    return TaskSummary(
        task=title,
        tasks=len(by_arm),
        hosts=min(values.shape[1] for values in scores["return"].values()),
        arms=tuple(sorted(arms, key=lambda arm: arm.returns.estimate)),
        pairwise=tuple(
            PairwiseComparison(
                name=name, other=other, returns=row, test=pairwise["test"][name, other]
            )
            for (name, other), row in pairwise["return"].items()
        ),
    )


def _compare(
    scores: Mapping[str, Floats], pairs: Iterable[tuple[str, str]], resamples: int
) -> Comparisons:
    """Comparisons of the pairs that are there and have the same hosts."""
    wanted = {}
    for name, other in pairs:
        if name != other and other in scores:
            x, y = scores[name], scores[other]
            if x.shape == y.shape and x.shape[1] > 1:
                wanted[name, other] = (x, y)
    return compare_pairs(wanted, resamples=resamples)


def _mean(rows: Sequence[Row], figure: str) -> float:
    return float(np.mean([nan if row[figure] is None else row[figure] for row in rows]))


def _findings(title: str, table: TaskSummary) -> list[str]:
    """One paragraph for each figure of a table, then of each learned arm."""
    lines = []
    for figure, label in (
        ("above_never", "return"),
        ("test_above_never", "test score"),
    ):
        found = {arm.name: getattr(arm, figure) for arm in table.arms}
        known = {name: row for name, row in found.items() if row is not None}
        if known:
            lines.append(f"{title}, {label}: {_outcomes(known, f' {BASELINE!r}:')}")
    for name in table.learned:
        for figure, label in (("returns", "return"), ("test", "test score")):
            outcomes = _outcomes(table.against(name, figure))
            lines.append(f"{title}, {label} of {name!r}: {outcomes}")
    return lines


def _outcomes(rows: Mapping[str, Comparison], than: str = "") -> str:
    """Names by outcome, with the difference, or with p where none is shown."""
    parts = []
    for outcome, label in (
        ("above", f"shown above{than}"),
        ("below", f"shown below{than}"),
        ("open", f"not shown to differ from{than}"),
    ):
        names = [
            f"{name!r} (p = {row.adjusted:.2g})"
            if outcome == "open"
            else f"{name!r} ({row.difference.estimate:+.4f})"
            for name, row in rows.items()
            if row.outcome == outcome
        ]
        if names:
            parts.append(f"{label} {', '.join(names)}")
    return f"{'; '.join(parts)}."


def _limits(tables: Sequence[TaskSummary]) -> list[str]:
    """What holds of all comparisons."""
    if not tables:
        return []
    lines = [
        f"{table.task}: with {table.tasks * table.hosts} hosts and "
        f"{len(table.arms) - 1} comparisons no adjusted p can be below "
        f"{table.smallest_p:.2g}, so nothing could have been shown: judge more hosts."
        for table in tables
        if table.smallest_p >= LEVEL and len(table.arms) > 1
    ]
    hosts = min(table.hosts for table in tables)
    narrow = "; intervals of so few are narrower than they should be"
    lines.append(
        f"A difference is shown if its p-value, corrected for all comparisons of its "
        f"table, is below {LEVEL:g}, its interval leaves out 0 and most hosts agree. "
        f"This rests on {hosts} hosts of each task"
        f"{narrow if hosts < FEW_HOSTS else ''}; it says nothing about other tasks, "
        "other hosts or longer training. Hosts of one task share a split of its rows "
        "(not on teacher), so the luck of the split is not in the intervals."
    )
    names = list(dict.fromkeys(arm.name for table in tables for arm in table.arms))
    learned = [repr(name) for name in names if is_learned(name)]
    if learned:
        lines.append(
            f"{', '.join(learned)}: one training each. Intervals are over hosts, so "
            "they say nothing about controllers that are trained anew."
        )
    static = [repr(name) for name in names if name in STATIC]
    if static:
        lines.append(
            f"{', '.join(static)}: matched to what {reference_of(names)!r} ended "
            "with. Every arm has the task's own learning rate, which was tuned for the "
            "plain host alone: a rate of its own might make each of them better."
        )
    return lines


def _finite(values: Sequence[float]) -> Floats:
    known = np.asarray(values, dtype=np.float64)
    return known[np.isfinite(known)]
