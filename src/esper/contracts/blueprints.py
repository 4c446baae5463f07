"""The built-in blueprints: one line for each module that can be planted.

A blueprint is a form at a size, or at a fraction of the layer's current width. The
table holds what a controller can know without building the module. Parameters and
multiply-adds depend on the slot and are observed there.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class Form(IntEnum):
    """Family of functions of a blueprint."""

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
    """A form at a size, and whether it can be merged into the host's weights."""

    name: str
    form: Form
    size: int
    """Units, rank or kernel size; 0 if it depends on the layer."""
    merges: bool
    share: float = 0.0
    """Units as a fraction of the layer's current width, including its seeds."""

    def units(self, width: int) -> int:
        """Size at a layer of this width; at least 1."""
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
"""Layer width that is assumed when relative and absolute sizes are compared."""
