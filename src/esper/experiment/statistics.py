r"""Interquartile means, bootstrap intervals and paired tests of scores.

A sample is `[seed]`, `[task, seed]`, or a list with one `[member, seed]` array per task
(NaN is missing) for controllers that were trained several times. One resampler serves
every interval, a percentile bootstrap (Efron 1979): seeds are drawn with replacement
within each task, the same for all arms that are compared; members are drawn once for
all tasks, one fewer than there are, since as many would vary too little (Hesterberg
2015). A draw is kept as counts, so that a statistic is a weighted mean of cells.

Interquartile mean and probability of improvement: Agarwal et al. 2021,
https://arxiv.org/abs/2108.13264; paired here. Signed ranks: Wilcoxon 1945; correction:
Holm 1979.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import Final, TypeVar

import numpy as np
import scipy
from numpy.typing import NDArray

from esper.contracts.errors import BadInput

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
"""How often each unit is drawn, `[draw, unit]`."""
Sample = Floats | Sequence[Floats]
Key = TypeVar("Key", bound=Hashable)

RESAMPLES: Final = 10_000
LEVEL: Final = 0.05
"""Adjusted p-value below which a difference counts as shown."""
_TAIL: Final = 0.025
_CHUNK: Final = 500  # draws that are evaluated at once, which bounds memory
_DIGITS: Final = 12  # of a difference; what follows is rounding, not a rank
_EXACT_TIED: Final = 13  # pairs up to which SciPy counts all signs of shared ranks


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval; NaN bounds are unknown."""

    estimate: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Estimate and bounds, each in the given format."""
        return f"{self.estimate:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(
    sizes: Sequence[int],
    statistic: Callable[..., Floats],
    *,
    draw: Sequence[int] | None = None,
    student: bool = False,
    resamples: int = RESAMPLES,
) -> Interval:
    """Interval of a statistic of several groups that are resampled independently.

    Args:
        sizes: Units in each group.
        statistic: Maps one `Counts` array per group to figures `[draw]`.
        draw: How many units are drawn of each group; None: as many as it has.
        student: Widen the interval to the tails of Student's t, for means of one size.
            Resampled means vary by (count - 1) / count of what they should, and are
            about normal where Student's t is due (Hesterberg 2015). Of 10 normal
            figures 94 % of the intervals then hold the truth, instead of 90.
        resamples: How often all groups are drawn.
    """
    if resamples < 1:
        raise BadInput(f"resamples must be at least 1, got {resamples}.")
    generators = np.random.default_rng(0).spawn(len(sizes))
    figures = []
    for start in range(0, resamples, _CHUNK):
        many = min(_CHUNK, resamples - start)
        counts = [
            _draw(generator, size, number, many)
            for generator, size, number in zip(
                generators, sizes, draw or sizes, strict=True
            )
        ]
        figures.append(statistic(*counts))
    found = np.concatenate(figures)
    # Of a hierarchical draw all cells may be missing.
    found = found[np.isfinite(found)]
    tail, count = _TAIL, sizes[0]
    if student and count > 1:
        t = scipy.stats.t.ppf(1.0 - tail, count - 1)
        tail = float(scipy.stats.norm.cdf(-t * sqrt(count / (count - 1))))
    low, high = np.quantile(found, [tail, 1.0 - tail]) if found.size else (nan, nan)
    estimate = statistic(*(np.ones((1, size), dtype=np.int64) for size in sizes))
    return Interval(float(estimate[0]), float(low), float(high))


def iqm_interval(sample: Sample, *, resamples: int = RESAMPLES) -> Interval:
    """Interquartile mean of all cells of all tasks; below four, their mean."""
    (arm,) = _present([_tasks(sample)])
    return _hierarchical(
        [arm],
        lambda members, seeds: _weighted_iqm(arm, members[0], seeds),
        resamples=resamples,
    )


def mean_interval(sample: Sample, *, resamples: int = RESAMPLES) -> Interval:
    """Mean over tasks of the mean of a task's cells."""
    (arm,) = _present([_tasks(sample)])
    return _hierarchical(
        [arm],
        lambda members, seeds: _weighted_mean(arm, [*members] * len(arm), seeds),
        student=len(arm) == 1 and len(arm[0]) == 1,
        resamples=resamples,
    )


def iqm_difference(
    x: Sample,
    y: Sample,
    *,
    same_members: bool = False,
    resamples: int = RESAMPLES,
) -> Interval:
    """Interquartile mean of x less that of y, over the cells that have a partner.

    Args:
        x: Scores.
        y: Of the same tasks and seeds, in the same places.
        same_members: Member i of y follows from member i of x: one draw serves both.
        resamples: How often members and seeds are drawn.
    """
    ours, theirs = _present(partners(x, y, same_members=same_members))
    return _hierarchical(
        [ours] if same_members else [ours, theirs],
        lambda members, seeds: (
            _weighted_iqm(ours, members[0], seeds)
            - _weighted_iqm(theirs, members[-1], seeds)
        ),
        resamples=resamples,
    )


def paired_improvement(
    x: Sample,
    y: Sample,
    *,
    same_members: bool = False,
    resamples: int = RESAMPLES,
) -> Interval:
    """Probability that x is above y on the same seed; a tie is half a win.

    The mean over tasks of the share among all pairs of members; arguments as of
    `iqm_difference`.
    """
    ours, theirs = _present(partners(x, y, same_members=same_members))
    won = []
    for a, b in zip(ours, theirs, strict=True):
        pairs = (a, b) if same_members else np.broadcast_arrays(a[:, None], b[None])
        first, second = (each.reshape(-1, a.shape[1]) for each in pairs)
        points = np.where(first == second, 0.5, first > second)
        won.append(np.where(np.isfinite(first + second), points, nan))

    def share(members: Sequence[Counts], seeds: Sequence[Counts]) -> Floats:
        pairs = members[0]
        if not same_members:
            pairs = pairs[:, :, None] * members[1][:, None, :]
        return _weighted_mean(won, [pairs.reshape(len(pairs), -1)] * len(won), seeds)

    return _hierarchical(
        [ours] if same_members else [ours, theirs], share, resamples=resamples
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm less another, host by host."""

    difference: Interval
    """Of the interquartile means."""
    improvement: Interval
    """Probability that the arm is above the other on the same seed."""
    p: float
    """Of the signed ranks of all pairs of all tasks."""
    adjusted: float
    """The same, corrected for the number of comparisons."""

    @property
    def shown(self) -> bool:
        """Adjusted p below 5 %, interval without zero, and most pairs agree."""
        gap, most = self.difference, self.improvement.estimate
        higher = gap.low > 0.0 and most > 0.5
        lower = gap.high < 0.0 and most < 0.5
        return self.adjusted < LEVEL and (higher or lower)

    @property
    def outcome(self) -> str:
        """Above, below or open."""
        if not self.shown:
            return "open"
        return "above" if self.difference.estimate > 0.0 else "below"


def compare_pairs(
    pairs: Mapping[Key, tuple[Floats, Floats]], *, resamples: int = RESAMPLES
) -> dict[Key, Comparison]:
    """Compare arms two by two; p-values are corrected for all of them at once.

    Args:
        pairs: An arm and the one that it is compared with, `[seed]` or `[task, seed]`.
        resamples: How often seeds are drawn.
    """
    p_values = [paired_wilcoxon(x, y) for x, y in pairs.values()]
    corrected = holm(p_values) if p_values else []
    return {
        key: Comparison(
            difference=iqm_difference(x, y, resamples=resamples),
            improvement=paired_improvement(x, y, resamples=resamples),
            p=p,
            adjusted=adjusted,
        )
        for (key, (x, y)), p, adjusted in zip(
            pairs.items(), p_values, corrected, strict=True
        )
    }


def paired_wilcoxon(x: Floats, y: Floats) -> float:
    """Two-sided p-value of the signed ranks of x - y; without any difference 1.

    Differences that agree in 12 digits of the largest score are ties: accuracies are
    ratios, whose differences are rounded.
    """
    x, y = _checked(x), _checked(y)
    if x.shape != y.shape:
        raise BadInput(
            f"paired scores must have the same tasks and seeds, got shapes {x.shape} "
            f"and {y.shape}; judge both on the same random seeds."
        )
    scale = max(np.abs(x).max(), np.abs(y).max(), np.finfo(np.float64).tiny)
    differences = (x / scale - y / scale).round(_DIGITS).ravel()
    nonzero = differences[differences != 0.0]
    if not nonzero.size:
        return 1.0
    tied = len(np.unique(np.abs(nonzero))) < differences.size
    if tied and differences.size <= _EXACT_TIED:
        return _exact_signed_ranks(nonzero)
    return float(scipy.stats.wilcoxon(differences).pvalue)


def _exact_signed_ranks(differences: Floats) -> float:
    """The same with shared ranks; SciPy does this by a permutation test, in seconds."""
    # Twice the rank is a whole number, shared or not.
    ranks = (2 * scipy.stats.rankdata(np.abs(differences))).astype(np.int64)
    ways = np.ones(1)  # number of choices of signs by the sum of positive ranks
    for rank in ranks:
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    positive = int(ranks[differences > 0.0].sum())
    tail = min(ways[: positive + 1].sum(), ways[positive:].sum())
    return float(min(1.0, 2.0 * tail / ways.sum()))


def holm(p_values: Sequence[float] | Floats) -> list[float]:
    """P-values of m tests, adjusted: the running maximum of (m - j) p_j in order."""
    values = np.asarray(p_values, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise BadInput(f"p-values must be a list of some, got shape {values.shape}.")
    if not ((values >= 0.0) & (values <= 1.0)).all():
        raise BadInput(f"p-values must lie in [0, 1], got {values.tolist()}.")
    order = np.argsort(values, kind="stable")
    steps = np.arange(values.size, 0, -1) * values[order]
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(np.minimum(steps, 1.0))
    return [float(value) for value in adjusted]


def partners(
    x: Sample, y: Sample, *, same_members: bool = False
) -> tuple[list[Floats], list[Floats]]:
    """Both with those cells only whose seed, and member if shared, the other has."""
    x, y = _tasks(x), _tasks(y)
    if len(x) != len(y):
        raise BadInput(f"x and y must have the same tasks, got {len(x)} and {len(y)}.")
    ours, theirs = [], []
    for a, b in zip(x, y, strict=True):
        if a.shape[1] != b.shape[1] or (same_members and a.shape != b.shape):
            raise BadInput(
                "x and y must have the same seeds, and members if they share them, "
                f"got shapes {a.shape} and {b.shape}."
            )
        here, there = np.isfinite(a), np.isfinite(b)
        if same_members:
            here = there = here & there
        else:
            here, there = here & there.any(axis=0), there & here.any(axis=0)
        ours.append(np.where(here, a, nan))
        theirs.append(np.where(there, b, nan))
    return ours, theirs


def _checked(scores: Floats) -> Floats:
    """Refuse scores that are not `[seed]` or `[task, seed]` of finite numbers."""
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim not in (1, 2) or not scores.size:
        raise BadInput(
            f"scores must be [seed] or [task, seed] and not empty, got shape "
            f"{scores.shape}."
        )
    if not np.isfinite(scores).all():
        where = np.argwhere(~np.isfinite(scores))[0].tolist()
        raise BadInput(
            f"scores must be finite, got {scores[tuple(where)]} at {where}; give a "
            "failed run the score that it earned."
        )
    return scores


def _tasks(sample: Sample) -> list[Floats]:
    """A sample as one `[member, seed]` array per task."""
    if isinstance(sample, np.ndarray):
        return [task[None] for task in np.atleast_2d(_checked(sample))]
    return list(sample)


def _present(arms: Sequence[Sequence[Floats]]) -> list[list[Floats]]:
    """Arms without the tasks, seeds and members of which the first arm has nothing.

    Cells without a partner are NaN in all arms, so the first one stands for all seeds.
    """
    seeds = [np.isfinite(task).any(axis=0) for task in arms[0]]
    found = []
    for arm in arms:
        tasks = [t[:, kept] for t, kept in zip(arm, seeds, strict=True) if kept.any()]
        if tasks:
            members = np.any([np.isfinite(t).any(axis=1) for t in tasks], axis=0)
            tasks = [task[members] for task in tasks]
        found.append(tasks)
    return found


def _hierarchical(
    arms: Sequence[Sequence[Floats]],
    statistic: Callable[[Sequence[Counts], Sequence[Counts]], Floats],
    *,
    student: bool = False,
    resamples: int,
) -> Interval:
    """Interval over the members of each arm and the seeds, which arms share."""
    if not arms[0]:
        return Interval(nan, nan, nan)
    members = [len(arm[0]) for arm in arms]
    seeds = [task.shape[1] for task in arms[0]]
    found = bootstrap(
        [*seeds, *members],
        lambda *counts: statistic(counts[len(seeds) :], counts[: len(seeds)]),
        draw=[*seeds, *(max(1, count - 1) for count in members)],
        student=student,
        resamples=resamples,
    )
    # One seed of a task cannot be resampled.
    return found if min(seeds) > 1 else Interval(found.estimate, nan, nan)


def _draw(generator: np.random.Generator, size: int, number: int, draws: int) -> Counts:
    drawn = generator.integers(size, size=(draws, number))
    cells = (drawn + size * np.arange(draws)[:, None]).ravel()
    counts: Counts = np.bincount(cells, minlength=draws * size).reshape(draws, size)
    return counts


def _weighted_iqm(
    arm: Sequence[Floats], members: Counts, seeds: Sequence[Counts]
) -> Floats:
    """Interquartile mean of every draw; a cell is there members x seeds times."""
    whole = np.concatenate(arm, axis=1)
    at = np.argwhere(np.isfinite(whole))
    figures = whole[tuple(at.T)]
    order = np.argsort(figures, kind="stable")
    figures, at = figures[order], at[order]
    counts = members[:, at[:, 0]] * np.concatenate(seeds, axis=1)[:, at[:, 1]]
    ends = np.cumsum(counts, axis=1)
    total = ends[:, -1:]
    cut = total // 4
    kept = np.minimum(ends, total - cut) - np.maximum(ends - counts, cut)
    # Around a middle, since a product would spoil equal figures by rounding.
    middle = figures[len(figures) // 2]
    with np.errstate(invalid="ignore"):
        offsets = np.maximum(kept, 0) @ (figures - middle) / (total - 2 * cut)[:, 0]
    means: Floats = middle + offsets
    return means


def _weighted_mean(
    tasks: Sequence[Floats], rows: Sequence[Counts], columns: Sequence[Counts]
) -> Floats:
    """Mean over tasks of the mean of a task whose cells count rows x columns times."""
    means = []
    for figures, row, column in zip(tasks, rows, columns, strict=True):
        there = np.isfinite(figures)
        middle = figures[there].mean()
        offsets = np.where(there, figures - middle, 0.0)
        total = ((row @ there) * column).sum(axis=1)
        with np.errstate(invalid="ignore"):
            means.append(middle + ((row @ offsets) * column).sum(axis=1) / total)
    found: Floats = np.mean(means, axis=0)
    return found
