"""Masked choices: exact against float64 sums, in value, gradient and chance."""

import math

import pytest
import torch
from scipy.stats import chisquare
from torch import Generator
from torch.autograd import gradcheck
from torch.testing import assert_close

from esper.contracts.actions import HEAD, NUM_HEADS, RELEVANT, Op
from esper.contracts.errors import BadInput, NoLegalAction
from esper.simic.agent.distribution import (
    choose,
    entropy,
    kl_divergence,
    legal_rows,
    masked_log_softmax,
    relevant,
    require_choice,
    require_masks,
    sample,
)
from esper.tamiyo.policy.action_masks import compute_masks
from tests.device_reads import count_device_reads
from tests.references import ppo as reference
from tests.rollouts import SPEC, random_observation

TABLES = ("op", "slot", "blueprint", "fixed")
WRONG = (torch.int64, torch.float32)


def random_rows(*shape, generator, chance=0.5):
    """Rows of every density; the first legal choice is at a random place."""
    rows = torch.rand(shape, generator=generator) < chance
    place = torch.randint(shape[-1], shape[:-1], generator=generator)
    return rows.scatter(-1, place.unsqueeze(-1), True)


def probabilities(log_probs, rows):
    return torch.where(rows, log_probs.exp(), 0.0)


def random_masks(envs=5, density=0.6, rng_seed=0):
    generator = Generator().manual_seed(rng_seed)
    return compute_masks(
        random_observation(envs, SPEC, generator, density=density), SPEC
    )


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
            kl_divergence(was, now)[case],
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
    assert gradcheck(lambda x: kl_divergence(old, masked_log_softmax(x, rows)), logits)


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
    require_choice(rows)
    rows[2, HEAD["tempo"]] = False
    with pytest.raises(NoLegalAction, match="'tempo' of environment 2 has no legal"):
        require_choice(rows)


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


def test_rows_are_conditional_on_the_heads_before_and_irrelevant_heads_are_forced():
    masks = random_masks(envs=40)
    generator = Generator().manual_seed(0)
    actions = torch.stack(
        [torch.randint(size, (40,), generator=generator) for size in SPEC.sizes], dim=1
    )
    rows = legal_rows(masks, actions)
    for env in range(40):
        op, slot = Op(int(actions[env, 0])), int(actions[env, 1])
        expected = torch.zeros(8, SPEC.width, dtype=torch.bool)
        expected[0, :6] = masks.op[env]
        for name, head in list(HEAD.items())[1:]:
            if not RELEVANT[op, head]:
                expected[head, 0] = True
            elif name == "slot":
                expected[head, :3] = masks.slot[env, op]
            elif name == "blueprint":
                expected[head, :7] = masks.blueprint[env, slot]
            else:
                expected[head] = SPEC.allowed[head]
        assert torch.equal(rows[env], expected)


def test_without_causality_heads_that_the_op_does_not_use_are_open():
    masks = random_masks(envs=3)
    waits = torch.zeros(3, 8, dtype=torch.int64)
    rows = legal_rows(masks, waits, causal=False)
    assert torch.equal(rows[:, 1:], SPEC.allowed[1:].expand(3, -1, -1))


def test_a_choice_is_legal_even_if_its_logits_are_nan():
    rows = torch.tensor([[False, True, True]])
    logits = torch.full((1, 3), torch.nan)
    assert int(choose(logits, rows, torch.zeros(1, 3))) == 1


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        *[("op", lambda x, to=kind: x.to(to), f"bool, got {kind}") for kind in WRONG],
        *[(n, lambda x: x.to(torch.uint8), "bool, got torch.uint8") for n in TABLES],
        ("op", lambda x: x[:4], r"\[5, 6\] .*got \[4, 6\]"),
        ("op", lambda x: x[:1], r"\[5, 6\]"),
        ("slot", lambda x: x.transpose(1, 2), r"\[5, 6, 3\]"),
        ("blueprint", lambda x: x[..., :1], r"\[5, 3, 7\]"),
        ("fixed", lambda x: x[:1], r"\[5, 8, 7\]"),
    ],
)
def test_masks_of_another_kind_are_refused_even_if_they_would_broadcast(
    name, spoil, message
):
    masks = random_masks()
    require_masks(masks, 5, SPEC)
    # Past the type checks of the test run.
    object.__setattr__(masks, name, spoil(getattr(masks, name)))
    with pytest.raises(BadInput, match=f"mask '{name}' must be {message}"):
        require_masks(masks, 5, SPEC)


def test_relevance_is_a_copy_on_the_device_of_the_actions():
    actions = torch.zeros(len(Op), NUM_HEADS, dtype=torch.int64)
    actions[:, 0] = torch.arange(len(Op))
    assert torch.equal(relevant(actions), RELEVANT)
    assert count_device_reads(lambda: relevant(actions)) == 0
    relevant(actions).fill_(True)
    assert torch.equal(relevant(actions), RELEVANT)
    there = relevant(actions.to("meta"))
    assert (there.device.type, there.shape) == ("meta", (len(Op), NUM_HEADS))
