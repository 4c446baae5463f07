"""Watching a run: a live panel in a terminal, plain lines elsewhere."""

from math import isfinite
from types import TracebackType
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from esper.contracts.actions import HEAD_NAMES
from esper.experiment.config import TrainConfig
from esper.experiment.loop import RoundRecord
from esper.experiment.news import News, Progressed, Said, Watched
from esper.experiment.summary import sparkline
from esper.experiment.worlds import ENDLESS

Number = int | float
LINES: Final = 16
"""Lines about rounds, where there is no terminal."""


class RunProgress:
    """Shows a run from its beginning to its end.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._returns: list[float] = []
        self._watched: Watched | None = None
        self._live: Live | None = None
        self._minutes: float | None = None
        self._last = 0.0
        if self._console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=32),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[news]}"),
                console=self._console,
            )
            self._tasks: dict[str, TaskID] = {}
            self._live = Live(self._bars, console=self._console, refresh_per_second=4)

    def __enter__(self) -> "RunProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, config: TrainConfig, resumed: str | None = None) -> None:
        """Say what is about to happen."""
        self._minutes = config.budget.minutes
        what = "Training" if resumed is None else f"Going on with {resumed}:"
        self._say(
            f"{what} on {', '.join(config.tasks)}, {config.envs} environments each, "
            f"rng_seed {config.rng_seed}."
        )

    def show(self, record: RoundRecord) -> None:
        """Tell of one round."""
        self._returns.append(record.mean_return)
        left = time_left(record, self._minutes)
        if self._live is None:
            every = max(record.rounds // LINES, 1)
            timed = record.rounds == ENDLESS
            due = record.seconds - self._last >= 15 if timed else None
            if due or (due is None and record.round % every == 0) or record.round == 1:
                self._last = record.seconds
                total = "" if record.rounds == ENDLESS else f"/{record.rounds}"
                place = f"round {record.round}{total}"
                self._say(f"{place}  {headline(record)}  {left} left")
            return
        if record.rounds == ENDLESS:
            assert self._minutes is not None
            minutes = round(record.seconds / 60, 1), self._minutes
            self._bar("training, minutes", *minutes, f"{left} left")
        else:
            self._bar("training", record.round, record.rounds, f"{left} left")
        self._live.update(Group(self._bars, self._panel(record)))

    def hear(self, news: News) -> None:
        """Tell of something else."""
        match news:
            case Said(text, warning):
                self._say(f"{'warning: ' if warning else ''}{text}")
            case Watched():
                self._watched = news
                if self._live is None:
                    self._say(f"round {news.round}  {_seen(news)}")
            case Progressed(what, done, total, text):
                if self._live is not None:
                    self._bar(what, done, total, text)
                elif done % max(total // 5, 1) == 0 or total <= LINES:
                    self._say(f"{what} {done}/{total}  {text}")

    def _bar(self, what: str, done: Number, total: Number, news: str) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total, news=news)
        self._bars.update(self._tasks[what], completed=done, total=total, news=news)

    def _panel(self, record: RoundRecord) -> Table:
        """What is known of the last round."""
        shown = Table.grid(padding=(0, 3))
        update = record.update
        shown.add_row("return", f"{record.mean_return:+.4f}", sparkline(self._returns))
        if record.mean_score is not None:
            grown = f"grown {record.added:.2f} x the host"
            shown.add_row("score", f"{record.mean_score:.4f}", grown)
        if self._watched is not None:
            shown.add_row(
                "watched",
                f"{self._watched.mean_return:+.4f}",
                f"in round {self._watched.round}",
            )
        shown.add_row(
            "KL",
            f"{update.kl:.4f}",
            f"explained variance {update.explained_variance:.2f}, "
            f"{record.env_steps / record.seconds:,.0f} env-steps/s",
        )
        shown.add_row("entropy", "", Text(_entropies(record)))
        return shown

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


def headline(record: RoundRecord) -> str:
    """One round in one line."""
    parts = [f"return {record.mean_return:+.4f}"]
    if record.mean_score is not None:
        parts += [f"score {record.mean_score:.3f}", f"grown {record.added:.2f}x"]
    parts += [
        f"kl {record.update.kl:.4f}",
        f"entropy {_entropies(record)}",
        f"{record.env_steps / record.seconds:,.0f} env-steps/s",
    ]
    return "  ".join(parts)


def time_left(record: RoundRecord, minutes: float | None) -> str:
    """How long training will go on, in words."""
    seconds = record.seconds / record.round * (record.rounds - record.round)
    if minutes is not None:
        seconds = min(seconds, max(60 * minutes - record.seconds, 0.0))
    if seconds >= 3_600:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _entropies(record: RoundRecord) -> str:
    """Of every head that had a choice."""
    heads = record.update.heads
    return " ".join(
        f"{name} {heads[name].entropy:.2f}"
        for name in HEAD_NAMES
        if isfinite(heads[name].entropy) and heads[name].openness > 0
    )


def _seen(watched: Watched) -> str:
    parts = [
        f"{task} {judged.returns.mean():+.4f} (score {judged.score.mean():.3f})"
        for task, judged in watched.tasks.items()
    ]
    return f"watched: {', '.join(parts)}"
