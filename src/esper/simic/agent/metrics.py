"""What one update did: built on the device, read once, returned as a record.

Each optimiser step leaves one row of numbers. Means are over the steps that were
taken, never over those that were planned; a mean over nothing is NaN, not 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

SCALARS: Final = (
    "policy_loss",
    "value_loss",
    "clip_fraction",
    "clamped",
    "grad_norm",
)
PER_HEAD: Final = ("kl", "entropy", "openness", "grad_norm")
FLAGS: Final = ("taken", "stopped", "finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """One minibatch's objective and what to report of it, all on the device."""

    loss: Float[Tensor, ""]
    policy_loss: Float[Tensor, ""]
    value_loss: Float[Tensor, ""]
    clip_fraction: Float[Tensor, ""]
    clamped: Float[Tensor, ""]
    """Steps whose log-ratio was clamped to keep its exponential finite."""
    kl: Float[Tensor, " head"]
    """Each head's share of KL(old || new); the sum estimates the joint KL."""
    entropy: Float[Tensor, " head"]
    """Mean entropy of each head where open, from 0 (certain) to 1 (uniform)."""
    openness: Float[Tensor, " head"]
    """Share of valid steps on which each head had a choice."""


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """One head in one update."""

    kl: float
    """Its share of KL(old || new)."""
    entropy: float
    """Mean entropy where it had a choice, from 0 (certain) to 1 (uniform)."""
    openness: float
    """Share of steps on which it mattered and had a choice."""
    grad_norm: float
    """Length of the loss gradient at its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One update, in numbers."""

    policy_loss: float
    value_loss: float
    clip_fraction: float
    """Share of steps whose joint ratio left the clip range."""
    clamped: float
    """Steps per minibatch whose log-ratio had to be clamped; 0 in health."""
    grad_norm: float
    """Gradient norm before clipping."""
    kl: float
    """KL(old || new), mean over the steps taken."""
    last_kl: float
    """KL(old || new) at the minibatch that stopped the update, else at the last one."""
    explained_variance: float
    """How much of the returns' variance the values at collection explain; 1 is all."""
    steps_planned: int
    """Optimiser steps that the configuration asks for."""
    steps_taken: int
    """Optimiser steps that changed the weights."""
    stopped_at: int | None
    """The step at which KL passed its target; None if it never did."""
    refused: int
    """Steps refused because loss or gradient was not finite."""
    heads: Mapping[str, HeadRecord]
    """The same, head by head."""


def step_row(
    terms: Terms,
    grad_norm: Float[Tensor, ""],
    head_grad_norms: Float[Tensor, " head"],
    flags: tuple[Tensor, Tensor, Tensor],
) -> Float[Tensor, " metric"]:
    """One optimiser step as numbers, in the order of the tables above."""
    scalars = [getattr(terms, name) for name in SCALARS[:-1]]
    kind = terms.loss.dtype
    return torch.cat(
        (
            torch.stack([*scalars, grad_norm]),
            terms.kl,
            terms.entropy,
            terms.openness,
            head_grad_norms,
            torch.stack([flag.to(kind) for flag in flags]),
        )
    ).detach()


def read_record(
    rows: list[Float[Tensor, " metric"]],
    explained_variance: Float[Tensor, ""],
    steps_planned: int,
    head_names: Sequence[str],
) -> UpdateRecord:
    """Read everything from the device in one copy and name it."""
    flat = torch.cat([*rows, explained_variance.detach().reshape(1)])
    host = flat.to("cpu", copy=True).numpy()  # the one read of an update
    table, explained = host[:-1].reshape(len(rows), -1), float(host[-1])
    taken, stopped, finite = table[:, -len(FLAGS) :].T > 0
    by_head = table[:, len(SCALARS) : -len(FLAGS)].reshape(
        len(rows), len(PER_HEAD), len(head_names)
    )
    scalars, heads = _mean(table[taken, : len(SCALARS)]), _mean(by_head[taken])
    # A minibatch in which a head was never open says nothing of its entropy.
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
    """Mean over the first axis; NaN, without a warning, over nothing."""
    if not len(steps):
        return np.full(steps.shape[1:], np.nan, dtype=np.float32)
    means: NDArray[np.float32] = steps.mean(axis=0)
    return means
