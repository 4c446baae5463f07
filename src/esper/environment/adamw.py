r"""AdamW for many networks at once, each part of each with its own clock.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    p <- p - r (w p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

A parameter of N networks is `[env, repeat, group, run]`: a group is the host, or one
slot of a place; its clock t and its rate r are `[env, group]`. A group that is not
active does not move by a bit, and a newborn's clock starts at 1, so it learns as it
would in an optimiser of its own. A group that trains in a shadow pass takes the
gradient of that pass. One compiled pass on the CPU, tensors elsewhere.
Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.scan import kernel

BETAS: Final = (0.9, 0.999)
RESTS: Final = (1 - BETAS[0], 1 - BETAS[1])
"""Taken before rounding: 1 - 0.999 in float32 is wrong in the fifth digit."""
EPS: Final = 1e-8


@dataclass(slots=True)
class Moments:
    """A parameter of many networks with what AdamW remembers of it."""

    value: Float[Tensor, "env repeat group run"]
    mean: Float[Tensor, "env repeat group run"] = field(init=False)
    square: Float[Tensor, "env repeat group run"] = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is remembered yet."""
        self.mean = torch.zeros_like(self.value)
        self.square = torch.zeros_like(self.value)

    def forget(self, env: int, group: int | None = None) -> None:
        """Start anew in one network, or in one group of it."""
        groups = slice(None) if group is None else group
        self.mean[env, :, groups] = 0.0
        self.square[env, :, groups] = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How far each group of each network goes in this step."""

    rate: Float[Tensor, "env group"]
    scale1: Float[Tensor, "env group"]
    """1 / (1 - b1^t)."""
    scale2: Float[Tensor, "env group"]
    """1 / sqrt(1 - b2^t)."""
    active: Bool[Tensor, "env group"]
    shadow: Bool[Tensor, "env group"]
    """Whether the group takes its gradient from the shadow pass."""

    @classmethod
    def of(
        cls,
        rate: Float[Tensor, "env group"],
        clock: Int64[Tensor, "env group"],
        active: Bool[Tensor, "env group"],
        shadow: Bool[Tensor, "env group"],
    ) -> "Pace":
        """The pace of a step that is the `clock`-th of its group."""
        time = clock.clamp(min=1).double()
        return cls(
            rate.contiguous(),
            (1 / (1 - BETAS[0] ** time)).to(rate.dtype),
            (1 - BETAS[1] ** time).rsqrt().to(rate.dtype),
            active.contiguous(),
            shadow.contiguous(),
        )


def step(
    moments: Moments,
    gradient: Float[Tensor, "..."],
    shadow: Float[Tensor, "..."],
    pace: Pace,
    decay: float,
) -> None:
    """Move one parameter of every network, in place.

    Args:
        moments: The parameter.
        gradient: Of the losses that the hosts feel.
        shadow: Of the shadow pass; the same tensor again if there was none.
        pace: Who moves how far.
        decay: Weight decay.
    """
    gradient = gradient.reshape(moments.value.shape)
    shadow = shadow.reshape(moments.value.shape)
    if moments.value.device.type != "cpu":
        _step_anywhere(moments, gradient, shadow, pace, decay)
        return
    kind = np.float64 if moments.value.dtype is torch.float64 else np.float32
    _step_compiled(
        *(
            tensor.detach().numpy()
            for tensor in (
                moments.value,
                gradient.contiguous(),
                shadow.contiguous(),
                moments.mean,
                moments.square,
                pace.rate,
                pace.scale1,
                pace.scale2,
                pace.active,
                pace.shadow,
            )
        ),
        *(kind(number) for number in (decay, *BETAS, *RESTS, EPS)),
    )


@kernel
def _step_compiled(
    value: Any,  # noqa: ANN401
    gradient: Any,  # noqa: ANN401
    beside: Any,  # noqa: ANN401
    mean: Any,  # noqa: ANN401
    square: Any,  # noqa: ANN401
    rate: Any,  # noqa: ANN401
    scale1: Any,  # noqa: ANN401
    scale2: Any,  # noqa: ANN401
    active: Any,  # noqa: ANN401
    shadow: Any,  # noqa: ANN401
    decay: Any,  # noqa: ANN401
    b1: Any,  # noqa: ANN401
    b2: Any,  # noqa: ANN401
    rest1: Any,  # noqa: ANN401
    rest2: Any,  # noqa: ANN401
    eps: Any,  # noqa: ANN401
) -> None:
    envs, repeats, groups, run = value.shape
    for env in range(envs):
        for group in range(groups):
            if not active[env, group]:
                continue
            r, s1, s2 = rate[env, group], scale1[env, group], scale2[env, group]
            for repeat in range(repeats):
                p, g = value[env, repeat, group], gradient[env, repeat, group]
                if shadow[env, group]:
                    g = beside[env, repeat, group]
                m, v = mean[env, repeat, group], square[env, repeat, group]
                for i in range(run):
                    m[i] = b1 * m[i] + rest1 * g[i]
                    v[i] = b2 * v[i] + rest2 * g[i] * g[i]
                    root = np.sqrt(v[i]) * s2 + eps
                    p[i] -= r * (decay * p[i] + m[i] * s1 / root)


def _step_anywhere(
    moments: Moments, gradient: Tensor, shadow: Tensor, pace: Pace, decay: float
) -> None:
    """The same, as tensors."""
    rate, scale1, scale2, active, beside = (
        factor[:, None, :, None]
        for factor in (pace.rate, pace.scale1, pace.scale2, pace.active, pace.shadow)
    )
    with torch.no_grad():
        gradient = torch.where(beside, shadow, gradient)
        mean = torch.lerp(moments.mean, gradient, RESTS[0])
        square = BETAS[1] * moments.square + RESTS[1] * gradient.square()
        root = square.sqrt() * scale2 + EPS
        move = rate * (decay * moments.value + mean * scale1 / root)
        moments.value.copy_(torch.where(active, moments.value - move, moments.value))
        moments.mean.copy_(torch.where(active, mean, moments.mean))
        moments.square.copy_(torch.where(active, square, moments.square))
