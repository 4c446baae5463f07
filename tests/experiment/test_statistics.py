"""Intervals agree with SciPy and hold what they should."""

import numpy as np
import pytest
from scipy import stats

from esper.experiment.statistics import Interval, bootstrap, mean_interval


def test_the_interval_of_a_mean_agrees_with_scipy():
    values = np.random.default_rng(0).exponential(size=400)
    ours = mean_interval(values)
    theirs = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=4_000, rng=1
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.estimate == pytest.approx(values.mean())
    assert ours.low == pytest.approx(theirs.low, abs=0.05 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.05 * width)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    intervals = [mean_interval(generator.normal(size=60)) for _ in range(300)]
    held = np.mean([it.low <= 0.0 <= it.high for it in intervals])
    assert 0.90 <= held <= 0.98


def test_arms_are_drawn_together():
    """A constant difference between arms has no interval, however noisy they are."""
    noise = np.random.default_rng(0).normal(size=50)
    gap = bootstrap(np.stack([noise, noise + 1.0]), lambda means: means[1] - means[0])
    assert (gap.low, gap.estimate, gap.high) == pytest.approx((1.0, 1.0, 1.0))


def test_the_same_random_seed_gives_the_same_interval():
    values = np.random.default_rng(0).normal(size=50)
    assert mean_interval(values) == mean_interval(values)


def test_an_interval_is_written_with_its_range():
    assert f"{Interval(1.0, 0.5, 1.5):.1f}" == "1.0 [0.5, 1.5]"
