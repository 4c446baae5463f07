"""Compiled decisions are those of torch: the same rows, choices, chances and values."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import NoLegalAction
from esper.contracts.slots import SlotConfig
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import compute_features
from esper.tamiyo.policy.network import PolicyConfig
from tests.rollouts import SPEC, TINY, make_policy, random_observation

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
WIDE = ActionSpec(slots=SlotConfig(max_slots=5), blueprints=BLUEPRINTS)
NARROW = ActionSpec(narrowed={"style": ("SCALE",), "alpha_speed": ("FAST", "SLOW")})
SETTINGS = [
    (SPEC, TINY, 5),
    (SPEC, replace(TINY, layers=3), 16),
    (SPEC, replace(TINY, memory="none"), 5),
    (SPEC, replace(TINY, causal=False), 33),
    (NARROW, TINY, 9),
    (WIDE, PolicyConfig(), 4),
]


def pair(spec=SPEC, config=TINY, strength=2.0):
    """A policy and its twin in torch alone."""
    fast, slow = (make_policy(spec, config, strength=strength) for _ in range(2))
    slow.compiled = False
    with torch.no_grad():
        for policy in (fast, slow):
            policy.value_mean.fill_(0.7)
            policy.value_scale.fill_(1.3)
    return fast, slow


def situation(policy, envs, rng_seed=0):
    generator = Generator().manual_seed(rng_seed)
    first = torch.rand(envs, generator=generator) < 0.3
    seen = random_observation(envs, policy.spec, generator, first=first)
    state = torch.randn(envs, *policy.state_shape, generator=generator)
    features = compute_features(seen, policy.spec)
    return features, compute_masks(seen, policy.spec), first, state


@torch.inference_mode()
@pytest.mark.parametrize("likeliest", [False, True])
@pytest.mark.parametrize(("spec", "config", "envs"), SETTINGS)
def test_compiled_decisions_equal_those_of_torch(spec, config, envs, likeliest):
    policies, ops = pair(spec, config), set()
    for rng_seed in range(12):
        given = situation(policies[0], envs, rng_seed)
        chances = [
            None if likeliest else Generator().manual_seed(rng_seed) for _ in policies
        ]
        one, other = (
            policy.act(*given, chance)
            for policy, chance in zip(policies, chances, strict=True)
        )
        assert torch.equal(one.rows, other.rows)
        same = one.actions == other.actions
        # Two likeliest choices may be equally likely; their chances tell, below.
        assert same.float().mean() > 0.98 if likeliest else same.all()
        for name in ("log_probs", "distribution", "values", "state"):
            assert_close(getattr(one, name), getattr(other, name), **CLOSE)
        assert (one.distribution[~one.rows] == 0).all()
        if not likeliest:
            assert torch.equal(*(chance.get_state() for chance in chances))
        values = [policy.value(given[0], *given[2:]) for policy in policies]
        assert_close(*values, **CLOSE)
        ops |= {*one.actions[:, 0].tolist()}
    assert len(ops) > 1


@torch.inference_mode()
def test_every_legal_choice_is_drawn_as_often_as_its_probability_says():
    policy, _ = pair(strength=4.0)
    features, masks, first, state = situation(policy, 4)
    chance, draws = Generator().manual_seed(0), 1_000
    counts = torch.zeros(4, SPEC.width)
    for _ in range(draws):
        decision = policy.act(features, masks, first, state, chance)
        counts[torch.arange(4), decision.actions[:, 0]] += 1
    legal = decision.rows[:, 0]
    share = torch.where(legal, decision.distribution[:, 0].exp(), 0.0)
    assert (counts[~legal] == 0).all()
    assert_close(counts / draws, share, rtol=0.0, atol=4 * 0.5 / draws**0.5)


@torch.inference_mode()
def test_a_single_legal_choice_has_log_probability_zero_to_the_bit():
    policy, _ = pair()
    features, masks, first, state = situation(policy, 8)
    masks.op[:, 1:] = False
    decision = policy.act(features, masks, first, state, Generator())
    assert (decision.actions == 0).all()
    assert (decision.log_probs == 0).all()
    assert (decision.distribution == 0).all()


@torch.inference_mode()
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("head", "op"), [("slot", 4), ("blueprint", 1)])
def test_a_head_with_nothing_to_choose_is_named(head, op, compiled):
    policy, _ = pair()
    policy.compiled = compiled
    features, masks, first, state = situation(policy, 4)
    masks.op[:] = False
    masks.op[:, 0] = True
    masks.op[2] = torch.arange(6) == op
    masks.slot[2, op] = head == "blueprint"
    masks.blueprint[2] = False
    with pytest.raises(NoLegalAction, match=f"head '{head}' of environment 2 has no"):
        policy.act(features, masks, first, state, None)


@torch.inference_mode()
def test_what_was_remembered_of_another_episode_does_not_pass():
    policy, _ = pair(config=replace(TINY, layers=2))
    features, masks, first, state = situation(policy, 6)
    first[:] = True
    stale = torch.full_like(state, torch.nan)
    one = policy.act(features, masks, first, stale, None)
    other = policy.act(features, masks, first, torch.zeros_like(state), None)
    for field in fields(one):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name))
    assert stale.isnan().all()


@torch.inference_mode()
def test_numbers_that_are_none_show_and_no_illegal_choice_follows_from_them():
    policy, _ = pair()
    features, masks, first, state = situation(policy, 4)
    features.host[1] = torch.nan
    decision = policy.act(features, masks, first, state, Generator())
    chosen = decision.rows.gather(2, decision.actions.unsqueeze(2))
    assert chosen.all()
    assert decision.values.isnan().tolist() == [False, True, False, False]
