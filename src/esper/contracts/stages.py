r"""Stages of a seed, ops, and the table of legal ops in each stage.

    DORMANT -> TRAINING -> BLENDING -> HOLDING -> FOSSILIZED
       ^           \___________\__________\
       |                                   v
       +------------------------------- COOLING

An empty slot is DORMANT. A seed in TRAINING is not part of the forward pass. In
BLENDING its alpha rises; in HOLDING alpha is at its target; FOSSILIZED is final. A
pruned seed is COOLING while its alpha falls to 0. Masks, lifecycle and simulated world
all read `TRANSITIONS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor


class Stage(IntEnum):
    """Stage of the seed in a slot."""

    DORMANT = 0
    TRAINING = 1
    BLENDING = 2
    HOLDING = 3
    FOSSILIZED = 4
    COOLING = 5


class Op(IntEnum):
    """Operation of a decision."""

    WAIT = 0
    GERMINATE = 1
    ADVANCE = 2
    SET_ALPHA = 3
    PRUNE = 4
    FOSSILIZE = 5


@dataclass(frozen=True, slots=True)
class StageTransition:
    """Next stage of an op, and its conditions."""

    next: Stage
    min_age: bool = False
    """Whether the seed must have reached the minimum age in its stage."""
    settled: bool = True
    """Whether alpha must have reached its target."""


TRANSITIONS: Final[Mapping[tuple[Op, Stage], StageTransition]] = MappingProxyType(
    {
        (Op.GERMINATE, Stage.DORMANT): StageTransition(Stage.TRAINING, settled=False),
        (Op.ADVANCE, Stage.TRAINING): StageTransition(Stage.BLENDING, min_age=True),
        (Op.ADVANCE, Stage.BLENDING): StageTransition(Stage.HOLDING, min_age=True),
        (Op.SET_ALPHA, Stage.BLENDING): StageTransition(Stage.BLENDING),
        (Op.SET_ALPHA, Stage.HOLDING): StageTransition(Stage.HOLDING),
        (Op.PRUNE, Stage.TRAINING): StageTransition(Stage.COOLING, min_age=True),
        (Op.PRUNE, Stage.BLENDING): StageTransition(Stage.COOLING, min_age=True),
        (Op.PRUNE, Stage.HOLDING): StageTransition(Stage.COOLING, min_age=True),
        (Op.FOSSILIZE, Stage.HOLDING): StageTransition(Stage.FOSSILIZED),
    }
)
"""All legal (op, stage) pairs.

GERMINATE also needs a blueprint that fits the slot and the budget. WAIT needs no slot
and is always legal.
"""

SETTLES_TO: Final[Mapping[Stage, Stage]] = MappingProxyType(
    {Stage.COOLING: Stage.DORMANT}
)
"""Stage that follows without an op once alpha has reached its target."""


def is_legal(op: Op, stage: Stage, *, old_enough: bool, settled: bool) -> bool:
    """Whether the op is legal for a slot in this stage."""
    rule = TRANSITIONS.get((op, stage))
    return (
        rule is not None
        and (old_enough or not rule.min_age)
        and (settled or not rule.settled)
    )


LEGAL: Final[Tensor] = torch.tensor(
    [
        is_legal(op, stage, old_enough=old, settled=settled)
        for op, stage, old, settled in product(Op, Stage, (False, True), (False, True))
    ]
).view(len(Op), len(Stage), 2, 2)
"""`is_legal` as a tensor, bool [op, stage, old enough, settled]."""

NEXT_STAGE: Final[Tensor] = torch.tensor(
    [
        [
            TRANSITIONS[op, stage].next if (op, stage) in TRANSITIONS else stage
            for stage in Stage
        ]
        for op in Op
    ]
)
"""The stage after an op, int64 [op, stage]; unchanged where the op is illegal."""


GROWING: Final = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
STAGE_EVENTS: Final[Mapping[tuple[Stage, Stage], str]] = MappingProxyType(
    {
        **{(Stage.DORMANT, stage): "planted" for stage in GROWING},
        (Stage.TRAINING, Stage.BLENDING): "blending",
        (Stage.TRAINING, Stage.HOLDING): "holding",
        (Stage.BLENDING, Stage.HOLDING): "holding",
        (Stage.HOLDING, Stage.FOSSILIZED): "kept",
        (Stage.COOLING, Stage.DORMANT): "cleared",
        **{(stage, Stage.COOLING): "pruned" for stage in GROWING},
        **{(stage, Stage.DORMANT): "pruned" for stage in GROWING},
    }
)
"""Names of changes of a stage in records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChanged:
    """A change of a slot's stage."""

    env: int
    slot: int
    step: int
    before: Stage
    after: Stage
    reason: str
    """Why, for the user."""
