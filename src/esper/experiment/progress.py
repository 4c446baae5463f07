"""Live progress: bars in a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from esper.experiment.loop import RoundRecord

LINES_PER_JOB = 10


class Progress:
    """Shows how each training is doing."""

    def __init__(self, names: Sequence[str], console: Console | None = None) -> None:
        self._console = console or Console()
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
        if self._bars is None:
            every = max(record.rounds // LINES_PER_JOB, 1)
            if record.round % every == 0 or record.round == record.rounds:
                place = f"{name}: round {record.round}/{record.rounds}"
                self._console.print(
                    f"{place}, {headline(record)}", highlight=False, soft_wrap=True
                )
            return
        task = self._tasks[name]
        if record.round == 1:
            self._bars.start_task(task)
        self._bars.update(
            task, completed=record.round, total=record.rounds, news=headline(record)
        )


def headline(record: RoundRecord) -> str:
    """One round in one line."""
    update = record.update
    return (
        f"return {record.mean_return:+.3f}  kl {update.kl:.4f}  "
        f"op entropy {update.heads['op'].entropy:.2f}  "
        f"{record.env_steps / record.seconds / 1000:.1f}k env-steps/s"
    )
