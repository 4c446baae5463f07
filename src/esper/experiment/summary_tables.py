"""Tables of a summary on the console."""

from collections.abc import Sequence
from math import isnan
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.experiment.progress import print_line, printable
from esper.experiment.statistics import Interval
from esper.experiment.summary import Summary, TaskSummary

WIDTH: Final = 150
"""Columns of a table that is not printed to a terminal."""
LEGEND: Final = (
    "Interquartile means over hosts [95 % interval]; p: paired Wilcoxon, Holm over its "
    "column; P: how often a host returns more than with never; "
    "parameters and MACs (multiply-adds per row) as a multiple of the host's; area: "
    "mean score over the decisions."
)


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
    for table in [summary.aggregate] if summary.aggregate else summary.tasks:
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
