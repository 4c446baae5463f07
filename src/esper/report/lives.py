"""The swimlanes: every seed's life in the last episode of each environment.

A lane is one slot of one environment, time goes to the right in decisions, and a bar is
one stage of one seed. The seed's blueprint is written on it where there is room, and
is always said where the pointer rests.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Final

from esper.contracts.stages import Stage
from esper.report.facts import Life, Lives
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

LANE: Final = 11
"""Pixels of one slot."""
BAR: Final = 9.5
"""Pixels of a bar in it."""
GAP: Final = 6
"""Pixels between two environments."""
SIGN: Final = 4.6
"""Pixels of a letter on a bar, about."""
TOP, BOTTOM, LEFT, RIGHT = 34, 30, 34, 10

STAGES: Final[Mapping[str, tuple[str, str]]] = {
    Stage.TRAINING.name: ("training", "training, not felt"),
    Stage.BLENDING.name: ("blending", "blending in"),
    Stage.HOLDING.name: ("holding", "holding"),
    Stage.FOSSILIZED.name: ("kept", "kept for good"),
    Stage.COOLING.name: ("cooling", "cooling, pruned"),
}
"""Colour and words of each stage that can be seen."""


def swimlanes(name: str, task: str, lives: Lives) -> Drawing:
    """One lane for each slot of each environment that is shown."""
    slots = 1 + max((life.slot for life in lives.bars), default=0)
    envs = sorted(lives.lengths)
    pitch = slots * LANE + GAP
    height = TOP + BOTTOM + len(envs) * pitch
    figure = sheet(plain(task, 40), WIDTH, height)
    axes = place(figure, LEFT, BOTTOM, WIDTH - LEFT - RIGHT, height - TOP - BOTTOM)
    longest = max(1, *lives.lengths.values())
    axes.set_xlim(0, longest)
    axes.set_ylim(len(envs) * pitch, 0)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    tops = {env: index * pitch + GAP / 2 for index, env in enumerate(envs)}
    for env, top in tops.items():
        for slot in range(slots):
            corner = (0.0, top + slot * LANE)
            block(axes, corner, (lives.lengths[env], BAR), "rule", alpha=0.35)
    axes.set_yticks([top + slots * LANE / 2 for top in tops.values()], map(str, envs))
    axes.annotate(
        "env",
        (0, 1),
        xycoords="axes fraction",
        xytext=(-6, 3),
        textcoords="offset points",
        ha="right",
        color=day("muted"),
        size=10,
    )
    axes.set_xlabel("decision of the episode", size=10.5, labelpad=2)
    scale = (WIDTH - LEFT - RIGHT) / longest
    tips: dict[str, str] = {}
    for life in lives.bars:
        mark = f"tip{len(tips)}"
        tips[mark] = _tip(life)
        colour = STAGES[life.stage][0] if life.stage in STAGES else "grey"
        corner = (life.start, tops[life.env] + life.slot * LANE)
        size = (life.end - life.start, BAR)
        block(axes, corner, size, colour, edge=0.6, mark=mark)
    for _, seed in groupby(lives.bars, lambda life: (life.env, life.slot, life.seed)):
        _name(axes, [*seed], tops, scale)
    kept = sum(life.stage == Stage.FOSSILIZED.name for life in lives.bars)
    seeds = len({(life.env, life.slot, life.seed) for life in lives.bars})
    alt = (
        f"Swimlanes of {plain(task)}: {seeds} seeds in the last episodes of "
        f"{len(envs)} environments, {kept} of them kept."
    )
    return finish(figure, name, alt, tips)


def _name(
    axes: "Axes", seed: list[Life], tops: Mapping[int, float], scale: float
) -> None:
    """Write a seed's blueprint on its bars, if enough of it can be read."""
    first, last = seed[0], seed[-1]
    room = int(((last.end - first.start) * scale - 4) / SIGN)
    if room < min(4, len(first.blueprint)):
        return
    axes.annotate(
        plain(first.blueprint, room),
        (first.start, tops[first.env] + first.slot * LANE + BAR / 2),
        xytext=(2.5, 0),
        textcoords="offset points",
        va="center_baseline",
        size=8,
        annotation_clip=True,
    )


def _tip(life: Life) -> str:
    words = STAGES.get(life.stage, ("", life.stage.lower()))[1]
    return (
        f"{plain(life.blueprint)}, {words}: decision {life.start} to {life.end} "
        f"(environment {life.env}, slot {life.slot})"
    )
