"""What a controller sees before a decision: host, slots, and what could be planted."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from esper.contracts.slots import SlotStates


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStates:
    """Every host in one record of `[env]` tensors."""

    progress: Float[Tensor, " env"]
    """Share of the horizon that has passed, in [0, 1]."""
    budget_left: Float[Tensor, " env"]
    """Parameters that may still be added, as a multiple of the host's; inf: any."""
    rent: Float[Tensor, " env"]
    """Score charged per added multiple of the host's parameters."""
    added: Float[Tensor, " env"]
    """Parameters added so far as a multiple of the host's."""
    score: Float[Tensor, " env"]
    """Score on the decision split, in [0, 1]."""
    score_slope: Float[Tensor, " env"]
    """Change of the score per step, recently."""
    loss: Float[Tensor, " env"]
    """Training loss against its value at the start (1 at the start)."""
    loss_slope: Float[Tensor, " env"]
    """Relative change of the training loss per step, recently."""
    plateau: Float[Tensor, " env"]
    """Share of the horizon since the score last improved, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlueprintOffers:
    """What each slot could be planted with: `[env, slot, blueprint]` tensors."""

    fits: Bool[Tensor, "env slot blueprint"]
    """Whether the blueprint can serve the tensors at this slot."""
    parameters: Float[Tensor, "env slot blueprint"]
    """Parameters it would add, as a multiple of the host's."""
    macs: Float[Tensor, "env slot blueprint"]
    """Multiply-adds it would add, as a multiple of the host's."""
    promise: Float[Tensor, "env slot blueprint"]
    """First-order gain it promises here; meaningful only where known."""
    promise_known: Bool[Tensor, "env slot blueprint"]
    """Whether `promise` was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One decision's view of every environment."""

    first: Bool[Tensor, " env"]
    """Whether this is the first observation of an episode: memory starts anew."""
    host: HostStates
    slots: SlotStates
    offers: BlueprintOffers
