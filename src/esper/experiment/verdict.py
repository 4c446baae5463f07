r"""Arms beside each other on the same random seeds: figures, and their words.

Signed ranks (Wilcoxon 1945): the ranks of |x - y| are summed where x > y. If both are
alike, each of the 2^n choices of signs is equally likely, so n pairs can give no p
below 2^(1 - n). Holm (1979): of m p-values in order, each becomes the largest of
(m - j) p_j, j = 0, 1, ..., up to itself. A difference is *shown* if its adjusted p is
below 5 %, its interval leaves out zero and most pairs agree with its sign.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from esper.contracts.errors import BadInput
from esper.experiment.statistics import (
    Floats,
    Interval,
    checked,
    iqm_of_each,
    paired,
    paired_improvement,
    probability_of_improvement,
    stratified_bootstrap,
)

LEVEL: Final = 0.05
"""Adjusted p-value below which a difference is taken for shown."""
Key = TypeVar("Key", bound=Hashable)
_DIGITS: Final = 12  # of a difference; what follows is rounding, not a rank
_EXACT: Final = 50  # pairs up to which all signs are counted, if no ranks are shared
_EXACT_TIED: Final = 13  # the same, if some are; both as SciPy has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """One arm less another."""

    difference: Interval
    """Of the interquartile means; one draw of seeds serves both."""
    improvement: Interval
    """How often a seed of the arm is above any seed of the other."""
    paired: Interval
    """How often the arm is above the other on the very same seed."""
    ahead: int
    """Pairs in which the arm is above the other."""
    behind: int
    """Pairs in which it is below."""
    pairs: int
    p: float
    """Of the signed ranks of all pairs of all tasks."""
    adjusted: float
    """The same, corrected for how many comparisons were made."""

    @property
    def shown(self) -> bool:
        """Whether the difference is more than luck would explain."""
        gap = self.difference
        higher = gap.low > 0.0 and self.paired.estimate > 0.5
        lower = gap.high < 0.0 and self.paired.estimate < 0.5
        return self.adjusted < LEVEL and (higher or lower)


def compare_pairs(
    pairs: Mapping[Key, tuple[Floats, Floats]],
    *,
    draws: int = 10_000,
    confidence: float = 0.95,
    rng_seed: int = 0,
) -> dict[Key, Against]:
    """Compare arms two by two; p-values are corrected for all of them at once.

    Args:
        pairs: An arm and the one that it is measured against, `[seed]` or
            `[task, seed]` each, paired by position.
        draws: How often seeds are drawn anew.
        confidence: Share of repetitions that the intervals should hold.
        rng_seed: Start of the random stream.
    """
    chance: Any = {"draws": draws, "confidence": confidence, "rng_seed": rng_seed}
    p_values = [paired_wilcoxon(x, y) for x, y in pairs.values()]
    found = {}
    for (key, both), p, adjusted in zip(
        pairs.items(), p_values, holm(p_values) if p_values else [], strict=True
    ):
        x, y = (np.atleast_2d(checked(scores, seeds=2)) for scores in both)
        found[key] = Against(
            difference=stratified_bootstrap(np.stack([x, y]), _gap, **chance),
            improvement=probability_of_improvement(x, y, **chance),
            paired=paired_improvement(x, y, **chance),
            ahead=int((x > y).sum()),
            behind=int((x < y).sum()),
            pairs=x.size,
            p=p,
            adjusted=adjusted,
        )
    return found


def told(rows: Mapping[str, Against], spec: str = "+.3g") -> dict[str, list[str]]:
    """Names with their differences, by what is shown: above, below, or open.

    Args:
        rows: By name.
        spec: Format of a difference.
    """
    sides: dict[str, list[str]] = {"above": [], "below": [], "open": []}
    for name, row in rows.items():
        side = "above" if row.difference.estimate > 0.0 else "below"
        words = f"{name!r} ({row.difference.estimate:{spec}})"
        sides[side if row.shown else "open"].append(words)
    return sides


def paired_wilcoxon(x: Floats, y: Floats) -> float:
    """Two-sided p-value of the signed ranks of x - y, as `scipy.stats.wilcoxon` has it.

    All choices of signs are counted up to 50 pairs, or up to 13 if some differences are
    zero or equally large; beyond that a normal distribution stands in. Differences that
    agree in 12 digits of the largest score are equally large: accuracies are ratios.
    Without any difference the value is 1.
    """
    x, y = paired(x, y)
    scale = max(np.abs(x).max(), np.abs(y).max(), np.finfo(np.float64).tiny)
    differences = (x / scale - y / scale).round(_DIGITS).ravel()
    left = differences[differences != 0.0]
    if not left.size:
        return 1.0
    ordered = np.sort(np.abs(left))
    below = np.searchsorted(ordered, np.abs(left), side="left")
    up_to = np.searchsorted(ordered, np.abs(left), side="right")
    doubled = below + up_to + 1  # twice the rank: whole numbers, shared or not
    seen = int(doubled[left > 0.0].sum())
    clean = left.size == differences.size and bool((up_to - below == 1).all())
    if differences.size <= (_EXACT if clean else _EXACT_TIED):
        return _counted(doubled, seen)
    deviation = math.sqrt((doubled**2).sum())
    z = (2 * seen - doubled.sum()) / deviation
    return math.erfc(abs(z) / math.sqrt(2.0))


def holm(p_values: Sequence[float] | Floats) -> list[float]:
    """P-values of several tests at once, adjusted step by step."""
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


def _counted(ranks: NDArray[np.int64], seen: int) -> float:
    """Two-sided share of all choices of signs that are as far out as what was seen."""
    total = int(ranks.sum())
    ways = np.zeros(total + 1)
    ways[0] = 1.0
    for rank in ranks:
        ways[rank:] = ways[rank:] + ways[: total + 1 - rank]
    tail = min(ways[: seen + 1].sum(), ways[seen:].sum())
    return float(min(1.0, 2.0 * tail / ways.sum()))


def _gap(drawn: Floats) -> Floats:
    gaps: Floats = iqm_of_each(drawn[:, 0]) - iqm_of_each(drawn[:, 1])
    return gaps
