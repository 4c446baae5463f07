"""Slots: their configuration and their state.

`SlotStates` is a struct of arrays: every field is a tensor over `[env, slot]`. Masks,
features, lifecycle and reward are functions of it, without a loop over slots.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.checks import require_int
from esper.contracts.errors import InvalidInputError
from esper.contracts.stages import Stage


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """Number of slots of a host, and minimum age of seeds."""

    max_slots: int = 3
    """Slots of every host."""
    min_age: int = 1
    """Steps a seed must spend in a stage before ADVANCE or PRUNE is legal."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        require_int("max_slots", self.max_slots, 1)
        require_int("min_age", self.min_age, 0)


@dataclass(frozen=True, slots=True)
class SlotMaskState:
    """State of one occupied slot that decides which ops are legal."""

    stage: Stage
    age: int
    """Steps spent in this stage."""
    alpha_settled: bool
    """Whether alpha has reached its target."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        counts = (self.stage, self.age)
        if (
            any(type(x) is bool or not isinstance(x, int | np.integer) for x in counts)
            or self.stage not in range(len(Stage))
            or self.age not in range(2**63)
            or not isinstance(self.alpha_settled, bool | np.bool_)
        ):
            raise InvalidInputError(
                "a slot must have a Stage, an age of at least 0 and a bool "
                f"alpha_settled, got {self!r}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStates:
    """State of all slots of all environments; a flag marks values not yet measured."""

    stage: Int64[Tensor, "env slot"]
    """`Stage` of the slot; DORMANT when empty."""
    age: Int64[Tensor, "env slot"]
    """Steps the seed has spent in its stage."""
    alpha: Float[Tensor, "env slot"]
    """Weight of the seed in the forward pass, in [0, 1]."""
    alpha_target: Float[Tensor, "env slot"]
    """Final value of the current alpha schedule."""
    alpha_settled: Bool[Tensor, "env slot"]
    """Whether alpha has reached its target."""
    blueprint: Int64[Tensor, "env slot"]
    """Index into the run's blueprints; -1 when empty."""
    style: Int64[Tensor, "env slot"]
    """Blending style: 0 ADD, 1 SCALE."""
    parameters: Float[Tensor, "env slot"]
    """Parameters of the seed as a multiple of the host's."""
    depth: Float[Tensor, "env slot"]
    """Depth of the slot between the host's input (0) and output (1)."""
    capacity: Float[Tensor, "env slot"]
    """Width at the slot divided by the host's largest width, in [0, 1]."""
    units: Float[Tensor, "env slot"]
    """Units of the layer at the slot, including its seeds; 0 if there is no layer."""
    liveness: Float[Tensor, "env slot"]
    """Fraction of the units at the slot that are active, in [0, 1]."""
    gradient_share: Float[Tensor, "env slot"]
    """Fraction of the host's gradient norm at the slot, in [0, 1]."""
    contribution: Float[Tensor, "env slot"]
    """Drop of the score without the seed; meaningful only where measured."""
    contribution_measured: Bool[Tensor, "env slot"]
