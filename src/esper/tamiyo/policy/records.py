"""What a policy hands on: decisions, its view of old ones, and what its heads read."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was chosen, and everything needed to learn from it."""

    actions: Int64[Tensor, "env head"]
    log_probs: Float[Tensor, "env head"]
    """Log-probability of each choice given the heads before it."""
    rows: Bool[Tensor, "env head choice"]
    """The exact mask rows the choices were drawn from."""
    distribution: Float[Tensor, "env head choice"]
    """Log-probabilities of all choices; 0 where illegal."""
    values: Float[Tensor, " env"]
    state: Float[Tensor, "env layer state"]
    """Memory after this decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The current policy's view of choices made before."""

    logits: Float[Tensor, "env time head choice"]
    distribution: Float[Tensor, "env time head choice"]
    """Log-probabilities of all choices; 0 where illegal."""
    log_probs: Float[Tensor, "env time head"]
    normalized_values: Float[Tensor, "env time"]
    """V(s) in units of the value statistics."""


@dataclass(frozen=True, slots=True)
class Context:
    """Encodings that all heads read."""

    core: Float[Tensor, "*batch core"]
    slots: Float[Tensor, "*batch slot slot_width"]
    offers: Float[Tensor, "*batch slot blueprint offer_width"]
