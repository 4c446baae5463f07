"""How benchmarks measure: both sides in one process, alternating, best of repeats.

Machines are noisy, so only ratios of one run are quoted. Alternating lets a slow
minute hit both sides; the minimum is the time without interruptions.
"""

import gc
import json
import platform
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

Cell = str | float | int | None
Size = TypeVar("Size")
QUICK = False
"""Whether every side is called once only, to see that it works; `--quick` sets it."""
WIDTH = 140
"""Columns of a table that is not shown in a terminal."""


def sizes(every: Sequence[Size]) -> Sequence[Size]:
    """All sizes; with `--quick` the first."""
    return every[:1] if QUICK else every


def alternate(
    sides: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 0.3,
    rounds: int = 5,
    budget: float = 4.0,
) -> dict[str, float]:
    """Best seconds per call of each side, measured turn by turn.

    Args:
        sides: What to call, by name.
        seconds: Calls are repeated until a turn lasts about this long over all rounds.
        rounds: Turns per side.
        budget: A side whose single call is slower than `budget / rounds` gets fewer
            turns, so that slow twins do not take minutes.
    """
    timers = {name: timeit.Timer(call) for name, call in sides.items()}
    if QUICK:
        return {name: timer.timeit(1) for name, timer in timers.items()}
    numbers, turns = {}, {}
    for name, timer in timers.items():
        timer.timeit(1)  # warm up: compilation, caches
        once = timer.timeit(1)
        numbers[name] = max(1, int(seconds / rounds / max(once, 1e-7)))
        turns[name] = max(1, min(rounds, int(budget / max(once, 1e-7))))
    best = dict.fromkeys(sides, float("inf"))
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for name, timer in timers.items():
                if turn < turns[name]:
                    took = timer.timeit(numbers[name]) / numbers[name]
                    best[name] = min(best[name], took)
    finally:
        gc.enable()
    return best


@dataclass
class Report:
    """One table with a title."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *row: Cell) -> None:
        """Add a row, one cell per column."""
        self.rows.append(row)

    def as_data(self) -> dict[str, Any]:
        """The table as plain data."""
        return {
            "title": self.title,
            "machine": machine(),
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "notes": self.notes,
        }

    def show(self) -> None:
        """Print the table."""
        console = Console()
        if not console.is_terminal:  # nobody's screen is too narrow
            console.width = max(console.width, WIDTH)
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*(readable(cell) for cell in row))
        console.print(table)
        for note in [*self.notes, machine()]:
            console.print(note, highlight=False)


def show(reports: Report | Sequence[Report], *, as_json: bool) -> None:
    """Print what a benchmark found: tables for people, or one JSON document."""
    reports = [reports] if isinstance(reports, Report) else reports
    if as_json:
        print(json.dumps([report.as_data() for report in reports], indent=2))
        return
    for report in reports:
        report.show()


def readable(cell: Cell) -> str:
    """A cell as people read it: three significant digits."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


def micro(seconds: float) -> float:
    """Seconds as microseconds."""
    return seconds * 1e6


def machine() -> str:
    """What ran this: figures of one machine do not carry over to another."""
    return (
        f"{platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} thread"
    )
