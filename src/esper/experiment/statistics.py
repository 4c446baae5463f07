r"""Intervals: what a figure is worth when luck is counted.

Interquartile mean: of all figures of all tasks without the lowest and the highest
floor(n / 4), as `rliable` and `scipy.stats.trim_mean(0.25)` define it. Intervals:
percentile bootstrap (Efron 1979); seeds are drawn anew, with replacement, within each
task. Probability of improvement: mean over tasks of P(x > y) + P(x = y) / 2 (Mann and
Whitney 1947; Agarwal et al. 2021, https://arxiv.org/abs/2108.13264).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from esper.contracts.errors import BadInput

Floats = NDArray[np.float64]

_AT_ONCE: Final = 2**20  # figures that are drawn at once: some 8 MB


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the range that holds it in 95 of 100 repetitions."""

    estimate: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Estimate and range, each in the given format."""
        return f"{self.estimate:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(
    arms: Floats,
    statistic: Callable[[Floats], Floats],
    *,
    resamples: int = 2_000,
    confidence: float = 0.95,
    rng_seed: int = 0,
) -> Interval:
    """Interval of a statistic of the arms' means, with the tails of Student's t.

    Args:
        arms: Figures `[arm, instance]`, paired by instance.
        statistic: Maps means `[arm, resample]` to figures `[resample]`.
        resamples: How often instances are drawn anew.
        confidence: Share of repetitions that the interval should hold.
        rng_seed: Start of the random stream.
    """
    generator = np.random.default_rng(rng_seed)
    count = arms.shape[1]
    # How often each instance is drawn; a matrix product then gives all means at once.
    drawn = generator.multinomial(count, np.full(count, 1.0 / count), size=resamples)
    means = arms @ drawn.T.astype(np.float64) / count
    tail = 100.0 * expanded_tail((1.0 - confidence) / 2.0, count)
    low, high = np.percentile(statistic(means), [tail, 100.0 - tail])
    estimate = float(statistic(arms.mean(axis=1, keepdims=True))[0])
    return Interval(estimate, float(low), float(high))


def mean_interval(values: Floats) -> Interval:
    """Interval of the mean."""
    return bootstrap(values[None], lambda means: means[0])


def expanded_tail(tail: float, count: int) -> float:
    """The tail of drawn means that stands for a tail of means of `count` figures.

    Drawn means vary by (count - 1) / count of what they should, and are about normal
    where Student's t is due (Hesterberg 2015); t is expanded in 1 / (count - 1). Of 10
    normal figures 94 % of the intervals then hold the truth, instead of 90.
    """
    if count < 2:
        return tail
    normal, v = NormalDist(), 1.0 / (count - 1)
    z = normal.inv_cdf(1.0 - tail)
    t = z + v * (z**3 + z) / 4 + v**2 * (5 * z**5 + 16 * z**3 + 3 * z) / 96
    t += v**3 * (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return normal.cdf(-t * sqrt(1.0 + v))


def iqm(scores: Floats) -> float:
    """Interquartile mean of `[seed]` or `[task, seed]`; below four the plain mean."""
    return float(iqm_of_each(checked(scores)[None])[0])


def iqm_of_each(drawn: Floats) -> Floats:
    """Interquartile mean over all axes but the first."""
    flat = drawn.reshape(len(drawn), -1)
    cut = flat.shape[1] // 4
    kept = np.sort(flat, axis=1)[:, cut : flat.shape[1] - cut]
    means: Floats = kept.mean(axis=1)
    return means


def stratified_bootstrap(
    scores: Floats,
    statistic: Callable[[Floats], Floats] = iqm_of_each,
    *,
    draws: int = 10_000,
    confidence: float = 0.95,
    rng_seed: int = 0,
) -> Interval:
    """Interval of a statistic; the seeds of each task are drawn anew.

    Args:
        scores: `[seed]`, `[task, seed]` or `[arm, task, seed]`. Arms are paired: one
            draw of seeds serves them all.
        statistic: Maps `[draw, *scores.shape]` to figures `[draw]`.
        draws: How often seeds are drawn anew.
        confidence: Share of repetitions that the interval should hold.
        rng_seed: Start of the random stream.
    """
    scores = checked(scores, axes=(1, 2, 3), seeds=2)
    generator = np.random.default_rng(rng_seed)
    per_draw, count = scores.shape[-2:], scores.shape[-1]
    arms = (1,) * (scores.ndim - len(per_draw))

    def figures() -> Iterator[Floats]:
        for many in _parts(draws, scores.size):
            seeds = generator.integers(count, size=(many, *arms, *per_draw))
            yield statistic(np.take_along_axis(scores[None], seeds, axis=-1))

    return _interval(statistic(scores[None]), figures(), confidence)


def hierarchical_bootstrap(
    scores: Floats,
    statistic: Callable[[Floats], Floats] = iqm_of_each,
    *,
    same_seeds: bool = False,
    draws: int = 10_000,
    confidence: float = 0.95,
    rng_seed: int = 0,
) -> Interval:
    """Interval that also counts the luck of having trained these controllers.

    Args:
        scores: `[controller, task, seed]`. Controllers are drawn first, then seeds
            within every task of each.
        statistic: Maps `[draw, controller, task, seed]` to figures `[draw]`.
        same_seeds: All controllers were judged on the same seeds: one draw of them
            serves all, since luck that is shared does not average out.
        draws: How often both are drawn anew.
        confidence: Share of repetitions that the interval should hold.
        rng_seed: Start of the random stream.
    """
    scores = checked(scores, axes=(3,), seeds=2)
    controllers, tasks, count = scores.shape
    if controllers < 2:
        raise BadInput(
            f"an interval over controllers needs at least 2, got {controllers}; train "
            "more, or use stratified_bootstrap() and claim nothing about training."
        )
    # Two streams, so that the figures do not depend on how many are drawn at once.
    above, below = np.random.default_rng(rng_seed).spawn(2)
    rows = 1 if same_seeds else controllers

    def figures() -> Iterator[Floats]:
        for many in _parts(draws, scores.size):
            chosen = above.integers(controllers, size=(many, controllers))
            seeds = below.integers(count, size=(many, rows, tasks, count))
            yield statistic(np.take_along_axis(scores[chosen], seeds, axis=-1))

    return _interval(statistic(scores[None]), figures(), confidence)


def probability_of_improvement(
    x: Floats,
    y: Floats,
    *,
    draws: int = 10_000,
    confidence: float = 0.95,
    rng_seed: int = 0,
) -> Interval:
    """How often a seed of `x` is above any seed of `y`; a tie is half a win.

    If all are above all, the interval has no width: no draw holds a loss that was
    never seen. That is a limit of drawing anew, not certainty.

    Args:
        x: `[seed]` or `[task, seed]`.
        y: The same tasks, with as many seeds or others.
        draws: How often the seeds of both are drawn anew, each for itself.
        confidence: Share of repetitions that the interval should hold.
        rng_seed: Start of the random stream.
    """
    x, y = np.atleast_2d(checked(x, seeds=2)), np.atleast_2d(checked(y, seeds=2))
    if len(x) != len(y):
        raise BadInput(f"x and y must have the same tasks, got {len(x)} and {len(y)}.")
    wins = _wins(x[:, :, None], y[:, None, :])  # [task, seed of x, seed of y]
    tasks, ours, theirs = wins.shape
    streams = np.random.default_rng(rng_seed).spawn(2)

    def figures() -> Iterator[Floats]:
        for many in _parts(draws, x.size + y.size):
            # How often each seed is drawn says all that the wins need.
            of_x, of_y = (
                stream.multinomial(count, [1.0 / count] * count, size=(many, tasks))
                for stream, count in zip(streams, (ours, theirs), strict=True)
            )
            won = np.einsum("dti,tij->dtj", of_x, wins)
            yield np.einsum("dtj,dtj->d", won, of_y) / wins.size

    return _interval(wins.mean(keepdims=True).ravel(), figures(), confidence)


def paired_improvement(
    x: Floats,
    y: Floats,
    *,
    draws: int = 10_000,
    confidence: float = 0.95,
    rng_seed: int = 0,
) -> Interval:
    """How often `x` is above `y` on the very same seed; a tie is half a win."""
    wins = _wins(*paired(x, y))
    return stratified_bootstrap(
        wins,
        lambda drawn: drawn.reshape(len(drawn), -1).mean(axis=1),
        draws=draws,
        confidence=confidence,
        rng_seed=rng_seed,
    )


def checked(
    scores: Floats, *, axes: tuple[int, ...] = (1, 2), seeds: int = 1
) -> Floats:
    """The scores, refused unless they are finite numbers of so many axes and seeds."""
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim not in axes:
        raise BadInput(
            f"scores must have {' or '.join(map(str, axes))} axes, the last one over "
            f"seeds, got shape {scores.shape}."
        )
    if not scores.size:
        raise BadInput(f"scores must not be empty, got shape {scores.shape}.")
    if not np.isfinite(scores).all():
        where = np.argwhere(~np.isfinite(scores))[0].tolist()
        raise BadInput(
            f"scores must be finite, got {scores[tuple(where)]} at {where}; give a "
            "failed run the score that it earned."
        )
    if scores.shape[-1] < seeds:
        raise BadInput(
            f"an interval needs at least {seeds} seeds per task, got shape "
            f"{scores.shape}; run more."
        )
    return scores


def paired(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Both, refused unless each seed of one has its partner in the other."""
    x, y = checked(x), checked(y)
    if x.shape != y.shape:
        raise BadInput(
            f"paired scores must have the same tasks and seeds, got shapes {x.shape} "
            f"and {y.shape}; judge both on the same random seeds."
        )
    return x, y


def _wins(x: Floats, y: Floats) -> Floats:
    won: Floats = np.where(x == y, 0.5, (x > y).astype(np.float64))
    return won


def _parts(draws: int, size: int) -> Iterator[int]:
    """How many draws to make at a time, so that memory stays bounded."""
    if draws < 1:
        raise BadInput(f"draws must be at least 1, got {draws}.")
    at_once = max(1, _AT_ONCE // size)
    for start in range(0, draws, at_once):
        yield min(at_once, draws - start)


def _interval(
    estimate: Floats, figures: Iterable[Floats], confidence: float
) -> Interval:
    if not 0.0 < confidence < 1.0:
        raise BadInput(f"confidence must lie in (0, 1), got {confidence}.")
    if np.shape(estimate) != (1,):
        raise BadInput(
            f"statistic must give one figure per draw, got shape {np.shape(estimate)} "
            "for one draw; reduce all axes but the first."
        )
    tail = 100.0 * (1.0 - confidence) / 2.0
    low, high = np.percentile(np.concatenate(list(figures)), [tail, 100.0 - tail])
    return Interval(float(estimate[0]), float(low), float(high))
