"""A policy that is shown only what it knows decides as if there were nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS, Form
from esper.contracts.slots import SlotConfig
from esper.tamiyo.controls import Random
from esper.tamiyo.familiar import Familiar
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.sampling import GreedyPolicy
from tests.rollouts import make_policy, random_observation, require_legal
from tests.strategies import action_specs, floats, observations

KINDS = {(Form.WIDEN, 8), (Form.WIDEN, 16), (Form.WIDEN, 32)}
WIDENING = tuple(each for each in BLUEPRINTS if each.form is Form.WIDEN)
SHUFFLED = (BLUEPRINTS[0], WIDENING[2], BLUEPRINTS[9], WIDENING[0], WIDENING[1])
SLOTS = SlotConfig(max_slots=3)


def strong(spec):
    """A policy that differs between situations and likes to plant."""
    policy = make_policy(spec, strength=4.0)
    policy.op_out.bias.data[Op.GERMINATE] += 2.0
    return GreedyPolicy(policy)


def test_what_it_does_not_know_changes_nothing_of_what_it_says():
    spec, alone = ActionSpec(SLOTS, SHUFFLED), (1, 3, 4)
    known = ActionSpec(SLOTS, tuple(SHUFFLED[at] for at in alone))
    generator = Generator().manual_seed(0)
    seen = random_observation(256, spec, generator, density=0.9)
    familiar = Familiar(strong, spec, KINDS, {})
    said, state = familiar.decide(seen, compute_masks(seen, spec), None, generator)
    narrow = familiar._seen(seen)
    for at, place in enumerate(alone):
        assert torch.equal(
            narrow.offers.promise[..., at], seen.offers.promise[..., place]
        )
        here = seen.slots.blueprint == place
        assert torch.equal(narrow.slots.blueprint == at, here)
    expected, after = strong(known).decide(
        narrow, compute_masks(narrow, known), None, generator
    )
    plants = expected[:, HEAD["op"]] == Op.GERMINATE
    assert 20 < int(plants.sum()) < 250
    places = torch.tensor(alone)[expected[:, HEAD["blueprint"]]]
    expected = expected.clone()
    expected[:, HEAD["blueprint"]] = torch.where(plants, places, 0)
    assert torch.equal(said, expected)
    assert torch.equal(state, after)


def test_with_nothing_else_offered_it_is_the_policy_itself():
    spec, generator = ActionSpec(SLOTS, WIDENING), Generator().manual_seed(0)
    seen = random_observation(64, spec, generator)
    masks = compute_masks(seen, spec)
    one, _ = Familiar(strong, spec, KINDS, {}).decide(seen, masks, None, generator)
    two, _ = strong(spec).decide(seen, masks, None, generator)
    assert torch.equal(one, two)


def test_it_waits_where_nothing_that_it_knows_can_be_planted():
    spec, generator = ActionSpec(SLOTS, SHUFFLED), Generator().manual_seed(0)
    seen = random_observation(32, spec, generator, density=1.0)
    seen.slots.stage.zero_()
    seen.offers.fits[:, :, [1, 3, 4]] = False
    masks = compute_masks(seen, spec)
    assert masks.op[:, Op.GERMINATE].any()
    said, _ = Familiar(strong, spec, KINDS, {}).decide(seen, masks, None, generator)
    assert not said.any()  # WAIT, and no other head


def test_if_it_knows_nothing_that_is_offered_everything_is_allowed_with_a_note():
    spec, generator = ActionSpec(SLOTS, BLUEPRINTS[:4]), Generator().manual_seed(0)
    familiar = Familiar(lambda known: Random(), spec, KINDS, {})
    assert familiar.spec.blueprints == spec.blueprints
    assert familiar.notes == (
        "the controller was trained with none of these blueprints, so what it plants "
        "is a guess; offer widen_16, widen_32, widen_8.",
    )
    seen = random_observation(64, spec, generator, density=1.0)
    said, _ = familiar.decide(seen, compute_masks(seen, spec), None, generator)
    assert (said[:, HEAD["op"]] == Op.GERMINATE).any()
    assert Familiar(lambda known: Random(), ActionSpec(), KINDS, {}).notes == ()


def test_choices_that_it_does_not_know_are_left_out_unless_no_other_is_allowed():
    known = {"style": ("ADD",), "tempo": ("SLOW",), "op": ("GERMINATE",)}
    spec = ActionSpec(narrowed={"tempo": ("FAST",)})
    familiar = Familiar(lambda known: Random(), spec, KINDS, known)
    heads = familiar.spec.describe()["heads"]
    assert heads["style"] == ["ADD"]
    assert heads["tempo"] == ["FAST"]
    assert heads["op"] == ["WAIT", "GERMINATE"]
    assert heads["alpha_curve"] == ["LINEAR", "COSINE", "SIGMOID"]


@pytest.mark.parametrize("meek", [False, True])
@settings(max_examples=25)
@given(data=st.data())
def test_every_sentence_is_legal_whatever_is_known(meek, data):
    spec = data.draw(action_specs())
    kinds = data.draw(
        st.sets(st.sampled_from([(b.form, b.size) for b in BLUEPRINTS]), min_size=1)
    )
    seen = data.draw(observations(spec, values=floats() if meek else None))
    choices = {"style": ("ADD",), "op": ("GERMINATE", "ADVANCE")}
    familiar = Familiar(lambda known: Random(), spec, kinds, choices)
    generator = Generator().manual_seed(0)
    said, _ = familiar.decide(seen, compute_masks(seen, spec), None, generator)
    require_legal(seen, spec, said)
    known = {(b.form, b.size) for b in spec.blueprints} & kinds
    for op, _, blueprint, *_ in said.tolist():
        assert Op(op) in (Op.WAIT, Op.GERMINATE, Op.ADVANCE) or not known
        if op == Op.GERMINATE and known:
            chosen = spec.blueprints[blueprint]
            assert (chosen.form, chosen.size) in known
