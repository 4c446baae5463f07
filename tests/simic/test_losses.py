"""PPO's objective against plain float64 sums, and what must not move it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator
from torch.autograd import gradcheck
from torch.testing import assert_close

from esper.contracts.actions import NUM_HEADS
from esper.simic.agent.distribution import (
    chosen,
    kl_divergence,
    masked_log_softmax,
    sample,
)
from esper.simic.agent.losses import (
    CLIP_MODES,
    masked_mean,
)
from esper.simic.agent.metrics import PER_HEAD, SCALARS
from tests.simic.minibatches import CHOICES, Case, weights

TERMS = ("loss", *SCALARS[:-1], *PER_HEAD[:-1])


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("mode", CLIP_MODES)
def test_the_objective_equals_the_float64_sums(mode, value_clip):
    for rng_seed in range(70):
        envs, time = 1 + rng_seed % 3, 1 + rng_seed % 5
        case = Case(rng_seed, envs, time, scale=[0.05, 0.3, 1.0][rng_seed % 3])
        settings = weights(mode, value_clip=value_clip, value=0.7, exploration=0.02)
        terms, expected = case.terms(settings), case.expected(settings)
        for name in vars(expected):
            assert_close(
                getattr(terms, name),
                torch.tensor(getattr(expected, name)),
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, name=name, at=rng_seed: f"{name} of case {at}: {text}",
            )


@pytest.mark.parametrize("mode", CLIP_MODES)
def test_gradients_of_the_objective_are_those_of_its_value(mode):
    """T36: the entropy bonus included, whose sampled estimate has no gradient."""
    case = Case(5, envs=2, time=2, scale=0.02)
    logits = case.logits.double().requires_grad_()
    values = case.values.double().requires_grad_()
    settings = weights(mode, entropy=0.3, value_clip=0.3, exploration=0.2)
    assert gradcheck(
        lambda x, v: case.terms(settings, x, v).loss, (logits, values), atol=1e-5
    )


def test_t11_steps_on_which_a_head_is_closed_weigh_its_gain_and_entropy_alike():
    """Twice the steps, the head closed on the added ones: half of both gradients."""
    settings = weights(value=0.0, entropy=torch.eye(NUM_HEADS)[4])
    lone = Case(0, envs=3, time=20, open_share=0.9, valid=torch.ones(3, 20) > 0)
    both = Case(0, envs=3, time=20, open_share=0.9, valid=torch.ones(3, 20) > 0)
    both.twice()
    both.batch.masks[3:, :, 4] = torch.arange(CHOICES) == 0
    grads, terms = [], []
    for case in (lone, both):
        logits = case.logits.requires_grad_()
        terms.append(case.terms(settings, logits))
        terms[-1].loss.backward()
        grads.append(logits.grad[:3, :, 4])
    assert grads[0].abs().max() > 1e-3
    assert_close(grads[1], grads[0] / 2)
    assert_close(terms[1].entropy[4], terms[0].entropy[4])
    assert_close(terms[1].openness[4], terms[0].openness[4] / 2)


@pytest.mark.parametrize("gap", [5.0, 10.0, 20.0])
def test_exploration_brings_back_improbable_choices_where_entropy_does_not(gap):
    """The slope of the bonus at an improbable choice is near 1 / choices."""
    logits = torch.zeros(1, 1, NUM_HEADS, CHOICES)
    logits[..., 0] = gap
    everything = torch.ones(1, 1, NUM_HEADS, CHOICES, dtype=torch.bool)
    nothing = torch.zeros(1, 1)
    slopes = []
    for bonus in ({"exploration": 1.0}, {"exploration": 0.0, "entropy": 1.0}):
        case = Case(0, 1, 1, masks=everything, advantages=nothing, valid=nothing == 0)
        given = logits.clone().requires_grad_()
        case.terms(weights(**({"entropy": 0.0} | bonus)), given).loss.backward()
        slopes.append(-given.grad[0, 0, 0])
    probability = torch.softmax(logits[0, 0, 0], 0)
    assert_close(slopes[0], 1 / CHOICES - probability)
    assert slopes[1][1] < 2 * (gap + 2) * probability[1]


def test_t16_heads_forced_on_every_step_give_finite_terms_and_no_gradient():
    rows = (torch.arange(CHOICES) == 0).expand(2, 3, NUM_HEADS, CHOICES)
    case = Case(3, envs=2, time=3, scale=2.0, masks=rows)
    logits = case.logits.requires_grad_()
    terms = case.terms(weights(), logits, case.values.requires_grad_())
    terms.loss.backward()
    for name in TERMS:
        assert getattr(terms, name).isfinite().all(), name
    assert (logits.grad == 0).all()
    assert (terms.openness == 0).all()
    assert (terms.entropy == 0).all()


def test_t33_exact_kl_is_positive_zero_without_a_change_and_k3_agrees():
    case = Case(4, envs=1, time=1, open_share=1.0, valid=torch.ones(1, 1) > 0)
    same = case.terms(weights(), logits=case.batch.distribution)
    assert (same.kl.abs() < 1e-6).all()
    moved = case.terms(weights())
    assert (moved.kl >= 0).all()
    draws, generator = 40_000, Generator().manual_seed(1)
    old, rows = case.batch.distribution[0, 0], case.batch.masks[0, 0]
    new = masked_log_softmax(case.logits[0, 0], rows)
    actions = sample(old.expand(draws, -1, -1), rows.expand(draws, -1, -1), generator)
    d = chosen((new - old).expand(draws, -1, -1), actions).double()
    k3 = d.exp() - 1.0 - d
    error = k3.std(dim=0) / math.sqrt(draws)
    assert ((k3.mean(dim=0) - moved.kl).abs() <= 4.0 * error + 1e-7).all()
    assert_close(moved.kl, kl_divergence(old, new, rows))


@pytest.mark.parametrize("mode", CLIP_MODES)
@pytest.mark.parametrize("size", [89.0, 1e4, 1e30])
@pytest.mark.parametrize("likelier", [False, True])
def test_t37_ratios_beyond_float32_stay_finite_and_are_counted(mode, size, likelier):
    """What was chosen is now all but excluded, or was so when it was chosen."""
    case = Case(7, open_share=1.0, valid=torch.ones(2, 3) > 0)
    assert case.terms(weights(mode)).clamped == 0
    logits = case.logits if likelier else size * case.logits
    if likelier:
        unlikely = torch.full_like(case.batch.log_probs, -size)
        case.batch = replace(case.batch, log_probs=unlikely)
    terms = case.terms(weights(mode), logits.requires_grad_())
    terms.loss.backward()
    assert terms.loss.isfinite()
    assert logits.grad.isfinite().all()
    assert terms.clamped > 0


def test_t37_a_joint_ratio_that_had_to_be_clamped_is_counted_too():
    """Eight heads that moved by four each: exp(32) although no head is extreme."""
    rows = torch.ones(1, 1, NUM_HEADS, CHOICES) > 0
    case = Case(8, envs=1, time=1, masks=rows, valid=torch.ones(1, 1) > 0)
    towards = torch.nn.functional.one_hot(case.batch.actions, CHOICES) * 40.0
    low = replace(case.batch, log_probs=torch.full((1, 1, NUM_HEADS), -4.0))
    case.batch = low
    assert case.terms(weights(), logits=towards).clamped == 1


def test_t24_means_are_over_valid_steps_whatever_stands_elsewhere():
    values = torch.tensor([[1.0, math.nan, 5.0], [math.inf, 1e30, 3.0]])
    valid = torch.tensor([[True, False, True], [False, False, True]])
    assert masked_mean(values, valid) == 3.0
    assert masked_mean(values, torch.zeros_like(valid)) == 0.0
