"""Masks forbid exactly the impossible, for one environment as for a thousand."""

from collections.abc import Mapping
from dataclasses import replace
from inspect import unwrap
from itertools import product
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from esper.contracts.actions import HEAD, HEADS, ActionSpec
from esper.contracts.blueprints import BLUEPRINTS, NUM_BLUEPRINTS
from esper.contracts.devices import map_tensors
from esper.contracts.errors import InvalidInputError
from esper.contracts.slots import SlotConfig, SlotMaskState, SlotStates
from esper.contracts.stages import Stage
from esper.contracts.world import Observation
from esper.tamiyo.policy import action_masks
from esper.tamiyo.policy.action_masks import (
    ActionMasks,
    compute_action_masks,
    compute_batch_masks,
    compute_masks,
)
from tests.device_reads import count_device_reads
from tests.references.masks import (
    Slot,
    masks_of,
    slots_from,
    slots_from_row,
)
from tests.strategies import action_specs, observations, slot_rows
from tests.worlds import blank_observation, blank_slots

FIELDS = ("op", "slot", "blueprint", "fixed")
STATES = [*product(Stage, (0, 1, 2, 3), (False, True))]
"""Every stage, age and settledness that a rule could tell apart."""


def assert_same(actual: ActionMasks, expected: ActionMasks) -> None:
    for field in FIELDS:
        assert_close(getattr(actual, field), getattr(expected, field))


def assert_says(masks: ActionMasks, env: int, expected: dict) -> None:
    for field, rows in expected.items():
        assert getattr(masks, field)[env].tolist() == rows, (field, env)


def states_of(rows: list[list[SlotMaskState | None]]) -> SlotStates:
    """The same slots as arrays."""
    filled = [
        [seed or SlotMaskState(Stage.DORMANT, 7, alpha_settled=False) for seed in row]
        for row in rows
    ]
    stage, age, settled = (
        torch.tensor([[getattr(seed, name) for seed in row] for row in filled])
        for name in ("stage", "age", "alpha_settled")
    )
    blank = blank_slots(*stage.shape)
    return replace(blank, stage=stage, age=age, alpha_settled=settled)


def observed(rows: list[list[SlotMaskState | None]], spec: ActionSpec) -> Observation:
    """The same slots in an observation in which every blueprint fits."""
    return replace(blank_observation(len(rows), spec), slots=states_of(rows))


@pytest.mark.parametrize("min_age", [0, 1, 2, 4])
def test_every_slot_state_is_judged_as_the_rules_say(min_age):
    spec = ActionSpec(SlotConfig(max_slots=1, min_age=min_age), BLUEPRINTS[:1])
    rows = [[SlotMaskState(*state)] for state in STATES]
    masks = compute_masks(observed(rows, spec), spec)
    for env, (stage, age, settled) in enumerate(STATES):
        slot = Slot(stage.name, age, settled, [True], [0.0])
        assert_says(masks, env, masks_of([slot], inf, spec))


@settings(max_examples=40)
@given(st.data())
def test_masks_of_arrays_are_those_of_plain_rules(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    masks = compute_masks(observation, spec)
    for env in range(len(observation.episode_start)):
        assert_says(masks, env, masks_of(*slots_from(observation, env), spec))
    assert_close(masks.fixed, spec.allowed.expand_as(masks.fixed))


@settings(max_examples=40)
@given(st.data())
def test_masks_of_lists_are_those_of_plain_rules_and_of_arrays(data):
    config = SlotConfig(data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3)))
    rows = data.draw(st.lists(slot_rows(config.max_slots), min_size=1, max_size=4))
    masks = compute_batch_masks(rows, config)
    for env, row in enumerate(rows):
        spec = ActionSpec(config)
        assert_says(masks, env, masks_of(*slots_from_row(row), spec))
        single = compute_action_masks(slot_states=row, slot_config=config)
        for head, row_of_head in single.items():
            assert_close(row_of_head[0], masks[head][env])
    assert_same(masks, compute_masks(observed(rows, spec), spec))


def test_strided_states_are_read_as_what_they_say():
    rows = [[SlotMaskState(*state)] * 2 for state in STATES]
    spec = ActionSpec(SlotConfig(max_slots=2))
    observation = observed(rows, spec)
    for name in ("stage", "age", "alpha_settled"):
        turned = getattr(observation.slots, name).T.contiguous().T
        assert not turned.is_contiguous()
        object.__setattr__(observation.slots, name, turned)
    expected = compute_batch_masks(rows, spec.slots)
    assert_same(compute_masks(observation, spec), expected)


def test_no_environments_give_empty_masks():
    masks = compute_batch_masks([], SlotConfig(max_slots=2))
    shapes = {head: tuple(rows.shape) for head, rows in masks.items()}
    assert shapes.pop("slot") == (0, 2)
    assert shapes.pop("blueprint") == (0, NUM_BLUEPRINTS)
    assert shapes == {h.name: (0, len(h.choices)) for h in HEADS if h.choices}


def test_all_eight_heads_can_be_asked_for_by_name():
    rows = [[None, SlotMaskState(Stage.HOLDING, 5, True), None]] * 4
    masks = compute_batch_masks(rows, SlotConfig(), device="cpu")
    assert [*masks] == [*masks.keys()] == [head.name for head in HEADS]
    assert len(masks) == 8
    assert isinstance(masks, Mapping)
    assert len([*masks.values()]) == 8
    assert masks.get("style") is not None
    assert masks.get("colour") is None
    for head in masks:
        assert masks[head].dtype is torch.bool
        assert masks[head].shape[0] == 4
    assert masks["slot"].shape == (4, 3)
    assert masks["blueprint"].shape == (4, NUM_BLUEPRINTS)


def test_masks_are_their_owners_and_written_by_name():
    rows = [[None, SlotMaskState(Stage.HOLDING, 5, True), None]] * 2
    before, masks = (compute_batch_masks(rows, SlotConfig()) for _ in range(2))
    masks["tempo"][0, 1] = False
    masks["op"][1] = torch.arange(6) == 0
    assert masks["tempo"].tolist() == [[True, False, True, True], [True] * 4]
    assert masks["op"][1].tolist() == [True] + [False] * 5
    for field in FIELDS:
        getattr(masks, field).logical_not_()
    assert_same(compute_batch_masks(rows, SlotConfig()), before)


@pytest.mark.parametrize("head", ["slot", "blueprint"])
def test_masks_that_are_unions_refuse_to_be_written_into(head):
    masks = compute_batch_masks([[None] * 3] * 2, SlotConfig())
    before = masks[head].tolist()
    with pytest.raises(InvalidInputError, match=rf"write into masks\.{head}\[env, "):
        masks[head][0, 1] = False
    with pytest.raises(InvalidInputError, match="read-only"):
        masks[head][1] &= False
    assert masks[head].tolist() == before
    getattr(masks, head)[:, :, 0] = False
    assert not masks[head][:, 0].any()


def example(spec: ActionSpec) -> Observation:
    """Any observation of three environments."""
    rows = [[SlotMaskState(*s)] * spec.slots.max_slots for s in STATES[:3]]
    return observed(rows, spec)


def test_masks_can_be_computed_on_a_device_that_holds_no_values():
    spec = ActionSpec()
    masks = compute_masks(map_tensors(lambda x: x.to("meta"), example(spec)), spec)
    listed = compute_batch_masks([[None] * 3] * 3, SlotConfig(), device="meta")
    for field, shape in zip(FIELDS, [(6,), (6, 3), (3, 16), (8, 16)], strict=True):
        for mask in (getattr(masks, field), getattr(listed, field)):
            assert (mask.device.type, mask.shape) == ("meta", (3, *shape))


def test_no_caller_can_spoil_the_masks_of_another():
    """Rules are kept for the whole process."""
    narrowed = {"style": ["ADD"], "tempo": ["FAST"]}
    spec = ActionSpec(narrowed=narrowed)
    assert spec.allowed[HEAD["style"]].tolist()[:2] == [True, False]
    narrowed["style"] = ["SCALE"]
    compute_masks(example(spec), spec)
    other = ActionSpec(narrowed={"style": ("SCALE",), "tempo": ("FAST",)})
    masks = compute_masks(example(other), other)
    assert masks["style"].tolist() == [[False, True]] * 3


def test_masks_first_asked_for_in_inference_serve_training_too():
    config = SlotConfig(max_slots=7)
    with torch.inference_mode():
        compute_batch_masks([[None] * 7], config)
    masks = compute_batch_masks([[None] * 7], config)
    for field in FIELDS:
        assert not getattr(masks, field).is_inference()


def test_masks_make_no_device_wait(monkeypatch):
    monkeypatch.setattr(action_masks, "_RULES", {})  # the first call counts too
    spec, observation = ActionSpec(), example(ActionSpec())
    assert count_device_reads(lambda: compute_masks(observation, spec)) == 0


# Bad input. Annotations are checked in tests, so what they would catch first is
# passed to the function underneath.

batch_masks = unwrap(compute_batch_masks)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[None] * 3, [None] * 2], "environment 1 has 2 slots, expected 3"),
        ([[None] * 4], "environment 0 has 4 slots, expected 3"),
        ([[None] * 3, [None, "seed", None]], "slot 1 of environment 1 .* got 'seed'"),
        ([None], "one list of slots per environment, got \\[None\\]"),
        (3, "one list of slots per environment, got 3"),
        ([SlotMaskState(Stage.TRAINING, 1, True)], "one list of slots"),
    ],
)
def test_rows_that_are_no_slots_are_refused(rows, message):
    with pytest.raises(InvalidInputError, match=message):
        batch_masks(rows, SlotConfig())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stage", 6),
        ("stage", -1),
        ("stage", 1.0),
        ("stage", None),
        ("age", -1),
        ("age", 1.5),
        ("age", 2**63),
        ("age", True),
        ("alpha_settled", 1),
        ("alpha_settled", "yes"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_slot_state_that_cannot_be_is_refused(field, value):
    given = {"stage": Stage.TRAINING, "age": 1, "alpha_settled": True, field: value}
    with pytest.raises(
        InvalidInputError, match=f"must have a Stage.*{field}={value!r}"
    ):
        SlotMaskState(**given)


@pytest.mark.parametrize(
    ("field", "spoil", "message"),
    [
        ("stage", lambda x: x.int(), r"stage must be .*int64 .* got .*int32"),
        ("stage", lambda x: x[:, :2], r"stage must be .* \(3, 3\) .* got .* \(3, 2\)"),
        ("age", lambda x: x.float(), r"age must be .*int64 .* got .*float32"),
        ("alpha_settled", lambda x: x.int(), "alpha_settled must be .*bool"),
        ("stage", lambda x: x + 6, r"stage must lie in 0\.\.5, got 6\.\.6"),
        ("stage", lambda x: x - 1, r"stage must lie in 0\.\.5, got -1\.\.-1"),
        ("fits", lambda x: x.float(), "fits must be .*bool .* got .*float32"),
        ("fits", lambda x: x.to("meta"), "fits .* on cpu, .* on meta"),
        (
            "parameters",
            lambda x: x[:1],
            r"parameters must be .* got .* \(1, 3, 16\)",
        ),
        ("budget_left", lambda x: x[:, None], r"budget_left must be .* \(3, 1\)"),
    ],
)
def test_states_and_offers_of_a_wrong_kind_are_refused(field, spoil, message):
    observation = example(ActionSpec())
    for record in (observation.host, observation.slots, observation.offers):
        if field in record.__slots__ and not (
            field == "parameters" and record is observation.slots
        ):
            object.__setattr__(record, field, spoil(getattr(record, field)))
    with pytest.raises(InvalidInputError, match=message):
        compute_masks(observation, ActionSpec())


@pytest.mark.parametrize("config", [None, {"max_slots": 3}])
def test_a_slot_config_that_is_none_is_refused(config):
    with pytest.raises(
        InvalidInputError, match="slot_config must be a SlotConfig, got"
    ):
        batch_masks([[None] * 3], config)
