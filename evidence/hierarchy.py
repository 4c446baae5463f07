r"""Intervals that count the luck of seeds and the luck of trainings.

Tasks are strata. Within a task seeds are drawn anew, with replacement; of an arm that
was trained several times members are drawn too, one fewer than there are, since as many
would vary too little (Hesterberg 2015). One draw of members serves all tasks, since a
controller is one thing, and one draw of seeds all arms that are compared. A draw is
kept as counts: a cell of member m and seed s is there c_m * c_s times, so a trimmed
mean is a sum along the order of the cells, which is the same for all draws. Cells that
are missing are never drawn; one seed of a task gives no interval (NaN).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import nan
from typing import Final

import numpy as np
from numpy.typing import NDArray

from esper.contracts.errors import BadInput
from esper.experiment.statistics import Floats, Interval
from esper.experiment.verdict import paired_wilcoxon

Counts = NDArray[np.int32]
Tasks = Sequence[Floats]
"""Figures `[member, seed]` of each task; NaN is missing."""
Statistic = Callable[[Counts, Counts], Floats]
"""From the counts of members and of seeds, `[draw, ...]`, to figures `[draw]`."""

RESAMPLES: Final = 10_000
_AT_ONCE: Final = 2**19  # counts that are looked at in one go: some 4 MB
_SEEDS, _MEMBERS, _OTHERS = range(3)  # random streams


def iqm_interval(
    arm: Tasks, *, resamples: int = RESAMPLES, rng_seed: int = 0
) -> Interval:
    """Interquartile mean of all cells of all tasks.

    Args:
        arm: Figures of each task.
        resamples: How often members and seeds are drawn anew.
        rng_seed: Start of the random streams.
    """
    return _One(arm).interval(drawn_iqm, resamples, rng_seed)


def mean_interval(
    arm: Tasks, *, resamples: int = RESAMPLES, rng_seed: int = 0
) -> Interval:
    """Mean over tasks of the mean of all cells of a task; arguments as above."""
    return _One(arm).interval(drawn_mean, resamples, rng_seed)


def difference(
    x: Tasks,
    y: Tasks,
    *,
    same_members: bool = False,
    resamples: int = RESAMPLES,
    rng_seed: int = 0,
) -> Interval:
    """Interquartile mean of x less that of y, over the cells that have a partner.

    Args:
        x: Figures of each task.
        y: Of the same tasks, seeds at the same places.
        same_members: Member i of y follows from member i of x: one draw serves both.
        resamples: How often members and seeds are drawn anew.
        rng_seed: Start of the random streams.
    """
    first, second = partners(x, y, same_members=same_members)
    return _Two(first, second, same_members).interval(_gap, resamples, rng_seed)


def improvement(
    x: Tasks,
    y: Tasks,
    *,
    same_members: bool = False,
    resamples: int = RESAMPLES,
    rng_seed: int = 0,
) -> Interval:
    """How often x is above y on the same seed, a tie being half a win.

    The mean over tasks of the share among all pairs of members; arguments as above.
    """
    first, second = partners(x, y, same_members=same_members)
    return _Two(first, second, same_members).interval(_wins, resamples, rng_seed)


def signed_ranks(x: Floats, y: Floats) -> float | None:
    """P-value of paired Wilcoxon on one task; members are averaged first."""
    first, second = (_member_mean(each) for each in (x, y))
    both = np.isfinite(first) & np.isfinite(second)
    return paired_wilcoxon(first[both], second[both]) if both.any() else None


def partners(
    x: Tasks, y: Tasks, *, same_members: bool = False
) -> tuple[list[Floats], list[Floats]]:
    """Both with those cells only whose seed, and member if shared, the other has."""
    if len(x) != len(y):
        raise BadInput(f"x and y must have the same tasks, got {len(x)} and {len(y)}.")
    ours, theirs = [], []
    for one, other in zip(x, y, strict=True):
        fits = one.shape[1] == other.shape[1]
        if not fits or (same_members and one.shape != other.shape):
            raise BadInput(
                "x and y must have the same seeds, and members if they share them, "
                f"got shapes {one.shape} and {other.shape}."
            )
        here, there = np.isfinite(one), np.isfinite(other)
        if same_members:
            here = there = here & there
        else:
            here, there = (
                here & there.any(axis=0, keepdims=True),
                there & here.any(axis=0, keepdims=True),
            )
        ours.append(np.where(here, one, nan))
        theirs.append(np.where(there, other, nan))
    return ours, theirs


def drawn_iqm(arm: Tasks, members: Counts, seeds: Counts) -> Floats:
    """Interquartile mean of every draw.

    Args:
        arm: Figures of each task.
        members: How often each is drawn, `[draw, member]`.
        seeds: The same, `[draw, seed]`, those of all tasks one after another.
    """
    whole = np.concatenate(list(arm), axis=1)
    at = np.argwhere(np.isfinite(whole))
    figures = whole[tuple(at.T)]
    order = np.argsort(figures, kind="stable")
    figures, at = figures[order], at[order]
    means = np.full(len(members), nan)
    for part in _parts(len(members), len(figures)):
        counts = members[part][:, at[:, 0]] * seeds[part][:, at[:, 1]]
        ends = np.cumsum(counts, axis=1)
        total = ends[:, -1:]
        cut = total // 4
        kept = np.minimum(ends, total - cut) - np.maximum(ends - counts, cut)
        kept = np.maximum(kept, 0).astype(np.float64)
        # A product would spoil equal figures by rounding; so their middle is moved.
        middle = figures[len(figures) // 2]
        with np.errstate(invalid="ignore"):
            above = kept @ (figures - middle) / (total - 2 * cut)[:, 0]
        means[part] = middle + above
    return means


def drawn_mean(arm: Tasks, members: Counts, seeds: Counts) -> Floats:
    """Mean over tasks of the mean of a task, of every draw; arguments as above."""
    means, start = [], 0
    for figures in arm:
        there = np.isfinite(figures)
        counts = seeds[:, start : start + figures.shape[1]].astype(np.float64)
        start += figures.shape[1]
        total = ((members @ there) * counts).sum(axis=1)
        middle = figures[there].mean()
        offsets = np.where(there, figures - middle, 0.0)
        with np.errstate(invalid="ignore"):
            means.append(middle + ((members @ offsets) * counts).sum(axis=1) / total)
    found: Floats = np.mean(means, axis=0)
    return found


class _One:
    """An arm without the tasks, members and seeds of which nothing is there."""

    def __init__(self, arm: Tasks) -> None:
        there = [np.isfinite(figures) for figures in arm]
        who = np.any([each.any(axis=1) for each in there if each.size], axis=0)
        self.arm = [
            figures[who][:, each.any(axis=0)]
            for figures, each in zip(arm, there, strict=True)
            if each.any()
        ]

    def interval(
        self,
        statistic: Callable[[Tasks, Counts, Counts], Floats],
        resamples: int,
        rng_seed: int,
    ) -> Interval:
        if not self.arm:
            return Interval(nan, nan, nan)
        counts = [figures.shape[1] for figures in self.arm]
        members = len(self.arm[0])
        return _interval(
            lambda of_members, of_seeds: statistic(self.arm, of_members, of_seeds),
            _drawn_members(members, resamples, (rng_seed, _MEMBERS)),
            _drawn(tuple(counts), resamples, (rng_seed, _SEEDS)),
            counts,
        )


class _Two:
    """Two arms with the same seeds, and the counts of both members side by side."""

    def __init__(self, x: Tasks, y: Tasks, same_members: bool) -> None:
        used = [np.isfinite(figures).any(axis=0) for figures in x]
        self.same = same_members
        self.x, self.y = (
            [f[:, seeds] for f, seeds in zip(arm, used, strict=True) if seeds.any()]
            for arm in (x, y)
        )
        if not self.x:
            return
        ours, theirs = (
            np.any([np.isfinite(figures).any(axis=1) for figures in arm], axis=0)
            for arm in (self.x, self.y)
        )
        self.x = [figures[ours] for figures in self.x]
        self.y = [figures[theirs] for figures in self.y]

    def interval(
        self,
        statistic: Callable[["_Two", Counts, Counts, Counts], Floats],
        resamples: int,
        rng_seed: int,
    ) -> Interval:
        if not self.x:
            return Interval(nan, nan, nan)
        counts = [figures.shape[1] for figures in self.x]
        ours, theirs = len(self.x[0]), len(self.y[0])
        first = _drawn_members(ours, resamples, (rng_seed, _MEMBERS))
        second = _drawn_members(theirs, resamples, (rng_seed, _OTHERS))
        return _interval(
            lambda members, seeds: statistic(
                self,
                members[:, :ours],
                members[:, :ours] if self.same else members[:, ours:],
                seeds,
            ),
            np.concatenate([first, second], axis=1),
            _drawn(tuple(counts), resamples, (rng_seed, _SEEDS)),
            counts,
        )


def _gap(both: _Two, ours: Counts, theirs: Counts, seeds: Counts) -> Floats:
    return drawn_iqm(both.x, ours, seeds) - drawn_iqm(both.y, theirs, seeds)


def _wins(both: _Two, ours: Counts, theirs: Counts, seeds: Counts) -> Floats:
    if both.same:
        won = [_won(x, y) for x, y in zip(both.x, both.y, strict=True)]
        return drawn_mean(won, ours, seeds)
    won = [
        _won(x[:, None], y[None]).reshape(-1, x.shape[1])
        for x, y in zip(both.x, both.y, strict=True)
    ]
    pairs = (ours[:, :, None] * theirs[:, None, :]).reshape(len(ours), -1)
    return drawn_mean(won, pairs, seeds)


def _won(x: Floats, y: Floats) -> Floats:
    won = np.where(x == y, 0.5, (x > y).astype(np.float64))
    found: Floats = np.where(np.isfinite(x) & np.isfinite(y), won, nan)
    return found


def _interval(
    statistic: Statistic, members: Counts, seeds: Counts, per_task: Sequence[int]
) -> Interval:
    once = statistic(np.ones_like(members[:1]), np.ones_like(seeds[:1]))
    if min(per_task) < 2:
        return Interval(float(once[0]), nan, nan)
    figures = statistic(members, seeds)
    figures = figures[np.isfinite(figures)]  # all cells of a draw may be missing
    low, high = np.percentile(figures, [2.5, 97.5])
    return Interval(float(once[0]), float(low), float(high))


def _drawn_members(count: int, resamples: int, stream: tuple[int, int]) -> Counts:
    return _drawn((count,), resamples, stream, max(1, count - 1))


@lru_cache(maxsize=16)
def _drawn(
    sizes: tuple[int, ...],
    resamples: int,
    stream: tuple[int, int],
    times: int | None = None,
) -> Counts:
    """How often each of so many is drawn, for several groups one after another.

    As many are drawn of a group as it has, or `times`.
    """
    if resamples < 1:
        raise BadInput(f"resamples must be at least 1, got {resamples}.")
    found = [
        np.random.default_rng([*stream, group]).multinomial(
            times or size, np.full(size, 1.0 / size), size=resamples
        )
        for group, size in enumerate(sizes)
    ]
    drawn: Counts = np.concatenate(found, axis=1).astype(np.int32)
    drawn.setflags(write=False)
    return drawn


def _parts(draws: int, cells: int) -> Iterator[slice]:
    at_once = max(1, _AT_ONCE // max(1, cells))
    for start in range(0, draws, at_once):
        yield slice(start, start + at_once)


def _member_mean(figures: Floats) -> Floats:
    """Mean over the members that are there, by seed."""
    there = np.isfinite(figures)
    total = np.where(there, figures, 0.0).sum(axis=0)
    count = there.sum(axis=0)
    found: Floats = np.where(count > 0, total / np.maximum(count, 1), nan)
    return found
