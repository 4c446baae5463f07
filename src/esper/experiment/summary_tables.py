"""What was judged, as tables and words for people."""

from collections.abc import Sequence
from math import isnan
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.experiment.statistics import Interval
from esper.experiment.summary import Summary, TaskSummary
from esper.experiment.verdict import Against

WIDTH: Final = 150
"""Columns of a table that is not shown in a terminal."""
LEGEND: Final = (
    "Interquartile means over hosts [95 % interval]; p: paired Wilcoxon, Holm over its "
    "column; P: how often a host returns more than one of never's, drawn by chance; "
    "parameters and MACs (multiply-adds per row) as a multiple of the host's; area: "
    "mean score over the decisions."
)


def print_summary(console: Console, summary: Summary) -> None:
    """Print tables for each task and one of all, then what they show."""
    _widen(console)
    for table in summary.tasks:
        console.print(_worth(table))
        console.print(_costs(table, f"{table.task}: what it took"))
    if summary.aggregate is not None:
        console.print(_worth(summary.aggregate))
    if summary.tasks:
        print_line(console, LEGEND)
    for paragraph in summary.words:
        print_line(console, paragraph)


def print_worth(console: Console, summary: Summary) -> None:
    """Print the table of all tasks only, or one of each if they do not fit in one."""
    _widen(console)
    tables = summary.tasks if summary.aggregate is None else (summary.aggregate,)
    for table in tables:
        console.print(_worth(table))
    print_line(console, LEGEND)


def print_line(console: Console, text: str) -> None:
    """Print a line of words as it is, without what would move a cursor."""
    console.print(_plain(text), highlight=False, markup=False, soft_wrap=True)


def _plain(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _widen(console: Console) -> None:
    """Give tables room where nobody looks at a screen."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)


def _worth(summary: TaskSummary) -> Table:
    title = f"{summary.task}: {summary.hosts} unseen hosts"
    if summary.tasks > 1:
        title += " of each"
    above = ("above never", "p")
    columns = ("return", *above, "P(above never)", "test score, %", *above)
    table = _begun(title, columns)
    for arm in summary.arms:
        table.add_row(
            Text(_plain(arm.name)),
            _interval(arm.returns, ".3f"),
            *_above(arm.above_never, "+.3f", 1.0),
            _chance(arm.above_never),
            _interval(arm.test, ".1f", 100.0),
            *_above(arm.test_above_never, "+.1f", 100.0),
            style="bold" if arm.learned else "",
        )
    return table


def _costs(summary: TaskSummary, title: str) -> Table:
    columns = ("parameters", "MACs", "training GMAC", "seconds", "area, %", "panics")
    table = _begun(title, columns)
    for arm in summary.arms:
        table.add_row(
            Text(_plain(arm.name)),
            f"{arm.parameters:.2f} x",
            f"{arm.macs:.2f} x",
            f"{arm.training_macs / 1e9:.3f}",
            f"{arm.seconds:.2f}",
            _interval(arm.area, ".1f", 100.0),
            str(arm.panics),
            style="bold" if arm.learned else "",
        )
    return table


def _begun(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(_plain(title)), title_justify="left")
    table.add_column("controller")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _above(row: Against | None, spec: str, scale: float) -> tuple[str, str]:
    if row is None:
        return "", ""
    return _interval(row.difference, spec, scale), f"{row.adjusted:.2g}"


def _chance(row: Against | None) -> str:
    return "" if row is None else f"{row.improvement:.2f}"


def _interval(it: Interval, spec: str, scale: float = 1.0) -> str:
    """An interval, or the estimate alone if there was one host."""
    scaled = Interval(scale * it.estimate, scale * it.low, scale * it.high)
    return f"{scaled.estimate:{spec}}" if isnan(it.low) else f"{scaled:{spec}}"
