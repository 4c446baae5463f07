"""Multiply-adds of training: one rule for every arm.

A step costs three times its forward pass: forwards, and backwards to the weights and to
the activations. While seeds train, a shadow pass comes on top: forwards through the
network and the seeds, backwards through what lies behind them, and through them.
"""

from typing import Final

SINGULAR: Final = 20
"""Multiply-adds of singular vectors, relative to `rows * columns * min(both)`."""


def step_macs(active: int, training: int = 0, behind: int = 0) -> int:
    """Multiply-adds per row of one training step.

    Args:
        active: Forward pass of the host with its active seeds.
        training: Forward pass of the seeds that train in the shadow.
        behind: Forward pass of all that lies behind the first of those.
    """
    shadow = active + training + 2 * training + behind if training else 0
    return 3 * active + shadow


def promise_macs(rows: int, features: int, wishes: int, size: int) -> int:
    """Multiply-adds of what one place promises, fitted and judged on half the rows."""
    half, rank = rows // 2, min(size, features, wishes)
    fit = half * features * (features + wishes)
    solve = features**3 // 3 + features**2 * wishes
    singular = SINGULAR * features * wishes * min(features, wishes)
    return fit + solve + singular + half * rank * (features + wishes)
