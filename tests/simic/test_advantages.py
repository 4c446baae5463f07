import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from esper.simic.agent.losses import normalize_advantages, subtract_group_baseline

NAN = float("nan")


numbers = st.floats(-100.0, 100.0, width=32)
steps = st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=12)


@given(steps)
def test_valid_steps_equal_numpy_and_padding_is_zero(row):
    values, valid = zip(*row, strict=True)
    kept = np.array([v for v, there in row if there], np.float64)
    centred = kept - kept.mean() if kept.size else kept
    spread = max(np.sqrt((centred**2).mean()), 1e-5) if kept.size else 1.0
    actual = normalize_advantages(torch.tensor([values]), torch.tensor([valid]))[0]
    there = torch.tensor(valid)
    # An error of one rounding of 100 is seen through at most the floor's lens.
    tolerance = 1e-5 + 1e-5 * np.abs(kept).max(initial=0.0) / spread
    expected = torch.from_numpy(centred / spread).float()
    assert_close(actual[there], expected, rtol=1e-4, atol=float(tolerance))
    assert not actual[~there].any()


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e30])
def test_t24_what_stands_on_padding_changes_nothing(poison):
    valid = torch.tensor([[True, True, False], [True, False, False]])
    clean = torch.tensor([[0.5, -1.5, 0.0], [2.0, 0.0, 0.0]])
    dirty = torch.where(valid, clean, poison)
    actual = normalize_advantages(dirty, valid)
    assert_close(actual, normalize_advantages(clean, valid), rtol=0, atol=0)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
@pytest.mark.parametrize("level", [0.0, 0.1, -7.7, 1e3, 1e-30])
def test_t31_equal_advantages_become_zero_however_many_there_are(count, level):
    advantages = torch.full((1, 1001), level)
    valid = torch.arange(1001)[None] < count
    actual = normalize_advantages(advantages, valid)
    assert_close(actual, torch.zeros(1, 1001), rtol=0, atol=1e-3)


def test_spreads_below_the_floor_are_not_blown_up():
    advantages, valid = torch.tensor([[0.0, 2e-7]]), torch.tensor([[True, True]])
    actual = normalize_advantages(advantages, valid)
    assert_close(actual, torch.tensor([[-0.01, 0.01]]), rtol=1e-5, atol=0)


def test_the_mean_of_the_others_in_a_group_is_subtracted():
    advantages = torch.tensor([[1.0, 5.0], [3.0, 5.0], [10.0, 0.0], [20.0, 4.0]])
    valid = torch.ones(4, 2, dtype=torch.bool)
    expected = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [-10.0, -4.0], [10.0, 4.0]])
    assert_close(
        subtract_group_baseline(advantages, valid, 2), expected, rtol=0, atol=0
    )


def test_padding_is_left_out_of_the_group_mean():
    advantages = torch.tensor([[1.0], [3.0], [NAN], [8.0]])
    valid = torch.tensor([[True], [True], [False], [True]])
    centred = subtract_group_baseline(advantages, valid, 4)
    assert_close(centred[valid], torch.tensor([-4.5, -1.5, 6.0]), rtol=0, atol=0)


def test_without_another_valid_environment_nothing_is_subtracted():
    advantages, valid = torch.tensor([[2.0], [9.0]]), torch.tensor([[True], [False]])
    assert subtract_group_baseline(advantages, valid, 2)[0, 0] == 2.0
