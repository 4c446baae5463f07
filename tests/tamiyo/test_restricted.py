"""A restricted policy decides as if there were nothing else than what it knows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS, Form
from esper.contracts.slots import SlotConfig
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.restricted import Restricted
from esper.tamiyo.rule_based import Random
from tests.rollouts import GreedyPolicy, make_policy, random_observation
from tests.strategies import action_specs, floats, observations
from tests.tamiyo.decisions import decide

KINDS = {"widen_8", "widen_16", "widen_32"}
WIDENING = tuple(each for each in BLUEPRINTS if each.form is Form.WIDEN)
SHUFFLED = (BLUEPRINTS[0], WIDENING[2], BLUEPRINTS[9], WIDENING[0], WIDENING[1])
SLOTS = SlotConfig(max_slots=3)


def strong(spec):
    """A policy that differs between situations and likes to plant."""
    policy = make_policy(spec, strength=4.0)
    policy.op_out.bias.data[Op.GERMINATE] += 2.0
    return GreedyPolicy(policy)


def anything(spec):
    return Random()


def test_unknown_blueprints_change_nothing():
    spec, alone = ActionSpec(SLOTS, SHUFFLED), (1, 3, 4)
    known = ActionSpec(SLOTS, tuple(SHUFFLED[at] for at in alone))
    seen = random_observation(256, spec, Generator().manual_seed(0), density=0.9)
    restricted = Restricted(strong, spec, KINDS, {})
    actions, state = decide(restricted, seen, spec)
    narrow = restricted._observed(seen)
    for at, place in enumerate(alone):
        assert torch.equal(
            narrow.offers.promise[..., at], seen.offers.promise[..., place]
        )
        here = seen.slots.blueprint == place
        assert torch.equal(narrow.slots.blueprint == at, here)
    expected, after = decide(strong(known), narrow, known)
    plants = expected[:, HEAD["op"]] == Op.GERMINATE
    assert 20 < int(plants.sum()) < 250
    places = torch.tensor(alone)[expected[:, HEAD["blueprint"]]]
    expected = expected.clone()
    expected[:, HEAD["blueprint"]] = torch.where(plants, places, 0)
    assert torch.equal(actions, expected)
    assert torch.equal(state, after)


def test_it_waits_where_nothing_that_it_knows_can_be_planted():
    spec = ActionSpec(SLOTS, SHUFFLED)
    seen = random_observation(32, spec, Generator().manual_seed(0), density=1.0)
    seen.slots.stage.zero_()
    seen.offers.fits[:, :, [1, 3, 4]] = False
    assert compute_masks(seen, spec).op[:, Op.GERMINATE].any()
    actions, _ = decide(Restricted(strong, spec, KINDS, {}), seen, spec)
    assert not actions.any()  # WAIT, and no other head


def test_if_it_knows_nothing_that_is_offered_everything_is_allowed_with_a_note():
    spec, generator = ActionSpec(SLOTS, BLUEPRINTS[:4]), Generator().manual_seed(0)
    restricted = Restricted(anything, spec, KINDS, {})
    assert restricted.spec.blueprints == spec.blueprints
    assert restricted.notes == (
        "the controller was trained with none of these blueprints, so its choice is "
        "a guess. Offer widen_16, widen_32, widen_8.",
    )
    seen = random_observation(64, spec, generator, density=1.0)
    actions, _ = decide(restricted, seen, spec, generator=generator)
    assert (actions[:, HEAD["op"]] == Op.GERMINATE).any()
    assert Restricted(anything, ActionSpec(), KINDS, {}).notes == ()


def test_unknown_choices_are_left_out_unless_no_other_is_allowed():
    known = {"style": ("ADD",), "tempo": ("SLOW",), "op": ("GERMINATE",)}
    spec = ActionSpec(narrowed={"tempo": ("FAST",)})
    heads = Restricted(anything, spec, KINDS, known).spec.describe()["heads"]
    assert heads["style"] == ["ADD"]
    assert heads["tempo"] == ["FAST"]
    assert heads["op"] == ["WAIT", "GERMINATE"]
    assert heads["alpha_curve"] == ["LINEAR", "COSINE", "SIGMOID"]


@pytest.mark.parametrize("values", [None, floats()], ids=["small", "any"])
@settings(max_examples=25)
@given(data=st.data())
def test_every_action_is_legal_whatever_is_known(values, data):
    spec = data.draw(action_specs())
    kinds = data.draw(
        st.sets(st.sampled_from([b.name for b in BLUEPRINTS]), min_size=1)
    )
    seen = data.draw(observations(spec, values=values))
    choices = {"style": ("ADD",), "op": ("GERMINATE", "ADVANCE")}
    restricted = Restricted(anything, spec, kinds, choices)
    actions, _ = decide(restricted, seen, spec)
    known = {b.name for b in spec.blueprints} & kinds
    for op, _, blueprint, *_ in actions.tolist():
        assert Op(op) in (Op.WAIT, Op.GERMINATE, Op.ADVANCE) or not known
        if op == Op.GERMINATE and known:
            chosen = spec.blueprints[blueprint]
            assert chosen.name in known
