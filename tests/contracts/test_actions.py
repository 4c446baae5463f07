"""The tables of the vocabulary: stages, ops, heads, and what a run may say."""

import pytest
import torch
from hypothesis import given, settings

from esper.contracts.actions import (
    HEAD,
    HEAD_NAMES,
    HEADS,
    NUM_HEADS,
    RELEVANT,
    ActionSpec,
    Op,
)
from esper.contracts.blueprints import BLUEPRINTS, NUM_BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from tests.strategies import action_specs

SENTENCES = {
    "WAIT": ["op"],
    "GERMINATE": ["op", "slot", "blueprint", "style", "tempo", "alpha_target"],
    "ADVANCE": ["op", "slot"],
    "SET_ALPHA": ["op", "slot", "style", "alpha_target", "alpha_speed", "alpha_curve"],
    "PRUNE": ["op", "slot", "alpha_speed", "alpha_curve"],
    "FOSSILIZE": ["op", "slot"],
}


# Stages


def test_the_stages_are_the_columns_of_a_one_hot_code():
    assert [stage.value for stage in Stage] == [*range(len(Stage))]


# Heads


def test_relevance_is_the_list_of_heads_that_each_op_speaks():
    spoken = {
        op.name: [HEAD_NAMES[head] for head in range(NUM_HEADS) if RELEVANT[op, head]]
        for op in Op
    }
    assert spoken == SENTENCES


def test_a_head_stands_where_the_table_says():
    assert HEAD_NAMES[:3] == ("op", "slot", "blueprint")
    assert [HEAD[name] for name in HEAD_NAMES] == [*range(NUM_HEADS)]
    assert RELEVANT.shape == (len(Op), NUM_HEADS)
    assert RELEVANT.dtype is torch.bool


def test_the_op_head_offers_every_op_in_order():
    assert {**HEADS[HEAD["op"]].choices} == {op.name: op for op in Op}
    assert [op.value for op in Op] == [*range(len(Op))]


def test_only_slots_and_blueprints_are_declared_by_the_run():
    assert [head.name for head in HEADS if not head.choices] == ["slot", "blueprint"]


def test_blueprints_have_names_of_their_own_and_real_sizes():
    assert len({blueprint.name for blueprint in BLUEPRINTS}) == NUM_BLUEPRINTS
    assert {blueprint.form for blueprint in BLUEPRINTS} == {*Form} - {Form.CUSTOM}
    assert all(blueprint.size >= 1 for blueprint in BLUEPRINTS)


# Action spaces


def test_the_whole_action_space_has_every_choice():
    spec = ActionSpec()
    assert spec.sizes == (6, 3, NUM_BLUEPRINTS, 2, 3, 3, 3, 3)
    assert spec.width == NUM_BLUEPRINTS
    assert spec.allowed.shape == (NUM_HEADS, NUM_BLUEPRINTS)
    assert spec.allowed.sum(dim=1).tolist() == [*spec.sizes]


def test_a_run_declares_its_slots_and_blueprints():
    spec = ActionSpec(SlotConfig(max_slots=9), BLUEPRINTS[4:6])
    assert spec.sizes[HEAD["slot"]] == 9
    assert spec.sizes[HEAD["blueprint"]] == 2
    assert spec.width == 9


def test_narrowing_keeps_places_and_removes_choices():
    spec = ActionSpec(narrowed={"alpha_target": ("FULL",), "op": ("WAIT", "PRUNE")})
    assert spec.sizes == ActionSpec().sizes
    assert spec.allowed[HEAD["alpha_target"]].nonzero().flatten().tolist() == [2]
    assert spec.allowed[HEAD["op"]].nonzero().flatten().tolist() == [0, 4]
    others = [h for h in range(NUM_HEADS) if h not in (0, HEAD["alpha_target"])]
    assert torch.equal(spec.allowed[others], ActionSpec().allowed[others])


@settings(max_examples=40)
@given(action_specs())
def test_every_head_of_every_action_space_has_a_choice_and_no_padding(spec):
    for head, size in enumerate(spec.sizes):
        row = spec.allowed[head]
        assert row[:size].any()
        assert not row[size:].any()
        names = spec.narrowed.get(HEAD_NAMES[head])
        assert int(row.sum()) == (size if names is None else len(names))
    assert spec.allowed[HEAD["op"], Op.WAIT]


def test_an_action_space_describes_itself_in_plain_data():
    spec = ActionSpec(
        SlotConfig(max_slots=2, min_age=3), BLUEPRINTS[:2], {"style": ("SCALE",)}
    )
    described = spec.describe()
    assert described["max_slots"] == 2
    assert described["min_age"] == 3
    assert described["blueprints"] == ["scale_shift", "squeeze_excite"]
    assert described["heads"]["style"] == ["SCALE"]
    assert described["heads"]["tempo"] == ["FAST", "STANDARD", "SLOW"]
    assert "slot" not in described["heads"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blueprints": ()}, "blueprints is empty; name at least one"),
        ({"blueprints": BLUEPRINTS[:1] * 2}, "name twice: scale_shift, scale_shift"),
        ({"narrowed": {"slot": ("0",)}}, "cannot narrow 'slot'; narrow one of op, "),
        ({"narrowed": {"speed": ("FAST",)}}, "cannot narrow 'speed'"),
        ({"narrowed": {"style": ()}}, "'style' is narrowed to nothing"),
        ({"narrowed": {"style": ("SCALED",)}}, "no choice 'SCALED'.*mean 'SCALE'"),
        ({"narrowed": {"op": ("PRUNE",)}}, "must keep WAIT"),
    ],
)
def test_an_action_space_that_cannot_be_meant_is_refused(arguments, message):
    with pytest.raises(BadInput, match=message):
        ActionSpec(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_slots": 0}, "max_slots must be at least 1, got 0"),
        ({"max_slots": -3}, "max_slots must be at least 1, got -3"),
        ({"min_age": -1}, "min_age must not be negative, got -1"),
    ],
)
def test_slots_that_cannot_be_meant_are_refused(arguments, message):
    with pytest.raises(BadInput, match=message):
        SlotConfig(**arguments)


def test_a_run_may_bring_blueprints_of_its_own():
    own = Blueprint("mine", Form.CONV, 5, merges=False)
    assert ActionSpec(blueprints=(*BLUEPRINTS, own)).sizes[HEAD["blueprint"]] == 13
