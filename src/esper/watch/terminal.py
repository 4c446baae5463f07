"""The terminal view of a run: learning, update health, hosts, events and alarms.

It only reads. What was not measured has a sign of its own (◌) and is never shown as
healthy (●); an alarm is ▲. Text of the store is never parsed as markup.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from math import isfinite, isnan, nan
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Final, NamedTuple

from numpy import array_split
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.table import Column, Table
from rich.text import Text

from esper.contracts.errors import EsperError
from esper.contracts.messages import one_line
from esper.runs.progress import BARS, duration
from esper.runs.records import TEST
from esper.watch.reading import HeadRow, RunReader, open_run

SECONDS, STALLED = 1.0, 120
"""Between two looks; without a new row until a running run is an alarm."""
WIDE, RECENT = 120, 5
"""Columns from which there are two halves; rounds whose mean can be an alarm."""
MAX_EVENTS, MAX_ALARMS = 8, 6
OK, ALARM, UNKNOWN = ("● ", "green"), ("▲ ", "bold red"), ("◌ ", "magenta")
PLAIN, TITLE = ("", ""), ("", "bold underline")
AGENTS, GROWER = ("ppo", "learn"), "grower"
"""Kinds of runs without hosts, and without updates."""
STAGES: Final = {
    "TRAINING": ("T", "black on blue"),
    "BLENDING": ("B", "black on yellow"),
    "HOLDING": ("H", "black on cyan"),
    "FOSSILIZED": ("K", "black on green"),
    "COOLING": ("C", "black on white"),
    "DORMANT": ("·", "dim"),
}
"""Letter and colour of each stage; K: kept."""
HEALTH: Final[Sequence[tuple[str, str, str, Callable[[float], bool]]]] = (
    ("kl", "KL", "the updates are too large", lambda mean: mean > 0.1),
    ("clip_fraction", "clip fraction", "too much is clipped", lambda mean: mean > 0.3),
    ("explained_variance", "explained variance", "useless", lambda mean: mean < 0.0),
)
"""Figures of an update, and when the mean of recent rounds is a problem."""
COLLAPSED: Final = ("collapsed", lambda mean: 0.0 <= mean < 0.01)
"""The same for entropies; those of numbers are in bits and can be negative."""


class Curve(NamedTuple):
    """Values over rounds, None where nothing was measured."""

    label: str
    values: Sequence[float | None]
    problem: str = ""  # what is wrong if the mean of recent rounds is bad
    is_bad: Callable[[float], bool] = lambda mean: False
    absent: str = ""  # what NaN as the last value means, if it is no alarm


def watch(run: Path, once: bool = False) -> None:
    """Show a run until Ctrl-C; print it once if asked to or without a terminal."""
    console, stop = Console(highlight=False), Event()
    if once or not console.is_terminal:
        with open_run(run) as reader:
            console.print(Picture(reader, (console.width, 99), 0))
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:  # Ctrl-C must not leave the terminal on another screen
        with console.screen() as screen:
            for shown in _pictures(run, console, stop):
                console.control(Control.home())
                screen.update(shown)
    finally:
        signal.signal(signal.SIGINT, before)


def _pictures(run: Path, console: Console, stop: Event) -> Iterator[RenderableType]:
    """A picture after every change; an error and the last one while there are none."""
    last: RenderableType = ""
    while not stop.is_set():
        try:
            with open_run(run) as reader:
                shown, version, since = None, -1, monotonic()
                while not (stop.is_set() or reader.replaced):
                    if (now := reader.version()) != version:
                        version, since = now, monotonic()
                    silent = int(monotonic() - since) // 10 * 10
                    if (key := (now, reader.state, console.size, silent)) != shown:
                        shown, last = key, Picture(reader, console.size, silent)
                        yield last
                    stop.wait(SECONDS)
        except EsperError as error:  # such as a run that has not begun
            yield Group(_line(str(error), ALARM), last)
            stop.wait(SECONDS)


class Picture:
    """The newest state of a run for a width in columns and a height in lines."""

    def __init__(self, reader: RunReader, size: tuple[int, int], silent: int) -> None:
        (width, height), self._is_wide = size, size[0] >= WIDE
        self._width = width // 2 - 1 if self._is_wide else width
        self._reader, self._problems, self._gaps = reader, list[str](), 0
        with reader.snapshot():
            self._hosts, self._rounds = reader.hosts(), reader.rounds()
            self._curves = [self._drawn(each) for each in self._learning()]
            self._updates = [self._drawn(each) for each in self._health()]
            self._top = [self._header(), *self._alarms(silent)]
            self._slots = self._grid(max(4, height - len(self._top) - 16))
            self._last = self._events()

    def __rich__(self) -> RenderableType:
        """What to print: two columns if there is room."""
        if not self._is_wide:
            parts = self._top, self._curves, self._slots, self._updates, self._last
            return Group(*chain(*parts))
        columns = [Column(width=self._width) for _ in range(2)]
        grid = Table.grid(*columns, padding=(0, 2, 0, 0))
        left = Group(*self._curves, *self._updates)
        grid.add_row(left, Group(*self._slots, *self._last))
        return Group(*self._top, grid)

    def _header(self) -> Text:
        state, view = self._reader.state, self._reader.overview()
        colour = {"running": "green", "finished": "blue"}.get(state, "yellow")
        line = _line(f"{self._reader.name}  {self._reader.kind}  ")
        line.append(state, colour)
        if (last := view.last) is not None:
            of = f"/{view.rounds_planned}" if view.rounds_planned else ""
            line.append(f"  round {last.round}{of}  {last.env_steps:,} steps  ")
        if state == "running" and view.seconds_left is None:
            line.append_text(_line("time left not measured", UNKNOWN))
        elif state == "running":
            line.append(f"{duration(view.seconds_left or 0.0)} left", "cyan")
        return line

    def _alarms(self, silent: int) -> list[Text]:
        found = ["stopped before its end"] * (self._reader.state == "stopped")
        if silent >= STALLED and self._reader.state == "running":
            found.append(f"nothing new for {duration(silent)}")
        if skipped := sum(each.refused or 0 for each in self._rounds):
            found.append(f"{skipped} optimizer steps were skipped: not finite")
        found += self._problems
        for host in self._hosts:
            if not isfinite(host.score or 0) or not isfinite(host.loss or 0):
                found.append(f"{host.task} {host.env}: score or loss is not finite")
        found += [f"{n.kind}: {n.text}" for n in self._reader.notes() if n.kind != TEST]
        if len(found) > MAX_ALARMS:
            found[MAX_ALARMS - 1 :] = [f"{len(found) - MAX_ALARMS + 1} more alarms"]
        gaps = [_line(f"curves with gaps: {self._gaps}", UNKNOWN)] * (self._gaps > 0)
        return [_line(text, ALARM) for text in found] + gaps or [_line("no alarms")]

    def _learning(self) -> Iterator[Curve]:
        """Return and scores on validation hosts; of a Grower, metric and loss."""
        if self._reader.kind == GROWER:
            first = [(each.task, each.env, each.episode) for each in self._hosts[:1]]
            steps = [step for host in first for step in self._reader.steps(*host)]
            yield Curve("metric", [step.score for step in steps])
            yield Curve("loss", [step.loss for step in steps])
            return
        returns = [each.mean_return for each in self._rounds]
        yield Curve("return", returns, absent="no episode ended")
        found = self._reader.evaluations()
        for task in dict.fromkeys([each.task for each in found] or ["score"]):
            scores = [each.mean_score for each in found if each.task == task]
            yield Curve(f"validation {task}", scores)

    def _health(self) -> Iterator[Curve]:
        """Figures of the updates."""
        if self._reader.kind == GROWER:
            return
        for name, label, text, is_bad in HEALTH:
            values = [getattr(each, name) for each in self._rounds]
            yield Curve(label, values, text, is_bad)
        heads = self._reader.heads() or [HeadRow(0, "of each head", *[None] * 3)]
        for head, rows in groupby(heads, lambda each: each.head):
            own = [(each.entropy, each.openness == 0.0) for each in rows]
            values = [nan if is_closed else value for value, is_closed in own]
            absent = "no choice" if own[-1][1] else ""
            yield Curve(f"entropy {head}", values, *COLLAPSED, absent)

    def _drawn(self, curve: Curve) -> Text:
        """A name, bars with a sign where nothing was measured, and the last value."""
        label, values, problem, is_bad, absent = curve
        self._gaps += None in values or not values
        bars = max(8, self._width - 45)
        parts = array_split(range(len(values)), max(1, min(bars, len(values))))
        known = [[v for i in part if (v := values[i]) is not None] for part in parts]
        finite = [[value for value in part if isfinite(value)] for part in known]
        means = [sum(part) / len(part) for part in finite if part] or [0.0]
        line, span = _line(f"{one_line(label, 18):<19}"), max(means) - min(means)
        for part, measured in zip(finite, known, strict=True):
            level = (sum(part) / len(part) - min(means)) / (span or 1.0) if part else 0
            bar = BARS[round(level * (len(BARS) - 1))] if part else " "
            line.append(*((bar, "cyan") if measured else ("◌", UNKNOWN[1])))
        last = values[-1] if values else None
        if absent and last is not None and isnan(last):
            return line.append(f" {absent}", "dim")
        recent = [each for each in values[-RECENT:] if each is not None]
        bad = last is not None and is_bad(sum(recent) / len(recent))
        if bad or (last is not None and not isfinite(last)):
            self._problems.append(f"{label} is {last:.3g}: {problem or 'not finite'}")
        sign = ALARM if bad else OK if problem else PLAIN
        return line.append(" ").append_text(_number(last, sign))

    def _grid(self, room: int) -> list[Text]:
        """Hosts by slots, coloured by stage, with the widths of their layers."""
        lines = [_line("hosts: score, seed in each slot, widths", TITLE)]
        if self._reader.kind in AGENTS:
            return [*lines, _line("none: this run trains an agent")]
        held = [{slot.slot: slot.stage for slot in host.slots} for host in self._hosts]
        slots = min(1 + max((max(s, default=-1) for s in held), default=-1), 24)
        signs = [f"{sign} {name.lower()}" for name, (sign, _) in STAGES.items()]
        lines.append(_line("  ".join(signs)))
        for host, stages in zip(self._hosts[:room], held, strict=False):
            line = _line(f"{one_line(host.task, 14):<14} {host.env:>3}  ")
            line.append_text(_number(host.score)).pad_right(max(0, 36 - line.cell_len))
            for slot in range(slots):
                line.append(*STAGES.get(stages.get(slot, "DORMANT"), ("?", "red")))
            widths = " ".join(str(layer.width) for layer in host.layers)
            end = _line(widths) if widths else _line("widths not measured", UNKNOWN)
            lines.append(line.append("  ").append_text(end))
        if (more := len(self._hosts) - room) > 0:
            lines.append(_line(f"{more} more hosts"))
        return lines if self._hosts else [*lines, _line("not measured", UNKNOWN)]

    def _events(self) -> list[Text]:
        lines = [_line("last events: decision, host, slot", TITLE)]
        for e in self._reader.events(MAX_EVENTS):
            text = f"{e.step:>6}  {e.task} {e.env}, slot {e.slot}  {e.what}"
            lines.append(_line(f"{text} {e.blueprint or ''}"))
        return lines if len(lines) > 1 else [*lines, _line("none so far")]


def _line(text: str, sign: tuple[str, str] = PLAIN) -> Text:
    """A line of printable text with a sign and its style, cut at the edge."""
    whole = one_line(f"{sign[0]}{text}", 400)
    return Text("", no_wrap=True, overflow="ellipsis").append(whole, sign[1])


def _number(value: float | None, sign: tuple[str, str] = PLAIN) -> Text:
    """A number, or that it was not measured, or an alarm if it is not finite."""
    sign = UNKNOWN if value is None else sign if isfinite(value) else ALARM
    return _line("not measured" if value is None else f"{value:.3g}", sign)
