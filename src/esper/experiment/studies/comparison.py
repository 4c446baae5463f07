r"""Two arms on the same random seeds: how far apart, and could it be luck?

Interquartile mean: of the middle half (a quarter of the values is left out on either
side). Signed ranks (Wilcoxon 1945): the ranks of the absolute differences are summed
where the difference is positive; all 2^n choices of signs are equally likely if the
arms are alike, so the tail is counted exactly, ties included. Holm (1979): of m
p-values in order, p_(i) becomes the largest of (m - j + 1) p_(j) for j up to i.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from esper.contracts.errors import BadInput
from esper.experiment.statistics import Floats, Interval, mean_interval

LEVEL = 0.05
"""Adjusted p-value below which a difference is taken for shown."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm less another, paired by random seed."""

    name: str
    """The other arm."""
    difference: Interval
    p: float
    adjusted: float
    """The p-value, corrected for how many comparisons were made."""
    won: int
    lost: int
    pairs: int

    @property
    def shown(self) -> bool:
        """Whether the difference is more than luck would explain."""
        low, high = self.difference.low, self.difference.high
        return self.adjusted < LEVEL and (low > 0.0 or high < 0.0)


def compare(ours: Floats, others: dict[str, Floats]) -> list[Comparison]:
    """Compare one arm with each of the others; values are paired by position."""
    differences = {name: ours - theirs for name, theirs in others.items()}
    found = [signed_rank_p(difference) for difference in differences.values()]
    adjusted = holm(found)
    return [
        Comparison(
            name,
            mean_interval(difference),
            p,
            corrected,
            won=int((difference > 0).sum()),
            lost=int((difference < 0).sum()),
            pairs=len(difference),
        )
        for (name, difference), p, corrected in zip(
            differences.items(), found, adjusted, strict=True
        )
    ]


def in_words(comparison: Comparison, subject: str) -> str:
    """What a comparison shows or does not show, in one sentence; figures in points."""
    gap = comparison.difference
    low, high = 100 * gap.low, 100 * gap.high
    record = (
        f"ahead on {comparison.won} of {comparison.pairs} random seeds, "
        f"p = {comparison.adjusted:.2g}"
    )
    against = f"'{comparison.name}'"
    if comparison.shown:
        verb = "beats" if gap.estimate > 0 else "loses to"
        return (
            f"{subject} {verb} {against} by {abs(100 * gap.estimate):.1f} points "
            f"({low:+.1f} to {high:+.1f}; {record})."
        )
    if low > 0.0 or high < 0.0:
        side = "ahead of" if gap.estimate > 0 else "behind"
        return (
            f"{subject} is {side} {against} by {abs(100 * gap.estimate):.1f} points on "
            f"these seeds ({low:+.1f} to {high:+.1f}), but the ranks do not settle it "
            f"({record})."
        )
    return (
        f"{subject} against {against}: no difference is shown; it may lie anywhere "
        f"from {low:+.1f} to {high:+.1f} points ({record})."
    )


def interquartile_mean(values: Floats) -> float:
    """Mean of what is left without a quarter of the values on either side."""
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def interval(
    values: Floats,
    statistic: Callable[[Floats], float],
    *,
    resamples: int = 2_000,
    rng_seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval, of 95 %, of any statistic of one arm."""
    generator = np.random.default_rng(rng_seed)
    drawn = generator.integers(len(values), size=(resamples, len(values)))
    each = [statistic(values[row]) for row in drawn]
    low, high = np.percentile(each, [2.5, 97.5])
    return Interval(statistic(values), float(low), float(high))


def signed_rank_p(differences: Floats) -> float:
    """Exact two-sided p-value of the signed ranks; zeros are left out."""
    if not np.isfinite(differences).all():
        raise BadInput(f"differences must be finite, got {differences.tolist()}.")
    # Accuracies are ratios: differences that are equal must also be so in floats.
    differences = differences.round(12)
    left = differences[differences != 0.0]
    if not len(left):
        return 1.0
    size = np.abs(left)
    # Twice the mid-ranks, so that ties have whole numbers too.
    below = (size[None] < size[:, None]).sum(1)
    same = (size[None] == size[:, None]).sum(1)
    doubled = (2 * below + same + 1).astype(np.int64)
    total = int(doubled.sum())
    ways = np.zeros(total + 1)
    ways[0] = 1.0
    for rank in doubled:
        ways[rank:] = ways[rank:] + ways[: total + 1 - rank]
    chance = ways / ways.sum()
    seen = int(doubled[left > 0].sum())
    tail = min(chance[: seen + 1].sum(), chance[seen:].sum())
    return float(min(1.0, 2.0 * tail))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of several tests at once, adjusted step by step."""
    order = np.argsort(p_values, kind="stable")
    count, least = len(p_values), 0.0
    adjusted = [0.0] * count
    for place, index in enumerate(order):
        least = max(least, min(1.0, (count - place) * p_values[index]))
        adjusted[index] = least
    return adjusted
