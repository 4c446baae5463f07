"""Progress of several jobs: bars in a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from esper.contracts.messages import printable

BARS: Final = "▁▂▃▄▅▆▇█"
MAX_BARS: Final = 60
"""Maximum width of a sparkline."""
MAX_SHOWN: Final = 4
"""Maximum number of active jobs to name."""


class Progress:
    """Shows the progress of jobs; those in `names` wait, others appear on update."""

    LINES_PER_JOB: Final = 10

    def __init__(
        self,
        names: Sequence[str] = (),
        console: Console | None = None,
        *,
        unit: str = "round",
    ) -> None:
        self._console, self._unit = console or Console(), unit
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        if self._console.is_terminal:
            self._bars = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[text]}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
            )
            for name in names:
                self._task(self._bars, name)

    def __enter__(self) -> "Progress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(
        self,
        name: str,
        done: float,
        total: float,
        text: str,
        active: Sequence[str] = (),
    ) -> None:
        """Update the bar of a job, with the jobs that workers are running."""
        if active:
            more = (
                f" and {len(active) - MAX_SHOWN} more"
                if len(active) > MAX_SHOWN
                else ""
            )
            text += f"; {len(active)} at work: {', '.join(active[:MAX_SHOWN])}{more}"
        if self._bars is None:
            every = max(total // self.LINES_PER_JOB, 1)
            if done % every == 0 or done == total:
                place = f"{name}: {self._unit} {done}/{total}"
                print_line(self._console, f"{place}, {text}")
            return
        task = self._task(self._bars, name)
        self._bars.start()
        self._bars.start_task(task)
        self._bars.update(task, completed=done, total=total, text=printable(text))

    def close(self) -> None:
        """Stop the bars."""
        if self._bars is not None:
            self._bars.stop()

    def _task(self, bars: RichProgress, name: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = bars.add_task(
                printable(name), total=None, text="waiting", start=False
            )
        return self._tasks[name]


def print_line(console: Console, text: str) -> None:
    """Print a line without control characters."""
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A time in one unit, as text."""
    if seconds >= 3_600:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def sparkline(values: Sequence[float]) -> str:
    """Values as bars; many values are averaged in groups."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        return ""
    parts = np.array_split(known, min(MAX_BARS, len(known)))
    means = np.array([part.mean() for part in parts])
    levels = (means - means.min()) / max(
        float(np.ptp(means)), 1e-12
    )  # all may be equal
    return "".join(BARS[round(level * (len(BARS) - 1))] for level in levels.tolist())
