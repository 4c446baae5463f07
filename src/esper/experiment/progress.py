"""Live progress: bars in a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from esper.experiment.loop import RoundRecord

LINES_PER_JOB = 10


class Progress:
    """Shows how each training is doing.

    Args:
        names: What the trainings are called.
        console: Where to show it.
        unit: What is counted.
    """

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
                TextColumn("{task.fields[news]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._tasks = {
                name: self._bars.add_task(name, total=None, news="waiting", start=False)
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

    def show(self, name: str, record: RoundRecord) -> None:
        """Tell of one round of one training."""
        self.tell(name, record.round, record.rounds, headline(record))

    def tell(self, name: str, done: int, total: int, news: str) -> None:
        """Tell how far one training is, counted from 1."""
        if self._bars is None:
            every = max(total // LINES_PER_JOB, 1)
            if done % every == 0 or done == total:
                place = f"{name}: {self._unit} {done}/{total}"
                self._console.print(
                    f"{place}, {news}", highlight=False, soft_wrap=True, markup=False
                )
            return
        task = self._tasks[name]
        if done == 1:
            self._bars.start_task(task)
        self._bars.update(task, completed=done, total=total, news=news)


def headline(record: RoundRecord) -> str:
    """One round in one line."""
    update = record.update
    return (
        f"return {record.mean_return:+.3f}  kl {update.kl:.4f}  "
        f"op entropy {update.heads['op'].entropy:.2f}  "
        f"{record.env_steps / record.seconds / 1000:.1f}k env-steps/s"
    )
