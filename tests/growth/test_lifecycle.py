"""The lifecycle follows the table, in every environment and slot at once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, Op
from esper.contracts.stages import Stage
from esper.growth import lifecycle
from esper.growth.lifecycle import CURVES, SeedStates, alpha_at
from tests.references.lifecycle import Slot

SLOTS = 2
SETTINGS = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
SIZES = {"blueprint": 3} | {
    head.name: len(head.choices) for head in HEADS if head.name in SETTINGS
}


@st.composite
def actions_of_one(draw):
    """One action of one environment."""
    choices = {head: draw(st.integers(0, size - 1)) for head, size in SIZES.items()}
    # Seeds that move on are rarer than chance if every op is as likely.
    op = draw(st.sampled_from([*Op, Op.ADVANCE, Op.ADVANCE, Op.GERMINATE]))
    return op, draw(st.integers(0, SLOTS - 1)), choices


def together(chosen):
    actions = torch.zeros(len(chosen), NUM_HEADS, dtype=torch.int64)
    for row, (op, slot, choices) in zip(actions, chosen, strict=True):
        row[HEAD["op"]], row[HEAD["slot"]] = op, slot
        for head, choice in choices.items():
            row[HEAD[head]] = choice
    return actions


@settings(max_examples=40)
@given(
    st.integers(0, 2),
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.tuples(actions_of_one(), actions_of_one(), actions_of_one()),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=12,
    ),
)
def test_all_slots_at_once_equal_each_slot_alone(min_age, tick, story):
    states = SeedStates.empty(3, SLOTS)
    alone = [[Slot() for _ in range(SLOTS)] for _ in range(3)]
    for chosen, batches, decision in story:
        states, done = lifecycle.act(states, together(chosen), min_age, tick)
        for env, (op, slot, choices) in enumerate(chosen):
            acted = alone[env][slot].act(op.name, choices, min_age, tick)
            assert bool(done[env]) == acted
        passed = torch.full((3,), batches)
        alphas, trains = lifecycle.schedule(states, batches)
        for batch in range(batches):
            before, then = (
                lifecycle.after(states, torch.full((3,), batch + more))
                for more in (0, 1)
            )
            assert torch.equal(trains[:, batch], before.stage == Stage.TRAINING)
            assert torch.equal(alphas[:, batch], then.alpha)
        states = lifecycle.after(states, passed, decision=decision)
        for env in range(3):
            for index, slot in enumerate(alone[env]):
                slot.after(batches, decision)
                assert Stage(int(states.stage[env, index])).name == slot.stage
                assert int(states.age[env, index]) == slot.age
                assert int(states.blueprint[env, index]) == slot.blueprint
                assert int(states.style[env, index]) == slot.style
                settled = slot.moved >= slot.length or slot.stage == "TRAINING"
                assert bool(states.settled[env, index]) == settled
                alpha = float(states.alpha[env, index])
                assert alpha == pytest.approx(slot.alpha, abs=1e-6)


def test_nothing_leaves_the_device():
    states = SeedStates.empty(2, 3, device="meta")
    actions = torch.zeros(2, NUM_HEADS, dtype=torch.int64, device="meta")
    acted, done = lifecycle.act(states, actions, 1)
    later = lifecycle.after(acted, actions[:, 0])
    assert later.alpha.device.type == "meta"
    assert done.shape == (2,)


@given(
    st.floats(0, 1, width=32),
    st.floats(0, 1, width=32),
    st.integers(1, 8),
    st.integers(0, len(CURVES) - 1),
)
def test_alpha_moves_monotonically_and_arrives_exactly(start, end, length, curve):
    def whole(value):
        return torch.full((1, 1), value, dtype=torch.int64)

    a, b = torch.full((1, 1), start), torch.full((1, 1), end)
    way = [
        float(alpha_at(a, b, whole(moved), whole(length), whole(curve)))
        for moved in range(length + 1)
    ]
    assert way[-1] == b
    assert way[0] == pytest.approx(start, abs=1e-6)
    signs = [later - earlier for earlier, later in pairwise(way)]
    up = end >= start
    assert all(step >= -1e-7 if up else step <= 1e-7 for step in signs)
