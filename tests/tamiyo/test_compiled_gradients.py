"""Gradients written by hand are those of autograd, for every weight, in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Generator
from torch.autograd import gradcheck
from torch.testing import assert_close

from esper.tamiyo.policy.features import Features
from esper.tamiyo.policy.gating import gated
from esper.tamiyo.policy.memory import MinGRU
from tests.rollouts import SPEC, TINY, fill_ragged, make_buffer, make_policy, take

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rollout(config, envs=5, steps=7):
    """A policy, its twin in torch alone, and what the policy collected."""
    fast, slow = (make_policy(config=config, strength=1.0) for _ in range(2))
    buffer = make_buffer(fast, envs, steps)
    fill_ragged(fast, buffer)
    slow.compiled = slow.memory.compiled = False
    return fast.double(), slow.double(), in_float64(take(buffer))


def in_float64(batch):
    seen = batch.features
    features = Features(seen.host.double(), seen.slots.double(), seen.offers.double())
    return replace(batch, features=features, state=batch.state.double())


def scores(policy, batch):
    return policy.scores(batch.features, batch.actions, batch.first, batch.state)


def gradients(policy, logits, values):
    """Of a random sum over logits that exist, and values."""
    generator = Generator().manual_seed(1)
    sizes = torch.tensor(SPEC.sizes).unsqueeze(1)
    exists = torch.arange(SPEC.width) < sizes
    weigh = torch.randn(logits.shape, generator=generator) * exists
    pull = torch.randn(values.shape, generator=generator)
    policy.zero_grad()
    ((logits * weigh).sum() + (values * pull).sum()).backward()
    return {name: weight.grad for name, weight in policy.named_parameters()}


@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, layers=2), replace(TINY, memory="lstm")]
)
def test_scores_and_all_gradients_equal_those_of_torch(config):
    fast, slow, batch = rollout(config)
    found, expected = scores(fast, batch), scores(slow, batch)
    assert_close(found, expected, **CLOSE)
    grads, plain = gradients(fast, *found), gradients(slow, *expected)
    for name in plain:
        assert plain[name].abs().max() > 0, name
        assert_close(grads[name], plain[name], **CLOSE, msg=lambda text, n=name: n)


def test_encodings_that_are_equally_large_share_a_gradient():
    fast, slow, batch = rollout(TINY)
    for one in (batch.features.slots, batch.features.offers):
        one[:, :, 1:] = one[:, :, :1]
    assert_close(
        gradients(fast, *scores(fast, batch)),
        gradients(slow, *scores(slow, batch)),
        **CLOSE,
    )


def test_float32_agrees_as_far_as_it_goes():
    fast, slow = (make_policy(strength=1.0) for _ in range(2))
    buffer = make_buffer(fast, 5, 7)
    fill_ragged(fast, buffer)
    slow.compiled = slow.memory.compiled = False
    batch = take(buffer)
    grads, plain = (gradients(p, *scores(p, batch)) for p in (fast, slow))
    for name in plain:
        size = float(plain[name].abs().max())
        assert_close(grads[name], plain[name], rtol=0.0, atol=1e-5 * size)


def test_gates_that_are_shut_open_or_between_have_the_gradient_of_differences():
    generator = Generator().manual_seed(0)

    def noise(*shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.requires_grad_()

    first = torch.rand(2, 4, generator=generator) < 0.4
    inputs, gates, state = noise(2, 4, 3), noise(2, 4, 6), noise(2, 3)
    assert gradcheck(
        lambda *own: gated(*own[:2], first, own[2]), (inputs, gates, state)
    )


@pytest.mark.parametrize("gate", [-200.0, -60.0, 60.0, 200.0])
def test_gates_beyond_float32_stay_finite_and_equal_torchs(gate):
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        memory = MinGRU(6)
        memory.compiled = compiled
        with torch.no_grad():
            memory.gates[0].bias[:6] = gate
        inputs = torch.randn(3, 5, 6, requires_grad=True)
        first = torch.rand(3, 5) < 0.3
        outputs, last = memory(inputs, first, torch.randn(3, 1, 6))
        (outputs.square().sum() + last.sum()).backward()
        weights = [inputs.grad, *(weight.grad for weight in memory.parameters())]
        assert all(weight.isfinite().all() for weight in weights)
        results.append((outputs, last, *weights))
    assert_close(*results, rtol=1e-5, atol=1e-6)


def test_nothing_of_another_episode_passes_forwards_or_back():
    memory, state = MinGRU(4), torch.full((2, 1, 4), torch.nan)
    first = torch.tensor([[True, False, True], [True, False, False]])
    inputs = torch.randn(2, 3, 4, requires_grad=True)
    outputs, last = memory(inputs, first, state)
    outputs[0, 2].sum().backward()
    assert outputs.isfinite().all()
    assert last.isfinite().all()
    assert (inputs.grad[0, :2] == 0).all()
    assert (inputs.grad[0, 2] != 0).all()
