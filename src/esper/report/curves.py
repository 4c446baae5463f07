"""What changes from round to round: returns, entropy, KL, and the update's health.

A pale dot is a round, or the mean of a few if there are very many; a line is the mean
of the rounds around it, so that one lucky round does not look like learning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from esper.experiment.statistics import Floats, Interval
from esper.report.facts import Columns
from esper.report.ink import (
    LINES,
    Drawing,
    Number,
    day,
    finish,
    label_ends,
    panel,
    plain,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS: Final = 150
"""Rounds that are drawn as dots, at most."""


@dataclass(frozen=True, slots=True)
class Level:
    """What an arm was worth at the end."""

    label: str
    colour: str
    interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgements:
    """Judgements of one task, to stand beside its learning curve."""

    watched: Sequence[tuple[int, Interval]] = ()
    """Round and mean return of the policy, always on the same hosts."""
    final: Interval | None = None
    """Of the policy at the end."""
    others: Sequence[Level] = ()
    """At the end, on the same hosts as `final`."""


def learning_curve(
    name: str, task: str, returns: Columns, judged: Judgements
) -> Drawing:
    """Returns of a task over rounds, beside what others are worth."""
    figure, axes = panel(f"Return on {plain(task, 32)}", 270, right=118)
    labels = []
    for level in judged.others:
        colour, at = day(level.colour), level.interval
        axes.axhspan(at.low, at.high, color=colour, alpha=0.07, lw=0)
        axes.axhline(at.estimate, color=colour, lw=1.2, ls=(0, (4, 3)))
        labels.append((at.estimate, level.label, level.colour))
    rounds, mean = returns["round"], returns["return"]
    if len(rounds):
        _each(axes, rounds, mean, "grey")
        smooth = smoothed(mean)
        axes.plot(rounds, smooth, color=day("muted"))
        if np.isfinite(smooth[-1]):
            labels.append((float(smooth[-1]), "training", "muted"))
    last = float(rounds[-1]) if len(rounds) else 1.0
    for number, at in judged.watched:
        _interval(axes, number, at, "o", 6)
    if judged.final is not None:
        # A little to the right, so that it does not hide the last round.
        _interval(axes, last * 1.03, judged.final, "D", 7)
        labels.append((judged.final.estimate, "Tamiyo, judged", "blue"))
    elif judged.watched:
        labels.append((judged.watched[-1][1].estimate, "Tamiyo, watched", "blue"))
    _round_axis(axes, last * (1.06 if judged.final is not None else 1.0))
    axes.margins(y=0.08)
    label_ends(axes, labels)
    where = f"from {_said(mean[:1])} to {_said(mean[-1:])}" if len(rounds) else "absent"
    alt = (
        f"Learning curve on {plain(task)}: mean return of training episodes {where}; "
        f"{len(judged.watched)} judgements in between; levels of "
        f"{', '.join(level.label for level in judged.others) or 'nobody else'}."
    )
    return finish(figure, name, alt)


def health_curve(
    name: str,
    title: str,
    rounds: Floats,
    values: Floats,
    *,
    healthy: tuple[float, float] | None = None,
    floor: float | None = None,
) -> Drawing:
    """One figure of the update over rounds; a band is where it should be."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = panel(title, 170, right=48)
    if healthy is not None:
        axes.axhspan(*healthy, color=day("green"), alpha=0.1, lw=0)
    _each(axes, rounds, values, "blue")
    axes.plot(rounds, smoothed(values), color=day("blue"))
    _round_axis(axes, float(rounds[-1]))
    axes.margins(y=0.12)
    if floor is not None:
        axes.set_ylim(bottom=floor)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    alt = (
        f"{title} over rounds: {_said(values)} at first, {_said(values[::-1])} at last."
    )
    return finish(figure, name, alt)


def named_curves(
    name: str, title: str, curves: Sequence[tuple[str, Floats, Floats]]
) -> Drawing:
    """Several curves from zero on, each with its name at its end.

    Args:
        name: Of the files.
        title: What is drawn.
        curves: Name, rounds and values of each.
    """
    figure, axes = panel(title, 270, right=104)
    labels, said, last = [], [], 1.0
    for index, (label, rounds, values) in enumerate(curves):
        colour, line = LINES[index % len(LINES)], smoothed(values)
        axes.plot(rounds, values, color=day(colour), lw=0.7, alpha=0.3)
        axes.plot(rounds, line, color=day(colour))
        last = max(last, float(rounds[-1]))
        if np.isfinite(line[-1]):
            labels.append((float(line[-1]), plain(label, 14), colour))
        said.append(f"{plain(label)} {_said(line[-1:])}")
    _round_axis(axes, last)
    axes.margins(y=0.06)
    axes.set_ylim(bottom=0)
    label_ends(axes, labels)
    return finish(figure, name, f"{title}, over rounds; at the end: {', '.join(said)}.")


def smoothed(values: Floats) -> Floats:
    """Mean of the rounds around each, about a tenth of them; what is missing is not."""
    reach = len(values) // 20
    known = np.isfinite(values)
    counts = np.concatenate([[0], np.cumsum(known)])
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    at = np.arange(len(values))
    low, high = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Floats = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return means


def _each(axes: "Axes", rounds: Floats, values: Floats, colour: str) -> None:
    """Every round by itself: a dot, or if they are very many a point of a pale line."""
    if len(rounds) <= DOTS:
        axes.plot(rounds, values, "o", color=day(colour), ms=3, alpha=0.45, mew=0)
    else:
        axes.plot(rounds, values, color=day(colour), lw=0.7, alpha=0.35)


def _interval(axes: "Axes", x: Number, at: Interval, marker: str, size: int) -> None:
    axes.plot([x, x], [at.low, at.high], color=day("blue"), lw=1.3)
    axes.plot(
        [x], [at.estimate], marker, color=day("blue"), ms=size, mec=day("paper"), mew=1
    )


def _round_axis(axes: "Axes", last: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.01 * last - 0.2, max(last, 1.0) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.annotate(
        "round",
        (1, 0),
        xycoords="axes fraction",
        xytext=(6, -13),
        textcoords="offset points",
        color=day("muted"),
        size=10.5,
    )


def _said(values: Floats) -> str:
    known = values[np.isfinite(values)]
    return f"{known[0]:.3g}" if len(known) else "unknown"
