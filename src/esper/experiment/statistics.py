"""Intervals: what a mean is worth when luck is counted.

Percentile bootstrap over paired instances (Efron 1979): instances are drawn anew, with
replacement, the same ones for every arm, and the statistic is computed each time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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
    """Interval of a statistic of the arms' means.

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
    tail = 100.0 * (1.0 - confidence) / 2.0
    low, high = np.percentile(statistic(means), [tail, 100.0 - tail])
    estimate = float(statistic(arms.mean(axis=1, keepdims=True))[0])
    return Interval(estimate, float(low), float(high))


def mean_interval(values: Floats) -> Interval:
    """Interval of the mean."""
    return bootstrap(values[None], lambda means: means[0])
