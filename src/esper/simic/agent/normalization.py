r"""Return statistics for value normalisation (PopArt), robust to outliers.

The critic predicts normalised returns; `policy.value_mean` and `policy.value_scale`
turn them back. When the statistics move, the last layer is rescaled so that every
prediction stays where it was (van Hasselt et al. 2016,
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
LIMIT: Final = 10.0
"""Deviations from the median at which a return is clipped in the statistics."""
FIRST_LIMIT: Final = 100.0
"""The same without a history, when sparse returns cannot be told from outliers."""
MAD_TO_DEVIATION: Final = 1.4826  # of a normal distribution


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
        valid = valid & returns.isfinite()
        returns = self._clip_outliers(returns, valid)
        count = valid.sum().clamp(min=1)
        mean = torch.where(valid, returns, 0.0).sum() / count
        spread = torch.where(valid, returns - mean, 0.0).square().sum() / count
        weight = fading * self.weight + 1.0
        share = 1.0 / weight
        gap = mean - self.mean
        kept = (1.0 - share) * (self.variance + share * gap.square())
        new = ReturnMoments(weight, self.mean + share * gap, kept + share * spread)
        usable = valid.any() & new.mean.isfinite() & new.variance.isfinite()
        return new.where(usable, self)

    def _clip_outliers(
        self, returns: Float[Tensor, "env time"], valid: Bool[Tensor, "env time"]
    ) -> Float[Tensor, "env time"]:
        """Returns within some deviations of their median.

        One absurd reward reaches the returns of every step before it, and its square
        would rule the variance for a hundred updates. The deviation is that of all
        returns so far or, if larger, the robust one of this rollout: so an outlier
        counts as a large return and nothing more, while returns that grow as a whole
        are followed at once. If both are 0 nothing is known, and nothing is clipped.
        """
        known = self.weight > 0
        median = torch.where(valid, returns, torch.nan).nanmedian()
        distance = torch.where(valid, (returns - median).abs(), torch.nan).nanmedian()
        limit = torch.where(known, LIMIT, FIRST_LIMIT)
        deviation = (MAD_TO_DEVIATION * distance).maximum(self.variance.sqrt())
        reach = torch.where(deviation > 0, limit * deviation, torch.inf)
        return returns.clamp(median - reach, median + reach)

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
