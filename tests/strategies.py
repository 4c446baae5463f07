"""Hypothesis strategies for what several packages are tested with."""

import random
from contextlib import contextmanager
from dataclasses import fields
from math import inf

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from esper.contracts.actions import HEADS, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.slots import SlotConfig, SlotMaskState, SlotStates
from esper.contracts.stages import Stage
from esper.contracts.world import BlueprintOffers, HostStates, Observation

COSTS = (0.0, 0.125, 0.25, 0.5, 2.0)
"""Few values, so that a cost often equals the budget."""


@contextmanager
def undisturbed():
    """Keep Python's random state: the type checker samples containers with it."""
    state = random.getstate()
    yield
    random.setstate(state)


def tensors(shape, elements, dtype):
    """Tensors of a shape with independently drawn elements."""
    drawn = arrays.arrays(dtype, shape, elements=elements, fill=st.nothing())
    return drawn.map(lambda values: torch.from_numpy(values.copy()))


def floats(bound=1e30):
    """Finite float32 numbers up to a bound, small ones more often than not."""
    return st.one_of(
        st.floats(-1.0, 1.0, width=32),
        st.floats(-float(np.float32(bound)), float(np.float32(bound)), width=32),
    )


@st.composite
def action_specs(draw, max_slots=4):
    """Action spaces: any slots and blueprints, heads narrowed at random."""
    narrowed = {}
    for head in HEADS:
        if head.choices and draw(st.integers(0, 3)) == 0:
            names = st.lists(st.sampled_from([*head.choices]), min_size=1, unique=True)
            chosen = draw(names)
            if head.name == "op" and Op.WAIT.name not in chosen:
                chosen.append(Op.WAIT.name)
            narrowed[head.name] = tuple(chosen)
    count = draw(st.integers(1, 4))
    first = draw(st.integers(0, len(BLUEPRINTS) - count))
    slots = SlotConfig(draw(st.integers(1, max_slots)), draw(st.integers(0, 3)))
    with undisturbed():
        kinds = BLUEPRINTS[first : first + count]
        return ActionSpec(slots, kinds, narrowed, draw(st.booleans()))


@st.composite
def slot_states(draw, envs, spec, values=None):
    """All slots of some environments; floats are shares unless `values` is given."""
    shape = (envs, spec.slots.max_slots)
    shares = st.floats(0.0, 1.0, width=32) if values is None else values
    flags = tensors(shape, st.booleans(), np.bool_)
    numbers = tensors(shape, shares, np.float32)
    kinds = st.integers(-1, len(spec.blueprints) - 1)
    special = {
        "stage": tensors(shape, st.sampled_from([*map(int, Stage)]), np.int64),
        "age": tensors(shape, st.integers(0, 5), np.int64),
        "blueprint": tensors(shape, kinds, np.int64),
        "style": tensors(shape, st.integers(0, 1), np.int64),
        "alpha_settled": flags,
        "contribution_measured": flags,
    }
    return draw_record(draw, SlotStates, numbers, special)


def draw_record(draw, record, usual, special):
    """A record whose fields are usual, but for some."""
    names = [field.name for field in fields(record)]
    return record(**{name: draw(special.get(name, usual)) for name in names})


@st.composite
def observations(draw, spec, envs=None, values=None):
    """What could be seen in an action space; floats are small unless `values`."""
    envs = draw(st.integers(1, 3)) if envs is None else envs
    numbers = st.floats(-1.0, 1.0, width=32) if values is None else values
    costs = st.sampled_from(COSTS) if values is None else values
    shape = (envs, spec.slots.max_slots, len(spec.blueprints))
    host = tensors((envs,), numbers, np.float32)
    offers = tensors(shape, numbers, np.float32)
    flags = tensors(shape, st.booleans(), np.bool_)
    budget = st.one_of(st.just(inf), costs)
    known = tensors((envs,), st.booleans(), np.bool_)
    budgets = {"budget_left": tensors((envs,), budget, np.float32), "end_known": known}
    prices = tensors(shape, costs, np.float32)
    special = {"fits": flags, "promise_known": flags, "parameters": prices}
    return Observation(
        episode_start=draw(tensors((envs,), st.booleans(), np.bool_)),
        host=draw_record(draw, HostStates, host, budgets),
        slots=draw(slot_states(envs, spec, values)),
        offers=draw_record(draw, BlueprintOffers, offers, special),
    )


def slot_rows(max_slots):
    """One environment's slots as a list, None where empty."""
    seed = st.builds(
        SlotMaskState,
        stage=st.sampled_from(Stage),
        age=st.integers(0, 5),
        alpha_settled=st.booleans(),
    )
    return st.lists(st.none() | seed, min_size=max_slots, max_size=max_slots)
