"""Multiply-adds of a forward pass, and a rule for those of a training step.

A training step costs three forward passes: one forward, one backward to the weights and
one backward to the activations. While seeds train, a shadow pass is added: forward
through network and seeds, backward through the seeds and the layers after them.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


class _NoModules(nullcontext[None]):
    """Replaces the counter's module tracker, which would hook every module."""

    parents = ("Global",)


def count_macs(run: Callable[[], object]) -> int:
    """Multiply-adds of the matrix products and convolutions in a call."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    # The counter does not support fused kernels of attention and LSTMs.
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
        training: Forward pass of the seeds in shadow training.
        behind: Forward pass of all layers after the first of those seeds.
    """
    shadow = active + training + 2 * training + behind if training else 0
    return 3 * active + shadow
