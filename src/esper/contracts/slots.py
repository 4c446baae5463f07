"""Slots: their configuration, one slot's state for masks, and the state of them all.

`SlotStates` is a struct of arrays: every field is a tensor over `[env, slot]`. Masks,
features, lifecycle and reward are functions of it, without a loop over slots.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.errors import InvalidInputError
from esper.contracts.stages import Stage


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """How many slots a host has, and how long a seed stays before it may be moved."""

    max_slots: int = 3
    """Slots of every host in the run."""
    min_age: int = 1
    """Steps a living seed spends in a stage before ADVANCE or PRUNE is legal."""

    def __post_init__(self) -> None:
        """Refuse a host without slots."""
        if self.max_slots < 1:
            raise InvalidInputError(
                f"max_slots must be at least 1, got {self.max_slots}."
            )
        if self.min_age < 0:
            raise InvalidInputError(
                f"min_age must not be negative, got {self.min_age}."
            )


@dataclass(frozen=True, slots=True)
class SlotMaskState:
    """What legality needs to know of one occupied slot; an empty slot is None."""

    stage: Stage
    """Where the seed is in its life."""
    age: int
    """Steps spent in this stage."""
    alpha_settled: bool
    """Whether alpha has reached its target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStates:
    """All slots of all environments. Unknown is not zero: it has a flag."""

    stage: Int64[Tensor, "env slot"]
    """`Stage` of the slot; DORMANT when empty."""
    age: Int64[Tensor, "env slot"]
    """Steps the seed has spent in its stage."""
    alpha: Float[Tensor, "env slot"]
    """Weight of the seed in the forward pass, in [0, 1]."""
    alpha_target: Float[Tensor, "env slot"]
    """Where alpha is going."""
    alpha_settled: Bool[Tensor, "env slot"]
    """Whether alpha has arrived."""
    blueprint: Int64[Tensor, "env slot"]
    """Index into the run's blueprints; -1 when empty."""
    style: Int64[Tensor, "env slot"]
    """How the seed is blended: 0 ADD, 1 SCALE."""
    parameters: Float[Tensor, "env slot"]
    """Parameters of the seed as a multiple of the host's."""
    depth: Float[Tensor, "env slot"]
    """Place of the slot between the host's input (0) and output (1)."""
    capacity: Float[Tensor, "env slot"]
    """Width at the slot against the widest place of the host, in [0, 1]."""
    units: Float[Tensor, "env slot"]
    """Units of the layer at the slot, living seeds included; 0: there is no layer."""
    liveness: Float[Tensor, "env slot"]
    """Share of the units at the slot that respond, in [0, 1]."""
    gradient_share: Float[Tensor, "env slot"]
    """Share of the host's gradient norm that passes the slot, in [0, 1]."""
    contribution: Float[Tensor, "env slot"]
    """Score lost when the seed is left out; meaningful only where measured."""
    contribution_measured: Bool[Tensor, "env slot"]
    """Whether `contribution` was measured."""
