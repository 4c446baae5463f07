"""What every place of every host promises: `growth.promise` with a leading env axis.

Fitted on every other row and judged on the rest, in float64; one batched factorisation
per place. Rows are plain vectors here, so there is nothing to unfold.
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from esper.growth.promise import RIDGE

TINY: Final = 1e-30


def gains(
    given: Float[Tensor, "env row feature"],
    wishes: Float[Tensor, "env row wish"],
    sizes: Sequence[int],
) -> Float[Tensor, "env size"]:
    """Drop of the loss per change of the outlet along the best map of each rank."""
    given, wishes = given.double(), wishes.double()
    scale = given.square().mean(dim=(1, 2), keepdim=True).sqrt().clamp(min=TINY)
    features = torch.cat([given / scale, torch.ones_like(given[..., :1])], dim=2)
    fitted, judged = features[:, 0::2], features[:, 1::2]
    rows, width = fitted.shape[1:]
    ridge = RIDGE * fitted.square().sum(dim=(1, 2)) / (rows * width)
    square = fitted.mT @ fitted / rows
    square.diagonal(dim1=1, dim2=2).add_(ridge.unsqueeze(1))
    lower = torch.linalg.cholesky(square)
    product = fitted.mT @ wishes[:, 0::2] / rows
    white = torch.linalg.solve_triangular(lower, product, upper=False)
    left, values, right = torch.linalg.svd(white, full_matrices=False)
    incoming = torch.linalg.solve_triangular(lower.mT, left, upper=True)
    units = judged @ incoming * values.unsqueeze(1)  # [env, row, direction]
    felt = wishes[:, 1::2] @ right.mT
    drop = (units * felt).mean(dim=1).cumsum(dim=1)
    change = units.square().mean(dim=1).cumsum(dim=1).sqrt()
    gained = torch.where(change > 0, drop / change.clamp(min=TINY), 0.0).clamp(min=0.0)
    gained = gained.cummax(dim=1).values
    last = gained.shape[1] - 1
    return gained[:, [min(size - 1, last) for size in sizes]]


def promises(
    given: Float[Tensor, "env row feature"],
    answer: Float[Tensor, "env row wish"],
    gradient: Float[Tensor, "env row wish"],
    loss: Float[Tensor, " env"],
    sizes: Sequence[int],
) -> Float[Tensor, "env size"]:
    """Relative drop of the loss per relative change of the outlet, in [0, 1].

    NaN where the numbers of a host are not finite: one such host would make the
    factorisation of all of them fail.

    Args:
        given: What the place's inlet was given.
        answer: What its outlet said.
        gradient: Of the mean loss of each host with respect to the answer.
        loss: Mean loss of each host.
        sizes: Ranks asked for.
    """
    rows = given.shape[1]
    sound = (given.isfinite().all(dim=2) & gradient.isfinite().all(dim=2)).all(dim=1)
    given, gradient = (
        torch.where(sound[:, None, None], part, 0.0) for part in (given, gradient)
    )
    found = gains(given, -rows * gradient, sizes)
    found = torch.where(sound[:, None], found, torch.nan)
    size = answer.double().square().mean(dim=(1, 2)).sqrt()
    wide = float(answer.shape[2]) ** 0.5  # rms over rows of the whole vector
    relative = found * (size * wide / loss.double().clamp(min=TINY)).unsqueeze(1)
    bounded: Tensor = relative.clamp(0.0, 1.0).float()
    return bounded
