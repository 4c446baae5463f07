"""The policy: any number of slots and blueprints, one code path, memory in and out."""

import inspect
from dataclasses import fields, replace

import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from esper.contracts.actions import HEAD, HEAD_NAMES, ActionSpec
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import InvalidInputError, NoLegalActionError
from esper.contracts.slots import SlotConfig
from esper.contracts.state import load, save
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import Features, compute_features
from esper.tamiyo.policy.network import (
    PolicyConfig,
    TamiyoPolicy,
    without_measurements,
)
from tests.rollouts import (
    SPEC,
    TINY,
    GreedyPolicy,
    evaluate,
    make_policy,
    random_observation,
    require_legal,
)

ENVS, TIME = 5, 6


def seen(spec=SPEC, envs=ENVS, rng_seed=0, **settings):
    generator = Generator().manual_seed(rng_seed)
    observation = random_observation(envs, spec, generator, **settings)
    return (
        observation,
        compute_features(observation, spec),
        compute_masks(observation, spec),
    )


def sequence(policy, rng_seed=0):
    """Random features, choices and episode starts over time."""
    steps = [seen(policy.spec, rng_seed=rng_seed + time) for time in range(TIME)]
    features = Features(
        *(
            torch.stack([getattr(step[1], field.name) for step in steps], dim=1)
            for field in fields(Features)
        )
    )
    generator = Generator().manual_seed(rng_seed)
    state = torch.randn(ENVS, *policy.state_shape, generator=generator)
    first = torch.rand(ENVS, TIME, generator=generator) < 0.3
    here, rows, actions = state, [], []
    for time, (_, one, masks) in enumerate(steps):
        decision = policy.act(one, masks, first[:, time], here, generator)
        here = decision.state
        rows.append(decision.masks)
        actions.append(decision.actions)
    return features, torch.stack(rows, 1), torch.stack(actions, 1), first, state


def part(features, where):
    """Some steps of a sequence."""
    return Features(features.host[where], features.slots[where], features.offers[where])


@pytest.mark.parametrize("memory", ["mingru", "lstm", "none"])
def test_acting_is_evaluating_a_sequence_of_length_one(memory):
    policy = make_policy(config=replace(TINY, memory=memory, layers=2), strength=2.0)
    _, features, masks = seen()
    state = torch.randn(ENVS, *policy.state_shape)
    first = torch.tensor([True, False, True, False, False])
    acted = policy.act(features, masks, first, state, Generator().manual_seed(1))
    one = Features(*(getattr(features, f.name)[:, None] for f in fields(Features)))
    new = evaluate(
        policy, one, acted.masks[:, None], acted.actions[:, None], first[:, None], state
    )
    close = {"rtol": 1e-6, "atol": 1e-6}
    assert_close(new.log_probs[:, 0], acted.log_probs, **close)
    assert_close(new.distribution[:, 0], acted.distribution, **close)
    assert_close(new.normalized_values[:, 0], acted.values, **close)
    assert_close(policy.value(features, first, state), acted.values, **close)


@pytest.mark.parametrize("memory", ["mingru", "lstm", "none"])
def test_step_by_step_and_in_halves_equals_the_whole_sequence(memory):
    policy = make_policy(config=replace(TINY, memory=memory, layers=2), strength=2.0)
    features, rows, actions, first, state = sequence(policy)
    whole = evaluate(policy, features, rows, actions, first, state)
    for cuts in (range(TIME), (0, 4)):
        here, parts = state, []
        for begin, end in zip(cuts, [*cuts[1:], TIME], strict=True):
            at = (slice(None), slice(begin, end))
            parts.append(
                evaluate(
                    policy, part(features, at), rows[at], actions[at], first[at], here
                )
            )
            _, here = policy.encode(part(features, at), first[at], here)
        for name in ("log_probs", "normalized_values", "distribution"):
            joined = torch.cat([getattr(each, name) for each in parts], dim=1)
            assert_close(joined, getattr(whole, name), rtol=1e-6, atol=2e-6)


def test_t20_asking_for_a_value_does_not_advance_memory():
    policy = make_policy()
    _, features, masks = seen()
    state = torch.randn(ENVS, *policy.state_shape)
    before, first = state.clone(), torch.zeros(ENVS, dtype=torch.bool)
    once, again = (policy.value(features, first, state) for _ in range(2))
    assert torch.equal(once, again)
    assert torch.equal(state, before)
    after = policy.act(features, masks, first, state, None).state
    assert not torch.equal(after, before)
    assert not torch.equal(policy.value(features, first, after), once)


def test_columns_that_are_not_measured_become_biases():
    wide = make_policy(replace(SPEC, measured=True), strength=2.0)
    weights = save(wide)
    narrow = TamiyoPolicy(SPEC, TINY)
    load(narrow, without_measurements(weights))
    observation, _, masks = seen()
    ones = torch.ones_like(observation.slots.liveness)
    slots = replace(
        observation.slots,
        liveness=ones,
        gradient_share=ones,
        contribution_measured=torch.zeros_like(ones, dtype=torch.bool),
    )
    unknown = torch.zeros_like(observation.offers.promise_known)
    offers = replace(observation.offers, promise_known=unknown)
    observation = replace(observation, slots=slots, offers=offers)
    state = torch.zeros(ENVS, *wide.state_shape)
    start = torch.ones(ENVS, dtype=torch.bool)
    found, expected = (
        policy.act(
            compute_features(observation, policy.spec), masks, start, state, None
        )
            compute_features(observation, policy.spec), masks, start, state, None
        )
        for policy in (narrow, wide)
    )
    assert torch.equal(found.actions, expected.actions)
    assert_close(found.distribution, expected.distribution, rtol=1e-5, atol=1e-5)
    assert_close(found.values, expected.values, rtol=1e-5, atol=1e-5)
    assert without_measurements(save(narrow)).keys() == weights.keys()


def test_t15_later_heads_depend_on_the_choices_before():
    policy = make_policy(strength=2.0)
    features, rows, actions, first, state = sequence(policy)
    rows = SPEC.allowed.expand_as(rows)
    base = evaluate(policy, features, rows, actions, first, state).logits
    for head, later in ((0, range(1, 8)), (1, range(2, 8)), (2, range(3, 8))):
        other = actions.clone()
        other[..., head] = (other[..., head] + 1) % SPEC.sizes[head]
        moved = evaluate(policy, features, rows, other, first, state).logits - base
        allowed = SPEC.allowed.expand_as(moved)
        assert (moved[..., : head + 1, :] == 0).all()
        for reached in later:
            change = moved[..., reached, :][allowed[..., reached, :]]
            assert change.abs().max() > 1e-3, (head, reached)


@pytest.mark.parametrize(
    "other",
    [
        ActionSpec(slots=SlotConfig(max_slots=5), blueprints=BLUEPRINTS[3:5]),
        ActionSpec(slots=SlotConfig(max_slots=1), blueprints=BLUEPRINTS),
        ActionSpec(slots=SlotConfig(max_slots=14), blueprints=BLUEPRINTS[:1]),
    ],
    ids=["five slots", "one slot", "fourteen slots"],
)
def test_one_set_of_weights_controls_any_slots_and_blueprints(other):
    trained, stranger = make_policy(strength=2.0), TamiyoPolicy(other, TINY)
    stranger.load_state_dict(trained.state_dict())
    for rng_seed in range(5):
        observation, _, masks = seen(other, rng_seed=rng_seed)
        actions, _ = stranger.decide(
            observation, masks, None, Generator().manual_seed(rng_seed)
        )
        require_legal(observation, other, actions)


@pytest.mark.parametrize("head", [1, 2], ids=["slots", "blueprints"])
def test_logits_follow_their_slots_and_blueprints_when_these_change_places(head):
    policy = make_policy(strength=2.0)
    features, rows, actions, first, state = sequence(policy)
    order = torch.tensor([2, 0, 1] if head == 1 else [3, 6, 0, 5, 1, 4, 2])
    other, moved = policy, replace(features, offers=features.offers[:, :, :, order])
    if head == 1:
        moved = replace(
            features,
            slots=features.slots[:, :, order],
            offers=features.offers[:, :, order],
        )
    else:
        spec = replace(SPEC, blueprints=tuple(BLUEPRINTS[index] for index in order))
        other = TamiyoPolicy(spec, TINY)
        other.load_state_dict(policy.state_dict())
    there = actions.clone()
    there[..., head] = order.argsort()[actions[..., head]]
    new = evaluate(other, moved, rows, there, first, state)
    old = evaluate(policy, features, rows, actions, first, state)
    close = {"rtol": 1e-5, "atol": 1e-5}
    own = old.logits[..., head, : len(order)]
    assert_close(new.logits[..., head, : len(order)], own[..., order], **close)
    others = [each for each in range(8) if each != head]
    assert_close(new.logits[..., others, :], old.logits[..., others, :], **close)
    assert_close(new.normalized_values, old.normalized_values, **close)
    assert own.std(dim=-1).mean() > 1e-3


def test_a_new_policy_is_nearly_even_and_its_value_is_exactly_zero():
    policy = TamiyoPolicy(SPEC)
    features, rows, actions, first, state = sequence(policy)
    new = evaluate(policy, features, rows, actions, first, state)
    assert (new.normalized_values == 0).all()
    even = -rows.sum(dim=-1, keepdim=True).log().expand_as(new.distribution)
    assert_close(new.distribution[rows], even[rows], rtol=0, atol=0.06)
    assert sum(p.numel() for p in policy.parameters()) < 400_000


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_t8_sampled_and_likeliest_decisions_are_legal(density):
    policy = make_policy(strength=2.0)
    generator, state, greedy_state = Generator().manual_seed(0), None, None
    ops = set()
    for rng_seed in range(10):
        observation, _, masks = seen(envs=32, rng_seed=rng_seed, density=density)
        actions, state = policy.decide(observation, masks, state, generator)
        require_legal(observation, SPEC, actions)
        ops |= set(actions[:, HEAD["op"]].tolist())
        greedy, greedy_state = GreedyPolicy(policy).decide(
            observation, masks, greedy_state, generator
        )
        require_legal(observation, SPEC, greedy)
    assert len(ops) >= {0.0: 1, 0.3: 3, 1.0: 6}[density]


@pytest.mark.parametrize(("head", "op"), [("op", None), ("slot", 4), ("blueprint", 1)])
def test_t3_a_head_without_a_legal_choice_is_refused(head, op):
    policy = make_policy()
    observation, _, masks = seen()
    masks.op[:] = torch.arange(6) == 0
    masks.op[2] = torch.arange(6) == (-1 if op is None else op)
    masks.slot[2] = head == "blueprint"
    masks.blueprint[2] = False
    with pytest.raises(
        NoLegalActionError, match=f"head '{head}' of environment 2 has no"
    ):
        policy.decide(observation, masks, None, Generator())


def encode_a_foreign_state(memory):
    policy = make_policy(config=replace(TINY, memory=memory))
    encode = inspect.unwrap(TamiyoPolicy.encode)  # past the type checks of the tests
    first = torch.zeros(8, 1, dtype=torch.bool)
    encode(policy, seen(envs=8)[1], first, policy.initial_state(2))


def score_a_foreign_choice(head, choice):
    policy = make_policy()
    features, rows, actions, first, state = sequence(policy)
    actions[1, 2, head] = choice
    evaluate(policy, features, rows, actions, first, state)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        *[
            (lambda n=name: PolicyConfig(**{n: 0}), f"{name} must lie in 1.*, got 0")
            for name in ("width", "slot_width", "offer_width", "layers")
        ],
        (
            lambda: inspect.unwrap(TamiyoPolicy.__init__)(make_policy(), None),
            "spec must be an ActionSpec, got NoneType",
        ),
        (
            lambda: make_policy().decide(seen(envs=4)[0], seen()[2], None, Generator()),
            r"mask 'op' must be .* \(4, 6\).*got .* \(5, 6\)",
        ),
        (
            lambda: make_policy().decide(*seen()[::2], (torch.zeros(1),), Generator()),
            "state must be a tensor or None, got",
        ),
        *[
            (
                lambda m=memory: encode_a_foreign_state(m),
                r"must be .* \(8, .*got .* \(2",
            )
            for memory in ("mingru", "lstm", "none")
        ],
        *[
            (
                lambda h=head, c=choice: score_a_foreign_choice(h, c),
                f"head '{HEAD_NAMES[head]}' must lie in 0",
            )
            for head, choice in ((0, 10**9), (1, 3), (2, -1), (7, 2**40))
        ],
    ],
)
def test_what_is_not_the_policys_is_refused(call, match):
    with pytest.raises(InvalidInputError, match=match):
        call()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (
            lambda f: replace(f, host=f.host[:3]),
            r"features.host must be .* got .*\(3, ",
        ),
        (
            lambda f: replace(f, host=f.host[:, :5]),
            r"features.host .*\(5, 1, 5\)",
        ),
        (lambda f: replace(f, slots=f.slots[:, :2]), r"features.slots .*\(5, 1, 2, "),
        (lambda f: replace(f, offers=f.offers[:, :, 1:]), "features.offers must be"),
        (lambda f: replace(f, host=f.host.double()), "features.host .* got .*float64"),
        (lambda f: {"host": f.host}, "features.host must be .* got NoneType"),
    ],
)
def test_features_that_are_not_the_policys_are_refused_in_one_line(spoil, match):
    policy = make_policy()
    _, features, masks = seen()
    first = torch.zeros(ENVS, dtype=torch.bool)
    for call in (
        lambda state: policy.act(spoil(features), masks, first, state, None),
        lambda state: policy.value(spoil(features), first, state),
    ):
        with pytest.raises(InvalidInputError, match=match) as caught:
            call(policy.initial_state(ENVS))
        assert "\n" not in str(caught.value)


def situation(policy, envs):
    generator = Generator().manual_seed(0)
    first = torch.rand(envs, generator=generator) < 0.3
    _, features, masks = seen(envs=envs, episode_start=first)
    return features, masks, first, torch.randn(envs, *policy.state_shape)


@pytest.mark.parametrize("greedy", [True, False])
def test_nan_features_show_in_the_value_and_lead_to_no_illegal_choice(greedy):
    policy = make_policy()
    features, masks, first, state = situation(policy, 4)
    features.host[1] = torch.nan
    chance = None if greedy else Generator()
    decision = policy.act(features, masks, first, state, chance)
    assert decision.masks.gather(2, decision.actions.unsqueeze(2)).all()
    assert decision.values.isnan().tolist() == [False, True, False, False]
