"""Estimates, intervals and tests agree with SciPy and with brute force."""

from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from esper.contracts.errors import InvalidInputError
from esper.evaluation.statistics import (
    Interval,
    bootstrap,
    compare_pairs,
    holm,
    iqm_difference,
    iqm_interval,
    mean_interval,
    paired_improvement,
    paired_wilcoxon,
)
from research.crossed import crossed_interval
from tests.references import statistics as reference

shapes = st.tuples(st.integers(1, 3), st.integers(2, 9))
# Whole numbers: ties and zeros are frequent, and sums are exact.
tables = shapes.flatmap(lambda s: arrays(np.float64, s, elements=st.integers(-4, 4)))
pairs = shapes.flatmap(
    lambda s: st.tuples(*[arrays(np.float64, s, elements=st.integers(-4, 4))] * 2)
)


def normal(*shape, rng_seed=0):
    return np.random.default_rng(rng_seed).normal(size=shape)


def width(interval):
    return interval.high - interval.low


# --- Intervals


@pytest.mark.parametrize(
    ("interval", "statistic"),
    [
        (mean_interval, np.mean),
        (iqm_interval, lambda v, axis: stats.trim_mean(v, 0.25, axis=axis)),
    ],
)
def test_an_interval_of_many_figures_agrees_with_scipy(interval, statistic):
    values = np.random.default_rng(0).exponential(size=400)
    theirs = stats.bootstrap(
        (values,), statistic, method="percentile", n_resamples=4_000, rng=1
    ).confidence_interval
    ours = interval(values)
    assert ours.estimate == pytest.approx(statistic(values, axis=0))
    near = 0.06 * (theirs.high - theirs.low)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=near)


@pytest.mark.parametrize(("count", "least"), [(10, 0.925), (40, 0.92)])
def test_intervals_of_means_hold_the_truth_as_often_as_they_claim(count, least):
    """Without the tails of Student's t, 90 of 100 intervals of 10 figures would."""
    generator = np.random.default_rng(0)
    intervals = [
        mean_interval(generator.normal(size=count), resamples=1_000) for _ in range(600)
    ]
    held = np.mean([it.low <= 0.0 <= it.high for it in intervals])
    assert least <= held <= 0.975


def test_groups_are_drawn_independently_and_an_interval_repeats():
    first, last = normal(50), normal(50, rng_seed=1)
    gap = bootstrap([50, 50], lambda a, b: (b @ last - a @ first) / 50)
    assert gap.estimate == pytest.approx(last.mean() - first.mean())
    assert width(gap) == pytest.approx(2 * 1.96 * (2 / 50) ** 0.5, rel=0.3)
    assert mean_interval(first) == mean_interval(first)
    assert f"{Interval(1.0, 0.5, 1.5):.1f}" == "1.0 [0.5, 1.5]"


def test_an_interval_is_that_of_every_possible_draw():
    tasks = [normal(4), 1.0 + normal(3, rng_seed=1)]
    draws = [*reference.every_draw([task.tolist() for task in tasks])]
    for interval, statistic in (
        (iqm_interval, reference.interquartile_mean),
        (mean_interval, reference.mean_of_means),
    ):
        found = interval(tasks, resamples=20_000)
        expected = np.percentile([*map(statistic, draws)], [2.5, 97.5])
        assert (found.low, found.high) == pytest.approx(expected, abs=0.05)
        assert found.estimate == pytest.approx(statistic(tasks))


def test_differences_and_improvements_are_those_of_every_draw():
    generator = np.random.default_rng(4)
    x, y = generator.integers(-2, 3, size=(2, 2, 3)).astype(float)
    pairs = [[*zip(*rows, strict=True)] for rows in zip(x, y, strict=True)]
    gaps, wins = [], []
    for draw in reference.every_draw(pairs):
        ours, theirs = ([[pair[at] for pair in t] for t in draw] for at in (0, 1))
        iqm = reference.interquartile_mean
        gaps.append(iqm(ours) - iqm(theirs))
        points = [[reference.points_of(*pair) for pair in task] for task in draw]
        wins.append(reference.mean_of_means(points))
    for compare, every in ((iqm_difference, gaps), (paired_improvement, wins)):
        found = compare(x, y, resamples=20_000)
        expected = np.percentile(every, [2.5, 97.5])
        assert (found.low, found.high) == pytest.approx(expected, abs=0.06)


def test_with_one_controller_only_seeds_are_drawn():
    x, y = [normal(5), normal(4, rng_seed=1)], [normal(5, rng_seed=2), normal(4)]
    assert crossed_interval(x) == iqm_interval(x)
    assert crossed_interval(x, y) == iqm_difference(x, y)
    assert crossed_interval(x, plain=True) == mean_interval(x)


def test_controllers_are_drawn_once_for_all_tasks_and_both_arms():
    luck = np.array([0.0, 1.0, 5.0])[:, None]
    tasks = [luck + np.zeros((3, 4)), luck + np.zeros((3, 2))]
    # The worst alone is drawn in 1 of 27 cases, if once for all tasks.
    assert crossed_interval(tasks, plain=True) == Interval(2.0, 0.0, 5.0)
    # Whatever both arms have in common is no difference, in any draw.
    fewer = [task - 1.0 for task in tasks]
    assert crossed_interval(tasks, fewer) == Interval(1.0, 1.0, 1.0)
    # An arm without controllers is the same beside every one of them.
    plain = [np.ones((1, 4)), np.ones((1, 2))]
    for center in (False, True):
        less = crossed_interval(tasks, plain, plain=center)
        alone = crossed_interval(tasks, plain=center)
        assert less.low == pytest.approx(alone.low - 1.0)
        assert less.high == pytest.approx(alone.high - 1.0)


def test_equal_figures_and_tasks_without_luck_have_an_interval_without_width():
    arm = [np.full(7, 0.1), np.full(5, 0.1)]
    for found in (iqm_interval(arm), mean_interval(arm)):
        assert found == Interval(0.1, 0.1, 0.1)
    assert iqm_difference(arm, arm) == Interval(0.0, 0.0, 0.0)
    assert paired_improvement(arm, arm).estimate == 0.5
    # Seeds are drawn within their task.
    assert iqm_interval(np.array([[0.0] * 5, [10.0] * 5])) == Interval(5.0, 5.0, 5.0)


def test_one_seed_has_no_interval():
    one = np.array([[0.5], [0.7]])
    for found in (
        iqm_interval(one),
        mean_interval(np.ones(1)),
        iqm_difference(one, one),
    ):
        assert isnan(found.low)
        assert isnan(found.high)
        assert not isnan(found.estimate)


# --- Estimates


@given(tables)
def test_the_interquartile_mean_is_the_one_by_hand(scores):
    expected = reference.interquartile_mean(scores.tolist())
    found = iqm_interval(scores, resamples=1).estimate
    assert found == pytest.approx(expected, abs=1e-12)


@given(pairs)
def test_improvement_counts_wins_and_half_of_ties(both):
    x, y = both
    points = [reference.points_of(*pair) for pair in zip(x.flat, y.flat, strict=True)]
    found = paired_improvement(x, y, resamples=1).estimate
    assert found == pytest.approx(np.mean(points), abs=1e-12)


# --- Signed ranks and Holm

# Heights of crossed less self-fertilised maize, in eighths of an inch (Darwin 1876).
MAIZE = np.array([6, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75.0])


def test_darwins_maize_has_its_known_p_value():
    assert paired_wilcoxon(MAIZE, np.zeros(15)) == pytest.approx(0.041259765625)
    assert paired_wilcoxon(np.ones(60), np.ones(60)) == 1.0


@given(pairs.filter(lambda both: both[0].size <= 8))
def test_signed_ranks_count_every_choice_of_signs(both):
    x, y = both
    expected = reference.signed_ranks((x - y).ravel().tolist())
    assert paired_wilcoxon(x, y) == pytest.approx(expected, abs=1e-12)


def test_differences_of_ratios_that_are_equal_share_their_rank():
    """0.3 - 0.2 and 0.2 - 0.1 differ in floats."""
    x, y = np.array([0.3, 0.2, 0.4, 0.1]), np.array([0.2, 0.1, 0.2, 0.5])
    whole = paired_wilcoxon((10 * x).round(), (10 * y).round())
    assert paired_wilcoxon(x, y) == whole


@pytest.mark.parametrize("count", [12, 51, 60])
@pytest.mark.parametrize("kind", ["clean", "tied", "with zeros"])
def test_signed_ranks_are_scipys(kind, count):
    gaps = 0.3 + normal(count, rng_seed=count)
    if kind != "clean":
        gaps = (8 * gaps).round()
        gaps[gaps == 0.0] = 1.0
        gaps[:3] = 3.0 if kind == "tied" else 0.0
    expected = stats.wilcoxon(gaps).pvalue
    # SciPy counts all signs of tied ranks up to 13 pairs; ours does up to 50.
    near = 0.01 if kind == "with zeros" and count == 51 else 1e-9
    found = paired_wilcoxon(gaps, np.zeros(count))
    assert found == pytest.approx(expected, rel=1e-9, abs=near)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_holm_is_closed_testing(p_values):
    assert holm(p_values) == pytest.approx(reference.holm(p_values), abs=1e-12)


# --- Several comparisons at once


def test_a_comparison_holds_what_each_function_finds():
    noise = 0.01 * normal(4, 2, 10)
    base = 0.8 + noise[0]
    arms = {
        "tamiyo": base + 0.05 + noise[1],
        "random": base + 0.5 * (noise[2] - noise[2].mean()),
        "harm": base - 0.05 + noise[3],
    }
    found = compare_pairs({name: (x, base) for name, x in arms.items()}, resamples=500)
    p_values = [stats.wilcoxon((x - base).ravel()).pvalue for x in arms.values()]
    for (name, x), p, corrected in zip(
        arms.items(), p_values, reference.holm(p_values), strict=True
    ):
        row = found[name]
        assert row.difference == iqm_difference(x, base, resamples=500)
        assert row.improvement == paired_improvement(x, base, resamples=500)
        assert (row.p, row.adjusted) == pytest.approx((p, corrected), rel=1e-9)
    assert [row.outcome for row in found.values()] == ["above", "unclear", "below"]
    assert compare_pairs({}) == {}


def test_the_interval_alone_decides_what_is_said_of_a_difference():
    """However many comparisons there are; p says how much they weaken it."""
    ours, base = 0.5 + np.arange(1, 7) / 1000, np.full(6, 0.5)  # p = 2 / 64
    alone = compare_pairs({"a": (ours, base)}, resamples=100)["a"]
    both = compare_pairs({"a": (ours, base), "b": (ours, base)}, resamples=100)["a"]
    assert (alone.p, alone.adjusted, both.adjusted) == (2 / 64, 2 / 64, 4 / 64)
    assert alone.outcome == both.outcome == "above"


# --- Bad input

GOOD, BAD = np.ones((2, 3)), np.array([[1.0, 2.0, 3.0], [1.0, np.nan, 3.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iqm_interval(BAD), "must be finite"),
        (lambda: iqm_interval(np.zeros((2, 0))), r"got \[\(0,\), \(0,\)\]"),
        (lambda: iqm_interval([]), r"scores of some seeds for each task, got \[\]"),
        (lambda: paired_improvement(GOOD, GOOD[:, :2]), r"\[3, 3\] and \[2, 2\]"),
        (lambda: paired_wilcoxon(GOOD[0], GOOD[0, :2]), r"\[3\] and \[2\]"),
        (lambda: crossed_interval([GOOD], [GOOD[:, :2]]), r"\[6\] and \[4\]"),
        (lambda: compare_pairs({"b": (GOOD, BAD)}), "finite"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(call, message):
    with pytest.raises(InvalidInputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
