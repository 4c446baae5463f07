"""Masked choices: exact against float64 sums, in value, gradient and chance."""

import math

import pytest
import torch
from scipy.stats import chisquare
from torch import Generator
from torch.autograd import gradcheck
from torch.distributions import Normal
from torch.distributions import kl_divergence as kl_of
from torch.testing import assert_close

from esper.contracts.errors import NoLegalActionError
from esper.simic.agent.distribution import (
    NUMBERS,
    choose,
    chosen,
    entropy,
    kl_divergence,
    masked_log_softmax,
    require_choice,
    sample,
)
from tests.references import ppo as reference


def random_rows(*shape, generator, chance=0.5):
    """Rows of every density; the first legal choice is at a random place."""
    rows = torch.rand(shape, generator=generator) < chance
    place = torch.randint(shape[-1], shape[:-1], generator=generator)
    return rows.scatter(-1, place.unsqueeze(-1), True)


def probabilities(log_probs, rows):
    return torch.where(rows, log_probs.exp(), 0.0)


@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_everything_equals_the_sums_over_legal_choices(scale, kind):
    generator = Generator().manual_seed(int(scale * 10))
    rows = random_rows(150, 6, generator=generator)
    old, new = (scale * torch.randn(150, 6, generator=generator) for _ in range(2))
    old, new = old.to(kind), new.to(kind)
    was, now = masked_log_softmax(old, rows), masked_log_softmax(new, rows)
    for case in range(150):
        legal = rows[case]
        before = reference.log_softmax(old[case, legal].tolist())
        after = reference.log_softmax(new[case, legal].tolist())
        close = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}
        double = torch.float64
        assert_close(now[case, legal], torch.tensor(after, dtype=double), **close)
        assert (now[case, ~legal] == 0).all()
        assert_close(
            entropy(now)[case],
            torch.tensor(reference.entropy(after), dtype=double),
            **close,
        )
        assert_close(
            kl_divergence(was, now, rows)[case],
            torch.tensor(reference.kl(before, after), dtype=double),
            rtol=1e-5,
            atol=1e-5,
            check_dtype=False,
        )


def test_illegal_choices_have_probability_and_gradient_exactly_zero():
    logits = torch.randn(64, 7, requires_grad=True)
    rows = random_rows(64, 7, generator=Generator().manual_seed(1))
    log_probs = masked_log_softmax(logits, rows)
    assert (probabilities(log_probs, rows)[~rows] == 0).all()
    assert_close(probabilities(log_probs, rows).sum(-1), torch.ones(64))
    (log_probs * torch.randn(64, 7)).sum().backward()
    assert (logits.grad[~rows] == 0).all()
    several = rows & (rows.sum(-1, keepdim=True) > 1)
    assert (logits.grad[several] != 0).all()


@pytest.mark.parametrize("legal", range(1, 6))
def test_t1_t2_gradients_of_masked_log_softmax_entropy_and_kl_are_exact(legal):
    generator = Generator().manual_seed(legal)
    logits, other = (
        torch.randn(3, 6, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    logits.requires_grad_()
    rows = torch.zeros(3, 6, dtype=torch.bool)
    for case in range(3):
        rows[case, torch.randperm(6, generator=generator)[:legal]] = True
    old = masked_log_softmax(other, rows)
    assert gradcheck(lambda x: masked_log_softmax(x, rows), logits)
    assert gradcheck(lambda x: entropy(masked_log_softmax(x, rows)), logits)
    assert gradcheck(
        lambda x: kl_divergence(old, masked_log_softmax(x, rows), rows), logits
    )


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("legal", range(1, 7))
def test_t2_t37_half_precision_is_finite_and_as_good_as_its_logits(kind, legal):
    logits = (8 * torch.randn(16, 7)).to(kind).requires_grad_()
    rows = (torch.arange(7) < legal).expand(16, 7)
    log_probs = masked_log_softmax(logits, rows)
    assert log_probs.dtype == torch.float32
    assert_close(log_probs, masked_log_softmax(logits.detach().float(), rows))
    entropy(log_probs).sum().backward()
    assert logits.grad.isfinite().all()


def test_t3_a_row_with_nothing_to_choose_names_environment_and_head():
    rows = torch.ones(4, 8, 3, dtype=torch.bool)
    names = [*"abcdefgh"]
    require_choice(rows, names, "look.")
    rows[2, 3] = False
    with pytest.raises(
        NoLegalActionError, match=r"'d' of environment 2 .* choice. look"
    ):
        require_choice(rows, names, "look.")


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
def test_t4_ten_thousand_choices_and_extreme_logits_stay_a_distribution(scale):
    generator = Generator().manual_seed(0)
    logits = scale * torch.randn(20, 10_000, generator=generator)
    rows = random_rows(20, 10_000, generator=generator)
    log_probs = masked_log_softmax(logits, rows)
    assert log_probs.isfinite().all()
    assert (log_probs <= 0).all()
    total = probabilities(log_probs, rows).double().sum(-1)
    assert_close(total, torch.ones(20, dtype=torch.float64), rtol=1e-4, atol=0)
    for _ in range(20):
        actions = sample(log_probs, rows, generator)
        assert rows.gather(-1, actions[:, None]).all()
    assert entropy(log_probs).isfinite().all()


def test_t5_a_million_draws_are_legal_and_fit_the_exact_probabilities():
    generator = Generator().manual_seed(3)
    rows = random_rows(50, 7, generator=generator)
    logits = -3.0 + 1.5 * torch.randn(50, 7, generator=generator)
    log_probs = masked_log_softmax(logits, rows)
    draws = 20_000
    many = sample(log_probs.expand(draws, 50, 7), rows.expand(draws, 50, 7), generator)
    counts = torch.nn.functional.one_hot(many, 7).sum(0)
    assert (counts[~rows] == 0).all()
    worst = 1.0
    for case in range(50):
        legal = rows[case]
        if legal.sum() == 1:
            continue
        exact = [
            math.exp(x) for x in reference.log_softmax(logits[case, legal].tolist())
        ]
        observed = counts[case, legal].double().numpy()
        test = chisquare(observed, [draws * share / sum(exact) for share in exact])
        worst = min(worst, test.pvalue)
    assert worst > 1e-4


@pytest.mark.parametrize("draw", [0.0, 2**-24, 0.5, 1 - 2**-24])
@pytest.mark.parametrize("size", [20.0, torch.inf])
def test_t5_no_noise_however_extreme_picks_what_is_illegal(draw, size, monkeypatch):
    generator = Generator().manual_seed(4)
    rows = random_rows(20_000, 12, generator=generator, chance=0.3)
    logits = size * torch.randn(20_000, 12, generator=generator)
    monkeypatch.setattr(
        torch, "rand", lambda shape, **_: torch.full(tuple(shape), draw)
    )
    picked = sample(logits, rows, generator)
    assert rows.gather(-1, picked[:, None]).all()


def test_without_a_generator_the_likeliest_legal_choice_is_taken():
    rows = random_rows(100, 5, generator=Generator().manual_seed(5))
    logits = torch.randn(100, 5) - 9.0
    actions = sample(masked_log_softmax(logits, rows), rows, None)
    for case in range(100):
        legal = [i for i in range(5) if rows[case, i]]
        assert actions[case] == max(legal, key=lambda i: float(logits[case, i]))


def test_a_choice_is_legal_even_if_its_logits_are_nan():
    rows = torch.tensor([[False, True, True]])
    logits = torch.full((1, 3), torch.nan)
    assert int(choose(logits, rows, torch.zeros(1, 3))) == 1


def test_numbers_agree_with_torchs_normal_distribution():
    generator = Generator().manual_seed(6)
    old, new = torch.randn(2, 40, 3, 2, generator=generator, dtype=torch.float64)
    actions = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    was, now = (Normal(x[..., 0], x[..., 1].exp()) for x in (old, new))
    assert_close(NUMBERS.log_probs(new, actions), now.log_prob(actions))
    assert_close(NUMBERS.entropy(new), now.entropy())
    rows = torch.ones(old.shape, dtype=torch.bool)
    assert_close(NUMBERS.kl(old, new, rows), kl_of(was, now))


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6])
def test_a_draw_comes_with_its_log_probabilities_whatever_logits_have_in_common(offset):
    generator = Generator().manual_seed(2)
    rows = random_rows(50, 8, 4, generator=generator)
    logits = torch.randint(-24, 24, (50, 8, 4), generator=generator) / 8
    expected = masked_log_softmax(logits, rows)
    shifted = torch.where(rows, logits + offset, torch.nan)
    actions = sample(shifted, rows, generator)
    distribution = masked_log_softmax(shifted, rows)
    assert rows.gather(-1, actions.unsqueeze(-1)).all()
    assert_close(distribution, expected, rtol=0, atol=1e-6)
    assert (chosen(distribution, actions) <= 0).all()


@pytest.mark.parametrize("extreme", [torch.nan, -torch.inf, 1e38, -1e38])
def test_a_draw_takes_the_legal_choice_whatever_its_logit(extreme):
    logits = torch.tensor([[0.0, extreme, 5.0]])
    rows = torch.tensor([[False, True, False]])
    assert sample(logits, rows, Generator().manual_seed(0)).tolist() == [1]
