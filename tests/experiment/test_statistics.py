"""Estimates and intervals agree with SciPy and with brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from esper.contracts.errors import BadInput
from esper.experiment import statistics
from esper.experiment.statistics import (
    Interval,
    bootstrap,
    expanded_tail,
    hierarchical_bootstrap,
    iqm,
    iqm_of_each,
    mean_interval,
    paired_improvement,
    probability_of_improvement,
    stratified_bootstrap,
)
from tests.references import statistics as reference

shapes = st.tuples(st.integers(1, 3), st.integers(2, 9))
# Whole numbers: ties and zeros are frequent, and sums are exact.
tables = shapes.flatmap(lambda s: arrays(np.float64, s, elements=st.integers(-4, 4)))
pairs = shapes.flatmap(
    lambda s: st.tuples(*[arrays(np.float64, s, elements=st.integers(-4, 4))] * 2)
)


def _means(drawn):
    return drawn.reshape(len(drawn), -1).mean(axis=1)


def _exact(resamples, statistic):
    return np.percentile([statistic(drawn) for drawn in resamples], [2.5, 97.5])


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


def test_of_ten_figures_the_interval_of_a_mean_holds_the_truth_as_often_as_it_says():
    """Percentiles as they are would do so in 90 of 100 cases."""
    generator = np.random.default_rng(0)
    intervals = [mean_interval(generator.normal(size=10)) for _ in range(1_000)]
    held = np.mean([it.low <= 0.0 <= it.high for it in intervals])
    assert 0.925 <= held <= 0.97


@pytest.mark.parametrize("count", [4, 5, 10, 16, 60, 1_000])
@pytest.mark.parametrize("tail", [0.025, 0.005])
def test_tails_are_those_of_students_t(tail, count):
    t = stats.t.ppf(1 - tail, count - 1)
    expected = stats.norm.cdf(-t * (count / (count - 1)) ** 0.5)
    found = expanded_tail(tail, count)
    assert found == pytest.approx(expected, rel=0.15, abs=2e-4)
    assert found < tail


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


# --- Interquartile mean


@given(tables)
def test_the_interquartile_mean_is_scipys_and_the_one_by_hand(scores):
    expected = stats.trim_mean(scores, 0.25, axis=None)
    assert iqm(scores) == pytest.approx(expected, abs=1e-12)
    assert iqm(scores) == pytest.approx(
        reference.interquartile_mean(scores.tolist()), abs=1e-12
    )


@given(tables, st.randoms(use_true_random=False))
def test_the_order_of_seeds_and_tasks_does_not_matter(scores, random):
    values = scores.ravel().tolist()
    random.shuffle(values)
    assert iqm(np.array(values)) == pytest.approx(iqm(scores), abs=1e-12)


@given(tables)
def test_the_interquartile_mean_lies_between_the_quartiles(scores):
    low, high = np.percentile(scores, [25, 75])
    assert low - 1e-12 <= iqm(scores) <= high + 1e-12


def test_a_quarter_that_is_no_whole_number_is_rounded_down():
    assert iqm(np.array([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, -100.0])) == 3.0
    assert iqm(np.array([0.0, 0.0, 9.0])) == 3.0


# --- Intervals over tasks, seeds and controllers


def test_with_one_task_the_interval_is_scipys_to_the_bit():
    values = np.random.default_rng(0).normal(size=11)
    theirs = stats.bootstrap(
        (values,),
        lambda drawn, axis: stats.trim_mean(drawn, 0.25, axis=axis),
        method="percentile",
        n_resamples=1_000,
        confidence_level=0.9,
        rng=np.random.default_rng(5),
    ).confidence_interval
    ours = stratified_bootstrap(values, draws=1_000, confidence=0.9, rng_seed=5)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-14)
    assert ours.estimate == iqm(values)


def test_the_stratified_interval_is_that_of_every_possible_draw():
    scores = np.random.default_rng(1).normal(size=(2, 4))
    every = reference.stratified_resamples(scores.tolist())  # 65,536
    low, high = _exact(every, reference.interquartile_mean)
    ours = stratified_bootstrap(scores, draws=40_000)
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.03 * (high - low))


def test_seeds_are_drawn_within_their_task():
    """Tasks that differ but hold no luck have no interval."""
    scores = np.array([[0.0] * 5, [10.0] * 5])
    assert stratified_bootstrap(scores) == Interval(5.0, 5.0, 5.0)


def test_one_draw_of_seeds_serves_both_arms():
    noise = np.random.default_rng(0).normal(size=(2, 6))
    gap = stratified_bootstrap(
        np.stack([noise + 1.0, noise]),
        lambda drawn: _means(drawn[:, 0]) - _means(drawn[:, 1]),
    )
    assert (gap.low, gap.estimate, gap.high) == pytest.approx((1.0, 1.0, 1.0))


def test_the_stratified_interval_holds_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    tasks = np.array([[0.0], [3.0]])
    held = []
    for _ in range(300):
        scores = tasks + generator.normal(size=(2, 30))
        it = stratified_bootstrap(scores, _means, draws=1_000)
        held.append(it.low <= 1.5 <= it.high)
    assert 0.91 <= np.mean(held) <= 0.98


@pytest.mark.parametrize(
    ("same_seeds", "resamples", "shape"),
    [
        (False, reference.hierarchical_resamples, (2, 1, 3)),
        (True, reference.hierarchical_resamples_of_shared_seeds, (3, 1, 3)),
    ],
)
def test_the_hierarchical_interval_is_that_of_every_possible_draw(
    same_seeds, resamples, shape
):
    scores = np.random.default_rng(2).normal(size=shape)
    low, high = _exact(resamples(scores.tolist()), np.mean)
    ours = hierarchical_bootstrap(scores, _means, same_seeds=same_seeds, draws=40_000)
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.03 * (high - low))
    assert ours.estimate == pytest.approx(scores.mean())


def test_luck_of_training_widens_the_interval():
    generator = np.random.default_rng(3)
    trained = generator.normal(size=(5, 1, 1))
    scores = trained + 0.1 * generator.normal(size=(5, 2, 10))
    inner, outer = stratified_bootstrap(scores, _means), hierarchical_bootstrap(scores)
    assert outer.high - outer.low > 5 * (inner.high - inner.low)


def test_luck_that_controllers_share_does_not_average_out():
    hosts = np.random.default_rng(4).normal(size=(1, 2, 10))
    scores = np.repeat(hosts, 5, axis=0)
    apart = hierarchical_bootstrap(scores, _means)
    shared = hierarchical_bootstrap(scores, _means, same_seeds=True)
    assert shared.high - shared.low > 1.8 * (apart.high - apart.low)


@pytest.mark.parametrize("draw_anew", [stratified_bootstrap, hierarchical_bootstrap])
def test_memory_stays_bounded_and_parts_change_nothing(draw_anew, monkeypatch):
    scores = np.random.default_rng(0).normal(size=(3, 2, 5))
    at_once = []

    def statistic(drawn):
        at_once.append(drawn.size)
        return iqm_of_each(drawn)

    whole = draw_anew(scores, statistic, draws=1_001)
    monkeypatch.setattr(statistics, "_AT_ONCE", 300)
    at_once.clear()
    assert draw_anew(scores, statistic, draws=1_001) == whole
    assert max(at_once) == 300
    assert sum(at_once) == (1 + 1_001) * scores.size  # the estimate is one more


# --- Probability of improvement


@given(pairs)
def test_improvement_is_mann_whitney_averaged_over_tasks(both):
    x, y = both
    expected = [
        stats.mannwhitneyu(a, b, method="asymptotic").statistic / (len(a) * len(b))
        for a, b in zip(x, y, strict=True)
        if len({*a, *b}) > 1  # SciPy's p-value warns without any difference
    ]
    expected += [0.5] * (len(x) - len(expected))
    found = probability_of_improvement(x, y, draws=1).estimate
    assert found == pytest.approx(np.mean(expected), abs=1e-12)
    assert found == pytest.approx(
        reference.probability_of_improvement(x.tolist(), y.tolist()), abs=1e-12
    )


@given(pairs)
def test_improvement_one_way_is_what_the_other_way_leaves(both):
    x, y = both
    for improvement in (probability_of_improvement, paired_improvement):
        there, back = improvement(x, y, draws=1), improvement(y, x, draws=1)
        assert there.estimate + back.estimate == pytest.approx(1.0, abs=1e-12)


@given(pairs)
def test_paired_improvement_counts_only_partners(both):
    x, y = both
    assert paired_improvement(x, y, draws=1).estimate == pytest.approx(
        reference.paired_improvement(x.tolist(), y.tolist()), abs=1e-12
    )


def test_the_interval_of_improvement_is_that_of_every_possible_draw():
    x = np.array([[0.3, 0.5, 0.9], [0.2, 0.2, 0.4]])
    y = np.array([[0.1, 0.5], [0.3, 0.1]])  # other seeds, and fewer
    every = [
        reference.probability_of_improvement(a, b)
        for a in reference.stratified_resamples(x.tolist())
        for b in reference.stratified_resamples(y.tolist())
    ]
    low, high = np.percentile(every, [10.0, 90.0])
    ours = probability_of_improvement(x, y, draws=20_000, confidence=0.8)
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.03)


def test_the_interval_of_improvement_agrees_with_scipy():
    generator = np.random.default_rng(6)
    x, y = generator.normal(0.5, 1.0, 12), generator.normal(0.0, 1.0, 15)

    def wins(a, b, axis):
        assert axis == -1
        return (a[..., :, None] > b[..., None, :]).mean(axis=(-2, -1))

    theirs = stats.bootstrap(
        (x, y), wins, method="percentile", n_resamples=8_000, rng=1
    ).confidence_interval
    ours = probability_of_improvement(x, y)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)


# --- Bad input

GOOD, BAD = np.ones((2, 3)), np.array([[1.0, 2.0, 3.0], [1.0, np.nan, 3.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iqm(BAD), r"finite, got nan at \[1, 1\]"),
        (lambda: iqm(np.zeros((2, 0))), r"not be empty, got shape \(2, 0\)"),
        (lambda: iqm(np.zeros((2, 2, 2))), r"1 or 2 axes.*got shape \(2, 2, 2\)"),
        (lambda: stratified_bootstrap(np.ones((3, 1))), r"2 seeds.*\(3, 1\)"),
        (
            lambda: stratified_bootstrap(GOOD, draws=0),
            "at least 1, got 0",
        ),
        (lambda: stratified_bootstrap(GOOD, confidence=1.0), r"in \(0, 1\), got 1.0"),
        (lambda: stratified_bootstrap(GOOD, lambda d: d[:, 0, 0:1]), "one figure per"),
        (lambda: hierarchical_bootstrap(GOOD), r"3 axes.*got shape \(2, 3\)"),
        (lambda: hierarchical_bootstrap(GOOD[None]), "at least 2, got 1; train more"),
        (lambda: probability_of_improvement(GOOD, GOOD[0]), "same tasks, got 2 and 1"),
        (lambda: probability_of_improvement(GOOD, BAD), "finite"),
        (lambda: paired_improvement(GOOD, GOOD[:, :2]), r"\(2, 3\) and \(2, 2\)"),
        (lambda: paired_improvement(GOOD[:, :1], GOOD[:, :1]), "at least 2 seeds"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(call, message):
    with pytest.raises(BadInput, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
