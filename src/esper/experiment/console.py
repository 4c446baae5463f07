"""A run in a terminal: bars and a panel; elsewhere plain lines."""

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.experiment.progress import Progress, print_line, sparkline
from esper.experiment.records import ENDLESS, Results, RoundRecord, mean_return
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
        self._progress = Progress(console=self._console)
        self._returns: list[float] = []
        self._evaluated: tuple[int, float] | None = None
        self._last = 0.0

    def on_message(self, text: str, *, warning: bool = False) -> None:
        """Print it."""
        print_line(self._console, f"{'warning: ' if warning else ''}{text}")

    def on_progress(self, name: str, done: int, total: int, text: str) -> None:
        """Show how far something is."""
        self._progress.update(name, done, total, text)

    def on_evaluation(self, trainer: Trainer, results: Results) -> None:
        """Show the mean return, or print all."""
        self._evaluated = trainer.round, mean_return(results)
        if not self._console.is_terminal:
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
        if self._console.is_terminal:
            done: tuple[str, float, float] = ("training", record.round, record.rounds)
            if endless and minutes is not None:
                done = "training, minutes", round(record.seconds / 60, 1), minutes
            self._progress.update(*done, left, self._panel(record))
            return
        due = record.round % max(record.rounds // LINES, 1) == 0
        if endless:
            due = record.seconds - self._last >= SECONDS
        if due or record.round == 1:
            self._last = record.seconds
            total = "" if endless else f"/{record.rounds}"
            self.on_message(f"round {record.round}{total}  {record.headline()}  {left}")

    def on_close(self) -> None:
        """Leave the terminal."""
        self._progress.close()

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
