"""Progress of several jobs: bars in a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """Shows how far several jobs are.

    Args:
        names: What the jobs are called.
        console: Where to show it.
        unit: What is counted.
    """

    LINES_PER_JOB: Final = 10

    def __init__(
        self,
        names: Sequence[str],
        console: Console | None = None,
        *,
        unit: str = "round",
    ) -> None:
        self._console, self._unit = console or Console(), unit
        self._bars: Bars | None = None
        if self._console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._tasks = {
                name: self._bars.add_task(name, total=None, text="waiting", start=False)
                for name in names
            }

    def __enter__(self) -> "Progress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, name: str, done: int, total: int, text: str) -> None:
        """Update the bar of a job, counted from 1."""
        if self._bars is None:
            every = max(total // self.LINES_PER_JOB, 1)
            if done % every == 0 or done == total:
                place = f"{name}: {self._unit} {done}/{total}"
                print_line(self._console, f"{place}, {text}")
            return
        task = self._tasks[name]
        if done == 1:
            self._bars.start_task(task)
        self._bars.update(task, completed=done, total=total, text=text)


def print_line(console: Console, text: str) -> None:
    """Print a line as it is, without characters that would move a cursor."""
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def printable(text: str) -> str:
    """The text with a question mark for every character that cannot be printed."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
