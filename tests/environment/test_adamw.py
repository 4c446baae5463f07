import pytest
import torch

from esper.environment.adamw import Moments, Pace, _step_anywhere, step

ENVS, REPEATS, GROUPS, RUN = 3, 2, 4, 5
SHAPE = (ENVS, REPEATS, GROUPS, RUN)
DECAY = 0.03
PATHS = {"compiled": step, "tensors": _step_anywhere}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
RATE = 0.01 * (1 + torch.arange(ENVS * GROUPS).view(ENVS, GROUPS))
BORN = torch.tensor([[0, 0, 3, 7], [0, 2, 2, 9], [0, 1, 4, 5]])
"""The step before which each group starts."""
SHADOW = torch.tensor([[False, True, True, False]] * ENVS)
NOBODY = torch.zeros(ENVS, GROUPS, dtype=torch.bool)


def pace(clock, active, dtype, shadow=SHADOW):
    return Pace.of(RATE.to(dtype), clock, active, shadow)


def gradients(time, dtype):
    chance = torch.Generator().manual_seed(time)
    drawn = torch.randn(2, *SHAPE, generator=chance, dtype=torch.float64)
    return drawn[0].to(dtype), drawn[1].to(dtype)


def start(dtype):
    chance = torch.Generator().manual_seed(99)
    return Moments(torch.randn(SHAPE, generator=chance, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_group_of_every_network_moves_as_in_an_optimiser_of_its_own(path, dtype):
    moments = start(dtype)
    alone, optimizers = {}, {}
    for env in range(ENVS):
        for group in range(GROUPS):
            leaf = moments.value[env, :, group].clone().requires_grad_()
            alone[env, group] = leaf
            optimizers[env, group] = torch.optim.AdamW(
                [leaf], lr=float(RATE[env, group]), weight_decay=DECAY
            )
    clock = torch.zeros(ENVS, GROUPS, dtype=torch.int64)
    for time in range(12):
        felt, beside = gradients(time, dtype)
        active = time >= BORN
        clock += active
        PATHS[path](moments, felt, beside, pace(clock, active, dtype), DECAY)
        for (env, group), leaf in alone.items():
            if active[env, group]:
                source = beside if SHADOW[env, group] else felt
                leaf.grad = source[env, :, group].clone()
                optimizers[env, group].step()
    near = TOLERANCE[dtype]
    for (env, group), leaf in alone.items():
        torch.testing.assert_close(
            moments.value[env, :, group], leaf.detach(), rtol=near, atol=near
        )


@pytest.mark.parametrize("path", PATHS)
def test_a_group_that_is_not_active_does_not_move_by_a_bit(path):
    moments = start(torch.float32)
    clock = torch.ones(ENVS, GROUPS, dtype=torch.int64)
    felt, beside = gradients(0, torch.float32)
    everyone = pace(clock, ~NOBODY, torch.float32)
    PATHS[path](moments, felt, beside, everyone, DECAY)
    kept = [t.clone() for t in (moments.value, moments.mean, moments.square)]
    active = NOBODY.clone()
    active[1, 2] = True
    felt, beside = gradients(1, torch.float32)
    still = ~active[:, None, :, None].expand(SHAPE)
    felt, beside = (
        felt.masked_fill(still, torch.nan),
        beside.masked_fill(still, torch.nan),
    )
    PATHS[path](
        moments, felt, beside, pace(clock + active, active, torch.float32), DECAY
    )
    now = (moments.value, moments.mean, moments.square)
    for before, after in zip(kept, now, strict=True):
        assert torch.equal(before[still], after[still])
        assert not torch.equal(before[1, :, 2], after[1, :, 2])


@pytest.mark.parametrize("path", PATHS)
def test_a_shadow_gradient_is_taken_only_where_it_is_said(path):
    clock = torch.ones(ENVS, GROUPS, dtype=torch.int64)
    ones = torch.ones(SHAPE)
    moments = Moments(torch.zeros(SHAPE))
    PATHS[path](moments, ones, -ones, pace(clock, ~NOBODY, torch.float32), 0.0)
    upwards = (moments.value > 0).all(dim=3).all(dim=1)
    assert torch.equal(upwards, SHADOW)


def test_gradients_in_another_order_or_shape_are_read_in_order():
    clock = torch.ones(ENVS, GROUPS, dtype=torch.int64)
    felt, beside = gradients(0, torch.float32)
    plain, other = start(torch.float32), start(torch.float32)
    usual = pace(clock, ~NOBODY, torch.float32)
    step(plain, felt, beside, usual, DECAY)
    turned = felt.transpose(1, 2).contiguous().transpose(1, 2)
    step(other, turned, beside.flatten(1), usual, DECAY)
    assert torch.equal(plain.value, other.value)


def test_to_forget_a_group_leaves_all_others():
    moments = start(torch.float32)
    clock = torch.ones(ENVS, GROUPS, dtype=torch.int64)
    felt, beside = gradients(0, torch.float32)
    step(moments, felt, beside, pace(clock, ~NOBODY, torch.float32), DECAY)
    moments.forget(1, 2)
    moments.forget(2)
    for memory in (moments.mean, moments.square):
        there = memory.ne(0).all(dim=3).all(dim=1)
        expected = ~NOBODY
        expected[1, 2] = False
        expected[2] = False
        assert torch.equal(there, expected)
        assert not memory[1, :, 2].any()
        assert not memory[2].any()


def test_elsewhere_than_on_the_cpu_the_tensor_version_is_used():
    moments = Moments(torch.zeros(SHAPE, device="meta"))
    parts = [torch.ones(ENVS, GROUPS, device="meta") for _ in range(3)]
    flags = [NOBODY.to("meta")] * 2
    gradient = torch.ones(SHAPE, device="meta")
    step(moments, gradient, gradient, Pace(*parts, *flags), DECAY)
    assert moments.value.shape == SHAPE
