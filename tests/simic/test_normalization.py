"""Value statistics: exact moments, and predictions that do not move with them."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from esper.simic.agent.ppo import (
    SMALLEST_SCALE,
    ReturnMoments,
    rescale_head,
)

HERE = torch.device("cpu")


def moments_of(*rollouts, decay=1.0):
    moments = ReturnMoments.none(HERE)
    for returns in rollouts:
        grid = torch.tensor([returns])
        moments = moments.with_returns(grid, torch.ones_like(grid) > 0, decay)
    return moments


@given(st.integers(0, 999), st.integers(1, 5), st.floats(0.01, 100))
def test_nothing_fades_moments_are_those_of_all_returns(rng_seed, count, scale):
    generator = torch.Generator().manual_seed(rng_seed)
    rollouts = [
        (scale * torch.randn(32, generator=generator)).tolist() for _ in range(count)
    ]
    moments = moments_of(*rollouts)
    everything = [value for rollout in rollouts for value in rollout]
    mean, spread = statistics.fmean(everything), statistics.pstdev(everything)
    assert_close(moments.mean, torch.tensor(mean), rtol=1e-5, atol=1e-4)
    floor = SMALLEST_SCALE * (1 + abs(mean))
    assert_close(
        moments.scale(), torch.tensor(max(spread, floor)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("outlier", [1e6, -1e6, 2e19, 3e38, math.inf, math.nan])
def test_one_absurd_return_counts_as_a_large_one_and_no_more(outlier):
    usual = torch.randn(64, generator=torch.Generator().manual_seed(0)).tolist()
    before = moments_of(usual, decay=0.95)
    odd = torch.tensor([[*usual[:-1], outlier]])
    after = before.with_returns(odd, torch.ones_like(odd) > 0, 0.95)
    assert 0.5 < after.scale() / before.scale() < 2.0
    assert abs(after.mean - before.mean) < before.scale()
    first = ReturnMoments.none(HERE).with_returns(odd, torch.ones_like(odd) > 0, 0.95)
    assert first.scale() < 20 * before.scale()


def test_returns_that_grow_as_a_whole_are_followed_at_once():
    usual = torch.randn(64, generator=torch.Generator().manual_seed(0)).tolist()
    grown = moments_of(usual, [1e4 * x for x in usual], decay=0.95)
    assert grown.scale() > 5e3


def test_sparse_first_returns_are_no_outliers():
    returns = [0.01 * (step % 7) for step in range(60)] + [1.0, 1.0, 1.0]
    assert_close(moments_of(returns).scale(), torch.tensor(statistics.pstdev(returns)))


def test_old_returns_fade():
    """Weights 1/4, 1/2, 1 of three rollouts whose returns are constant."""
    moments = moments_of([0.0, 0.0], [2.0, 2.0], [6.0, 6.0], decay=0.5)
    mean = (0.25 * 0 + 0.5 * 2 + 1.0 * 6) / 1.75
    square = (0.25 * 0 + 0.5 * 4 + 1.0 * 36) / 1.75
    assert_close(moments.mean, torch.tensor(mean))
    assert_close(moments.scale(), torch.tensor(math.sqrt(square - mean**2)))


@pytest.mark.parametrize("filler", [math.nan, math.inf, 1e30])
def test_t24_padding_is_not_counted(filler):
    valid = torch.tensor([[True, True, False], [True, False, False]])
    returns = torch.where(
        valid, torch.tensor([[1.0, 2.0, 0.0], [6.0, 0.0, 0.0]]), filler
    )
    padded = ReturnMoments.none(HERE).with_returns(returns, valid, 0.9)
    plain = moments_of([1.0, 2.0, 6.0])
    assert_close((padded.mean, padded.scale()), (plain.mean, plain.scale()))


def test_a_rollout_without_steps_changes_nothing():
    before = moments_of([1.0, 5.0])
    none = torch.zeros(1, 2, dtype=torch.bool)
    after = before.with_returns(torch.tensor([[math.nan, 7.0]]), none, 0.5)
    for name in ("weight", "mean", "variance"):
        assert torch.equal(getattr(after, name), getattr(before, name))


def test_large_returns_that_differ_little_keep_their_spread():
    returns = [10_000.0 + 4.0 * (step % 2) for step in range(64)]
    assert_close(
        moments_of(returns, returns).scale(), torch.tensor(2.0), rtol=1e-3, atol=0
    )


def test_constant_returns_do_not_become_noise():
    assert_close(moments_of([3.0, 3.0]).scale(), torch.tensor(4.0 * SMALLEST_SCALE))


@given(
    st.tuples(*[st.floats(-50, 50, width=32)] * 2),
    st.tuples(*[st.floats(0.125, 64, width=32)] * 2),
)
def test_changing_units_does_not_change_a_prediction(means, scales):
    torch.manual_seed(0)
    head, inputs = nn.Linear(5, 1), torch.randn(7, 5)
    before = means[0] + scales[0] * head(inputs)
    tensors = [
        (torch.tensor(m), torch.tensor(s)) for m, s in zip(means, scales, strict=True)
    ]
    rescale_head(head, tensors[0], tensors[1])
    after = means[1] + scales[1] * head(inputs)
    assert_close(after, before, rtol=1e-4, atol=1e-3)
