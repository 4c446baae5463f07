"""Figures of one Grower and one PPO agent: `Grower.plot` and `PPO.plot`.

They need no display and leave `pyplot` alone. A figure has a limited number of points.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

import numpy as np

from esper.contracts.messages import one_line
from esper.evaluation.statistics import Floats
from esper.growth.history import GrowthDecision, changed_widths, outcome
from esper.report.plots import smoothed
from esper.report.style import LIGHT, LINE_COLOURS, new_figure, plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS: Final = 600
"""Maximum number of decisions in a figure."""
MAX_LAYERS: Final = len(LINE_COLOURS)
"""Maximum number of areas; layers that grew least share the last one."""
MAX_ROWS: Final = 12
"""Maximum number of layers and changes in a table."""
WIDE: Final = 640
DPI: Final = 100
MARKERS: Final = {
    "planted": ("^", 12, "blue"),
    "kept": ("o", 9, "green"),
    "pruned": ("X", 6, "orange"),
}
"""Marker, size and colour of what became of a seed; smaller ones are in front."""
MISSING: Final = "The network had grown before: its earlier history is missing."
HEALTHY_CLIP: Final = (0.02, 0.3)


def growth_figure(
    history: Sequence[GrowthDecision], start: Mapping[str, int], *, missing: bool
) -> "Figure":
    """Metric, loss and the width of every layer over batches.

    Args:
        history: All decisions; the last one can be unfinished.
        start: Widths of the layers before the first one.
        missing: Whether the network had grown before that.
    """
    shown = np.unique(np.linspace(0, len(history) - 1, MAX_POINTS).round().astype(int))
    batches = np.array([history[n].batches for n in shown], float)
    metric = np.array([history[n].metric for n in shown], float)
    loss = np.array([history[n].loss for n in shown], float)
    widths, events = [dict(start)], Counter[tuple[str, int]]()
    now: Mapping[str, int] = start
    for number, decision in enumerate(history):
        now = changed_widths(now, decision)
        point = int(np.searchsorted(shown, number))
        events.update((outcome(event), point) for event in decision.events)
        if shown[point] == number:
            widths.append(dict(now))
    with plot_style():
        figure = _figure("Growth", 480)
        over = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 2))
        over[0].set_title("metric")
        over[1].set_title("mean loss")
        over[2].set_title("width of the layers")
        _line(over[0], batches, metric, "blue", "no decision yet")
        _line(over[1], batches, loss, "purple", "not measured: use grower.loss")
        _mark(over[0], batches, metric, events)
        _areas(over[2], np.array([0.0, *batches]), widths)
        over[2].set_xlabel("batch")
        if missing:
            figure.supxlabel(MISSING, color=LIGHT["orange"], size="medium")
        return _finished(figure)


def ppo_figure(
    points: Mapping[str, Floats],
    entropies: Mapping[str, Floats],
    target_kl: float,
) -> "Figure":
    """Return and update health over steps.

    Args:
        points: Columns of the agent's learning curve.
        entropies: Entropy of each head.
        target_kl: The KL divergence at which an update stops.
    """
    steps = points["env_steps"]
    with plot_style():
        figure = _figure("Training", 520)
        grid = figure.add_gridspec(3, 2, height_ratios=(1.6, 1, 1))
        places = (grid[0, :], grid[1, 0], grid[1, 1], grid[2, 0], grid[2, 1])
        over = [figure.add_subplot(place) for place in places]
        titles = ("return", "KL", "entropy", "clip fraction", "explained variance")
        for axes, title in zip(over, titles, strict=True):
            axes.set_title(title)
            axes.set_xlabel("step")
            axes.locator_params(axis="both", nbins=4)
        missing = "no episode has ended yet"
        _line(over[0], steps, points["return"], "blue", missing, smooth=True)
        _line(over[1], steps, points["kl"], "orange")
        if np.isfinite(target_kl):
            over[1].axhline(target_kl, color=LIGHT["muted"], ls="--", lw=1)
        for (name, values), colour in zip(
            entropies.items(), LINE_COLOURS, strict=False
        ):
            _line(over[2], steps, values, colour, label=one_line(name, 18))
        _line(over[3], steps, points["clip_fraction"], "green")
        over[3].axhspan(*HEALTHY_CLIP, color=LIGHT["green"], alpha=0.1, lw=0)
        _line(over[4], steps, points["explained_variance"], "purple")
        if len(entropies) > 1:
            over[2].legend(fontsize="small")
        return _finished(figure)


def growth_table(
    history: Sequence[GrowthDecision],
    before: Mapping[str, int],
    now: Mapping[str, int],
    parameters: tuple[int, int],
) -> str:
    """A small HTML table of what grew; every text is escaped."""
    first, last = parameters
    known = [one.metric for one in history[:-1]]
    rows = [
        ("decisions", f"{len(known)}"),
        ("batches", f"{history[-1].batches:,}"),
        ("parameters", f"{first:,} → {last:,} ({last / first:.2f} ×)"),
    ]
    if known:
        rows.append(("metric", f"{known[0]:.4g} → {known[-1]:.4g}"))
    grown = [name for name in now if before[name] != now[name]]
    rows += [(n, f"{before[n]} → {now[n]} units") for n in grown[:MAX_ROWS]]
    if (more := len(now) - len(grown[:MAX_ROWS])) > 0:
        rows.append(("other layers", f"{more}"))
    changes = [one for one in history[:-1] if one.grew and one.action != "wait"]
    rows += [(f"decision {one.step}", one.action) for one in changes[-MAX_ROWS // 2 :]]
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(one_line(name, 80))}</th>"
        f"<td style='text-align:left'>{escape(one_line(text, 120))}</td></tr>"
        for name, text in rows
    )
    return f"<table><caption>Grower</caption>{cells}</table>"


def _figure(title: str, height: float) -> "Figure":
    """An empty figure on paper, since notebooks can be dark."""
    figure = new_figure(title, height, WIDE)
    figure.set_facecolor(LIGHT["background"])
    figure.set_dpi(DPI)
    return figure


def _finished(figure: "Figure") -> "Figure":
    """The figure, with ticks in the style of now."""
    figure.draw_without_rendering()
    return figure


def _line(
    axes: "Axes",
    x: Floats,
    values: Floats,
    colour: str,
    missing: str = "not measured",
    *,
    label: str = "",
    smooth: bool = False,
) -> None:
    """A line with dots, or in words why there is none."""
    values = np.where(np.isfinite(values), values, np.nan)
    known = np.isfinite(values)
    if not known.any():
        axes.text(0.02, 0.5, missing, transform=axes.transAxes, color=LIGHT["orange"])
        return
    style = "." if smooth else ".-"
    axes.plot(x, values, style, color=LIGHT[colour], ms=4, lw=1.2, label=label or None)
    if smooth:
        axes.plot(x, smoothed(values), color=LIGHT[colour])


def _mark(
    axes: "Axes", x: Floats, values: Floats, events: Mapping[tuple[str, int], int]
) -> None:
    """Markers on the line where something became of a seed."""
    points = np.arange(len(values))
    known = np.isfinite(values)
    level = np.interp(points, points[known], values[known]) if known.any() else 0 * x
    for what, (marker, size, colour) in MARKERS.items():
        at = sorted(point for word, point in events if word == what)
        if at:
            colour = LIGHT[colour]
            axes.plot(x[at], level[at], marker, color=colour, ms=size, label=what)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", ncols=3)


def _areas(axes: "Axes", x: Floats, widths: Sequence[Mapping[str, int]]) -> None:
    """Widths of the layers on top of each other."""
    names = [*dict.fromkeys(name for one in widths for name in one)]
    table = {n: np.array([one.get(n, 0) for one in widths], float) for n in names}
    if len(names) > MAX_LAYERS:
        most = sorted(names, key=lambda name: -float(np.ptp(table[name])))
        own = {*most[: MAX_LAYERS - 1]}
        rest = sum((table[n] for n in names if n not in own), np.zeros(len(x)))
        names = [name for name in names if name in own]
        table |= {(other := f"{len(table) - len(own)} other layers"): rest}
        names.append(other)
    if not names:
        axes.text(0.02, 0.5, "no linear or convolution layer", transform=axes.transAxes)
        return
    axes.stackplot(
        x,
        [table[name] for name in names],
        labels=[one_line(name, 24) for name in names],
        colors=[LIGHT[colour] for colour in LINE_COLOURS],
        step="post",
        alpha=0.75,
        lw=0,
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(  # in the order of the areas
        handles[::-1],
        labels[::-1],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        fontsize="small",
    )
