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
_DIGITS: Final = 12  # of a difference; what follows is rounding, not a rank
_EXACT: Final = 50  # pairs up to which all signs are counted, if no ranks are shared
_EXACT_TIED: Final = 13  # the same, if some are; both as SciPy has them
_FEW: Final = 10  # seeds below which a percentile interval is markedly too narrow


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of the table."""

    name: str
    iqm: Interval
    against: Against | None
    """None for the baseline itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The table: the baseline first, the others as they came."""

    baseline: str
    arms: tuple[Arm, ...]
    tasks: int
    seeds: int
    """Per task."""

    @property
    def smallest_p(self) -> float:
        """The smallest adjusted p-value that so many pairs and arms can give."""
        return min(1.0, (len(self.arms) - 1) * 2.0 ** (1 - self.tasks * self.seeds))


def compare(
    arms: Mapping[str, Floats],
    baseline: str,
    *,
    draws: int = 10_000,
    confidence: float = 0.95,
    rng_seed: int = 0,
) -> Verdict:
    """Compare each arm with the baseline.

    Args:
        arms: Scores `[seed]` or `[task, seed]` of each, higher is better; paired by
            position, and on one scale if there are several tasks.
        baseline: The name of the arm that the others are measured against.
        draws: How often seeds are drawn anew; one draw serves every arm.
        confidence: Share of repetitions that the intervals should hold.
        rng_seed: Start of the random stream.
    """
    if baseline not in arms or len(arms) < 2:
        raise BadInput(
            f"arms must hold the baseline {baseline!r} and at least one other, "
            f"got {sorted(arms)}."
        )
    base = checked(arms[baseline], seeds=2)
    others = {name: arms[name] for name in arms if name != baseline}
    found = compare_pairs(
        {name: (scores, base) for name, scores in others.items()},
        draws=draws,
        confidence=confidence,
        rng_seed=rng_seed,
    )
    tasks, seeds = np.atleast_2d(base).shape
    rows = tuple(
        Arm(
            name=name,
            iqm=stratified_bootstrap(
                arms[name], draws=draws, confidence=confidence, rng_seed=rng_seed
            ),
            against=found.get(name),
        )
        for name in (baseline, *others)
    )
    return Verdict(baseline=baseline, arms=rows, tasks=tasks, seeds=seeds)


Key = TypeVar("Key", bound=Hashable)


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


def in_words(verdict: Verdict, spec: str = "+.3g") -> str:
    """What the table does and does not show, in two or three sentences.

    Args:
        verdict: The table.
        spec: Format of a difference.
    """
    rows = {arm.name: arm.against for arm in verdict.arms if arm.against is not None}
    return " ".join([*sentences(rows, verdict.baseline, spec), _limits(verdict)])


def sentences(rows: Mapping[str, Against], other: str, spec: str = "+.3g") -> list[str]:
    """What is shown, and what is not, of arms against one other.

    Args:
        rows: By the arms' names.
        other: What each of them was measured against.
        spec: Format of a difference.
    """
    shown, open_ = [], []
    for name, row in rows.items():
        told = f"{row.difference:{spec}}, p = {row.adjusted:.2g}"
        if row.shown:
            side = "above" if row.difference.estimate > 0.0 else "below"
            shown.append(f"{name!r} is {side} it by {told}")
        else:
            open_.append(f"{name!r} ({told})")
    said = []
    if shown:
        said.append(f"Shown against {other!r}: {'; '.join(shown)}.")
    if open_:
        said.append(
            f"This does not show a difference from {other!r}, nor that there is none, "
            f"for {'; '.join(open_)}."
        )
    return said


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


def _limits(verdict: Verdict) -> str:
    least = verdict.smallest_p
    if least >= LEVEL:
        pairs = _many(verdict.tasks * verdict.seeds, "pair")
        return (
            f"With {pairs} and {_many(len(verdict.arms) - 1, 'arm')} compared no "
            f"adjusted p can be below {least:.2g}, so nothing could have been shown: "
            "run more random seeds."
        )
    narrow = " and the intervals are narrower than they should be"
    return (
        f"This rests on {verdict.seeds} random seeds on each of "
        f"{_many(verdict.tasks, 'task')}{narrow if verdict.seeds < _FEW else ''}; it "
        "says nothing about other tasks or about controllers trained anew."
    )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
