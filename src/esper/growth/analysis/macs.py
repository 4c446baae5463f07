"""Multiply-adds: counted in a forward pass, and of training by one rule for every arm.

A step costs three times its forward pass: forwards, and backwards to the weights and to
the activations. While seeds train, a shadow pass comes on top: forwards through the
network and the seeds, backwards through what lies behind them, and through them.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


class _NoModules(nullcontext[None]):
    """Counts no module by itself: that needs hooks on all that modules are given."""

    parents = ("Global",)

    def __exit__(self, *_: object) -> None:
        """Nothing; the counter gives no exception."""


def count_macs(run: Callable[[], object]) -> int:
    """Multiply-adds of the matrix products and convolutions of a call."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    # The counter knows the plain kernels of attention and of LSTMs, not the fused ones.
    with (
        warnings.catch_warnings(action="ignore"),
        torch.backends.mkldnn.flags(enabled=False),
        torch.backends.cudnn.flags(enabled=False),
        counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
    ):
        run()
    return int(counter.get_total_flops()) // 2


def step_macs(active: int, training: int = 0, behind: int = 0) -> int:
    """Multiply-adds per row of one training step.

    Args:
        active: Forward pass of the host with its active seeds.
        training: Forward pass of the seeds that train in the shadow.
        behind: Forward pass of all that lies behind the first of those.
    """
    shadow = active + training + 2 * training + behind if training else 0
    return 3 * active + shadow
