"""Draws of seeds and members agree with draws that are written out."""

from math import isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from esper.contracts.errors import BadInput
from evidence.hierarchy import (
    difference,
    drawn_iqm,
    drawn_mean,
    improvement,
    iqm_interval,
    mean_interval,
    partners,
    signed_ranks,
)
from tests.references import hierarchy as reference


def arm_and_draw(number):
    """An arm `[member, seed]` of some tasks with holes, and one draw of both."""
    generator = np.random.default_rng(number)
    members = generator.integers(1, 4)
    sizes = generator.integers(1, 5, size=generator.integers(1, 4)).tolist()
    arm = []
    for size in sizes:
        figures = generator.integers(-5, 6, size=(members, size)).astype(np.float64)
        figures[generator.random((members, size)) < 0.2] = nan
        arm.append(figures)
    who = generator.integers(members, size=members)
    return arm, who, [generator.integers(size, size=size) for size in sizes]


def counts(places, size):
    return np.bincount(places, minlength=size)[None].astype(np.int32)


def as_counts(arm, who, which):
    members = counts(who, len(arm[0]))
    seeds = [counts(w, f.shape[1]) for f, w in zip(arm, which, strict=True)]
    return members, np.concatenate(seeds, axis=1)


@given(st.integers(0, 10**6))
def test_an_interquartile_mean_of_a_draw_is_that_of_its_cells(number):
    arm, who, which = arm_and_draw(number)
    cells = reference.cells([f.tolist() for f in arm], who, which)
    if not any(np.isfinite(f).any() for f in arm):
        return
    found = drawn_iqm(arm, *as_counts(arm, who, which))[0]
    expected = reference.interquartile_mean(cells)
    assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


@given(st.integers(0, 10**6))
def test_a_mean_over_tasks_of_a_draw_is_that_of_its_cells(number):
    arm, who, which = arm_and_draw(number)
    if not all(np.isfinite(f).any() for f in arm):
        return
    cells = reference.cells([f.tolist() for f in arm], who, which)
    found = drawn_mean(arm, *as_counts(arm, who, which))[0]
    expected = reference.mean_of_means(cells)
    assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_an_interval_is_that_of_every_draw_there_is():
    generator = np.random.default_rng(3)
    arm = [generator.normal(size=(3, 3)), generator.normal(1.0, 1.0, size=(3, 2))]
    arm[0][1, 2] = nan
    lists = [figures.tolist() for figures in arm]
    whole = [
        reference.interquartile_mean(reference.cells(lists, who, which))
        for who, which in reference.every_draw(3, (3, 2))
    ]
    found = iqm_interval(arm, resamples=100_000)
    assert found.low == pytest.approx(reference.percentile(whole, 0.025), abs=0.03)
    assert found.high == pytest.approx(reference.percentile(whole, 0.975), abs=0.03)
    once = reference.cells(lists, range(3), [range(3), range(2)])
    assert found.estimate == pytest.approx(reference.interquartile_mean(once))


@pytest.mark.parametrize("same", [True, False])
def test_differences_and_improvements_are_those_of_every_draw(same):
    generator = np.random.default_rng(4)
    x = [generator.integers(-2, 3, size=(2, 3)).astype(float) for _ in range(2)]
    y = [generator.integers(-2, 3, size=(2, 3)).astype(float) for _ in range(2)]
    x[0][0, 1] = nan
    y[1][1, 2] = nan
    mine, yours = (
        [f.tolist() for f in arm] for arm in partners(x, y, same_members=same)
    )
    gaps, wins = [], []
    for who, which in reference.every_draw(2, (3, 3)):
        others = [(0,), (1,)]
        for other in [None] if same else others:
            theirs = who if other is None else other
            gaps.append(
                reference.interquartile_mean(reference.cells(mine, who, which))
                - reference.interquartile_mean(reference.cells(yours, theirs, which))
            )
            wins.append(reference.improvement(mine, yours, who, other, which))
    for found, whole in (
        (difference(x, y, same_members=same, resamples=60_000), gaps),
        (improvement(x, y, same_members=same, resamples=60_000), wins),
    ):
        known = [value for value in whole if not isnan(value)]
        assert found.low == pytest.approx(reference.percentile(known, 0.025), abs=0.06)
        assert found.high == pytest.approx(reference.percentile(known, 0.975), abs=0.06)
    once = [range(3), range(3)]
    others = None if same else range(2)
    expected = reference.improvement(mine, yours, range(2), others, once)
    assert improvement(x, y, same_members=same).estimate == pytest.approx(expected)


def test_members_that_differ_widen_the_interval_more_than_seeds_that_do():
    generator = np.random.default_rng(0)
    members = [np.repeat(generator.normal(size=(4, 1)), 12, axis=1)] * 3
    seeds = [np.repeat(generator.normal(size=(1, 12)), 4, axis=0) for _ in range(3)]
    by_member, by_seed = iqm_interval(members), iqm_interval(seeds)
    assert by_member.high - by_member.low > by_seed.high - by_seed.low > 0.0


def test_luck_of_seeds_that_is_shared_leaves_no_trace_in_a_difference():
    generator = np.random.default_rng(0)
    luck = [generator.normal(size=(1, 10)) for _ in range(3)]
    x = [figures + 0.1 for figures in luck]
    gap = difference(x, luck)
    assert (gap.low, gap.high) == pytest.approx((0.1, 0.1))
    assert improvement(x, luck) == improvement(x, luck, rng_seed=9)
    assert improvement(x, luck).low == 1.0


def test_a_member_drawn_for_one_task_is_drawn_for_all():
    # Members cancel within a task pair only if one draw serves both tasks.
    member = np.array([[1.0], [-1.0], [3.0]])
    up, down = np.repeat(member, 4, axis=1), np.repeat(-member, 4, axis=1)
    mean = mean_interval([up, down])
    assert (mean.low, mean.high) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_figures_that_are_all_equal_have_an_interval_without_width():
    arm = [np.full((3, 7), 0.1), np.full((3, 5), 0.1)]
    for found in (iqm_interval(arm), mean_interval(arm)):
        assert (found.estimate, found.low, found.high) == (0.1, 0.1, 0.1)
    gap = difference(arm, arm)
    assert (gap.estimate, gap.low, gap.high) == (0.0, 0.0, 0.0)
    assert improvement(arm, arm).estimate == 0.5


def test_one_seed_has_no_interval():
    arm = [np.array([[0.5], [0.7]])]
    for found in (iqm_interval(arm), difference(arm, arm), improvement(arm, arm)):
        assert isnan(found.low)
        assert isnan(found.high)
        assert not isnan(found.estimate)


def test_nothing_has_no_estimate():
    for arm in ([], [np.full((2, 3), nan)], [np.empty((0, 3))]):
        for found in (iqm_interval(arm), difference(arm, arm)):
            assert isnan(found.estimate)
    assert signed_ranks(np.empty((0, 3)), np.ones((1, 3))) is None


def test_a_task_that_is_missing_is_left_out():
    generator = np.random.default_rng(0)
    task = generator.normal(size=(2, 6))
    gone = np.full((2, 6), nan)
    assert iqm_interval([gone, task]) == iqm_interval([task])
    assert difference([task, gone], [task[:1], task[:1]]) == difference(
        [task], [task[:1]]
    )


def test_only_cells_with_a_partner_are_compared():
    x = [np.array([[1.0, 2.0, nan], [3.0, nan, 5.0]])]
    y = [np.array([[0.0, 0.0, nan]])]
    (ours,), (theirs,) = partners(x, y)
    np.testing.assert_array_equal(ours, [[1.0, 2.0, nan], [3.0, nan, nan]])
    np.testing.assert_array_equal(theirs, [[0.0, 0.0, nan]])
    z = [np.array([[nan, 0.0, 0.0], [0.0, 0.0, 0.0]])]
    (ours,), (theirs,) = partners(x, z, same_members=True)
    np.testing.assert_array_equal(ours, [[nan, 2.0, nan], [3.0, nan, 5.0]])
    np.testing.assert_array_equal(theirs, [[nan, 0.0, nan], [0.0, nan, 0.0]])


def test_ranks_are_of_the_mean_of_the_members_that_are_there():
    generator = np.random.default_rng(1)
    x, y = generator.normal(0.5, 1.0, size=(3, 9)), generator.normal(size=(1, 9))
    x[0, 0] = nan
    expected = stats.wilcoxon(np.nanmean(x, axis=0), y[0]).pvalue
    assert signed_ranks(x, y) == pytest.approx(expected)


def test_seeds_that_do_not_match_are_refused():
    with pytest.raises(BadInput, match="same seeds"):
        difference([np.ones((1, 3))], [np.ones((1, 4))])
    with pytest.raises(BadInput, match="same tasks"):
        difference([np.ones((1, 3))], [])
