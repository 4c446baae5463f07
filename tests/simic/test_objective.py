"""The compiled objective is that of `losses`, and its gradient that of its value."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

from esper.simic.agent.losses import CLIP_MODES
from esper.simic.agent.objective import compiled_terms
from tests.simic.agents import agent_with_rollout, flat
from tests.simic.minibatches import Case, weights

SCALES = [0.05, 0.3, 1.0, 15.0, 60.0]


def compiled(case, settings, logits=None, values=None):
    return compiled_terms(
        case.logits if logits is None else logits,
        case.values if values is None else values,
        case.batch,
        case.targets,
        case.old_values,
        settings,
    )


def leaves(case):
    return (x.double().requires_grad_() for x in (case.logits, case.values))


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("mode", CLIP_MODES)
def test_terms_and_gradients_equal_those_of_autograd(mode, value_clip):
    settings, extreme = weights(mode, value_clip=value_clip, value=0.7), 0.0
    for rng_seed in range(60):
        case = Case(rng_seed, 3, 4, scale=SCALES[rng_seed % len(SCALES)])
        logits, values = leaves(case)
        other_logits, other_values = leaves(case)
        terms, lengths = compiled(case, settings, logits, values)
        plain = case.terms(settings, other_logits, other_values)
        for name in plain.__slots__:
            found, expected = getattr(terms, name), getattr(plain, name).double()
            assert_close(found, expected, rtol=1e-6, atol=1e-6, check_dtype=False)
        terms.loss.backward()
        plain.loss.backward()
        assert_close(logits.grad, other_logits.grad, rtol=1e-5, atol=1e-8)
        assert_close(values.grad, other_values.grad, rtol=1e-5, atol=1e-8)
        reached = other_logits.grad.square().sum(dim=(0, 1, 3)).sqrt()
        assert_close(lengths, reached, rtol=1e-5, atol=1e-8)
        extreme += float(terms.clamped)
    assert extreme > 0


@pytest.mark.parametrize("mode", CLIP_MODES)
def test_terms_equal_the_float64_sums_of_the_reference(mode):
    settings = weights(mode, value_clip=0.3, value=0.7)
    for rng_seed in range(20):
        case = Case(rng_seed, 2, 5, scale=1.0)
        terms, expected = compiled(case, settings)[0], case.expected(settings)
        for name in vars(expected):
            number = torch.tensor(getattr(expected, name))
            assert_close(getattr(terms, name), number, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", CLIP_MODES)
def test_the_gradient_is_that_of_finite_differences(mode):
    case, settings = Case(1, scale=0.05), weights(mode, entropy=0.1)
    case = with_float64_memory(case)
    assert gradcheck(
        lambda *own: compiled(case, settings, *own)[0].loss, (*leaves(case),)
    )


def with_float64_memory(case):
    """Old figures in float64: differences of a millionth must show."""
    names = ("log_probs", "distribution", "advantages")
    exact = {name: getattr(case.batch, name).double() for name in names}
    case.batch = replace(case.batch, **exact)
    case.targets, case.old_values = case.targets.double(), case.old_values.double()
    return case


def test_the_illegal_the_closed_and_padding_have_gradient_exactly_zero():
    case = Case(3, 4, 6)
    logits = case.logits.clone().requires_grad_()
    compiled(case, weights(), logits)[0].loss.backward()
    rows = case.batch.rows
    is_open = (rows.sum(-1, keepdim=True) > 1) & case.batch.valid_mask[..., None, None]
    assert (logits.grad[~(rows & is_open)] == 0).all()
    assert (logits.grad[rows & is_open] != 0).all()


@pytest.mark.parametrize("filler", [torch.nan, 1e30])
def test_what_stands_on_padding_is_never_read(filler):
    case = Case(5, 4, 6)
    before = compiled(case, weights())
    void = ~case.batch.valid_mask
    assert void.any()
    for tensor in (
        case.logits,
        case.values,
        case.targets,
        case.old_values,
        case.batch.log_probs,
        case.batch.distribution,
        case.batch.advantages,
    ):
        tensor[void] = filler
    after = compiled(case, weights())
    for name in before[0].__slots__:
        assert torch.equal(getattr(before[0], name), getattr(after[0], name))
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("broken", ["logits", "values", "advantages", "log_probs"])
def test_numbers_that_are_none_show_in_the_loss(broken):
    case = Case(5, 4, 6, open_share=1.0)
    where = case.batch if broken in ("advantages", "log_probs") else case
    getattr(where, broken)[case.batch.valid_mask] = torch.nan
    assert not compiled(case, weights())[0].loss.isfinite()


def test_a_minibatch_without_steps_has_no_loss_and_no_gradient():
    case = Case(0, valid=torch.zeros(2, 3, dtype=torch.bool))
    logits = case.logits.clone().requires_grad_()
    terms, lengths = compiled(case, weights(), logits)
    terms.loss.backward()
    assert terms.loss == 0.0
    assert (lengths == 0).all()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("mode", CLIP_MODES)
def test_an_update_is_that_of_torch_alone(mode):
    settings = {"epochs": 2, "clip_mode": mode, "target_kl": 10.0}
    agents = [agent_with_rollout(acted=0.8, **settings) for _ in range(2)]
    agents[1].policy.compiled = agents[1].policy.memory.compiled = False
    records = [agent.update() for agent in agents]
    one, other = (flat(record) for record in records)
    assert one.pop("stopped_at") is other.pop("stopped_at") is None
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=1e-2, abs=1e-4), name
    for own, twin in zip(*(agent.parameters for agent in agents), strict=True):
        assert_close(own, twin, rtol=1e-2, atol=1e-3)
