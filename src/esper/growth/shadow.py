"""Training seeds beside a host that does not feel them.

A shadow pass calls the same loss once more with the training seeds at alpha 1. The
host is frozen for that pass, works on copies of its buffers, and torch's random state
is given back, so a host with a training seed equals the host without it to the bit.
The seeds' gradients are exact; they wait inside the loss that is returned and reach
the seeds when the user walks it backwards, scaled as the user scales it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.calls import kept_randomness, swapped_buffers
from esper.growth.junction import Flow


def shadow_gradients(
    closure: Callable[[], Tensor],
    flow: Flow,
    host: nn.Module,
    frozen: nn.Module,
    learning: Sequence[nn.Parameter],
    seeds: Iterable[nn.Module] = (),
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss with the training seeds at alpha 1, and its gradients to them.

    Args:
        closure: Computes the loss of the present batch.
        flow: How the host's places treat their seeds.
        host: Whose random state is kept.
        frozen: Everything whose buffers must not change.
        learning: The parameters of the training seeds.
        seeds: The training seeds; their norms follow the data while they train.
    """
    mine = {id(p) for p in learning}
    others = [p for p in frozen.parameters() if p.requires_grad and id(p) not in mine]
    flow.shadow = True
    try:
        with (
            swapped_buffers(frozen, but=seeds),
            kept_randomness(host),
            _without_gradients(others),
            torch.enable_grad(),
        ):
            loss = closure()
            found: Sequence[Tensor | None] = [None] * len(learning)
            if loss.requires_grad:  # not if the host left the seeds' places out
                found = torch.autograd.grad(loss, [*learning], allow_unused=True)
    finally:
        flow.shadow = False
    gradients = tuple(
        torch.zeros_like(p) if g is None else g
        for p, g in zip(learning, found, strict=True)
    )
    return loss.detach(), gradients


def carry(
    loss: Tensor, learning: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> Tensor:
    """The same loss, which also brings the gradients to the seeds when walked back."""
    carried: Tensor = _Carry.apply(  # type: ignore[no-untyped-call]
        loss, len(learning), *learning, *gradients
    )
    return carried


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class _Carry(torch.autograd.Function):
    """The identity for a loss, with gradients for others in its baggage."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *rest: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(*rest[count:])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (grad,) = grads
        own = [(grad * g).to(g.dtype) for g in ctx.saved_tensors]
        return grad, None, *own, *(None for _ in own)
