r"""Times of decisions and of scoring.

The unit of time is one training minibatch of the initial host. With the clock
`compute`, decision 0 is at time 0 and decision k at first * ratio^(k - 1); a network
with twice the multiply-adds trains half as many batches between decisions. With the
clock `batches`, every batch takes one unit and decisions are equally spaced.

An episode is scored at its *stops*. `end` has one stop, at the end, and a learning rate
schedule towards it. `anytime` has `STOPS` stops, a factor of two apart; the learning
rate falls with compute and nothing depends on the end.
"""

from dataclasses import dataclass
from math import log
from typing import Final, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from esper.contracts.checks import require_number, require_one_of
from esper.contracts.errors import InvalidInputError

ClockKind = Literal["compute", "batches"]
CLOCKS: Final = get_args(ClockKind)
Stop = Literal["end", "anytime"]
ENDS: Final = get_args(Stop)
STOPS: Final = 7
"""Number of stops of `anytime`: at C, C/2, ... C/64."""
BACKWARD: Final = 2
"""Multiply-adds of a backward pass, as a multiple of the forward pass."""
WARMUP: Final = 0.1
"""Fraction of an episode with a rising learning rate (`end`)."""
FLOOR: Final = 0.02
"""Final fraction of the learning rate (`end`)."""
FALL: Final = 0.3
"""Exponent of the decay of the learning rate (`anytime`)."""
LEVEL: Final = 16.0
"""Compute after which that decay sets in, in batches of the initial host."""
LONGEST: Final = 1e30
"""Maximum of an interval or ratio."""
TIME_TOLERANCE: Final = 1e-9
"""Relative tolerance of times, against rounding."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of decisions and stops of an episode."""

    kind: ClockKind
    horizon: int
    """Number of decisions."""
    first: float
    """Time of the second decision."""
    ratio: float = 2 ** (1 / 3)
    """Ratio of the times of consecutive later decisions (`compute`)."""
    stop: Stop = "end"

    def __post_init__(self) -> None:
        """Check the kind, the first interval and the ratio."""
        require_one_of("clock", self.kind, CLOCKS)
        require_one_of("stop", self.stop, ENDS)
        require_number("first", self.first, 1.0, LONGEST)
        if self.kind == "compute" and not 1 < self.ratio <= LONGEST:
            raise InvalidInputError(f"ratio must be more than 1, got {self.ratio}.")

    def times(self) -> Float[Tensor, " decision"]:
        """Return the times of all decisions and of the end, in float64."""
        count = torch.arange(self.horizon, dtype=torch.float64)
        if self.kind == "batches":
            after = self.first * (count + 1)
        else:
            after = self.first * self.ratio**count
        return torch.cat((torch.zeros(1, dtype=torch.float64), after))

    def decisions_within(self, compute: float) -> int:
        """Return the number of decisions within this compute, at least 1."""
        return 1 + int(
            log(max(compute / self.first, 1)) / log(self.ratio) + TIME_TOLERANCE
        )

    def weights(self) -> Float[Tensor, " decision"]:
        """Return the weight of each decision in the score; weights sum to 1."""
        return stop_weights(self.times(), self.stop)

    def rate(self, time: Float[Tensor, "env step"]) -> Float[Tensor, "env step"]:
        """Return the learning rate at these times, as a fraction of its maximum."""
        if self.stop == "anytime":
            return (1 + time / LEVEL) ** -FALL
        share = time / self.times()[-1]
        rise = (share / WARMUP).clamp(max=1.0)
        passed = ((share - WARMUP) / (1 - WARMUP)).clamp(0, 1)
        fall = (1 + torch.cos(torch.pi * passed)) / 2
        return FLOOR + (1 - FLOOR) * torch.minimum(rise, fall)


def stop_weights(
    times: Float[Tensor, " decision"], stop: str
) -> Float[Tensor, " decision"]:
    """Return the weight of each time in the score of an episode."""
    weights = torch.zeros_like(times)
    if stop == "end":
        weights[-1] = 1.0
        return weights
    wanted = times[-1] * 0.5 ** torch.arange(STOPS, dtype=torch.float64)
    # The first decision at or after each stop, up to rounding.
    nearest = torch.searchsorted(times, wanted * (1 - TIME_TOLERANCE))
    at = nearest[wanted >= times[1] * (1 - TIME_TOLERANCE)]
    return weights.index_put_((at,), torch.ones(()).double() / len(at), True)
