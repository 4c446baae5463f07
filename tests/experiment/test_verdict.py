"""Tests of differences agree with SciPy, brute force and what is called shown."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from esper.contracts.errors import BadInput
from esper.experiment.statistics import (
    iqm,
    paired_improvement,
    probability_of_improvement,
)
from esper.experiment.verdict import compare_pairs, holm, paired_wilcoxon, told
from tests.references import statistics as reference

shapes = st.tuples(st.integers(1, 3), st.integers(2, 9))
# Whole numbers: ties and zeros are frequent, and sums are exact.
pairs = shapes.flatmap(
    lambda s: st.tuples(*[arrays(np.float64, s, elements=st.integers(-4, 4))] * 2)
)

# Heights of crossed less self-fertilised maize, in eighths of an inch (Darwin 1876).
MAIZE = np.array([6, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75.0])


def test_darwins_maize_has_its_known_p_value():
    assert paired_wilcoxon(MAIZE, np.zeros(15)) == pytest.approx(0.041259765625)


@given(pairs.filter(lambda both: both[0].size <= 10))
def test_signed_ranks_count_every_choice_of_signs(both):
    x, y = both
    expected = reference.signed_ranks((x - y).ravel().tolist())
    assert paired_wilcoxon(x, y) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("count", [1, 2, 5, 9, 14, 25, 26, 50, 51, 200])
@pytest.mark.parametrize("kind", ["clean", "tied", "with zeros"])
def test_signed_ranks_are_scipys(kind, count):
    generator = np.random.default_rng(count)
    x, y = generator.normal(0.3, 1.0, count), generator.normal(0.0, 1.0, count)
    if kind != "clean":
        x, y = (8 * x).round(), (8 * y).round()
        y[:1] = x[:1] - 3.0
        if kind == "tied":
            y -= x == y
        else:
            y[1:3] = x[1:3]
    expected = stats.wilcoxon(x, y).pvalue
    assert paired_wilcoxon(x, y) == pytest.approx(expected, rel=1e-9)


def test_thirteen_pairs_that_share_ranks_are_still_counted():
    differences = np.array([3, 3, -2, 5, 0, 1, 1, -1, 4, 4, -4, 7, 0.0])
    assert paired_wilcoxon(differences, np.zeros(13)) == pytest.approx(
        reference.signed_ranks(differences.tolist()), abs=1e-12
    )


def test_differences_of_ratios_that_are_equal_share_their_rank():
    """0.3 - 0.2 and 0.2 - 0.1 differ in floats."""
    x, y = np.array([0.3, 0.2, 0.4, 0.1]), np.array([0.2, 0.1, 0.2, 0.5])
    whole = paired_wilcoxon((10 * x).round(), (10 * y).round())
    assert paired_wilcoxon(x, y) == whole


def test_arms_without_any_difference_are_alike():
    assert paired_wilcoxon(np.ones(60), np.ones(60)) == 1.0


p_lists = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6)


@given(p_lists)
def test_holm_is_closed_testing(p_values):
    assert holm(p_values) == pytest.approx(reference.holm(p_values), abs=1e-12)


@given(p_lists)
def test_holm_lowers_no_p_value_and_keeps_their_order(p_values):
    adjusted = holm(p_values)
    assert all(a >= p for a, p in zip(adjusted, p_values, strict=True))
    assert sorted(adjusted) == [
        a for _, a in sorted(zip(p_values, adjusted, strict=True))
    ]


# --- Several comparisons at once


def _arms(seeds, tasks=2):
    noise = np.random.default_rng(0).normal(scale=0.01, size=(4, tasks, seeds))
    base = 0.8 + noise[0]
    return {
        "tamiyo": base + 0.05 + noise[1],
        "never": base,
        "random": base + 0.5 * (noise[2] - noise[2].mean()),
        "harm": base - 0.05 + noise[3],
    }


def _against(arms, baseline, **options):
    others = {name: (arms[name], arms[baseline]) for name in arms if name != baseline}
    return compare_pairs(others, **options)


def test_a_comparison_holds_what_each_function_says():
    arms = _arms(10)
    found = _against(arms, "never", draws=500)
    assert [*found] == ["tamiyo", "random", "harm"]
    p_values = [
        stats.wilcoxon((arms[name] - arms["never"]).ravel()).pvalue for name in found
    ]
    adjusted = reference.holm(p_values)
    for (name, row), p, corrected in zip(
        found.items(), p_values, adjusted, strict=True
    ):
        x, y = arms[name], arms["never"]
        assert row.difference.estimate == pytest.approx(iqm(x) - iqm(y))
        assert row.improvement == probability_of_improvement(x, y, draws=500)
        assert row.paired == paired_improvement(x, y, draws=500)
        assert (row.p, row.adjusted) == pytest.approx((p, corrected), rel=1e-9)
        assert (row.ahead, row.behind) == ((x > y).sum(), (x < y).sum())
        assert row.pairs == 20


def test_luck_that_arms_share_is_not_in_their_difference():
    luck = np.random.default_rng(0).normal(size=12)
    row = compare_pairs({"it": (luck + 0.25, luck)}, draws=500)["it"]
    assert (row.difference.low, row.difference.high) == pytest.approx((0.25, 0.25))


def test_more_comparisons_need_more_evidence():
    ours, base = 0.5 + np.arange(1, 7) / 1000, np.full(6, 0.5)  # p = 2 / 64
    alone = compare_pairs({"a": (ours, base)}, draws=100)["a"]
    both = compare_pairs({"a": (ours, base), "b": (ours, base)}, draws=100)
    assert (alone.p, alone.adjusted) == (2 / 64, 2 / 64)
    assert alone.shown
    assert both["a"].adjusted == 4 / 64
    assert not both["a"].shown


def test_names_are_sorted_by_what_is_shown():
    sides = told(_against(_arms(10), "never", draws=500), "+.2f")
    assert sides == {
        "above": ["'tamiyo' (+0.05)"],
        "below": ["'harm' (-0.05)"],
        "open": ["'random' (-0.00)"],
    }


def test_a_mean_that_most_pairs_contradict_is_not_shown():
    """Few large gains on one task, many small losses on another: mean against ranks."""
    base = np.zeros((2, 40))
    mixed = np.concatenate([np.full((1, 40), -0.1), np.full((1, 40), -0.2)])
    mixed[1, :39] = 5.0 + np.arange(39) / 100
    row = compare_pairs({"mixed": (mixed, base)})["mixed"]
    assert row.difference.low > 0.0
    assert row.adjusted < 0.05
    assert row.paired.estimate < 0.5
    assert not row.shown


def test_no_pairs_are_no_comparisons():
    assert compare_pairs({}) == {}


# --- Bad input

GOOD, BAD = np.ones((2, 3)), np.array([[1.0, 2.0, 3.0], [1.0, np.nan, 3.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_wilcoxon(GOOD, BAD), "finite"),
        (lambda: paired_wilcoxon(GOOD[0], GOOD[0, :2]), r"\(3,\) and \(2,\)"),
        (lambda: holm([]), r"got shape \(0,\)"),
        (lambda: holm([0.1, float("nan")]), r"in \[0, 1\], got \[0.1, nan\]"),
        (lambda: holm([1.1]), r"in \[0, 1\]"),
        (lambda: compare_pairs({"b": (GOOD, BAD)}), "finite"),
        (lambda: compare_pairs({"b": (GOOD, GOOD[:, :2])}), "same tasks and seeds"),
        (lambda: compare_pairs({"b": (GOOD[:, :1], GOOD[:, :1])}), "at least 2 seeds"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(call, message):
    with pytest.raises(BadInput, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
