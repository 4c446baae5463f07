import pytest
import torch

from esper.environment.engine import adamw

LENGTH, START, DECAY = 37, 5, 0.03
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def state(dtype):
    chance = torch.Generator().manual_seed(3)
    values = torch.randn(LENGTH + 2 * START, generator=chance, dtype=torch.float64)
    return [values.to(dtype), *(torch.zeros(len(values), dtype=dtype) for _ in "mq")]


def gradient(time, dtype):
    chance = torch.Generator().manual_seed(100 + time)
    drawn = torch.randn(LENGTH + 2 * START, generator=chance, dtype=torch.float64)
    return drawn.to(dtype)


def step(held, found, rate, clock):
    values, mean, square = (part.numpy() for part in held)
    found = found.numpy()
    adamw(values, found, mean, square, START, LENGTH, float(rate), clock, DECAY)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_stretch_moves_as_in_an_optimiser_of_its_own(dtype):
    held = state(dtype)
    alone = held[0][START : START + LENGTH].clone().requires_grad_()
    optimizer = torch.optim.AdamW([alone], lr=1.0, weight_decay=DECAY)
    for time in range(12):
        found, rate = gradient(time, dtype), 0.01 * (time + 1)
        step(held, found, rate, time + 1)
        optimizer.param_groups[0]["lr"] = rate
        alone.grad = found[START : START + LENGTH].clone()
        optimizer.step()
    near = TOLERANCE[dtype]
    moved = held[0][START : START + LENGTH]
    torch.testing.assert_close(moved, alone.detach(), rtol=near, atol=near)


def test_what_lies_outside_the_stretch_does_not_move_by_a_bit():
    held = state(torch.float32)
    kept = [part.clone() for part in held]
    found = gradient(0, torch.float32)
    found[:START] = found[START + LENGTH :] = torch.nan
    step(held, found, 0.1, 1)
    for before, after in zip(kept, held, strict=True):
        assert torch.equal(before[:START], after[:START])
        assert torch.equal(before[START + LENGTH :], after[START + LENGTH :])
        assert not torch.equal(before, after)


def test_a_late_step_is_not_scaled_as_a_first_one():
    first, late = state(torch.float64), state(torch.float64)
    step(first, gradient(0, torch.float64), 0.1, 1)
    step(late, gradient(0, torch.float64), 0.1, 10_000)
    begun = state(torch.float64)[0]
    moved = [float((held[0] - begun).abs().sum()) for held in (first, late)]
    assert moved[1] < 4 * moved[0]
    assert moved[1] > 2 * moved[0]
