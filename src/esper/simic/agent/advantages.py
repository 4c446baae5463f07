r"""Advantages normalised over valid steps, with a baseline from grouped environments.

Where environments of a group have the same random streams, what happens to all of them
at the same step is not due to the action:

    A_i <- A_i - mean of A_j over the others j != i of the group.

What the others do does not depend on what i chose, so this is a baseline: it removes
the variance of host, data and batches and leaves the policy gradient where it was.

Padding is selected away, never multiplied: NaN * 0 is NaN. The deviation has a floor,
so that advantages which are all equal become 0 rather than amplified rounding.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def subtract_group_baseline(
    advantages: Float[Tensor, "env time"],
    valid: Bool[Tensor, "env time"],
    group_size: int,
) -> Float[Tensor, "env time"]:
    """Advantages less the mean of the rest of an environment's group at each step.

    Args:
        advantages: Of every step.
        valid: False on padding, which is left out of the means.
        group_size: How many environments in a row form a group; 1: none.
    """
    if group_size == 1:
        return advantages
    known = torch.where(valid, advantages, 0.0).unflatten(0, (-1, group_size))
    count = valid.unflatten(0, (-1, group_size)).sum(dim=1, keepdim=True)
    others = (known.sum(dim=1, keepdim=True) - known) / (count - 1).clamp(min=1)
    return torch.where(valid, (known - others).flatten(0, 1), advantages)


def normalize_advantages(
    advantages: Float[Tensor, "env time"],
    valid: Bool[Tensor, "env time"],
    floor: float = 1e-5,
) -> Float[Tensor, "env time"]:
    """Advantages with mean 0 and deviation 1 over valid steps; 0 on padding.

    Args:
        advantages: Of every step; what stands on padding is not read.
        valid: False on padding. One valid step, or none, gives zeros.
        floor: Spreads smaller than this are divided by it instead.
    """
    count = valid.sum().clamp(min=1)
    centred = torch.where(valid, advantages, 0.0)
    # Once for the mean, once more for what rounding left of it.
    for _ in range(2):
        centred = torch.where(valid, centred - centred.sum() / count, 0.0)
    deviation = (centred.square().sum() / count).sqrt()
    return centred / deviation.clamp(min=floor)
