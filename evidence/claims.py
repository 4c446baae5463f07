"""What was to be shown, written down beforehand, and whether it was.

A claim is *reached* or *not reached* once every task of the protocol has figures for
it, with an interval; until then it is *undecided*. The best schedule is the one with
the highest interquartile mean over the tasks that all schedules have in common.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import numpy as np

from esper.experiment.statistics import (
    RESAMPLES,
    Floats,
    Interval,
    holm,
    iqm_difference,
    iqm_interval,
    paired_improvement,
    paired_wilcoxon,
    partners,
)
from evidence.readout import LEARNED, Cells

PLAIN: Final = ("never", "random", "plateau")
SCHEDULES: Final = ("early", "periodic", "promise", "searched")
REPLAYS: Final = ("replay", "replay-elsewhere")
"""They follow a member's actions, so that one draw of members serves both."""
STATIC: Final = ("static", "static-macs")
REACHED, MISSED, OPEN = "reached", "not reached", "undecided"
ENOUGH: Final = 0.6
"""Probability of improvement over the best schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTask:
    """Tamiyo less another arm on one task."""

    difference: Interval
    seeds: int
    """That both were judged on."""
    p: float | None
    adjusted: float | None
    """By Holm, over the claims about this task; None: no claim is about this arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """Tamiyo beside another arm."""

    other: str
    difference: Interval
    """Of the interquartile means over all tasks."""
    improvement: Interval
    """How often it is above the other on the same seed."""
    tasks: Mapping[str, OnTask]
    """Those that have a pair."""

    @property
    def seeds(self) -> int:
        """Pairs of task and seed."""
        return sum(each.seeds for each in self.tasks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A goal, what became of it, and by which figures."""

    goal: str
    short: str
    """The goal in two or three words."""
    verdict: str
    figures: str


def compare(
    cells: Cells,
    tasks: Sequence[str],
    *,
    resamples: int = RESAMPLES,
) -> dict[str, Versus]:
    """Tamiyo beside everybody else, by name.

    Args:
        cells: Normalised objectives.
        tasks: Those of the protocol, in its order.
        resamples: How often members and seeds are drawn anew.
    """
    others = [arm for arm in cells.members if arm != LEARNED]
    corrected = _corrected(cells, tasks, claimed(cells, tasks))
    found = {}
    for other in others:
        same = other in REPLAYS
        known: Any = {"same_members": same, "resamples": resamples}
        rows = {}
        for task in tasks:
            x, y = _beside(cells, other, [task])
            both, _ = partners(x, y, same_members=same)
            seeds = int(np.isfinite(both[0]).any(axis=0).sum())
            if seeds:
                rows[task] = OnTask(
                    difference=iqm_difference(x, y, **known),
                    seeds=seeds,
                    p=signed_ranks(x[0], y[0]),
                    adjusted=corrected.get((task, other)),
                )
        x, y = _beside(cells, other, list(rows))
        found[other] = Versus(
            other=other,
            difference=iqm_difference(x, y, **known),
            improvement=paired_improvement(x, y, **known),
            tasks=rows,
        )
    return found


def claims(
    cells: Cells, tasks: Sequence[str], against: Mapping[str, Versus]
) -> list[Claim]:
    """Every claim with its verdict.

    Args:
        cells: Normalised objectives.
        tasks: Those of the protocol, all of which a claim is about.
        against: What `compare` found.
    """
    best = best_schedule(cells, tasks)
    found = [_everywhere(arm, tasks, against.get(arm)) for arm in PLAIN]
    words = " and ".join((", ".join(SCHEDULES[:-1]), SCHEDULES[-1]))
    found.append(
        _judged(
            f"more often above the best of {words} than not: probability of "
            f"improvement at least {ENOUGH}, its interval above 0.5",
            "above the best schedule",
            tasks,
            None if best is None else against.get(best),
            lambda v: v.improvement.estimate >= ENOUGH and v.improvement.low > 0.5,
        )
    )
    found.append(
        _judged(
            "above its own actions replayed from another seed: interval clear of 0",
            "above its replay",
            tasks,
            against.get("replay"),
            lambda v: v.difference.low > 0.0,
        )
    )
    for arm, words in zip(
        STATIC, ("parameters", "parameters and multiply-adds"), strict=True
    ):
        found.append(
            _judged(
                f"not shown to be below a plain network of equal {words}: interval not "
                "wholly below 0",
                f"not below {arm}",
                tasks,
                against.get(arm),
                lambda v: v.difference.high >= 0.0,
            )
        )
    return found


def best_schedule(cells: Cells, tasks: Sequence[str]) -> str | None:
    """Whom a schedule that is learnt must beat; None: no schedule has any figures."""
    known = [arm for arm in SCHEDULES if cells.done(arm, tasks)]
    common = [t for t in tasks if all(cells.done(arm, [t]) for arm in known)] or tasks
    height = {arm: iqm_interval(cells.of(arm, common), resamples=1) for arm in known}
    ranked = [arm for arm in known if isfinite(height[arm].estimate)]
    return max(ranked, key=lambda arm: height[arm].estimate, default=None)


def claimed(cells: Cells, tasks: Sequence[str]) -> list[str]:
    """The arms that claims are about."""
    best = best_schedule(cells, tasks)
    return [*PLAIN, *([] if best is None else [best]), "replay", *STATIC]


def _beside(
    cells: Cells, other: str, tasks: Sequence[str]
) -> tuple[list[Floats], list[Floats]]:
    """Figures of both; of a replay, those members that both have."""
    ours, theirs = cells.of(LEARNED, tasks), cells.of(other, tasks)
    if other not in REPLAYS:
        return ours, theirs
    ours_by, theirs_by = cells.members.get(LEARNED, ()), cells.members[other]
    both = [member for member in ours_by if member in theirs_by]
    mine = [ours_by.index(member) for member in both]
    other_ones = [theirs_by.index(member) for member in both]
    return [f[mine] for f in ours], [f[other_ones] for f in theirs]


def _corrected(
    cells: Cells, tasks: Sequence[str], arms: Sequence[str]
) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for task in tasks:
        ours = cells.at(LEARNED, task)
        values = {arm: signed_ranks(ours, cells.at(arm, task)) for arm in arms}
        known = {arm: p for arm, p in values.items() if p is not None}
        if known:
            adjusted = holm(list(known.values()))
            found.update(zip(((task, arm) for arm in known), adjusted, strict=True))
    return found


def _everywhere(arm: str, tasks: Sequence[str], versus: Versus | None) -> Claim:
    """Above an arm on every task."""
    goal = f"above {arm} on every task: each interval clear of 0"
    if versus is None or not versus.tasks:
        return Claim(goal=goal, short=f"above {arm}", verdict=OPEN, figures="not run")
    gaps = {task: each.difference for task, each in versus.tasks.items()}
    above = [task for task, gap in gaps.items() if gap.low > 0.0]
    below = [task for task, gap in gaps.items() if gap.high < 0.0]
    rest = [task for task in gaps if task not in above and task not in below]
    text = [f"above on {len(above)} of {len(tasks)}"]
    text += [f"not distinguished on {_names(rest)}"] if rest else []
    text += [f"below on {_names(below)}"] if below else []
    text.append(f"all tasks {_shown(versus.difference)}")
    verdict = REACHED if len(above) == len(tasks) else MISSED
    if not _whole(tasks, versus):
        verdict = OPEN
    figures = _so_far("; ".join(text), tasks, versus)
    return Claim(goal=goal, short=f"above {arm}", verdict=verdict, figures=figures)


def _judged(
    goal: str,
    short: str,
    tasks: Sequence[str],
    versus: Versus | None,
    holds: Callable[[Versus], bool],
) -> Claim:
    """A claim about all tasks together."""
    if versus is None or not versus.tasks:
        return Claim(goal=goal, short=short, verdict=OPEN, figures="not run")
    gap = versus.difference
    side = (
        "above" if gap.low > 0.0 else "below" if gap.high < 0.0 else "not distinguished"
    )
    text = (
        f"{versus.other}: {side}, difference {_shown(gap)}, probability "
        f"{_shown(versus.improvement, '.2f')}"
    )
    decided = REACHED if holds(versus) else MISSED
    return Claim(
        goal=goal,
        short=short,
        verdict=decided if _whole(tasks, versus) else OPEN,
        figures=_so_far(text, tasks, versus),
    )


def _whole(tasks: Sequence[str], versus: Versus) -> bool:
    """Whether every task has figures with an interval."""
    rows = versus.tasks
    return bool(tasks) and all(
        task in rows and isfinite(rows[task].difference.low) for task in tasks
    )


def _so_far(text: str, tasks: Sequence[str], versus: Versus) -> str:
    done = len(versus.tasks)
    more = "" if done == len(tasks) else f"; {done} of {len(tasks)} tasks so far"
    return f"{text}; n = {versus.seeds}{more}"


def _shown(interval: Interval, spec: str = "+.3f") -> str:
    known = isfinite(interval.low)
    text = f"{interval:{spec}}" if known else f"{interval.estimate:{spec}}"
    return text.replace("-", "−")


def _names(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def signed_ranks(x: Floats, y: Floats) -> float | None:
    """P-value of paired Wilcoxon on one task; members are averaged first."""
    first, second = (_member_mean(each) for each in (x, y))
    both = np.isfinite(first) & np.isfinite(second)
    return paired_wilcoxon(first[both], second[both]) if both.any() else None


def _member_mean(figures: Floats) -> Floats:
    """Mean over the members that are there, by seed; NaN without any."""
    there = np.isfinite(figures)
    total = np.where(there, figures, 0.0).sum(axis=0)
    with np.errstate(invalid="ignore"):
        found: Floats = total / there.sum(axis=0)
    return found
