r"""When decisions come, and at which moments an episode is scored.

Time is compute: its unit is one training minibatch of the task's starting host. With
the clock `compute`, decision k comes at

    0 for k = 0,    first * ratio^(k - 1) after it,

so decisions are dense at the beginning and evenly spaced on a log scale; a network of
twice the multiply-adds takes half as many batches between two of them. With the clock
`batches` a batch takes one unit whatever the network, and decisions are equally far
apart.

An episode is scored at its *stops*. Where the end is known there is one, at the end,
and the learning rate rises and falls towards it. Where it is not, stops lie a factor of
two apart, as many as `STOPS`, the learning rate falls with the compute so far, and
nothing depends on the end.
"""

from dataclasses import dataclass
from math import isfinite, log
from typing import Final, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from esper.contracts.errors import InvalidInputError

ClockKind = Literal["compute", "batches"]
CLOCKS: Final = get_args(ClockKind)
Stop = Literal["end", "anytime"]
ENDS: Final = get_args(Stop)
STOPS: Final = 7
"""Stops of an episode whose end is not known: at C, C/2, ... C/64."""
BACKWARD: Final = 2
"""Multiply-adds of a backward pass, as a multiple of the forward pass."""
WARMUP: Final = 0.1
"""Share of an episode over which the learning rate rises, if its end is known."""
FLOOR: Final = 0.02
"""Share of the learning rate that is left at a known end."""
FALL: Final = 0.3
"""Power of compute with which the learning rate falls where the end is not known ..."""
LEVEL: Final = 16.0
"""... after about so many batches of the starting host."""
SLACK: Final = 1e-9
"""Share of a batch by which an interval may fall short of it."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The moments of an episode.

    Args:
        kind: `compute` or `batches`.
        horizon: Decisions of an episode.
        first: Time of the second decision.
        ratio: Time of each decision after it against the one before (`compute`).
        stop: `end` or `anytime`.
    """

    kind: ClockKind
    horizon: int
    first: float
    ratio: float = 2 ** (1 / 3)
    stop: Stop = "end"

    def __post_init__(self) -> None:
        """Refuse moments at which nothing can happen."""
        for name, value, known in (
            ("clock", self.kind, CLOCKS),
            ("stop", self.stop, ENDS),
        ):
            if value not in known:
                raise InvalidInputError(
                    f"{name} must be one of {', '.join(known)}, got {value!r}."
                )
        if not (isfinite(self.first) and self.first >= 1):
            raise InvalidInputError(
                f"the first interval must be at least one batch of the starting host, "
                f"got {self.first}; give first = 1 or more."
            )
        if self.kind == "compute" and not (isfinite(self.ratio) and self.ratio > 1):
            raise InvalidInputError(
                f"ratio must be more than 1, so that moments follow each other, got "
                f"{self.ratio}."
            )

    def times(self) -> Float[Tensor, " decision"]:
        """The moments of all decisions and of the end, in float64."""
        count = torch.arange(self.horizon, dtype=torch.float64)
        if self.kind == "batches":
            after = self.first * (count + 1)
        else:
            after = self.first * self.ratio**count
        return torch.cat((torch.zeros(1, dtype=torch.float64), after))

    def decisions_within(self, compute: float) -> int:
        """The horizon of an episode of so much compute (`compute`); at least 1."""
        return 1 + int(log(max(compute / self.first, 1)) / log(self.ratio) + SLACK)

    def weights(self) -> Float[Tensor, " decision"]:
        """What the state at each moment weighs in the score; they sum to 1."""
        return stop_weights(self.times(), self.stop)

    def rate(self, moment: Float[Tensor, "env step"]) -> Float[Tensor, "env step"]:
        """Share of the learning rate that is due at a moment."""
        if self.stop == "anytime":
            return (1 + moment / LEVEL) ** -FALL
        share = moment / self.times()[-1]
        rise = (share / WARMUP).clamp(max=1.0)
        passed = ((share - WARMUP) / (1 - WARMUP)).clamp(0, 1)
        fall = (1 + torch.cos(torch.pi * passed)) / 2
        return FLOOR + (1 - FLOOR) * torch.minimum(rise, fall)


def stop_weights(
    times: Float[Tensor, " decision"], stop: str
) -> Float[Tensor, " decision"]:
    """What the state at each moment weighs in the score of an episode that has them."""
    weights = torch.zeros_like(times)
    if stop == "end":
        weights[-1] = 1.0
        return weights
    wanted = times[-1] * 0.5 ** torch.arange(STOPS, dtype=torch.float64)
    # The first moment that is not before the stop, whatever powers round to.
    nearest = torch.searchsorted(times, wanted * (1 - SLACK))
    at = nearest[wanted >= times[1] * (1 - SLACK)]
    return weights.index_put_((at,), torch.ones(()).double() / len(at), True)
