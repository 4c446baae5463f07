r"""AdamW on a stretch of a flat vector of weights, with a clock of its own.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    p <- p - r (w p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

A newborn seed's clock starts at 1, so it learns as it would in an optimiser of its own,
and a stretch that is not called does not move by a bit.
Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101.
"""

import math

from esper.kernels import fused_with

B1, B2, EPS = 0.9, 0.999, 1e-8
REST1, REST2 = 1 - B1, 1 - B2
"""Taken before rounding: 1 - 0.999 in float32 is wrong in the fifth digit."""

# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"


@fused_with(part=True)
def adamw(weights, gradients, means, squares, start, length, rate, clock, decay):
    """Move `length` weights from `start` on; this is their `clock`-th step."""
    real = weights.dtype.type
    scale1 = real(1 / (1 - B1**clock))
    scale2 = real(1 / math.sqrt(1 - B2**clock))
    far, shrink, eps = real(rate), real(rate * decay), real(EPS)
    w, g = weights[start : start + length], gradients[start : start + length]
    m, q = means[start : start + length], squares[start : start + length]
    for i in range(length):
        m[i] = real(B1) * m[i] + real(REST1) * g[i]
        q[i] = real(B2) * q[i] + real(REST2) * g[i] * g[i]
        w[i] -= shrink * w[i] + far * (m[i] * scale1 / (math.sqrt(q[i]) * scale2 + eps))
