"""The learning curve of an agent: a few figures of its updates, saved with it.

Memory is limited: a full curve drops every second point, and later ones are as far
apart. A return is the mean over the episodes that ended since the point before. The
last update is always in it.
"""

from collections.abc import Sequence
from math import nan
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import InvalidInputError
from esper.contracts.state import Stateful
from esper.simic.agent.metrics import UpdateRecord

Columns = dict[str, NDArray[np.float64]]

SIZE: Final = 256
"""Maximum number of points."""
FIGURES: Final = ("env_steps", "return", "kl", "clip_fraction", "explained_variance")
"""Columns of a curve, before the entropy of each head; NaN is not measured."""


class LearningCurve(Stateful):
    """Return, KL, clip fraction, explained variance and entropies of updates.

    Args:
        heads: Names of the policy's heads.
    """

    STATE = ("points", "length", "count", "stride", "episodes", "total")

    def __init__(self, heads: Sequence[str]) -> None:
        self._heads = [*heads]
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        shape = SIZE, len(FIGURES) + len(self._heads)
        self.points = torch.zeros(shape, dtype=torch.float64)
        self.length = 0
        """Number of points that stay; the last update comes after them."""
        self.count = 0
        """Updates so far."""
        self.stride = 1
        """Updates from one point to the next."""
        self.episodes, self.total = 0, 0.0
        """Episodes since the last point that stays, and the sum of their returns."""

    def add(self, env_steps: int, returns: Tensor, update: UpdateRecord) -> None:
        """Add an update and the returns of the episodes that ended before it."""
        self.episodes += len(returns)
        self.total += float(returns.double().sum())
        mean = self.total / self.episodes if self.episodes else nan
        heads = [update.heads[name] for name in self._heads]
        entropies = [head.entropy if head.openness > 0 else nan for head in heads]
        health = update.kl, update.clip_fraction, update.explained_variance
        row = env_steps, mean, *health, *entropies
        self.points[self.length] = torch.tensor(row, dtype=torch.float64)
        self.count += 1
        if self.count % self.stride:
            return
        self.length += 1
        self.episodes, self.total = 0, 0.0
        if self.length == SIZE:
            early, late = self.points[::2], self.points[1::2]
            merged = torch.where(late.isnan(), early, late)
            self.points = torch.cat([merged, torch.zeros_like(merged)])
            self.length, self.stride = SIZE // 2, 2 * self.stride

    def columns(self) -> tuple[Columns, Columns]:
        """Figures by name, and entropies by head; infinities are NaN."""
        used = self.length + (self.count % self.stride != 0)
        table = self.points[:used].numpy()
        table = np.where(np.isfinite(table), table, nan).T
        names = len(FIGURES)
        return (
            dict(zip(FIGURES, table[:names], strict=True)),
            dict(zip(self._heads, table[names:], strict=True)),
        )

    def loaded(self) -> None:
        """Refuse numbers that no curve has."""
        if not (0 <= self.length < SIZE and self.stride > 0 <= self.episodes):
            raise InvalidInputError("the learning curve of this agent is damaged.")
