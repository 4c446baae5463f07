"""Lifecycle and simulated world obey the one table; masks: tests/tamiyo."""

from dataclasses import replace
from itertools import product

import torch

from esper.contracts.actions import HEAD, NUM_HEADS, Op
from esper.contracts.stages import (
    LEGAL,
    NEXT_STAGE,
    SETTLES_TO,
    TRANSITIONS,
    Stage,
    is_legal,
)
from esper.growth import lifecycle
from esper.growth.lifecycle import SeedStates
from esper.testing import slot_tables

MIN_AGE = 2


def expected(op: Op, stage: Stage, age: int, settled: bool) -> bool:
    return is_legal(op, stage, old_enough=age >= MIN_AGE, settled=settled)


CASES = [*product(Op, Stage, (MIN_AGE - 1, MIN_AGE), (False, True))]
STILL = (Stage.DORMANT, Stage.TRAINING)
"""Stages in which alpha never moves."""


def lives_in(stage: Stage, age: int, settled: bool) -> SeedStates:
    """One host with one slot."""
    one = torch.tensor([[1]])
    return replace(
        SeedStates.empty(1, 1),
        stage=one * stage,
        age=one * age,
        length=one * (0 if settled else 4),
    )


def test_the_diagram_is_the_table():
    edges = {(stage, rule.next) for (_, stage), rule in TRANSITIONS.items()}
    changes = {edge for edge in edges | {*SETTLES_TO.items()} if edge[0] is not edge[1]}
    dormant, training, blending, holding, fossilized, cooling = Stage
    assert changes == {
        (dormant, training),
        (training, blending),
        (blending, holding),
        (holding, fossilized),
        *((stage, cooling) for stage in (training, blending, holding)),
        (cooling, dormant),
    }


def test_the_tensors_are_the_table():
    for op, stage, age, settled in CASES:
        rule = TRANSITIONS.get((op, stage))
        old = age >= MIN_AGE
        legal = rule is not None and old >= rule.min_age and settled >= rule.settled
        assert bool(LEGAL[op, stage, int(old), int(settled)]) is legal
        assert expected(op, stage, age, settled) is legal
        assert int(NEXT_STAGE[op, stage]) == (stage if rule is None else rule.next)


def test_the_lifecycle_does_what_the_table_says():
    for op, stage, age, settled in CASES:
        if stage in STILL and not settled:
            continue
        actions = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
        actions[0, HEAD["op"]] = op
        before = lives_in(stage, age, settled)
        after, done = lifecycle.act(before, actions, MIN_AGE)
        # The alpha of a seed in training stands still, however long it has to train.
        legal = expected(op, stage, age, settled or stage is Stage.TRAINING)
        assert bool(done) is (legal or op is Op.WAIT)
        assert int(after.stage) == (NEXT_STAGE[op, stage] if legal else stage)


def test_seeds_tend_themselves_up_to_holding_and_leave_when_cooled_down():
    for stage, settled in product(Stage, (False, True)):
        after = lifecycle.after(lives_in(stage, 1, settled), torch.ones(1).long())
        holds = stage in (Stage.TRAINING, Stage.BLENDING)
        left = Stage.HOLDING if holds else SETTLES_TO.get(stage, stage)
        assert int(after.stage) == (left if settled else stage)


def test_the_simulated_world_does_what_the_table_says():
    min_age = slot_tables.SPEC.slots.min_age
    for life, act in product(slot_tables.LIVES, slot_tables.ACTS):
        after = slot_tables.acted(life, act)
        rule = TRANSITIONS.get((act.op, life.stage))
        legal = is_legal(
            act.op, life.stage, old_enough=life.age >= min_age, settled=life.settled
        )
        assert (after is not None) is (legal or act.op is Op.WAIT)
        if after is None or act.op is Op.WAIT:
            continue
        assert rule is not None
        assert after.stage is rule.next
    for life in slot_tables.LIVES:
        now, after = life.stage, slot_tables.passed(life).stage
        assert after in (now, SETTLES_TO.get(now, now))
