import pytest
import torch

from esper.environment.units import (
    DEAD,
    GELU,
    LINEAR,
    RELU,
    _slope_anywhere,
    _speak_anywhere,
    slope,
    speak,
)

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
KINDS = torch.tensor([[DEAD, RELU, LINEAR, GELU], [GELU, LINEAR, RELU, DEAD]]).to(
    torch.int8
)
PATHS = {"compiled": (speak, slope), "tensors": (_speak_anywhere, _slope_anywhere)}


def expected(pre, kind):
    """One unit at a time, in plain PyTorch."""
    acts = {
        DEAD: lambda column: torch.zeros_like(column),
        RELU: torch.relu,
        LINEAR: lambda column: column,
        GELU: torch.nn.functional.gelu,
    }
    said = [
        torch.stack([acts[k](pre[env, :, i]) for i, k in enumerate(row)], dim=1)
        for env, row in enumerate(kind.tolist())
    ]
    return torch.stack(said)


def example(dtype):
    pre = 2 * torch.randn(2, 9, 4, dtype=dtype)
    pre[:, 0] = 0.0
    return pre, torch.randn_like(pre)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_units_say_what_their_activation_says(path, dtype):
    pre, _ = example(dtype)
    near = TOLERANCE[dtype]
    said = PATHS[path][0](pre, KINDS)
    torch.testing.assert_close(said, expected(pre, KINDS), rtol=near, atol=near)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_slope_is_that_of_autograd(path, dtype):
    pre, given = example(dtype)
    leaf = pre.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((expected(leaf, KINDS) * given).sum(), leaf)
    back = PATHS[path][1](given, pre, KINDS)
    near = TOLERANCE[dtype]
    torch.testing.assert_close(back, wanted, rtol=near, atol=near)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_a_dead_unit_holds_never_shows(path, bad):
    say, back = PATHS[path]
    pre, given = example(torch.float32)
    dead = (KINDS == DEAD).unsqueeze(1).expand_as(pre)
    broken = pre.masked_fill(dead, bad)
    wrong = given.masked_fill(dead, bad)
    assert torch.equal(say(broken, KINDS), say(pre, KINDS))
    assert torch.equal(back(wrong, broken, KINDS), back(given, pre, KINDS))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [RELU, LINEAR, GELU])
def test_what_breaks_in_a_living_unit_is_not_hidden(path, kind):
    pre = torch.full((1, 3, 2), torch.nan)
    kinds = torch.full((1, 2), kind, dtype=torch.int8)
    assert PATHS[path][0](pre, kinds).isnan().all()


def test_gradients_that_do_not_lie_in_order_are_read_in_order():
    pre, given = example(torch.float32)
    turned = given.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    assert torch.equal(slope(turned, pre, KINDS), slope(given, pre, KINDS))


def test_elsewhere_than_on_the_cpu_shapes_are_the_same():
    pre = torch.empty(2, 9, 4, device="meta")
    kinds = KINDS.to("meta")
    assert speak(pre, kinds).shape == pre.shape
    assert slope(pre, pre, kinds).shape == pre.shape
