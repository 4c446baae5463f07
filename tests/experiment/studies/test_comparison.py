"""Paired comparisons agree with SciPy, with brute force, and with their own words."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from esper.contracts.errors import BadInput
from esper.experiment.studies.comparison import (
    compare,
    holm,
    in_words,
    interquartile_mean,
    interval,
    signed_rank_p,
)


def _by_enumeration(differences):
    """Every choice of signs, one by one."""
    left = [d for d in differences if d != 0]
    ranks = stats.rankdata(np.abs(left))
    seen = sum(r for r, d in zip(ranks, left, strict=True) if d > 0)
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign)
        for signs in product((False, True), repeat=len(left))
    ]
    below = np.mean([s <= seen for s in sums])
    above = np.mean([s >= seen for s in sums])
    return min(1.0, 2 * min(below, above))


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_signed_ranks_count_every_choice_of_signs(whole):
    differences = np.array(whole, dtype=np.float64) / 1000
    expected = _by_enumeration(whole)
    assert signed_rank_p(differences) == pytest.approx(expected, abs=1e-12)


def test_signed_ranks_agree_with_scipy_without_ties():
    differences = np.random.default_rng(0).normal(0.4, 1.0, size=25)
    expected = stats.wilcoxon(differences, method="exact").pvalue
    assert signed_rank_p(differences) == pytest.approx(expected, rel=1e-9)


def test_ten_wins_of_ten_cannot_be_rarer_than_two_in_1024():
    assert signed_rank_p(np.arange(1.0, 11.0)) == pytest.approx(2 / 1024)


def test_arms_without_any_difference_are_alike():
    assert signed_rank_p(np.zeros(10)) == 1.0


def test_a_difference_that_is_no_number_is_refused():
    with pytest.raises(BadInput, match="finite"):
        signed_rank_p(np.array([0.1, np.nan]))


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, then never less.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_middle_half_agrees_with_scipy_and_ignores_an_outlier():
    values = np.random.default_rng(0).normal(size=10)
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25))
    outlier = values.copy()
    outlier[values.argmax()] = 1e6
    assert interquartile_mean(outlier) == interquartile_mean(values)


def test_the_interval_of_any_statistic_agrees_with_scipy():
    values = np.random.default_rng(0).normal(size=40)
    ours = interval(values, interquartile_mean)
    theirs = stats.bootstrap(
        (values,),
        interquartile_mean,
        method="percentile",
        vectorized=False,
        n_resamples=2_000,
        rng=1,
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.estimate == interquartile_mean(values)
    assert ours.low == pytest.approx(theirs.low, abs=0.1 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.1 * width)


NOISE = np.random.default_rng(1).normal(0.0, 0.01, size=10)


@pytest.mark.parametrize(
    ("gap", "says"),
    [(0.02, "beats 'theirs' by 2."), (-0.02, "loses to 'theirs' by 1.")],
)
def test_a_clear_difference_is_said_in_points_and_with_its_sign(gap, says):
    ours = 0.5 + NOISE + gap + np.linspace(0.0, 0.002, 10)
    (found,) = compare(ours, {"theirs": 0.5 + NOISE})
    assert found.shown
    assert (found.won, found.lost) == ((10, 0) if gap > 0 else (0, 10))
    assert found.difference.estimate == pytest.approx(gap + 0.001)
    assert says in in_words(found, "Ours")


def test_what_may_be_luck_is_called_no_difference():
    (found,) = compare(0.5 + NOISE, {"theirs": 0.5 + NOISE[::-1]})
    assert not found.shown
    assert "no difference is shown" in in_words(found, "Ours")


def test_more_comparisons_need_more_evidence():
    ours = 0.5 + np.arange(1, 7) / 1000  # six wins of six: p = 2 / 64
    base = np.full(6, 0.5)
    (alone,) = compare(ours, {"a": base})
    both = compare(ours, {"a": base, "b": base})
    assert alone.p == pytest.approx(2 / 64)
    assert alone.shown
    assert not any(one.shown for one in both)
    assert "is ahead of 'a' by 0." in in_words(both[0], "Ours")
    assert "do not settle it" in in_words(both[0], "Ours")
