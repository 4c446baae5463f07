"""Tables and sentences of judged hosts, from the rows of a run's event store.

    summary = summarise(rows(open_store(run / "events.sqlite"), "live_evaluations"))

Figures are interquartile means over hosts with 95 % intervals. Arms are compared host
by host: all with the baseline `never`, and every learned arm with every other arm. Each
table (one task, or all) and each figure (return, test score) is one family of
comparisons, over which p-values are corrected.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.experiment.database import open_store, rows
from esper.experiment.progress import print_line, printable, sparkline
from esper.experiment.records import STATIC, is_learned, reference_of
from esper.experiment.run import STORE
from esper.experiment.statistics import (
    LEVEL,
    Comparison,
    Floats,
    Interval,
    bootstrap,
    compare_pairs,
    iqm_interval,
)

BASELINE: Final = "never"
RESAMPLES: Final = 4_000
FEW_HOSTS: Final = 10
"""Hosts below which intervals are narrower than they should be."""
FEW_ROUNDS: Final = 8
"""Rounds in a fifth of a run below which an interval over them is too narrow."""
WIDTH: Final = 150
"""Columns of a table that is not printed to a terminal."""
LEGEND: Final = (
    "Interquartile means over hosts [95 % interval]; p: paired Wilcoxon, Holm over its "
    "column; P: how often a host returns more than with never; "
    "parameters and MACs (multiply-adds per row) as a multiple of the host's; area: "
    "mean score over the decisions."
)
LABELS: Final = {"returns": "Return", "test": "Test score"}
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
    def where(self) -> str:
        """Its hosts, in a sentence."""
        each = "each of " * (self.tasks > 1)
        return f"{self.hosts} unseen hosts of {each}{self.task}"

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

    @property
    def overall(self) -> tuple[TaskSummary, ...]:
        """The table of all tasks, or of each if they cannot be added up."""
        return self.tasks if self.aggregate is None else (self.aggregate,)

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
    tables = [*tasks, *filter(None, [aggregate])]
    conclusions = [
        line
        for table in tables
        for line in (*_baseline_findings(table), *_learned_findings(table, LABELS))
    ]
    conclusions += _limits(tables)
    return Summary(tasks=tasks, aggregate=aggregate, conclusions=tuple(conclusions))


def headline(summary: Summary) -> list[str]:
    """The outcome by return: of each learned arm, or without one of all arms."""
    return [
        line
        for table in summary.overall
        for line in (
            _learned_findings(table, ["returns"]) or _baseline_findings(table)[:1]
        )
    ]


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


def _baseline_findings(table: TaskSummary) -> list[str]:
    """How all arms compare with the baseline: one line for each figure."""
    lines = []
    for figure, label in LABELS.items():
        name = "above_never" if figure == "returns" else "test_above_never"
        found = {arm.name: getattr(arm, name) for arm in table.arms}
        known = {name: row for name, row in found.items() if row is not None}
        if known:
            outcomes = _outcomes(known, f" {BASELINE!r}:")
            lines.append(f"{label} on {table.where}: {outcomes}")
    return lines


def _learned_findings(table: TaskSummary, figures: Iterable[str]) -> list[str]:
    """How every learned arm compares with the others: one line for each figure."""
    arms = {arm.name: arm for arm in table.arms}
    return [
        f"{LABELS[figure]} of {name!r} on {table.where}: "
        f"{getattr(arms[name], figure):.3f}; {_outcomes(table.against(name, figure))}"
        for name in table.learned
        for figure in figures
    ]


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


def summary_of(path: Path) -> Summary:
    """What the store of a run says of what was judged in it."""
    with closing(open_store(path / STORE)) as db:
        return summarise(rows(db, "live_evaluations"))


def print_training(path: Path, console: Console | None = None) -> None:
    """Print how the return went in a training, and its final evaluation."""
    console = console or Console()
    with closing(open_store(path / STORE)) as db:
        found = db.execute("SELECT mean_return FROM live_rounds ORDER BY round")
        returns = [nan if value is None else value for (value,) in found]
        notes = db.execute("SELECT text FROM live_notes WHERE kind = 'judged'")
        judged = [str(text) for (text,) in notes]
    print_line(console, f"Mean return per round: {sparkline(returns)}")
    print_line(console, return_trend(returns))
    summary = summary_of(path)
    if summary.tasks:
        print_scores(console, summary)
        for line in (*(f"{t[0].upper()}{t[1:]}." for t in judged), *headline(summary)):
            print_line(console, line)
    print_line(console, f"The run is in {path}.")


def print_summary(console: Console, summary: Summary) -> None:
    """Print two tables for each task, one of all tasks, and the conclusions."""
    _widen(console)
    for table in summary.tasks:
        console.print(_score_table(table))
        console.print(_cost_table(table))
    if summary.aggregate is not None:
        console.print(_score_table(summary.aggregate))
    if summary.tasks:
        print_line(console, LEGEND)
    for paragraph in summary.conclusions:
        print_line(console, paragraph)


def print_scores(console: Console, summary: Summary) -> None:
    """Print the scores over all tasks, or of each if they cannot be added up."""
    _widen(console)
    for table in summary.overall:
        console.print(_score_table(table))
    print_line(console, LEGEND)


def _widen(console: Console) -> None:
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)


def _score_table(summary: TaskSummary) -> Table:
    title = f"{summary.task}: {summary.hosts} unseen hosts"
    if summary.tasks > 1:
        title += " of each"
    above = ("above never", "p")
    columns = ("return", *above, "P(above never)", "test score, %", *above)
    rows = []
    for arm in summary.arms:
        returns, test = arm.above_never, arm.test_above_never
        row = [_interval(arm.returns, ".3f"), "", "", ""]
        if returns is not None:
            row[1:] = (
                _interval(returns.difference, "+.3f"),
                f"{returns.adjusted:.2g}",
                f"{returns.improvement:.2f}",
            )
        row.append(_interval(arm.test, ".1f", 100.0))
        if test is not None:
            row.append(_interval(test.difference, "+.1f", 100.0))
            row.append(f"{test.adjusted:.2g}")
        rows.append(row)
    return _arm_table(title, columns, summary, rows)


def _cost_table(summary: TaskSummary) -> Table:
    columns = ("parameters", "MACs", "training GMAC", "seconds", "area, %", "panics")
    rows = [
        [
            f"{arm.parameters:.2f} x",
            f"{arm.macs:.2f} x",
            f"{arm.training_macs / 1e9:.3f}",
            f"{arm.seconds:.2f}",
            _interval(arm.area, ".1f", 100.0),
            str(arm.panics),
        ]
        for arm in summary.arms
    ]
    return _arm_table(f"{summary.task}: costs", columns, summary, rows)


def _arm_table(
    title: str,
    columns: Sequence[str],
    summary: TaskSummary,
    rows: Sequence[Sequence[str]],
) -> Table:
    table = Table(title=Text(printable(title)), title_justify="left")
    table.add_column("controller")
    for column in columns:
        table.add_column(column, justify="right")
    for arm, row in zip(summary.arms, rows, strict=True):
        style = "bold" if arm.learned else ""
        table.add_row(Text(printable(arm.name)), *row, style=style)
    return table


def _interval(it: Interval, spec: str, scale: float = 1.0) -> str:
    """An interval, or the estimate alone if there was one host."""
    scaled = Interval(scale * it.estimate, scale * it.low, scale * it.high)
    return f"{scaled.estimate:{spec}}" if isnan(it.low) else f"{scaled:{spec}}"


def _finite(values: Sequence[float]) -> Floats:
    known = np.asarray(values, dtype=np.float64)
    return known[np.isfinite(known)]
