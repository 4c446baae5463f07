"""The policy's activation against the exact function."""

import math

import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

from esper.rl.policy import tanh


def test_tanh_is_that_of_float64_in_value_and_gradient():
    x = torch.cat((torch.linspace(-12.0, 12.0, 100_001), torch.logspace(-30, 0, 999)))
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, expected = tanh(leaf), torch.tanh(exact)
    assert_close(y.double(), expected, rtol=5e-7, atol=0.0)
    assert y.abs().max() <= 1.0
    y.sum().backward()
    expected.sum().backward()
    assert_close(leaf.grad.double(), exact.grad, rtol=0.0, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(tanh(leaf), y)


def test_tanh_has_limits_and_keeps_nan():
    x = torch.tensor([math.inf, -math.inf, 0.0, math.nan])
    assert_close(tanh(x), torch.tensor([1.0, -1.0, 0.0, math.nan]), equal_nan=True)


def test_tanh_takes_any_layout_and_dtype():
    x = torch.randn(6, 4, 3)
    assert torch.equal(tanh(x.transpose(0, 2)), tanh(x).transpose(0, 2))
    assert tanh(x[:0]).shape == (0, 4, 3)
    assert gradcheck(tanh, (x[0].double().requires_grad_(),))
