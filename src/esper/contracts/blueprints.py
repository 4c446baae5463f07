"""What can be planted: one line per blueprint.

A blueprint is a form at a size. The table declares what a controller may know of it
without building it; parameters and multiply-adds depend on the place and are
observed per slot. Adding a blueprint is one line here.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class Form(IntEnum):
    """The family of functions a blueprint belongs to."""

    SCALE_SHIFT = 0
    SQUEEZE_EXCITE = 1
    LOW_RANK = 2
    DEPTHWISE = 3
    WIDEN = 4
    RESIDUAL_MLP = 5
    BOTTLENECK = 6
    CONV = 7
    ATTENTION = 8
    CUSTOM = 9


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A form at a size, and whether it folds into the host's own weights."""

    name: str
    form: Form
    size: int
    merges: bool


BLUEPRINTS: Final[tuple[Blueprint, ...]] = (
    Blueprint("scale_shift", Form.SCALE_SHIFT, 1, merges=True),
    Blueprint("squeeze_excite", Form.SQUEEZE_EXCITE, 4, merges=False),
    Blueprint("low_rank_4", Form.LOW_RANK, 4, merges=True),
    Blueprint("low_rank_16", Form.LOW_RANK, 16, merges=True),
    Blueprint("depthwise", Form.DEPTHWISE, 3, merges=False),
    Blueprint("widen_8", Form.WIDEN, 8, merges=True),
    Blueprint("widen_16", Form.WIDEN, 16, merges=True),
    Blueprint("widen_32", Form.WIDEN, 32, merges=True),
    Blueprint("residual_mlp", Form.RESIDUAL_MLP, 16, merges=False),
    Blueprint("bottleneck", Form.BOTTLENECK, 8, merges=False),
    Blueprint("conv", Form.CONV, 3, merges=False),
    Blueprint("attention", Form.ATTENTION, 2, merges=False),
)

NUM_BLUEPRINTS: Final = len(BLUEPRINTS)
