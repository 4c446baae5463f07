r"""One layer of minimal gated recurrent units on the CPU, its gradient by hand.

With z the gate, c the candidate and w = (z (2 - z))^½, along each row

    h_t = (1 - z_t) h_{t-1} + w_t c_t          the first term only within an episode
    G_t = dL/dy_t + (1 - z_{t+1}) G_{t+1}      backwards, likewise; y = x + h

    dL/dc = G w        dL/dz = G (c (1 - z) / w - h_{t-1})
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.kernels import fused

LEAST: Final = 1e-30
"""Below it z (2 - z) counts as this: it spares a shut gate the root's endless slope."""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


def gated(
    inputs: Float[Tensor, "env time width"],
    gates: Float[Tensor, "env time twice"],
    first: Bool[Tensor, "env time"],
    state: Float[Tensor, "env width"],
) -> tuple[Float[Tensor, "env time width"], Float[Tensor, "env width"]]:
    """The inputs with what is remembered added, and the state after the last step.

    Args:
        inputs: What the layer adds to.
        gates: Gates before the logistic function, then candidates.
        first: Where an episode begins; nothing of before passes, not even NaN.
        state: Before the first step.
    """
    return _apply(inputs, gates, first, state)


class _Gated(torch.autograd.Function):
    """The layer as one operation."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        inputs: Tensor,
        gates: Tensor,
        first: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run along the rows."""
        width = inputs.shape[2]
        inputs, gates, first = (
            inputs.contiguous(),
            gates.contiguous(),
            first.contiguous(),
        )
        update = torch.sigmoid(gates[..., :width]).contiguous()
        outputs, hidden = torch.empty_like(inputs), torch.empty_like(inputs)
        start = state.detach().contiguous()
        tensors = inputs, gates, update, first, start, outputs, hidden
        _forwards(*(tensor.numpy() for tensor in tensors))
        ctx.save_for_backward(gates, update, first, start, hidden)
        return outputs, hidden[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
        last: Tensor,
    ) -> tuple[Tensor, Tensor, None, Tensor]:
        """Run back along the rows."""
        gates = ctx.saved_tensors[0]
        back, total = torch.empty_like(gates), last.clone().contiguous()
        tensors = grad.contiguous(), total, *ctx.saved_tensors, back
        _backwards(*(tensor.numpy() for tensor in tensors))
        return grad, back, None, total


_apply: Final[Callable[..., tuple[Tensor, Tensor]]] = _Gated.apply


@fused
def _forwards(inputs, gates, update, first, start, outputs, hidden):
    real = inputs.dtype.type
    one, two, least, zero = real(1), real(2), real(LEAST), real(0)
    rows, time, width = inputs.shape
    for row in range(rows):
        before = start[row]
        for step in range(time):
            gate, candidate = update[row, step], gates[row, step, width:]
            own, out, given = hidden[row, step], outputs[row, step], inputs[row, step]
            fresh = first[row, step]
            for i in range(width):
                z = gate[i]
                kept = zero if fresh or z == one else (one - z) * before[i]
                size = z * (two - z)
                write = math.sqrt(least if size < least else size)
                own[i] = kept + write * candidate[i]
                out[i] = given[i] + own[i]
            before = own


@fused
def _backwards(grad, total, gates, update, first, start, hidden, back):
    """`total` comes as the gradient at the last state and becomes the first one's."""
    real = grad.dtype.type
    one, two, least, zero = real(1), real(2), real(LEAST), real(0)
    rows, time, width = grad.shape
    for row in range(rows):
        sums = total[row]
        for step in range(time - 1, -1, -1):
            gate, candidate = update[row, step], gates[row, step, width:]
            given, out = grad[row, step], back[row, step]
            before = hidden[row, step - 1] if step > 0 else start[row]
            fresh = first[row, step]
            for i in range(width):
                z, pull = gate[i], sums[i] + given[i]
                size = z * (two - z)
                write = math.sqrt(least if size < least else size)
                slope = zero if size < least else candidate[i] * (one - z) / write
                shut = fresh or z == one
                slope -= zero if shut else before[i]
                out[i] = pull * slope * (z * (one - z))
                out[width + i] = pull * write
                sums[i] = zero if shut else (one - z) * pull
