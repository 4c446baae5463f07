"""Everybody who was judged, beside each other: returns, and score against size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from esper.experiment.statistics import Interval
from esper.report.ink import (
    WIDTH,
    Drawing,
    day,
    finish,
    panel,
    place,
    plain,
    sheet,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW: Final = 24
LEFT, RIGHT, TOP, BOTTOM = 104, 14, 34, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPoint:
    """What one arm was worth on one task."""

    name: str
    colour: str
    returns: Interval
    test: Interval
    parameters: Interval
    """Of the final network, as a multiple of the host's."""


def forest(name: str, task: str, arms: Sequence[ArmPoint]) -> Drawing:
    """The return of every arm with its interval, the best above."""
    ordered = sorted(arms, key=lambda arm: -arm.returns.estimate)
    height = TOP + BOTTOM + ROW * len(ordered)
    title = f"Return on {plain(task, 24)}, 95 % intervals"
    figure = sheet(title, WIDTH, height)
    axes = place(figure, LEFT, BOTTOM, WIDTH - LEFT - RIGHT, ROW * len(ordered))
    for row, arm in enumerate(ordered):
        at, colour = arm.returns, day(arm.colour)
        axes.plot([at.low, at.high], [row, row], color=colour, lw=2.2)
        axes.plot([at.estimate], [row], "o", color=colour, ms=7, mec=day("paper"))
    axes.set_yticks(range(len(ordered)), [plain(arm.name, 16) for arm in ordered])
    axes.set_ylim(len(ordered) - 0.5, -0.5)
    axes.margins(x=0.04)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    said = ", ".join(f"{plain(arm.name)} {arm.returns:.3f}" for arm in ordered)
    return finish(figure, name, f"{title}: {said}.")


def size_scatter(name: str, task: str, arms: Sequence[ArmPoint]) -> Drawing:
    """Test score against parameters added, with the intervals of both."""
    title = f"Test score on {plain(task, 18)} against size"
    figure, axes = panel(title, 290, right=20, bottom=42)
    for arm in arms:
        colour = day(arm.colour)
        x, y = arm.parameters, arm.test
        axes.plot([x.estimate] * 2, [y.low, y.high], color=colour, lw=1.2, alpha=0.6)
        axes.plot([x.low, x.high], [y.estimate] * 2, color=colour, lw=1.2, alpha=0.6)
        axes.plot([x.estimate], [y.estimate], "o", color=colour, ms=7, mec=day("paper"))
    axes.margins(x=0.12, y=0.1)
    axes.set_xlim(left=min(0.9, axes.get_xlim()[0]))
    axes.set_xlabel("parameters, in multiples of the host's", size=10.5, labelpad=4)
    _names(axes, arms)
    said = ", ".join(
        f"{plain(arm.name)} {arm.test.estimate:.3f} at "
        f"{arm.parameters.estimate:.2g} times the host"
        for arm in arms
    )
    return finish(figure, name, f"{title}: {said}.")


def _names(axes: "Axes", arms: Sequence[ArmPoint]) -> None:
    """Write each name beside its point, where no other name or point stands."""
    box = axes.get_window_extent()
    points = axes.transData.transform(
        [(arm.parameters.estimate, arm.test.estimate) for arm in arms]
    ).tolist()
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    for arm in arms:
        x, y = arm.parameters, arm.test
        for ends in (
            ((x.low, y.estimate), (x.high, y.estimate)),
            ((x.estimate, y.low), (x.estimate, y.high)),
        ):
            (left, low), (right, high) = axes.transData.transform(ends).tolist()
            taken.append((left - 1, low - 1, right + 1, high + 1))
    for arm, (x, y) in sorted(zip(arms, points, strict=True), key=lambda p: -p[1][1]):
        text = plain(arm.name, 16)
        wide, high = 6.1 * len(text), 12.0
        spots = [
            (x + dx - (wide if side < 0 else 0), y + dy, side)
            for distance in (0, 9, 18, 28)
            for dy in ((0,) if not distance else (distance, -distance))
            for side, dx in ((1, 8), (-1, -8))
        ]
        free = [
            spot
            for spot in spots
            if box.x0 <= spot[0]
            and spot[0] + wide <= box.x1 + 18
            and not any(_meet((*spot[:2], wide, high), other) for other in taken)
        ]
        left, middle, side = (free or spots)[0]
        taken.append((left, middle - high / 2, left + wide, middle + high / 2))
        axes.annotate(
            text,
            (arm.parameters.estimate, arm.test.estimate),
            xytext=((left + (wide if side < 0 else 0) - x), middle - y),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
            va="center_baseline",
            size=10.5,
            color=day(arm.colour) if arm.colour != "grey" else day("muted"),
        )


def _meet(
    text: tuple[float, float, float, float], other: tuple[float, float, float, float]
) -> bool:
    left, middle, wide, high = text
    return (
        left < other[2]
        and left + wide > other[0]
        and middle - high / 2 < other[3]
        and middle + high / 2 > other[1]
    )
