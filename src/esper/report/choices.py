"""What Tamiyo plants and where, early and late, and what becomes of it.

A cell's colour and number are its share of all seeds that were planted in that third of
the rounds. Blueprints are in one order, the most planted first, in every figure.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from esper.report.facts import Choice
from esper.report.ink import (
    WIDTH,
    Drawing,
    block,
    day,
    finish,
    place,
    plain,
    sheet,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW: Final = 26
MOST: Final = 14
"""Blueprints that are shown; the others are added up."""
OTHERS: Final = "all others"
LEFT, TOP, BOTTOM = 104, 58, 30


def choice_map(name: str, task: str, choices: Sequence[Choice]) -> Drawing:
    """Shares of what was planted where, in the first and in the last rounds."""
    order = _order(choices)
    slots = sorted({choice.slot for choice in choices})
    height = TOP + BOTTOM + ROW * len(order)
    figure = sheet(f"Planted on {plain(task, 32)}", WIDTH, height)
    room = (WIDTH - LEFT - 24) / 2
    said = []
    for index, (third, title) in enumerate(
        (("early", "first third of the rounds"), ("late", "last third"))
    ):
        axes = place(figure, LEFT + index * (room + 18), BOTTOM, room, ROW * len(order))
        most = _map(axes, [c for c in choices if c.third == third], order, slots)
        axes.set_title(title, size=10.5, color=day("muted"), loc="left", pad=6)
        axes.set_yticks(range(len(order)), order if index == 0 else [""] * len(order))
        said.append(f"{title}: {most}")
    return finish(
        figure, name, f"Share of seeds planted on {plain(task)}; {'; '.join(said)}."
    )


def outcome_bars(name: str, task: str, choices: Sequence[Choice]) -> Drawing:
    """What became of the seeds of each blueprint, over all rounds."""
    order = _order(choices)
    height = TOP + BOTTOM + ROW * len(order)
    figure = sheet(f"What became of them on {plain(task, 24)}", WIDTH, height)
    axes = place(figure, LEFT, BOTTOM, WIDTH - LEFT - 52, ROW * len(order))
    totals = {row: [0, 0, 0] for row in order}
    for choice in choices:
        total = totals[_row(choice, order)]
        total[0] += choice.kept
        total[1] += choice.planted - choice.kept - choice.pruned
        total[2] += choice.pruned
    kinds = (("kept", "kept"), ("neither", "training"), ("pruned", "cooling"))
    for row, counts in enumerate(totals.values()):
        start, planted = 0.0, max(1, sum(counts))
        for count, (_, colour) in zip(counts, kinds, strict=True):
            share = 100 * count / planted
            block(axes, (start, row - 0.35), (share, 0.7), colour)
            if share >= 9:
                axes.text(
                    start + share / 2,
                    row,
                    f"{share:.0f}",
                    size=9.5,
                    ha="center",
                    va="center_baseline",
                )
            start += share
        axes.annotate(
            f"{sum(counts):,}",
            (100, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center_baseline",
            size=10,
            color=day("muted"),
        )
    _legend(figure, height, kinds)
    axes.set_xlim(0, 100)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_yticks(range(len(order)), order)
    axes.set_xticks([0, 50, 100], ["0", "50", "100 %"])
    axes.grid(visible=False)
    said = [
        f"{row} {100 * counts[0] / max(1, sum(counts)):.0f} % kept"
        for row, counts in totals.items()
    ]
    alt = f"What became of seeds on {plain(task)}: {', '.join(said)}."
    return finish(figure, name, alt)


def _map(
    axes: "Axes", choices: Sequence[Choice], order: Sequence[str], slots: Sequence[int]
) -> str:
    """Draw one map; return its fullest cell in words."""
    cells = {(row, slot): 0 for row in order for slot in slots}
    for choice in choices:
        cells[_row(choice, order), choice.slot] += choice.planted
    total = max(1, sum(cells.values()))
    most = max(cells.values())
    for (row, slot), count in cells.items():
        x, y = slots.index(slot), order.index(row)
        # Behind words: at full strength they could not be read.
        strength = 0.06 + 0.6 * count / max(1, most) if count else 0.0
        block(axes, (x - 0.47, y - 0.45), (0.94, 0.9), "blue", alpha=strength)
        if count:
            axes.text(
                x,
                y,
                f"{100 * count / total:.0f}",
                ha="center",
                va="center_baseline",
                size=9.5,
            )
    axes.set_xlim(-0.5, len(slots) - 0.5)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xticks(range(len(slots)), map(str, slots))
    axes.set_xlabel("slot; shares in %", size=10.5, labelpad=2)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    if not most:
        return "nothing was planted"
    row, slot = max(cells, key=lambda cell: cells[cell])
    return f"most often {row} in slot {slot}, {100 * most / total:.0f} %"


def _order(choices: Sequence[Choice]) -> list[str]:
    planted: dict[str, int] = {}
    for choice in choices:
        planted[choice.blueprint] = planted.get(choice.blueprint, 0) + choice.planted
    ordered = sorted(planted, key=lambda name: (-planted[name], name))
    rows = [plain(name, 16) for name in ordered[:MOST]]
    return [*dict.fromkeys(rows), *([OTHERS] if len(ordered) > MOST else [])]


def _row(choice: Choice, order: Sequence[str]) -> str:
    name = plain(choice.blueprint, 16)
    return name if name in order else OTHERS


def _legend(figure: "Figure", height: int, kinds: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Rectangle

    x = float(LEFT)
    for word, colour in kinds:
        corner = (x / WIDTH, 1 - (TOP - 12) / height)
        figure.add_artist(
            Rectangle(
                corner,
                10 / WIDTH,
                10 / height,
                color=day(colour),
                lw=0,
                transform=figure.transFigure,
            )
        )
        figure.text(
            (x + 15) / WIDTH,
            corner[1],
            word,
            size=10.5,
            color=day("muted"),
            va="baseline",
        )
        x += 30 + 7 * len(word)
