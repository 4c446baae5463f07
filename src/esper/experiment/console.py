"""A run in a terminal: live bars and a panel; elsewhere plain lines."""

from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from esper.experiment.progress import print_line
from esper.experiment.records import ENDLESS, Results, RoundRecord, mean_return
from esper.experiment.summary import sparkline
from esper.experiment.trainer import Callback, Trainer

LINES: Final = 16
"""Lines about rounds, where there is no terminal."""
SECONDS: Final = 15
"""Between two of them, if time ends the training."""


class ConsoleProgress(Callback):
    """Shows a run from its beginning to its end.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._returns: list[float] = []
        self._evaluated: tuple[int, float] | None = None
        self._last = 0.0
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[text]}"),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._bars, console=self._console, refresh_per_second=4)

    def on_message(self, text: str, *, warning: bool = False) -> None:
        """Print it."""
        print_line(self._console, f"{'warning: ' if warning else ''}{text}")

    def on_progress(self, name: str, done: int, total: int, text: str) -> None:
        """Move a bar, or print every fifth of many steps."""
        if self._live is not None:
            self._bar(self._live, name, done, total, text)
        elif done % max(total // 5, 1) == 0 or total <= LINES:
            self.on_message(f"{name} {done}/{total}  {text}")

    def on_evaluation(self, trainer: Trainer, results: Results) -> None:
        """Show the mean return, or print all."""
        self._evaluated = trainer.round, mean_return(results)
        if self._live is None:
            parts = [
                f"{task} {judged.returns.mean():+.4f} (score {judged.score.mean():.3f})"
                for task, judged in results.items()
            ]
            self.on_message(f"round {trainer.round}  evaluation: {', '.join(parts)}")

    def on_round_end(self, trainer: Trainer, record: RoundRecord) -> None:
        """Show one round."""
        self._returns.append(record.mean_return)
        minutes, endless = trainer.config.budget.minutes, record.rounds == ENDLESS
        left = f"{time_left(record, minutes)} left"
        if self._live is None:
            every = max(record.rounds // LINES, 1)
            due = record.round % every == 0
            if endless:
                due = record.seconds - self._last >= SECONDS
            if due or record.round == 1:
                self._last = record.seconds
                total = "" if endless else f"/{record.rounds}"
                text = f"round {record.round}{total}  {record.headline()}  {left}"
                self.on_message(text)
            return
        if endless and minutes is not None:
            spent = round(record.seconds / 60, 1)
            self._bar(self._live, "training, minutes", spent, minutes, left)
        else:
            self._bar(self._live, "training", record.round, record.rounds, left)
        self._live.update(Group(self._bars, self._panel(record)))

    def on_close(self) -> None:
        """Leave the terminal."""
        if self._live is not None:
            self._live.stop()

    def _bar(self, live: Live, name: str, done: float, total: float, text: str) -> None:
        live.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, text=text)
        self._bars.update(self._tasks[name], completed=done, total=total, text=text)

    def _panel(self, record: RoundRecord) -> Table:
        """The figures of the last round."""
        shown = Table.grid(padding=(0, 3))
        update = record.update
        shown.add_row("return", f"{record.mean_return:+.4f}", sparkline(self._returns))
        if record.mean_score is not None:
            grown = f"grown {record.added:.2f} x the host"
            shown.add_row("score", f"{record.mean_score:.4f}", grown)
        if self._evaluated is not None:
            number, value = self._evaluated
            shown.add_row("evaluation", f"{value:+.4f}", f"in round {number}")
        shown.add_row(
            "KL",
            f"{update.kl:.4f}",
            f"explained variance {update.explained_variance:.2f}, "
            f"{record.env_steps / record.seconds:,.0f} env-steps/s",
        )
        shown.add_row("entropy", "", Text(record.entropies()))
        return shown


def time_left(record: RoundRecord, minutes: float | None) -> str:
    """How long training will go on, in words."""
    seconds = record.seconds / record.round * (record.rounds - record.round)
    if minutes is not None:
        seconds = min(seconds, max(60 * minutes - record.seconds, 0.0))
    if seconds >= 3_600:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
