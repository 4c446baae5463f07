"""What can be planted: one line per blueprint.

A blueprint is a form at a size, or at a share of the layer's present width. The table
declares what a controller may know of it without building it; parameters and
multiply-adds depend on the place and are observed per slot. Adding a blueprint is one
line here.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from typing import Final

from esper.contracts.errors import InvalidInputError


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
    """Units, rank or kernel; 0 if it depends on the layer."""
    merges: bool
    share: float = 0.0
    """Units as a share of the layer's present width, living seeds included."""

    def __post_init__(self) -> None:
        """Refuse a share that is none."""
        if not (isfinite(self.share) and self.share >= 0.0):
            raise InvalidInputError(
                f"blueprint {self.name!r} adds {self.share} of a layer's width; give "
                "a share above 0."
            )

    def units(self, width: int) -> int:
        """Its size at a layer of this width: at least one."""
        return max(1, round(self.share * width)) if self.share else self.size


BLUEPRINTS: Final[tuple[Blueprint, ...]] = (
    Blueprint("scale_shift", Form.SCALE_SHIFT, 1, merges=True),
    Blueprint("squeeze_excite", Form.SQUEEZE_EXCITE, 4, merges=False),
    Blueprint("low_rank_4", Form.LOW_RANK, 4, merges=True),
    Blueprint("low_rank_16", Form.LOW_RANK, 16, merges=True),
    Blueprint("depthwise", Form.DEPTHWISE, 3, merges=False),
    Blueprint("widen_8", Form.WIDEN, 8, merges=True),
    Blueprint("widen_16", Form.WIDEN, 16, merges=True),
    Blueprint("widen_32", Form.WIDEN, 32, merges=True),
    Blueprint("widen_x1.25", Form.WIDEN, 0, merges=True, share=0.25),
    Blueprint("widen_x1.5", Form.WIDEN, 0, merges=True, share=0.5),
    Blueprint("widen_x2", Form.WIDEN, 0, merges=True, share=1.0),
    Blueprint("widen_x4", Form.WIDEN, 0, merges=True, share=3.0),
    Blueprint("residual_mlp", Form.RESIDUAL_MLP, 16, merges=False),
    Blueprint("bottleneck", Form.BOTTLENECK, 8, merges=False),
    Blueprint("conv", Form.CONV, 3, merges=False),
    Blueprint("attention", Form.ATTENTION, 2, merges=False),
)

NUM_BLUEPRINTS: Final = len(BLUEPRINTS)
NOMINAL_WIDTH: Final = 32
"""Width of a layer at which relative sizes compare with absolute ones."""
