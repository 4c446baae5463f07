"""Diagnostics of one update: collected on the device and read from it once.

Each optimiser step gives one row of numbers. Means are over the steps that were taken;
the mean over no step is NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

SCALARS: Final = ("policy_loss", "value_loss", "clip_fraction", "clamped", "grad_norm")
PER_HEAD: Final = ("kl", "entropy", "openness", "grad_norm")
SHARED_TERMS: Final = ("gain", "value_error", "clipped", "clamped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostics:
    """Sums of the terms of minibatches, and what they say.

    Terms are `SHARED_TERMS`, then for each head the KL, the entropy, and the mean
    log-probability of its legal choices.
    """

    sums: Any
    """Sum of each term `[..., term]` over the steps that it counts."""
    counts: Any
    """Number of these steps: those with a choice, for terms of a head."""

    @property
    def policy_loss(self) -> Any:
        """Mean clipped objective, negated."""
        return -self._mean(0)

    @property
    def value_loss(self) -> Any:
        """Mean value error."""
        return self._mean(1)

    @property
    def clip_fraction(self) -> Any:
        """Fraction of steps whose joint ratio left the clip range."""
        return self._mean(2)

    @property
    def clamped(self) -> Any:
        """Number of steps whose log-ratio was clamped."""
        return self.sums[..., 3]

    @property
    def total_kl(self) -> Any:
        """KL(old || new) of all heads, summed over steps."""
        return self.sums[..., self._heads(0)].sum(-1)

    @property
    def kl(self) -> Any:
        """KL(old || new) of each head; the sum estimates the joint KL."""
        return self.sums[..., self._heads(0)] / self._steps()[..., None]

    @property
    def entropy(self) -> Any:
        """Mean normalised entropy of each head where open; of numbers in bits."""
        heads = self._heads(1)
        return self.sums[..., heads] / self.counts[..., heads].clip(min=1)

    @property
    def openness(self) -> Any:
        """Fraction of valid steps on which each head had more than one choice."""
        return self.counts[..., self._heads(1)] / self._steps()[..., None]

    def _mean(self, term: int) -> Any:
        return self.sums[..., term] / self._steps()

    def _steps(self) -> Any:
        return self.counts[..., 0].clip(min=1)

    def _heads(self, block: int) -> slice:
        """Where a term of all heads is."""
        shared = len(SHARED_TERMS)
        heads = (self.sums.shape[-1] - shared) // 3
        return slice(shared + block * heads, shared + (block + 1) * heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms(Diagnostics):
    """Loss and diagnostics of one minibatch, on the device."""

    loss: Float[Tensor, ""]


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """Diagnostics of one head in one update."""

    kl: float
    """KL(old || new) of this head."""
    entropy: float
    """Mean normalised entropy where open: 0 (certain) to 1 (uniform); of a number in
    bits."""
    openness: float
    """Fraction of steps on which it had more than one choice."""
    grad_norm: float
    """Norm of the loss gradient at its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """Diagnostics of one update."""

    policy_loss: float
    value_loss: float
    clip_fraction: float
    """Fraction of steps whose joint ratio left the clip range."""
    clamped: float
    """Steps per minibatch whose log-ratio was clamped; normally 0."""
    grad_norm: float
    """Gradient norm before clipping."""
    kl: float
    """KL(old || new), mean over the steps taken."""
    last_kl: float
    """KL(old || new) at the minibatch that stopped the update, else at the last one."""
    explained_variance: float
    """Fraction of the variance of the returns that the values explain."""
    steps_planned: int
    """Number of optimiser steps in the configuration."""
    steps_taken: int
    """Number of optimiser steps that changed the weights."""
    stopped_at: int | None
    """The step at which KL exceeded its target; None if it did not."""
    refused: int
    """Number of steps skipped because loss or gradient was not finite."""
    heads: Mapping[str, HeadRecord]
    """Diagnostics of each head."""


def step_row(
    terms: Terms,
    grad_norm: Float[Tensor, ""],
    head_grad_norms: Float[Tensor, " head"],
    flags: tuple[Tensor, Tensor, Tensor],
) -> Float[Tensor, " metric"]:
    """Return the numbers of one optimiser step that `read_record` needs."""
    ends = grad_norm.reshape(1), torch.stack(flags)
    return torch.cat((terms.sums, terms.counts, head_grad_norms, *ends))


def read_record(
    rows: list[Float[Tensor, " metric"]],
    explained_variance: Float[Tensor, ""],
    steps_planned: int,
    head_names: Sequence[str],
) -> UpdateRecord:
    """Read all metrics from the device in one copy."""
    flat = torch.cat([*rows, explained_variance.detach().reshape(1)])
    host = flat.to("cpu", copy=True).numpy()  # the one read of an update
    table, explained = host[:-1].reshape(len(rows), -1), float(host[-1])
    terms = len(SHARED_TERMS) + 3 * len(head_names)
    widths = np.cumsum((terms, terms, len(head_names), 1))
    sums, counts, lengths, norm, flags = np.split(table, widths, axis=1)
    taken, stopped, finite = flags.T > 0
    found = Diagnostics(sums=sums, counts=counts)
    shared = [getattr(found, name) for name in SCALARS[:-1]]
    per_head = [getattr(found, name) for name in PER_HEAD[:-1]]
    table = np.stack((*shared, norm[:, 0]), axis=1)
    by_head = np.stack((*per_head, lengths), axis=1)
    scalars, heads = _mean(table[taken]), _mean(by_head[taken])
    # Weight a head's entropy by how often the head was open in each minibatch.
    entropies, openness = by_head[taken, 1], by_head[taken, 2]
    opened = openness.sum(axis=0)
    weighted = (entropies * openness).sum(axis=0) / np.where(opened > 0, opened, 1.0)
    heads[1] = np.where(opened > 0, weighted, heads[1])
    stopped_at = int(stopped.argmax()) if stopped.any() else None
    last = len(rows) - 1 if stopped_at is None else stopped_at
    return UpdateRecord(
        **dict(zip(SCALARS, scalars.tolist(), strict=True)),
        kl=float(heads[0].sum()),
        last_kl=float(by_head[last, 0].sum()),
        explained_variance=explained,
        steps_planned=steps_planned,
        steps_taken=int(taken.sum()),
        stopped_at=stopped_at,
        refused=int((~finite & ~stopped).sum()),
        heads={
            name: HeadRecord(*heads[:, index].tolist())
            for index, name in enumerate(head_names)
        },
    )


def _mean(steps: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean over the first axis; NaN, without a warning, if it is empty."""
    if not len(steps):
        return np.full(steps.shape[1:], np.nan, dtype=np.float32)
    means: NDArray[np.float32] = steps.mean(axis=0)
    return means
