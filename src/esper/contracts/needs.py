"""When an op is possible in a slot: the whole law, as one table.

It says at which stages of a slot an op makes sense and whether the seed must have
reached its minimum age and its alpha its target. GERMINATE needs a blueprint that fits
and can be paid for besides; WAIT needs no slot. Masks forbid by it and the lifecycle
acts by it.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from esper.contracts.actions import Op
from esper.contracts.stages import Stage


@dataclass(frozen=True, slots=True)
class Need:
    """What a slot must be for an op to be possible there."""

    stages: frozenset[Stage]
    min_age: bool = False
    """Whether the seed must have spent its minimum age in this stage."""
    settled: bool = False
    """Whether alpha must have arrived at its target."""


NEEDS: Final = MappingProxyType(
    {
        Op.WAIT: Need(frozenset()),
        Op.GERMINATE: Need(frozenset({Stage.DORMANT})),
        Op.ADVANCE: Need(
            frozenset({Stage.TRAINING, Stage.BLENDING}), min_age=True, settled=True
        ),
        Op.SET_ALPHA: Need(frozenset({Stage.BLENDING, Stage.HOLDING}), settled=True),
        Op.PRUNE: Need(
            frozenset({Stage.TRAINING, Stage.BLENDING, Stage.HOLDING}),
            min_age=True,
            settled=True,
        ),
        Op.FOSSILIZE: Need(frozenset({Stage.HOLDING}), settled=True),
    }
)
