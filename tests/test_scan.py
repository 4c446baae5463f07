"""The recurrence against sums in float64, and every way in which it must not leak."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck
from torch.testing import assert_close

from esper import scan as module
from esper.scan import gae, gated_scan
from tests.references.recurrence import (
    gae_reference,
    leaky_gae_loop,
    naive_gae_loop,
    scan_reference,
    time_gae_loop,
)

BOOL = torch.bool
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
}
EXACT = {"rtol": 0.0, "atol": 0.0}


def recurrence(shape, rng_seed, *, zeros=0.3, dtype=torch.float64):
    """Random decay, inputs and initial; some decays are exactly zero."""
    generator = torch.Generator().manual_seed(rng_seed)
    decay = torch.rand(shape, generator=generator, dtype=dtype) * 2.4 - 1.2
    decay[torch.rand(shape, generator=generator) < zeros] = 0.0
    inputs = torch.randn(shape, generator=generator, dtype=dtype)
    initial = torch.randn(shape[:1] + shape[2:], generator=generator, dtype=dtype)
    return decay, inputs, initial


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 17), st.integers(1, 10)),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_the_recurrence_is_the_sum_of_decayed_inputs(shape, reverse, dtype, rng_seed):
    decay, inputs, initial = recurrence(shape, rng_seed, dtype=dtype)

    y = module._log_depth(decay, inputs, initial, reverse=reverse)

    expected = scan_reference(decay, inputs, initial, reverse=reverse)
    assert y.dtype == dtype
    assert_close(y.double(), torch.from_numpy(expected), **TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(2, 3, 2), (2, 1, 2), (1, 7, 2), (2, 0, 4)])
def test_derivatives_of_the_recurrence_agree_with_differences(shape):
    leaves = [x.requires_grad_() for x in recurrence(shape, 1)]
    assert gradcheck(module._scan, leaves)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_t18_nothing_passes_a_boundary_in_value_or_gradient(poison):
    decay, inputs, initial = recurrence((2, 9, 8), 5, zeros=0.0)
    decay[:, 4] = 0.0
    expected = module._scan(decay, inputs, initial)[:, 4:]
    inputs[:, :4] = poison
    inputs.requires_grad_()

    y = module._scan(decay, inputs, initial * poison)

    assert_close(y[:, 4:], expected, **EXACT)
    (gradient,) = grad(y[:, 4:].sum() + 2.0 * y[:, :4].sum(), inputs)
    assert gradient.isfinite().all()
    (own,) = grad(module._scan(decay, inputs, initial)[:, :4].sum(), inputs)
    assert_close(gradient[:, :4], 2.0 * own[:, :4], rtol=1e-12, atol=0.0)


def gated(rng_seed, *, size=(3, 7, 5), dtype=torch.float64, scale=1.0):
    """Random gates with candidates, boundaries and initial."""
    generator = torch.Generator().manual_seed(rng_seed)
    envs, time, hidden = size
    shape = (envs, time, 2 * hidden)
    gates = scale * torch.randn(shape, generator=generator, dtype=dtype)
    first = torch.rand(envs, time, generator=generator) < 0.3
    initial = torch.randn(envs, hidden, generator=generator, dtype=dtype)
    return gates, first, initial


@given(st.integers(0, 99), st.sampled_from(DTYPES), st.sampled_from([0.1, 3.0, 60.0]))
def test_a_gated_scan_is_the_scan_of_its_gates_in_value_and_gradient(
    rng_seed, dtype, scale
):
    gates, first, initial = gated(rng_seed, dtype=dtype, scale=scale)
    leaves = gates.requires_grad_(), initial.requires_grad_()
    fused = gated_scan(gates, first, initial)
    plain = module._gated_by_scan(gates, first, initial)
    assert_close(fused, plain, **TOLERANCE[dtype])
    weights = torch.linspace(-1.0, 2.0, fused.numel(), dtype=dtype).view_as(fused)
    ours, theirs = (grad((weights * y).sum(), leaves) for y in (fused, plain))
    assert_close(ours, theirs, **TOLERANCE[dtype])
    with torch.no_grad():
        assert_close(gated_scan(gates, first, initial), fused.detach(), **EXACT)


@pytest.mark.parametrize("road", [gated_scan, module._gated_by_scan])
def test_t18_acting_step_by_step_is_the_whole_sequence(road):
    gates, first, initial = gated(4, size=(3, 9, 16), dtype=torch.float32)
    whole, state = road(gates, first, initial), initial
    exact = EXACT if road is gated_scan else TOLERANCE[torch.float32]
    with torch.no_grad():
        for t in range(9):
            now = slice(t, t + 1)
            state = road(gates[:, now], first[:, now], state)[:, 0]
            assert_close(state, whole[:, t], **exact)


def test_the_gradient_of_a_gated_scan_agrees_with_differences():
    gates, first, initial = gated(0, size=(2, 4, 2))
    leaves = gates.requires_grad_(), initial.requires_grad_()
    assert gradcheck(lambda g, i: gated_scan(g, first, i), leaves)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_t18_nothing_passes_a_boundary_of_a_gated_scan(poison):
    gates, first, initial = gated(1)
    first[:] = False
    first[:, 4] = True
    expected = gated_scan(gates, first, initial)[:, 4:]
    gates[:, :4] = poison
    gates.requires_grad_()
    y = gated_scan(gates, first, initial * poison)
    assert_close(y[:, 4:], expected, **EXACT)
    (gradient,) = grad(y[:, 4:].sum(), gates)
    assert gradient[:, 4:].isfinite().all()
    assert not gradient[:, 4:].eq(0).all()


@pytest.mark.parametrize("size", [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_an_empty_gated_scan_gives_empty_results_and_gradients(size):
    gates, first, initial = gated(0, size=size)
    y = gated_scan(gates.requires_grad_(), first, initial.requires_grad_())
    assert y.shape == size
    gradients = grad(y.sum(), (gates, initial))
    assert [x.shape for x in gradients] == [gates.shape, initial.shape]


# Advantages


def rollout(
    rng_seed, envs, time, *, ends=0.2, cuts=0.5, full=False, dtype=torch.float64
):
    """Random rows of several episodes; `ends` per step, `cuts` of them truncations."""
    generator = torch.Generator().manual_seed(rng_seed)

    def rand(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    dones = rand(envs, time) < ends
    counts = (rand(envs) * (time + 1)).long()
    return {
        "rewards": (4.0 * rand(envs, time) - 2.0).to(dtype),
        "values": (4.0 * rand(envs, time) - 2.0).to(dtype),
        "dones": dones,
        "truncated": dones & (rand(envs, time) < cuts),
        "step_counts": torch.full_like(counts, time) if full else counts,
        "final_values": (4.0 * rand(envs, time) - 2.0).to(dtype),
        "last_values": (4.0 * rand(envs) - 2.0).to(dtype),
    }


def padding_of(steps):
    return torch.arange(steps["rewards"].shape[1]) >= steps["step_counts"][:, None]


def compiled(steps, *, gamma, lam):
    """The loop for the CPU, which writes into arrays `[time, env]`."""
    rows = [x.T if x.ndim == 2 else x for x in steps.values()]
    rows += [torch.zeros_like(rows[0]) for _ in ("advantages", "returns")]
    arrays = [x.contiguous().numpy() for x in rows]
    module.gae_time_major(*arrays, gamma, lam)
    return tuple(torch.from_numpy(x).T for x in arrays[-2:])


def pairwise(steps, *, gamma, lam):
    """Whole-tensor operations, for every other device."""
    return gae(module.Rollout(**steps), gamma, lam)


GAE_ROADS = pytest.mark.parametrize("road", [compiled, pairwise])
sizes = st.tuples(st.sampled_from([1, 3, 37]), st.integers(1, 12))


@GAE_ROADS
def test_t26_three_endings_by_hand(road):
    """Two steps that terminate, two that are truncated, two that are cut, padding."""
    steps = {
        "rewards": torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 9.0]]),
        "values": torch.tensor([[4.0, 2.0, 4.0, 2.0, 4.0, 2.0, 9.0]]),
        "dones": torch.tensor([[0, 1, 0, 1, 0, 0, 0]]).bool(),
        "truncated": torch.tensor([[0, 0, 0, 1, 0, 0, 0]]).bool(),
        "step_counts": torch.tensor([6]),
        "final_values": torch.tensor([[9.0, 9.0, 9.0, 8.0, 9.0, 9.0, 9.0]]),
        "last_values": torch.tensor([16.0]),
    }

    advantages, returns = road(steps, gamma=0.5, lam=0.5)

    # delta of a first step: 1 + 0.5 * 2 - 4 = -2; the trace adds a quarter of the next.
    expected = [
        *(-2.0 + 0.25 * 0.0, 0.0),  # terminated: 2 + 0 - 2
        *(-2.0 + 0.25 * 4.0, 4.0),  # truncated: 2 + 0.5 * 8 - 2
        *(-2.0 + 0.25 * 8.0, 8.0),  # cut: 2 + 0.5 * 16 - 2
        0.0,
    ]
    assert_close(advantages, torch.tensor([expected]), **EXACT)
    assert_close(returns, torch.tensor([[2.0, 2.0, 3.0, 6.0, 4.0, 10.0, 0.0]]), **EXACT)


@GAE_ROADS
@given(
    st.integers(0, 999),
    sizes,
    st.sampled_from([0.0, 0.2, 1.0]),
    st.sampled_from(DTYPES),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_t27_advantages_are_the_sum_over_each_episode(
    road, rng_seed, size, ends, dtype, gamma, lam
):
    steps = rollout(rng_seed, *size, ends=ends, dtype=dtype)
    if rng_seed % 2:  # a truncation ends an episode without its done flag, too
        steps["dones"] = steps["dones"] & ~steps["truncated"]
        steps["step_counts"] = steps["step_counts"].int()

    actual = road(steps, gamma=gamma, lam=lam)

    expected = gae_reference(**steps, gamma=gamma, lam=lam)
    for result, reference in zip(actual, expected, strict=True):
        assert result.dtype == dtype
        assert_close(result.double(), torch.from_numpy(reference), **TOLERANCE[dtype])


@GAE_ROADS
@given(st.integers(0, 999), sizes, st.sampled_from([torch.nan, 1e30, torch.inf]))
def test_t24_padding_and_values_that_no_ending_asks_for_change_nothing(
    road, rng_seed, size, stale
):
    steps = rollout(rng_seed, *size)
    padding, counts = padding_of(steps), steps["step_counts"]
    expected = road(steps, gamma=0.9, lam=0.8)
    ended = steps["dones"].gather(1, (counts - 1).clamp(min=0)[:, None]).squeeze(1)
    dirty = steps | {
        name: x.masked_fill(padding, bool(rng_seed % 2) if x.dtype == BOOL else stale)
        for name, x in steps.items()
        if x.ndim == 2
    }
    unused = padding | ~steps["truncated"]
    dirty["final_values"] = steps["final_values"].masked_fill(unused, stale)
    unused = ended | (counts == 0)
    dirty["last_values"] = steps["last_values"].masked_fill(unused, stale)
    assert_close(road(dirty, gamma=0.9, lam=0.8), expected, **EXACT)
    assert all(result[padding].eq(0.0).all() for result in expected)


@GAE_ROADS
@given(st.integers(0, 999), sizes, st.sampled_from([7.0, torch.nan]))
def test_t26_other_episodes_never_change_this_one(road, rng_seed, size, other):
    steps = rollout(rng_seed, *size, full=True)
    expected = road(steps, gamma=0.9, lam=0.8)
    episode = steps["dones"].cumsum(dim=1) - steps["dones"].long()
    mine = episode == episode[:, size[1] // 2, None]
    changed = steps | {
        name: torch.where(mine, steps[name], steps[name].flip(1) * other)
        for name in ("rewards", "values", "final_values")
    }

    actual = road(changed, gamma=0.9, lam=0.8)

    for result, reference in zip(actual, expected, strict=True):
        assert_close(result[mine], reference[mine], **EXACT)


def test_t27_the_leaky_trace_is_wrong_exactly_before_a_truncation_in_mid_row():
    steps = rollout(3, 6, 12, full=True, ends=0.15)
    right = compiled(steps, gamma=0.9, lam=0.8)[0]
    leaky = leaky_gae_loop(*steps.values(), gamma=0.9, lam=0.8)[0]

    # Wrong from a truncation back to its episode's start, unless it is the last step.
    expected = torch.zeros_like(steps["dones"])
    for env, time in steps["truncated"][:, :-1].nonzero().tolist():
        ends = steps["dones"][env, :time].nonzero().flatten().tolist()
        expected[env, max(ends, default=-1) + 1 : time + 1] = True
    assert expected.any()
    assert not expected.all()
    assert torch.equal((leaky - right).abs() > 1e-9, expected)


@GAE_ROADS
@pytest.mark.parametrize("envs", [2, 30])
def test_counts_beyond_the_row_mean_all_of_it_and_negative_ones_none(road, envs):
    steps = rollout(4, envs, 9)
    for odd, plain in ((99, 9), (-3, 0)):
        counts = torch.full((envs,), odd)
        actual = road(steps | {"step_counts": counts}, gamma=0.9, lam=0.8)
        counts = torch.full((envs,), plain)
        expected = road(steps | {"step_counts": counts}, gamma=0.9, lam=0.8)
        assert_close(actual, expected, **EXACT)


def test_no_gradient_flows_into_the_targets():
    steps = rollout(0, 3, 5)
    steps["values"].requires_grad_()
    assert not any(x.requires_grad for x in pairwise(steps, gamma=0.9, lam=0.8))


def test_shapes_are_known_on_a_device_without_numbers():
    steps = {name: x.to("meta") for name, x in rollout(0, 3, 5).items()}
    for result in pairwise(steps, gamma=0.9, lam=0.8):
        assert (result.shape, result.device.type) == ((3, 5), "meta")
    for time in (1, 5):
        gates, first, initial = (x.to("meta") for x in gated(0, size=(2, time, 4)))
        y = gated_scan(gates.requires_grad_(), first, initial)
        assert (y.shape, y.device.type) == ((2, time, 4), "meta")
        assert grad(y.sum(), gates)[0].shape == gates.shape


def test_the_loops_to_compare_with_compute_the_same():
    steps = rollout(7, 5, 9)
    expected = gae_reference(**steps, gamma=0.9, lam=0.8)
    actual = naive_gae_loop(*steps.values(), gamma=0.9, lam=0.8)
    for result, reference in zip(actual, expected, strict=True):
        assert_close(result, torch.from_numpy(reference), rtol=1e-12, atol=1e-12)

    steps = rollout(7, 5, 9, full=True)
    expected = naive_gae_loop(*steps.values(), gamma=0.9, lam=0.8)
    steps.pop("step_counts")
    actual = time_gae_loop(
        *(x.mT if x.ndim == 2 else x for x in steps.values()), gamma=0.9, lam=0.8
    )
    for result, reference in zip(actual, expected, strict=True):
        assert_close(result.T, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("envs", "time", "taps"), [(3, 9, 4), (2, 1, 8), (4, 3, 8)])
def test_the_compiled_convolution_and_its_gradient_equal_torch(envs, time, taps):
    generator = torch.Generator().manual_seed(time)

    def draw(*shape):
        numbers = torch.randn(shape, dtype=torch.float64, generator=generator)
        return numbers.requires_grad_()

    rows, weights = draw(envs, taps - 1 + time, 5), draw(taps, 5)
    bias, grads = draw(5), (draw(envs, time, 5), draw(envs, taps - 1, 5))
    starts = torch.rand(envs, time, generator=generator) < 0.3
    inputs = (rows, starts, weights, bias)
    results = [module.causal_conv(*inputs), module._conv_by_lags(*inputs)]
    found = [grad(result, (rows, weights, bias), grads) for result in results]
    assert_close(*results)
    assert_close(*found)
    with torch.no_grad():
        assert_close(module.causal_conv(*inputs), results[1])
