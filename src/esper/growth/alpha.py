"""How alpha travels from one value to another.

`travel` is monotone for every curve, starts at the first value and arrives at the
second exactly. A curve is one line of `CURVES`, in the order of the `alpha_curve` head.
"""

from collections.abc import Callable
from math import pi
from typing import Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

STEEPNESS: Final = 6.0
"""The sigmoid runs over plus and minus this."""


def _sigmoid(share: Tensor) -> Tensor:
    low, high = (torch.sigmoid(share.new_tensor(end * STEEPNESS)) for end in (-1, 1))
    return (torch.sigmoid(STEEPNESS * (2 * share - 1)) - low) / (high - low)


CURVES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "LINEAR": lambda share: share,
    "COSINE": lambda share: (1 - torch.cos(pi * share)) / 2,
    "SIGMOID": _sigmoid,
}
"""Share of the way by share of the time."""


def travel(
    start: Float[Tensor, "env slot"],
    end: Float[Tensor, "env slot"],
    moved: Int64[Tensor, "env slot"],
    length: Int64[Tensor, "env slot"],
    curve: Int64[Tensor, "env slot"],
) -> Float[Tensor, "env slot"]:
    """Alpha after `moved` of `length` decisions."""
    share = (moved / length.clamp(min=1)).clamp(max=1.0).to(start.dtype)
    ways = torch.stack([way(share) for way in CURVES.values()])
    way = ways.gather(0, curve.unsqueeze(0)).squeeze(0)
    return torch.where(moved >= length, end, start + (end - start) * way)
