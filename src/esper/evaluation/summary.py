"""Tables and sentences about test hosts, from the rows of a run's event store.

    summary = summarise(rows(open_store(run / "events.sqlite"), "live_evaluations"))

Figures are interquartile means over hosts with 95 % intervals. Arms are compared host
by host: all with the baseline `never`, and every trained arm with every other arm. An
arm is above or below another if the 95 % interval of the difference excludes 0.
p-values are corrected over all comparisons of one table and one figure.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.contracts.messages import printable
from esper.evaluation.statistics import (
    Comparison,
    Interval,
    bootstrap,
    compare_pairs,
    iqm_interval,
    mean_interval,
)
from esper.runs.database import open_store, rows
from esper.runs.progress import print_line, sparkline
from esper.runs.records import (
    STATIC,
    TEST,
    VALIDATION,
    Floats,
    bounded,
    interquartile_mean,
    is_learned,
    reference_of,
)
from esper.runs.run import STORE

BASELINE: Final = "never"
RESAMPLES: Final = 4_000
FEW_HOSTS: Final = 10
"""Number of hosts below which intervals are too narrow."""
FEW_ROUNDS: Final = 8
"""Rounds in a fifth of a run below which an interval over them is too narrow."""
WIDTH: Final = 150
"""Columns of a table outside of a terminal."""
LEGEND: Final = (
    "Interquartile means over hosts [95 % interval]; mean: over all hosts, "
    "of returns bounded to [-1, 1]; p: paired "
    "Wilcoxon, Holm-corrected per column; P: fraction of hosts with a higher return "
    "than never, ties count half; parameters and MACs (multiply-adds per row) as "
    "multiples of the host's; area: mean score over the decisions."
)
OUTCOMES: Final = {
    "above": "above",
    "below": "below",
    "unclear": "no clear difference from",
}
LABELS: Final = {"returns": "Return", "test": "Test score"}
Row = Mapping[str, Any]
Comparisons = dict[tuple[str, str], Comparison]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One row of a table."""

    name: str
    returns: Interval
    """See `EvalResult.returns`."""
    mean: Interval
    """Mean of the returns bounded to [-1, 1], which includes all hosts."""
    test: Interval
    """Accuracy on the test split."""
    area: Interval
    """Mean accuracy on the validation split over the episode."""
    parameters: float
    """Mean size of the final network, as a multiple of the host's."""
    macs: float
    """Mean multiply-adds per row of the final network, as a multiple of the host's."""
    training_macs: float
    """Mean multiply-adds of the training, measurements included."""
    seconds: float
    """Mean time of the training."""
    panics: int
    """Number of hosts with values that were not finite."""

    @property
    def learned(self) -> bool:
        """Whether it is a trained controller."""
        return is_learned(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairwiseComparison:
    """The difference of two arms."""

    name: str
    other: str
    returns: Comparison
    test: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """One table: all arms on one task, or on all tasks together."""

    task: str
    """Name of the task, or names of all tasks in one line."""
    tasks: int
    hosts: int
    """Hosts per task."""
    arms: tuple[ArmSummary, ...]
    """Lowest return first."""
    pairwise: tuple[PairwiseComparison, ...]
    """Every arm against `never`, and every trained one against every other."""

    def above_never(self, name: str) -> PairwiseComparison | None:
        """The comparison of an arm with `never`, if there is one."""
        pairs = (pair for pair in self.pairwise if pair.other == BASELINE)
        return next((pair for pair in pairs if pair.name == name), None)

    @property
    def where(self) -> str:
        """The hosts, as part of a sentence."""
        each = "each of " * (self.tasks > 1)
        return f"{self.hosts} unseen hosts of {each}{self.task}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All tables of the last evaluation."""

    tasks: tuple[TaskSummary, ...]
    aggregate: TaskSummary | None
    """Over all tasks; None if there is only one, or if their arms differ."""
    conclusions: tuple[str, ...]
    """Findings and limits, one paragraph each."""

    @property
    def overall(self) -> tuple[TaskSummary, ...]:
        """The table of all tasks, or one per task if they cannot be combined."""
        return self.tasks if self.aggregate is None else (self.aggregate,)

    def as_data(self) -> dict[str, Any]:
        """The summary as JSON values; figures that are not finite are None."""
        text = json.dumps(asdict(self))
        data: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
        return data


def summarise(rows: Iterable[Row], *, resamples: int = RESAMPLES) -> Summary:
    """Tables and conclusions of the last evaluation on test hosts."""
    found = [row for row in rows if row["stage"] == TEST]
    last = max((row["round"] for row in found), default=0)
    by_arm: dict[str, dict[str, list[Row]]] = {}
    # Workers finish in any order.
    for row in sorted(found, key=lambda r: (r["task"], r["controller"], r["host"])):
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
        line for table in tables for part in _findings(table, LABELS) for line in part
    ]
    conclusions += _limits(tables)
    return Summary(tasks=tasks, aggregate=aggregate, conclusions=tuple(conclusions))


def headline(summary: Summary) -> list[str]:
    """One sentence per table: how each trained arm did, or all arms without one."""
    return [line for table in summary.overall for line in _conclusion(table)]


def return_trend(returns: Sequence[float]) -> str:
    """Whether the return rose: the last fifth of rounds against the first."""
    known = np.asarray(returns, dtype=np.float64)
    known = known[np.isfinite(known)]
    fifth = len(known) // 5
    if fifth < FEW_ROUNDS:
        return (
            f"Too few rounds to see a trend in the return: {len(known)}; at least "
            f"{5 * FEW_ROUNDS} are needed."
        )
    first, last = known[:fifth], known[-fifth:]
    rise = bootstrap(
        [fifth, fifth],
        lambda early, late: (late @ last - early @ first) / fifth,
        student=True,
    )
    change = "did not change clearly"
    if rise.low > 0 or rise.high < 0:
        change = "rose" if rise.low > 0 else "fell"
    return (
        f"The return {change}: {first.mean():.4f} in the first {fifth} rounds, "
        f"{last.mean():.4f} in the last {fifth}, by {rise:+.4f} (95 % over rounds)."
    )


def validation_returns(
    evaluations: Iterable[Row],
) -> dict[int, dict[tuple[str, int], float]]:
    """Returns on the validation hosts: by round, then by task and host."""
    found: dict[int, dict[tuple[str, int], float]] = {}
    for row in evaluations:
        if row["stage"] == VALIDATION and row["return"] is not None:
            own = found.setdefault(row["round"], {})
            own[row["task"], row["host"]] = row["return"]
    return found


def validation_trend(evaluations: Iterable[Row]) -> str | None:
    """The change on the validation hosts from the first round to the last.

    The best round would be biased, since these hosts selected it.
    """
    found = validation_returns(evaluations)
    if len(found) < 2:
        return None
    start, end = min(found), max(found)
    by_task: dict[str, list[float]] = {}
    returns = {round: np.array([*found[round].values()]) for round in (start, end)}
    for task, host in found[end].keys() & found[start].keys():
        pair = np.array([found[end][task, host], found[start][task, host]])
        by_task.setdefault(task, []).append(-float(np.diff(bounded(pair))[0]))
    total = mean_interval([np.sort(own) for own in by_task.values()])
    means = [bounded(own).mean() for own in returns.values()]
    iqms = [f"{interquartile_mean(own):+.3f}" for own in returns.values()]
    by = f"{total.estimate:+.3f}"
    if not np.isnan(total.low):  # one host has no interval
        by = f"{total:+.3f} (95 % over hosts)"
    return (
        f"On the validation hosts: {means[0]:+.3f} at round {start}, "
        f"{means[1]:+.3f} at round {end}, by {by}. Interquartile means: "
        f"{iqms[0]} and {iqms[1]}."
    )


def _table(
    title: str, by_arm: Mapping[str, Mapping[str, Sequence[Row]]], resamples: int
) -> TaskSummary:
    """One table of tasks that have the same arms."""
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
    shapes = {name: values.shape for name, values in scores["return"].items()}

    def compared(figure: str, pairs: Iterable[tuple[str, str]]) -> Comparisons:
        """Compare pairs that have the same hosts, as one family."""
        arms = scores[figure]
        wanted = dict[tuple[str, str], tuple[Floats, Floats]]()
        for name, other in pairs:
            fits = shapes[name] == shapes.get(other) != (len(by_arm), 1)
            if name != other and fits and (other, name) not in wanted:
                wanted[name, other] = (arms[name], arms[other])
        found = compare_pairs(wanted, resamples=resamples)
        # Two trained arms are one comparison, shown for both.
        both = {(b, a): row.reversed for (a, b), row in found.items() if is_learned(b)}
        return {**found, **both}

    # Comparisons with the baseline are a family of their own.
    others = [name for name in names if name != BASELINE]
    own = [(name, other) for name in filter(is_learned, names) for other in others]
    returns, test = (
        compared(figure, [(name, BASELINE) for name in names]) | compared(figure, own)
        for figure in ("return", "test")
    )
    arms = []
    for name in names:
        rows = [row for arms in by_arm.values() for row in arms[name]]
        spread = {
            figure: iqm_interval(values[name], resamples=resamples)
            if np.isfinite(values[name]).all()
            else Interval(nan, nan, nan)  # not measured
            for figure, values in scores.items()
        }
        arms.append(
            ArmSummary(
                name=name,
                returns=spread["return"],
                mean=mean_interval(
                    bounded(scores["return"][name]), resamples=resamples
                ),
                test=spread["test"],
                area=spread["area"],
                parameters=1.0 + _mean(rows, "added"),
                macs=_mean(rows, "macs"),
                training_macs=_mean(rows, "training_macs"),
                seconds=_mean(rows, "seconds"),
                panics=sum(bool(row["panicked"]) for row in rows),
            )
        )
    return TaskSummary(
        task=title,
        tasks=len(by_arm),
        hosts=min(hosts for _, hosts in shapes.values()),
        arms=tuple(sorted(arms, key=lambda arm: arm.returns.estimate)),
        pairwise=tuple(
            PairwiseComparison(
                name=name, other=other, returns=row, test=test[name, other]
            )
            for (name, other), row in returns.items()
        ),
    )


def _mean(rows: Sequence[Row], figure: str) -> float:
    return float(np.mean([nan if row[figure] is None else row[figure] for row in rows]))


def _findings(
    table: TaskSummary, figures: Collection[str]
) -> tuple[list[str], list[str]]:
    """How arms compare with the baseline, and each trained arm with all others."""
    baseline, learned = [], []
    if known := [pair for pair in table.pairwise if pair.other == BASELINE]:
        for figure in figures:
            rows = {pair.name: getattr(pair, figure) for pair in known}
            outcomes = _outcomes(rows, f" {BASELINE!r}:")
            baseline.append(f"{LABELS[figure]} on {table.where}: {outcomes}")
    for arm in filter(lambda arm: arm.learned, table.arms):
        own = [pair for pair in table.pairwise if pair.name == arm.name]
        for figure in figures if own else ():
            rows = {pair.other: getattr(pair, figure) for pair in own}
            learned.append(
                f"{LABELS[figure]} of {arm.name!r} on {table.where}: "
                f"{getattr(arm, figure):.3f}; {_outcomes(rows)}"
            )
    return baseline, learned


def _conclusion(table: TaskSummary) -> list[str]:
    """The outcome by return, in one sentence for each trained arm."""
    where = f"On {table.where}, "
    lines = []
    for arm in filter(lambda arm: arm.learned, table.arms):
        own = [pair for pair in table.pairwise if pair.name == arm.name]
        found = []
        for outcome, label in OUTCOMES.items():
            names = [pair.other for pair in own if pair.returns.outcome == outcome]
            verb = "shows" if outcome == "unclear" else "is"
            found += [f"{verb} {label} {_named(names, own)}"] if names else []
        if found:
            lines.append(f"{where}{arm.name!r} {_joined(found)}.")
    known = [pair for pair in table.pairwise if pair.other == BASELINE]
    if lines or not known:
        return lines
    best = table.arms[-1].name
    above = _named([p.name for p in known if p.returns.outcome == "above"], known)
    return [
        f"{where}{best!r} has the highest return; "
        f"clearly above {BASELINE!r}: {above or 'no arm'}."
    ]


def _named(names: Sequence[str], pairs: Sequence[PairwiseComparison]) -> str:
    """One or two names, or how many of all other arms they are."""
    if len(names) > 2:
        count = "all" if len(names) == len(pairs) else f"{len(names)} of"
        return f"{count} {len(pairs)} other arms"
    return " and ".join(map(repr, names))


def _joined(parts: Sequence[str]) -> str:
    """Parts of a sentence: `a`, `a and b`, or `a, b, and c`."""
    if len(parts) < 3:
        return " and ".join(parts)
    return f"{', '.join(parts[:-1])}, and {parts[-1]}"


def _outcomes(rows: Mapping[str, Comparison], than: str = "") -> str:
    """Names grouped by outcome, with difference, interval and p."""
    parts = []
    for outcome, label in OUTCOMES.items():
        names = [
            f"{name!r} ({row.difference:+.3f}, p = {row.adjusted:.2g})"
            for name, row in rows.items()
            if row.outcome == outcome
        ]
        if names:
            parts.append(f"{label}{than} {', '.join(names)}")
    return f"{'; '.join(parts)}."


def _limits(tables: Sequence[TaskSummary]) -> list[str]:
    """Limits of all comparisons."""
    if not tables:
        return []
    hosts = min(table.hosts for table in tables)
    narrow = ", too few for reliable intervals"
    lines = [
        "Above and below: the 95 % interval of the difference excludes 0. p: paired "
        "Wilcoxon, corrected for all comparisons with the baseline, and for all "
        "comparisons of trained controllers with others. There are "
        f"{hosts} hosts per task{narrow if hosts < FEW_HOSTS else ''}. The results do "
        "not cover other tasks, other hosts or longer training. Hosts of one task "
        "share one split of its rows (except on teacher), so the intervals do not "
        "cover the variation between splits."
    ]
    names = list(dict.fromkeys(arm.name for table in tables for arm in table.arms))
    learned = [repr(name) for name in names if is_learned(name)]
    if learned:
        lines.append(
            f"{', '.join(learned)}: one training each. Intervals are over hosts, not "
            "over trainings."
        )
    static = [repr(name) for name in names if name in STATIC]
    if static:
        lines.append(
            f"{', '.join(static)}: matched to the final size or compute of "
            f"{reference_of(names)!r}. All arms use the task's learning rate, which "
            "was tuned for the plain host; another rate might suit them better."
        )
    return lines


def summary_of(path: Path) -> Summary:
    """The summary of a run's test hosts."""
    with closing(open_store(path / STORE)) as db:
        return summarise(rows(db, "live_evaluations"))


def print_training(path: Path, console: Console | None = None) -> None:
    """Print the course of a training and its final evaluation."""
    console = console or Console()
    with closing(open_store(path / STORE)) as db:
        found = db.execute("SELECT mean_return FROM live_rounds ORDER BY round")
        returns = [nan if value is None else value for (value,) in found]
        notes = db.execute("SELECT text FROM live_notes WHERE kind = ?", [TEST])
        remarks = [str(text) for (text,) in notes]
        trend = validation_trend(rows(db, "live_evaluations"))
    print_line(console, f"Mean return per round: {sparkline(returns)}")
    # Tasks may differ between rounds; the validation hosts do not.
    print_line(console, trend or return_trend(returns))
    summary = summary_of(path)
    if summary.tasks:
        print_summary(console, summary, costs=False)
        for line in (*(f"{t[0].upper()}{t[1:]}." for t in remarks), *headline(summary)):
            print_line(console, line)
    print_line(console, f"The run is in {path}.")


def print_summary(console: Console, summary: Summary, *, costs: bool = True) -> None:
    """Print score tables; with `costs` also each task's costs and conclusions."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for table in summary.tasks if costs else ():
        console.print(_score_table(table))
        console.print(_cost_table(table))
    for table in summary.overall if not costs or summary.aggregate else ():
        console.print(_score_table(table))
    if summary.tasks:
        print_line(console, LEGEND)
    for paragraph in summary.conclusions if costs else ():
        print_line(console, paragraph)


def _score_table(summary: TaskSummary) -> Table:
    title = f"{summary.task}: {summary.hosts} unseen hosts"
    if summary.tasks > 1:
        title += " of each"
    # Returns of relative worlds are differences from never already.
    never = [arm.returns for arm in summary.arms if arm.name == BASELINE]
    relative = never == [Interval(0.0, 0.0, 0.0)]
    columns = ["return", "mean", "above never", "p", "P(above never)"]
    columns += ["test score, %", "above never", "p"]
    rows = []
    for arm in summary.arms:
        row = [_interval(arm.returns, ".3f"), f"{arm.mean.estimate:.3f}", "", "", ""]
        row += [_interval(arm.test, ".1f", 100.0), "", ""]
        if pair := summary.above_never(arm.name):
            row[2:5] = (
                _interval(pair.returns.difference, "+.3f"),
                f"{pair.returns.adjusted:.2g}",
                f"{pair.returns.improvement:.2f}",
            )
            row[6:] = (
                _interval(pair.test.difference, "+.1f", 100.0),
                f"{pair.test.adjusted:.2g}",
            )
        rows.append(row)
    if relative:
        for row in (columns, *rows):
            del row[2]
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
    """An interval, or only the estimate for one host."""
    scaled = Interval(scale * it.estimate, scale * it.low, scale * it.high)
    return f"{scaled.estimate:{spec}}" if isnan(it.low) else f"{scaled:{spec}}"
