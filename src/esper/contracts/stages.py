r"""The life of a seed as a table.

    DORMANT -> TRAINING -> BLENDING -> HOLDING -> FOSSILIZED
       ^           \___________\__________\
       |                                   v
       +------------------------------- COOLING

An empty slot is DORMANT. In TRAINING the host does not feel the seed, in BLENDING
its alpha rises, in HOLDING it has arrived, FOSSILIZED it stays for good. A pruned
seed cools while its alpha fades and leaves the slot DORMANT. Nothing outside this
table says which transitions exist.
"""

from enum import IntEnum
from types import MappingProxyType
from typing import Final


class Stage(IntEnum):
    """Where the seed of a slot is in its life; the value is its one-hot index."""

    DORMANT = 0
    TRAINING = 1
    BLENDING = 2
    HOLDING = 3
    FOSSILIZED = 4
    COOLING = 5


NEXT_STAGES: Final = MappingProxyType(
    {
        Stage.DORMANT: frozenset({Stage.TRAINING}),
        Stage.TRAINING: frozenset({Stage.BLENDING, Stage.COOLING}),
        Stage.BLENDING: frozenset({Stage.HOLDING, Stage.COOLING}),
        Stage.HOLDING: frozenset({Stage.FOSSILIZED, Stage.COOLING}),
        Stage.FOSSILIZED: frozenset[Stage](),
        Stage.COOLING: frozenset({Stage.DORMANT}),
    }
)
