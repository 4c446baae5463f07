"""On what terms hosts grow, and what became of them."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What may differ from environment to environment: ranges to draw from."""

    rent: tuple[float, float] = (0.01, 0.01)
    """Score charged per added multiple of the host's parameters."""
    budget: tuple[float, float] = (4.0, 4.0)
    """Parameters that may be added, as a multiple of the host's."""
    rate: tuple[float, float] = (1.0, 1.0)
    """Learning rate against the task's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of the episodes that ended in a step."""

    env: Int64[Tensor, " ended"]
    score: Float[Tensor, " ended"]
    """On all decision rows that are looked at."""
    test: Float[Tensor, " ended"]
    """On the test rows; no decision and no reward ever sees it."""
    added: Float[Tensor, " ended"]
    """Parameters added, as a multiple of the host's."""
    macs: Float[Tensor, " ended"]
    """Multiply-adds per row, as a multiple of the host's."""
    panicked: Bool[Tensor, " ended"]
