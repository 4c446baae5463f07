"""Tending seeds, preferring offers, and saying why nothing was planted."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.contracts.actions import HEADS, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.tamiyo.gardening import GENTLE, SLOW, Preference, explain, tend
from esper.tamiyo.policy.action_masks import compute_masks
from tests.device_reads import count_device_reads
from tests.rollouts import require_legal
from tests.strategies import action_specs, observations
from tests.worlds import blank_observation

NAMES = [blueprint.name for blueprint in BLUEPRINTS]
SPEC = ActionSpec(slots=SlotConfig(max_slots=3))
KINDS = len(NAMES)
NOTHING = torch.full((1, 3, KINDS), -inf)


def seen(spec=SPEC, host=None, offers=None, **slots):
    """One host with empty slots, apart from what is given."""
    blank = blank_observation(1, spec)
    parts = {"host": host or {}, "slots": slots, "offers": offers or {}}
    changed = {}
    for part, values in parts.items():
        old = getattr(blank, part)
        tensors = {
            name: torch.as_tensor(value, dtype=getattr(old, name).dtype).expand_as(
                getattr(old, name)
            )
            for name, value in values.items()
        }
        changed[part] = replace(old, **tensors)
    return replace(blank, **changed)


def said(observation, wish=NOTHING, spec=SPEC, **how):
    """The sentence as words, as far as its op uses them."""
    masks = compute_masks(observation, spec)
    actions = tend(observation, masks, wish, **how)
    require_legal(observation, spec, actions)
    op = Op(int(actions[0, 0]))
    words = {"op": op.name}
    for head, choice in zip(HEADS[1:], actions[0, 1:].tolist(), strict=True):
        if op in head.used_by:
            words[head.name] = [*head.choices][choice] if head.choices else choice
    return words


def by_hand(observation, spec, wish, env, patience):
    """Op, slot and blueprint, one rule after the other."""
    masks = compute_masks(observation, spec)
    slots = observation.slots
    for op in (Op.FOSSILIZE, Op.PRUNE, Op.ADVANCE):
        for slot in range(spec.slots.max_slots):
            stage = slots.stage[env, slot].item()
            cost = (observation.host.rent[env] * slots.parameters[env, slot]).item()
            useless = (
                slots.contribution_measured[env, slot].item()
                and slots.contribution[env, slot].item() <= cost
            )
            due = {
                Op.FOSSILIZE: not useless,
                Op.PRUNE: useless and stage == Stage.HOLDING,
                Op.ADVANCE: stage == Stage.BLENDING
                or slots.age[env, slot].item() >= patience,
            }[op]
            if due and masks.slot[env, op, slot]:
                return op, slot, 0
    best = (-inf, 0, 0)
    for slot in range(spec.slots.max_slots):
        for blueprint in range(len(spec.blueprints)):
            value = wish[env, slot, blueprint].item()
            if masks.blueprint[env, slot, blueprint] and value > best[0]:
                best = (value, slot, blueprint)
    return (Op.GERMINATE, *best[1:]) if best[0] > -inf else (Op.WAIT, 0, 0)


@settings(max_examples=40)
@given(st.data())
def test_every_sentence_is_the_most_urgent_legal_one(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    shape = observation.offers.promise.shape
    values = st.sampled_from([-inf, -1.0, 0.0, 1.0, inf, nan])
    count = shape.numel()
    drawn = data.draw(st.lists(values, min_size=count, max_size=count))
    wish, patience = torch.tensor(drawn).view(shape), data.draw(st.integers(0, 3))
    masks = compute_masks(observation, spec)
    actions = tend(observation, masks, wish, patience=patience)
    require_legal(observation, spec, actions)
    for env, sentence in enumerate(actions.tolist()):
        expected = by_hand(observation, spec, wish, env, patience)
        assert tuple(sentence[:3]) == expected


@pytest.mark.parametrize(
    ("slot", "op"),
    [
        ({"stage": Stage.TRAINING, "age": 1}, "WAIT"),
        ({"stage": Stage.TRAINING, "age": 2}, "ADVANCE"),
        ({"stage": Stage.BLENDING, "age": 1}, "ADVANCE"),
        ({"stage": Stage.BLENDING, "age": 9, "alpha_settled": False}, "WAIT"),
        ({"stage": Stage.HOLDING}, "FOSSILIZE"),
        ({"stage": Stage.HOLDING, "contribution": -1.0}, "FOSSILIZE"),
        ({"stage": Stage.COOLING}, "WAIT"),
        ({"stage": Stage.FOSSILIZED}, "WAIT"),
    ],
)
def test_a_seed_moves_on_when_its_time_has_come(slot, op):
    assert said(seen(**slot))["op"] == op


@pytest.mark.parametrize(("contribution", "op"), [(0.3, "FOSSILIZE"), (0.2, "PRUNE")])
def test_a_holding_seed_is_kept_if_it_earns_its_rent(contribution, op):
    observation = seen(
        host={"rent": 0.5},
        stage=Stage.HOLDING,
        age=1,
        parameters=0.5,
        contribution=contribution,
        contribution_measured=True,
    )
    assert said(observation)["op"] == op


def test_a_planting_is_gentle_and_not_slow():
    words = said(seen(), torch.zeros(1, 3, KINDS))
    assert words == {
        "op": "GERMINATE",
        "slot": 0,
        "blueprint": 0,
        "style": "ADD",
        "tempo": "STANDARD",
        "alpha_target": "FULL",
    }


@pytest.mark.parametrize(
    ("narrowed", "manner", "tempo", "target"),
    [
        ({}, SLOW, "SLOW", "FULL"),
        ({"tempo": ("FAST", "SLOW")}, GENTLE, "FAST", "FULL"),
        ({"tempo": ("FAST", "STANDARD")}, SLOW, "STANDARD", "FULL"),
        ({"alpha_target": ("HALF", "MOST")}, GENTLE, "STANDARD", "MOST"),
    ],
)
def test_a_narrowed_head_takes_the_nearest_choice(narrowed, manner, tempo, target):
    spec = ActionSpec(slots=SPEC.slots, narrowed=narrowed)
    words = said(seen(spec), torch.zeros(1, 3, KINDS), spec, manner=manner)
    assert (words["tempo"], words["alpha_target"]) == (tempo, target)


def test_an_action_space_with_many_slots_keeps_its_settings():
    spec = ActionSpec(slots=SlotConfig(max_slots=20))
    words = said(seen(spec), torch.zeros(1, 20, KINDS), spec)
    assert (words["tempo"], words["alpha_target"]) == ("STANDARD", "FULL")


def test_nothing_is_read_from_the_device():
    observation = seen(stage=[[0, 1, 3]], age=2)
    masks, preference = compute_masks(observation, SPEC), Preference(SPEC, "conv")

    def decide():
        wish = preference.wish(observation.offers, observation.first)
        tend(observation, masks, wish)

    assert count_device_reads(decide) == 0


def preferred(observation, spec=SPEC, blueprint=None):
    """Slot and name of the planting."""
    wish = Preference(spec, blueprint).wish(observation.offers, torch.tensor([True]))
    words = said(observation, wish, spec)
    if words["op"] != "GERMINATE":
        return words["op"]
    return words["slot"], spec.blueprints[words["blueprint"]].name


def test_the_largest_widening_goes_to_the_first_free_slot():
    """However large other offers are, or the same one elsewhere."""
    parameters = torch.rand(1, 3, KINDS) * 1e6
    observation = seen(stage=[[4, 0, 0]], offers={"parameters": parameters})
    assert preferred(observation) == (1, "widen_32")


def test_the_largest_widening_that_can_be_paid_for_is_preferred():
    costs = torch.full((1, 3, KINDS), 0.1)
    costs[:, :, NAMES.index("widen_32")] = 0.5
    costs[:, :2, NAMES.index("widen_16")] = 0.5
    observation = seen(host={"budget_left": 0.3}, offers={"parameters": costs})
    assert preferred(observation) == (2, "widen_16")


def test_without_a_widening_the_offer_with_most_parameters_is_preferred():
    fits = torch.tensor(["widen" not in name for name in NAMES])
    costs = torch.full((1, 3, KINDS), 0.1)
    costs[:, 2, NAMES.index("conv")] = 0.2
    costs[:, 1, NAMES.index("attention")] = 0.9
    observation = seen(
        host={"budget_left": 0.3}, offers={"parameters": costs, "fits": fits}
    )
    assert preferred(observation) == (2, "conv")


def test_one_named_blueprint_is_planted_alone():
    assert preferred(seen(), blueprint="conv") == (0, "conv")
    fits = torch.tensor([name != "conv" for name in NAMES])
    assert preferred(seen(offers={"fits": fits}), blueprint="conv") == "WAIT"


def test_an_unknown_blueprint_is_refused_with_the_nearest_name():
    with pytest.raises(BadInput, match=r"'widen_33'.*did you mean 'widen_32'"):
        Preference(SPEC, "widen_33")


def test_offers_of_another_action_space_are_refused():
    other = ActionSpec(blueprints=BLUEPRINTS[:4])
    with pytest.raises(BadInput, match=rf"{KINDS} blueprints .* got 4"):
        Preference(SPEC).scores(seen(other).offers)


FORBIDDEN = ActionSpec(slots=SPEC.slots, narrowed={"op": ("WAIT", "ADVANCE")})


@pytest.mark.parametrize(
    ("observation", "spec", "reason"),
    [
        (seen(), SPEC, "the controller chose to wait"),
        (seen(FORBIDDEN), FORBIDDEN, "this run does not allow planting"),
        (
            seen(stage=[[4, 1, 4]]),
            SPEC,
            "no slot is free (1 training, 2 fossilized)",
        ),
        (seen(offers={"fits": False}), SPEC, "nothing fits the free slots"),
        (
            seen(host={"budget_left": 0.3}, offers={"parameters": 0.5}),
            SPEC,
            "no blueprint fits the budget left (0.3 x host): the smallest takes "
            "0.5 x host",
        ),
    ],
)
def test_why_nothing_was_planted_is_said_in_words(observation, spec, reason):
    assert explain(observation, compute_masks(observation, spec)) == reason


def test_an_offer_in_a_slot_that_is_not_free_is_no_reason():
    """The free slot fits nothing; the cheap offer stands in a filled one."""
    fits = torch.zeros(1, 3, KINDS, dtype=torch.bool)
    fits[:, 1] = True
    observation = seen(stage=[[0, 4, 4]], offers={"fits": fits})
    masks = compute_masks(observation, SPEC)
    assert explain(observation, masks) == "nothing fits the free slots"


def test_an_environment_that_is_not_there_is_refused():
    with pytest.raises(BadInput, match=r"env must lie in 0\.\.0, got 1"):
        explain(seen(), compute_masks(seen(), SPEC), env=1)


@settings(max_examples=20)
@given(st.data())
def test_there_is_a_reason_exactly_when_nothing_can_be_planted(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    masks = compute_masks(observation, spec)
    for env in range(len(masks.op)):
        possible = bool(masks.op[env, Op.GERMINATE])
        reason = explain(observation, masks, env)
        assert (reason == "the controller chose to wait") == possible
