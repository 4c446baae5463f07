"""The tables of the vocabulary: stages, ops, heads, and what a run may say."""

import copy
import pickle

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
from esper.contracts.errors import InvalidInputError
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


def test_the_tables_name_every_stage_op_head_and_blueprint_once_and_in_order():
    for table in (Stage, Op):
        assert [entry.value for entry in table] == [*range(len(table))]
    assert HEAD_NAMES[:3] == ("op", "slot", "blueprint")
    assert [HEAD[name] for name in HEAD_NAMES] == [*range(NUM_HEADS)]
    assert {**HEADS[HEAD["op"]].choices} == {op.name: op for op in Op}
    assert [head.name for head in HEADS if not head.choices] == ["slot", "blueprint"]
    assert len({blueprint.name for blueprint in BLUEPRINTS}) == NUM_BLUEPRINTS
    assert {blueprint.form for blueprint in BLUEPRINTS} == {*Form} - {Form.CUSTOM}


def test_relevance_is_the_list_of_heads_that_each_op_uses():
    assert RELEVANT.dtype is torch.bool
    used = {op.name: [n for n in HEAD_NAMES if RELEVANT[op, HEAD[n]]] for op in Op}
    assert used == SENTENCES


def test_an_action_space_has_every_choice_that_is_not_taken_from_it():
    spec = ActionSpec()
    assert spec.sizes == (6, 3, NUM_BLUEPRINTS, 2, 4, 3, 3, 3)
    assert spec.width == NUM_BLUEPRINTS
    assert spec.allowed.shape == (NUM_HEADS, NUM_BLUEPRINTS)
    assert spec.allowed.sum(dim=1).tolist() == [*spec.sizes]
    own = Blueprint("mine", Form.CONV, 5, merges=False)
    spec = ActionSpec(SlotConfig(max_slots=9), (*BLUEPRINTS[4:6], own))
    assert (spec.sizes[HEAD["slot"]], spec.sizes[HEAD["blueprint"]]) == (9, 3)
    assert spec.width == 9


def test_narrowing_keeps_places_and_removes_choices():
    spec = ActionSpec(narrowed={"alpha_target": ("FULL",), "op": ("WAIT", "PRUNE")})
    assert spec.sizes == ActionSpec().sizes
    assert spec.allowed[HEAD["alpha_target"]].nonzero().flatten().tolist() == [2]
    assert spec.allowed[HEAD["op"]].nonzero().flatten().tolist() == [0, 4]
    others = [h for h in range(NUM_HEADS) if h not in (0, HEAD["alpha_target"])]
    assert torch.equal(spec.allowed[others], ActionSpec().allowed[others])


@pytest.mark.usefixtures("unchecked")
def test_what_the_caller_does_to_its_arguments_changes_no_action_space():
    names, blueprints = ["ADD"], [*BLUEPRINTS[:2]]
    narrowed = {"style": names}
    spec = ActionSpec(blueprints=blueprints, narrowed=narrowed)
    same = ActionSpec(blueprints=BLUEPRINTS[:2], narrowed={"style": ("ADD",)})
    names[0] = "SCALE"
    narrowed["op"] = ["WAIT"]
    blueprints.pop()
    assert spec == same == copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec))
    assert len({spec, same, copy.deepcopy(spec), ActionSpec()}) == 2
    with pytest.raises(TypeError):
        spec.narrowed["style"] = ("SCALE",)
    with pytest.raises(InvalidInputError, match="read-only; narrow a head"):
        spec.allowed[0] = False


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
    assert described["heads"]["tempo"] == ["AT_ONCE", "FAST", "STANDARD", "SLOW"]
    assert "slot" not in described["heads"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blueprints": ()}, "blueprints is empty. Name at least one"),
        ({"blueprints": BLUEPRINTS[:1] * 2}, "name twice: scale_shift, scale_shift"),
        ({"narrowed": {"slot": ("0",)}}, "cannot narrow 'slot'. Narrow one of op, "),
        ({"narrowed": {"speed": ("FAST",)}}, "cannot narrow 'speed'"),
        ({"narrowed": {"style": ()}}, "'style' is narrowed to nothing"),
        ({"narrowed": {"style": ("SCALED",)}}, "no choice 'SCALED'.*mean 'SCALE'"),
        ({"narrowed": {"op": ("PRUNE",)}}, "must keep WAIT"),
        ({"narrowed": {"style": 3}}, "narrowed must map heads to names .*'style': 3"),
        ({"slots": None}, "slots must be a SlotConfig, got NoneType"),
        ({"narrowed": None}, "narrowed must map heads to names .* got None"),
        ({"max_slots": 0}, "max_slots must be .* at least 1, got 0"),
        ({"min_age": -1}, "min_age must be .* at least 0, got -1"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, message):
    kind = SlotConfig if {*arguments} & {"max_slots", "min_age"} else ActionSpec
    with pytest.raises(InvalidInputError, match=message):
        kind(**arguments)
