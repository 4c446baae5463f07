"""Running statistics that normalise the numbers of observations."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from esper.contracts.state import Stateful
from esper.rl.spaces import SpaceSpec

Array = NDArray[Any]
CLIP: Final = 10.0
"""Deviations from the mean at which a normalised number is cut."""


class ObservationMoments(Stateful):
    """Running mean and variance of the columns of a vector, in float64.

    Args:
        spec: Whose vector it is; columns that are not numbers stay as they are.
    """

    STATE = ("count", "mean", "square")
    DERIVED = ("_shift", "_scale", "_waiting")

    def __init__(self, spec: SpaceSpec) -> None:
        self._columns = spec.normalised
        self.count = 0.0
        self.mean = np.zeros(len(self._columns))
        self.square = np.zeros(len(self._columns))
        """Sum of squared distances from the mean."""
        self._waiting: list[Array] = []
        self.loaded()

    def add(self, rows: Array) -> None:
        """Count some rows: at once while few were seen, else in `settle`."""
        self._waiting.append(rows)
        if len(self._waiting) * len(rows) > self.count:
            self.settle()

    def settle(self) -> None:
        """Take rows that wait into the statistics (Chan et al. 1983)."""
        if not self._waiting:
            return
        rows = np.concatenate(self._waiting)
        self._waiting = []
        count = len(rows)
        if not count:
            return
        mean = rows.mean(axis=0, dtype=np.float64)
        square = np.square(rows - mean).sum(axis=0)
        total = self.count + count
        gap = mean - self.mean
        self.square = self.square + square + gap * gap * (self.count * count / total)
        self.mean = self.mean + gap * (count / total)
        self.count = total
        self.loaded()

    def loaded(self) -> None:
        """Renew shift and scale."""
        deviation = np.sqrt(self.square / max(self.count, 1.0))
        known = self._columns & (deviation > 1e-8)
        self._shift = np.where(self._columns, self.mean, 0.0).astype(np.float32)
        self._scale = np.where(known, 1.0 / np.where(known, deviation, 1.0), 1.0)
        self._scale = self._scale.astype(np.float32)

    def shift_and_scale(self) -> tuple[Array, Array]:
        """What is taken from each column, and what it is multiplied by."""
        return self._shift, self._scale

    def normalize(self, rows: Array) -> Array:
        """Distances from the mean in deviations, at most `CLIP` of them."""
        centred = (rows - self._shift) * self._scale
        return np.clip(centred, -CLIP, CLIP, out=centred)
