"""The figures of the evidence: differences, and score against cost.

Every figure is a file that stands alone, on white paper, so that it can be read on a
bright page and on a dark one. The same numbers give the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from esper.experiment.statistics import Floats, Interval, iqm_interval, mean_interval
from esper.report.style import LIGHT, Plot, new_figure, one_line, plot_style, render
from evidence.claims import Versus
from evidence.readout import Cells, Readout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH: Final = 900
COLUMNS: Final = 4
PANEL: Final = 190
"""Pixels of a panel's height, with its title and ticks."""
ROW: Final = 22
IN_ALT_TEXT: Final = ("tamiyo", "static", "never")
"""Arms that alternative texts name; the tables have all."""
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


def pareto(price: "Price", tasks: Mapping[str, Sequence[Spot]]) -> Plot:
    """Test score against a cost, one panel per task."""
    title, label, log = price.title, price.label, price.log
    rows = -(-len(tasks) // COLUMNS)
    figure = new_figure(title, 60 + rows * PANEL, WIDTH)
    grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes in grid[len(tasks) :]:
        axes.set_axis_off()
    for axes, (task, spots) in zip(grid, tasks.items(), strict=False):
        axes.set_title(one_line(task, 24))
        if log:
            axes.set_xscale("log")
        for spot in spots:
            _spot(axes, spot)
        axes.margins(x=0.1, y=0.12)
        axes.minorticks_off()
        if log:
            _few_ticks(axes)
    figure.supxlabel(label)
    arms = {spot.arm for spots in tasks.values() for spot in spots}
    _legend(figure, [arm for arm in STYLES if arm in arms])
    values = "; ".join(
        f"{one_line(task)}: {_listed(spots)}" for task, spots in tasks.items()
    )
    return render(figure, price.name, f"{title} ({label}). {values}.")


def forest(name: str, against: Sequence[Versus]) -> Plot:
    """Tamiyo less every other arm, all tasks together and each as a dot."""
    known = [each for each in against if isfinite(each.difference.estimate)]
    title = "Tamiyo less everybody else: share of never's errors, 95 % intervals"
    figure = new_figure(title, 80 + ROW * max(1, len(known)), WIDTH)
    axes = figure.subplots()
    for row, versus in enumerate(known):
        gap, colour = versus.difference, LIGHT[STYLES.get(versus.other, GREY)[0]]
        tasks = [each.difference.estimate for each in versus.tasks.values()]
        axes.plot(tasks, [row] * len(tasks), "o", color=LIGHT["rule"], ms=4, zorder=1)
        if isfinite(gap.low):
            axes.plot([gap.low, gap.high], [row, row], color=colour, lw=2.2, zorder=2)
        axes.plot(
            [gap.estimate], [row], "o", color=colour, ms=7, mec=LIGHT["background"]
        )
    axes.axvline(0.0, color=LIGHT["text"], lw=1.0)
    axes.set_yticks(range(len(known)), [one_line(each.other, 20) for each in known])
    axes.set_ylim(max(1, len(known)) - 0.5, -0.5)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.03)
    axes.set_xlabel("to the right Tamiyo is ahead; a pale dot is one task", size=10.5)
    values = ", ".join(f"{one_line(v.other)} {v.difference:+.3f}" for v in known)
    return render(figure, name, f"{title}: {values}.")


def _listed(spots: Sequence[Spot]) -> str:
    return ", ".join(
        f"{spot.arm} {100 * spot.score.estimate:.1f} at {spot.cost.estimate:.3g}"
        for spot in spots
        if spot.arm in IN_ALT_TEXT
    )


def _spot(axes: "Axes", spot: Spot) -> None:
    colour, marker, size = STYLES.get(spot.arm, GREY)
    x, y = spot.cost, spot.score
    line: Any = {"color": LIGHT[colour], "lw": 1.0, "alpha": 0.6, "zorder": 2}
    if isfinite(y.low):
        axes.plot([x.estimate] * 2, [100 * y.low, 100 * y.high], **line)
    if isfinite(x.low):
        axes.plot([x.low, x.high], [100 * y.estimate] * 2, **line)
    axes.plot(
        [x.estimate],
        [100 * y.estimate],
        marker,
        color=LIGHT[colour],
        ms=size,
        mec=LIGHT["background"],
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


def _legend(figure: "Figure", arms: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], ls="", marker=marker, color=LIGHT[colour], ms=size)
        for colour, marker, size in (STYLES[arm] for arm in arms)
    ]
    figure.legend(handles, list(arms), loc="outside lower center", ncols=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a score is held against."""

    name: str
    column: str
    title: str
    label: str
    shift: float = 0.0
    scale: float = 1.0
    log: bool = False


PRICES: Final = (
    Price(
        name="pareto-parameters",
        column="added",
        title="Test score, %, against parameters",
        label="parameters, in multiples of the host's",
        shift=1.0,
    ),
    Price(
        name="pareto-training",
        column="training_macs",
        title="Test score, %, against the work of training",
        label="multiply-adds of training, in billions",
        scale=1e-9,
        log=True,
    ),
)


def draw_plots(
    readout: Readout,
    tasks: Sequence[str],
    against: Mapping[str, Versus],
    arms: Sequence[str],
    resamples: int,
) -> list[Plot]:
    """All figures, in the order of the page."""
    ordered = [against[arm] for arm in STYLES if arm in against]
    ordered += [versus for arm, versus in against.items() if arm not in STYLES]
    tests = readout.figure("test")
    scores = {
        (task, arm): iqm_interval(tests.of(arm, [task]), resamples=resamples)
        for task in tasks
        for arm in arms
        if tests.count(arm, [task])
    }
    found = []
    with plot_style():
        if any(isfinite(versus.difference.estimate) for versus in ordered):
            found.append(forest("forest", ordered))
        for price in PRICES:
            spots = _spots(readout.figure(price.column), scores, price, resamples)
            if spots:
                found.append(pareto(price, spots))
    return found


def _spots(
    prices: Cells,
    scores: Mapping[tuple[str, str], Interval],
    price: Price,
    resamples: int,
) -> dict[str, list[Spot]]:
    """Places of arms, by task."""
    found: dict[str, list[Spot]] = {}
    for (task, arm), score in scores.items():
        paid = mean_interval(prices.of(arm, [task]), resamples=resamples)
        if isfinite(paid.estimate):
            ends = (paid.estimate, paid.low, paid.high)
            cost = Interval(*(price.shift + price.scale * end for end in ends))
            found.setdefault(task, []).append(Spot(arm=arm, cost=cost, score=score))
    return found
