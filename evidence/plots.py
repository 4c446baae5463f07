"""The figures of the evidence: score against cost, differences, and one life.

Every figure is a file that stands alone, on white paper, so that it can be read on a
bright page and on a dark one. The same numbers give the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from esper.contracts.stages import Stage
from esper.experiment.statistics import Floats, Interval
from esper.report.ink import Drawing, block, day, finish, place, plain, sheet
from esper.report.lives import STAGES
from evidence.claims import Versus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH: Final = 900
COLUMNS: Final = 4
PANEL: Final = 190
"""Pixels of a panel's height, with its title and ticks."""
LEFT, RIGHT, TOP, BOTTOM = 38, 12, 34, 34
ROW: Final = 22
LANE: Final = 34
TOLD: Final = ("tamiyo", "static", "never")
"""Whose places are told to those who do not see them; the tables have all."""
GREY: Final = ("grey", ".", 6.0)
STYLES: Final[Mapping[str, tuple[str, str, float]]] = {
    "tamiyo": ("blue", "o", 9.0),
    "replay": ("sky", "o", 6.0),
    "replay-elsewhere": ("sky", "d", 6.0),
    "bandit": ("purple", "P", 7.0),
    "searched": ("orange", "*", 9.0),
    "early": ("orange", "^", 6.5),
    "periodic": ("orange", "v", 6.5),
    "promise": ("orange", ">", 6.5),
    "plateau": ("amber", "<", 6.5),
    "random": ("amber", "X", 6.5),
    "scratch": ("green", "p", 7.0),
    "static-macs": ("green", "D", 5.5),
    "static": ("green", "s", 6.0),
    "longer": ("grey", "D", 5.5),
    "never": ("grey", "s", 6.0),
}
"""Colour, marker and size of each arm; orders of legends too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where an arm stands on one task."""

    arm: str
    cost: Interval
    score: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode of a network under Tamiyo, decision by decision."""

    title: str
    stages: NDArray[np.int8]
    """`[decision, slot]`, as are the next two."""
    blueprints: NDArray[np.int8]
    alphas: NDArray[np.float32]
    scores: NDArray[np.float32]
    """On the decision rows, after every decision."""
    slots: Sequence[str]
    names: Sequence[str]
    """Of blueprints."""


def pareto(
    name: str,
    title: str,
    label: str,
    tasks: Mapping[str, Sequence[Spot]],
    *,
    log: bool = False,
) -> Drawing:
    """Test score against a cost, one panel per task."""
    rows = -(-len(tasks) // COLUMNS)
    height = TOP + rows * PANEL + BOTTOM + 26
    figure = sheet(title, WIDTH, height)
    wide = WIDTH / COLUMNS
    for index, (task, spots) in enumerate(tasks.items()):
        left = index % COLUMNS * wide + LEFT
        bottom = height - TOP - (index // COLUMNS + 1) * PANEL + 32
        axes = place(figure, left, bottom, wide - LEFT - RIGHT, PANEL - 58)
        axes.set_title(plain(task, 24), size=11, loc="left", pad=5)
        if log:
            axes.set_xscale("log")
        for spot in spots:
            _spot(axes, spot)
        axes.margins(x=0.1, y=0.12)
        axes.tick_params(labelsize=9)
        axes.minorticks_off()
        if log:
            _few_ticks(axes)
    figure.text(0.5, 50 / height, label, ha="center", size=10.5, color=day("muted"))
    arms = {spot.arm for spots in tasks.values() for spot in spots}
    _legend(figure, [arm for arm in STYLES if arm in arms], height)
    said = "; ".join(
        f"{plain(task)}: {_told([spot for spot in spots if spot.arm in TOLD])}"
        for task, spots in tasks.items()
    )
    return finish(figure, name, f"{title} ({label}). {said}.")


def forest(name: str, against: Sequence[Versus]) -> Drawing:
    """Tamiyo less every other arm, all tasks together and each as a dot."""
    known = [each for each in against if isfinite(each.difference.estimate)]
    height = TOP + 40 + ROW * max(1, len(known))
    title = "Tamiyo less everybody else: share of never's errors, 95 % intervals"
    figure = sheet(title, WIDTH, height)
    axes = place(figure, 130, 40, WIDTH - 150, height - TOP - 40)
    for row, versus in enumerate(known):
        gap, colour = versus.difference, day(STYLES.get(versus.other, GREY)[0])
        tasks = [each.difference.estimate for each in versus.tasks.values()]
        axes.plot(tasks, [row] * len(tasks), "o", color=day("rule"), ms=4, zorder=1)
        if isfinite(gap.low):
            axes.plot([gap.low, gap.high], [row, row], color=colour, lw=2.2, zorder=2)
        axes.plot([gap.estimate], [row], "o", color=colour, ms=7, mec=day("paper"))
    axes.axvline(0.0, color=day("ink"), lw=1.0)
    axes.set_yticks(range(len(known)), [plain(each.other, 20) for each in known])
    axes.set_ylim(max(1, len(known)) - 0.5, -0.5)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.03)
    axes.set_xlabel("to the right Tamiyo is ahead; a pale dot is one task", size=10.5)
    said = ", ".join(f"{plain(v.other)} {v.difference:+.3f}" for v in known)
    return finish(figure, name, f"{title}: {said}.")


def swimlane(name: str, episode: Episode) -> Drawing:
    """One episode: the score above, a lane for each slot below."""
    decisions, slots = episode.stages.shape
    height = TOP + 110 + slots * LANE + 66
    figure = sheet(plain(episode.title, 90), WIDTH, height)
    curve = place(figure, 90, 66 + slots * LANE + 12, WIDTH - 110, 90)
    curve.step(
        np.arange(decisions + 1),
        100 * np.append(episode.scores, episode.scores[-1:]),
        where="post",
        color=day("blue"),
    )
    curve.set_xlim(0, decisions)
    curve.tick_params(labelbottom=False, labelsize=9)
    curve.set_ylabel("score, %", size=10.5)
    axes = place(figure, 90, 66, WIDTH - 110, slots * LANE)
    axes.set_xlim(0, decisions)
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(slots, 0)
    axes.set_yticks(
        [slot + 0.5 for slot in range(slots)],
        [plain(slot, 14) for slot in episode.slots],
    )
    axes.grid(visible=False)
    axes.set_xlabel("decision; the bar's height is the seed's alpha", size=10.5)
    for slot in range(slots):
        _lane(axes, episode, slot)
    seen = [Stage(stage).name for stage in np.unique(episode.stages)]
    shown = [stage for stage in STAGES if stage in seen]
    for index, stage in enumerate(shown):
        colour, words = STAGES[stage]
        left = 90 + index * 150
        key = place(figure, left, 12, 14, 12)
        key.axis("off")
        block(key, (0, 0), (1, 1), colour)
        figure.text((left + 20) / WIDTH, 14 / height, words, size=10)
    planted = _plantings(episode)
    alt = (
        f"{episode.title}: {planted} seeds planted in {slots} slots over {decisions} "
        f"decisions; the score goes from {100 * episode.scores[0]:.1f} to "
        f"{100 * episode.scores[-1]:.1f} %."
    )
    return finish(figure, name, alt)


def events(stages: NDArray[np.int8]) -> int:
    """How often a slot changed its stage."""
    return int((np.diff(stages, axis=0) != 0).sum())


def _lane(axes: "Axes", episode: Episode, slot: int) -> None:
    stages, planted = episode.stages[:, slot], episode.blueprints[:, slot]
    block(axes, (0, slot + 0.06), (len(stages), 0.88), "rule", alpha=0.3)
    start, last = 0, None
    for (stage, blueprint), run in groupby(zip(stages, planted, strict=True)):
        length = len(list(run))
        if stage != Stage.DORMANT:
            colour = STAGES[Stage(stage).name][0]
            block(axes, (start, slot + 0.06), (length, 0.88), colour, alpha=0.35)
            for at in range(start, start + length):
                high = 0.88 * float(np.clip(episode.alphas[at, slot], 0.0, 1.0))
                block(axes, (at, slot + 0.94 - high), (1, high), colour)
            if last != blueprint:
                axes.annotate(
                    plain(_name(episode.names, int(blueprint)), 14),
                    (start, slot + 0.5),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center_baseline",
                    size=9,
                )
        last = None if stage == Stage.DORMANT else blueprint
        start += length


def _told(spots: Sequence[Spot]) -> str:
    return ", ".join(
        f"{plain(spot.arm)} {100 * spot.score.estimate:.1f} at {spot.cost.estimate:.3g}"
        for spot in spots
    )


def _name(names: Sequence[str], index: int) -> str:
    return names[index] if 0 <= index < len(names) else "?"


def _plantings(episode: Episode) -> int:
    alive = np.vstack(
        [np.zeros((1, episode.stages.shape[1]), np.bool_), episode.stages != 0]
    )
    return int((alive[1:] & ~alive[:-1]).sum())


def _spot(axes: "Axes", spot: Spot) -> None:
    colour, marker, size = STYLES.get(spot.arm, GREY)
    x, y = spot.cost, spot.score
    line: Any = {"color": day(colour), "lw": 1.0, "alpha": 0.6, "zorder": 2}
    if isfinite(y.low):
        axes.plot([x.estimate] * 2, [100 * y.low, 100 * y.high], **line)
    if isfinite(x.low):
        axes.plot([x.low, x.high], [100 * y.estimate] * 2, **line)
    axes.plot(
        [x.estimate],
        [100 * y.estimate],
        marker,
        color=day(colour),
        ms=size,
        mec=day("paper"),
        mew=0.6,
        zorder=4 if spot.arm == "tamiyo" else 3,
    )


def _few_ticks(axes: "Axes") -> None:
    """Three plain numbers along an axis of powers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axes.get_xlim()
    ticks: Floats = np.geomspace(low, high, 7)[1:-1:2]
    axes.xaxis.set_major_locator(FixedLocator([float(f"{t:.2g}") for t in ticks]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _legend(figure: "Figure", arms: Sequence[str], height: int) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], ls="", marker=marker, color=day(colour), ms=size)
        for colour, marker, size in (STYLES[arm] for arm in arms)
    ]
    figure.legend(
        handles,
        list(arms),
        loc="lower center",
        ncols=8,
        frameon=False,
        fontsize=9.5,
        handletextpad=0.2,
        columnspacing=1.2,
        bbox_to_anchor=(0.5, 0.0),
    )
