r"""Values in the units of their own statistics, without forgetting what was learnt.

The critic predicts normalised returns; `policy.value_mean` and `policy.value_scale`
turn them back. When the statistics move, the last layer is rescaled so that every
prediction stays where it was (PopArt, van Hasselt et al. 2016,
https://arxiv.org/abs/1602.07714):

    w' = w σ/σ'        b' = (σ b + μ - μ') / σ'

Statistics are those of all returns so far with old ones fading, counted over valid
steps only. Everything stays on the device.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

SMALLEST_SCALE: Final = 1e-4  # constant returns must not blow up to unit noise


@dataclass(frozen=True, slots=True)
class ReturnMoments:
    """Fading mean and variance of the returns, and how much they weigh.

    The variance is kept as such: a mean square less a squared mean would cancel to
    noise where returns are large and differ little.
    """

    weight: Float[Tensor, ""]
    mean: Float[Tensor, ""]
    variance: Float[Tensor, ""]

    @classmethod
    def none(cls, device: torch.device) -> "ReturnMoments":
        """Nothing seen yet."""
        return cls(*(torch.zeros((), device=device) for _ in range(3)))

    def with_returns(
        self,
        returns: Float[Tensor, "env time"],
        valid: Bool[Tensor, "env time"],
        fading: float,
    ) -> "ReturnMoments":
        """The moments after one more rollout; unchanged if it has no valid step."""
        count = valid.sum().clamp(min=1)
        mean = torch.where(valid, returns, 0.0).sum() / count
        spread = torch.where(valid, returns - mean, 0.0).square().sum() / count
        weight = fading * self.weight + 1.0
        share = torch.where(valid.any(), 1.0 / weight, 0.0)
        gap = mean - self.mean
        kept = (1.0 - share) * (self.variance + share * gap.square())
        return ReturnMoments(
            torch.where(valid.any(), weight, self.weight),
            self.mean + share * gap,
            kept + share * spread,
        )

    def scale(self) -> Float[Tensor, ""]:
        """Standard deviation of the returns; 1 before any were seen."""
        floor = SMALLEST_SCALE * (1.0 + self.mean.abs())
        return torch.where(self.weight > 0, self.variance.sqrt().maximum(floor), 1.0)

    def where(self, condition: Tensor, other: "ReturnMoments") -> "ReturnMoments":
        """These moments where `condition` holds, else the other ones."""
        return ReturnMoments(
            torch.where(condition, self.weight, other.weight),
            torch.where(condition, self.mean, other.mean),
            torch.where(condition, self.variance, other.variance),
        )


def rescale_head(
    head: nn.Linear,
    old: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
) -> None:
    """Change the units of a last layer without changing what it predicts."""
    (old_mean, old_scale), (new_mean, new_scale) = old, new
    with torch.no_grad():
        head.weight.mul_(old_scale / new_scale)
        head.bias.mul_(old_scale).add_(old_mean - new_mean).div_(new_scale)
