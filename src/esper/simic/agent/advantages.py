"""Advantages in units of their own spread, over the steps that happened.

Padding is selected away, never multiplied: NaN * 0 is NaN. The deviation has a floor,
so that advantages which are all equal become 0 rather than amplified rounding.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
