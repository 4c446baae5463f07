"""Converts observations to the features of a policy: split, checked and normalised.

NaN and infinity raise an error, since one such number would spoil all weights.
"""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import NotFiniteError
from esper.contracts.state import Stateful
from esper.rl.spaces import SpaceSpec

Array = NDArray[Any]
CLIP: Final = 10.0
"""Normalised numbers are clipped to this many standard deviations."""


class ObservationMoments(Stateful):
    """Running mean and variance of the vector in float64; normalises Box columns."""

    STATE = ("count", "mean", "square")
    DERIVED = ("shift", "scale", "_pending")

    def __init__(self, spec: SpaceSpec) -> None:
        self._columns = spec.normalised
        self.count = 0.0
        self.mean = np.zeros(len(self._columns))
        self.square = np.zeros(len(self._columns))
        """Sum of squared distances from the mean."""
        self._pending: list[Array] = []
        self.loaded()

    def add(self, rows: Array) -> None:
        """Add rows: at once while there are few, otherwise in `settle`."""
        self._pending.append(rows)
        if len(self._pending) * len(rows) > self.count:
            self.settle()

    def settle(self) -> None:
        """Add pending rows to the statistics (Chan et al. 1983)."""
        pending, self._pending = self._pending, []
        count = sum(map(len, pending))
        if not count:
            return
        rows = np.concatenate(pending)
        mean = rows.mean(axis=0, dtype=np.float64)
        square = np.square(rows - mean).sum(axis=0)
        total = self.count + count
        gap = mean - self.mean
        self.square = self.square + square + gap * gap * (self.count * count / total)
        self.mean = self.mean + gap * (count / total)
        self.count = total
        self.loaded()

    def loaded(self) -> None:
        """Update shift and scale."""
        deviation = np.sqrt(self.square / max(self.count, 1.0))
        varies = self._columns & (deviation > 1e-8)
        shift, scale = np.where(self._columns, self.mean, 0.0), np.ones_like(deviation)
        np.divide(1.0, deviation, out=scale, where=varies)
        self.shift: Array = shift.astype(np.float32)
        self.scale: Array = scale.astype(np.float32)

    def normalize(self, rows: Array) -> Array:
        """Rows in standard deviations from the mean, clipped to `CLIP`."""
        centred = (rows - self.shift) * self.scale
        return np.clip(centred, -CLIP, CLIP, out=centred)


class ObservationReader(Stateful):
    """Converts observations to features, with running statistics.

    `normalize` applies to numbers; the policy scales images.
    """

    STATE = ("moments",)
    DERIVED = ("largest",)

    def __init__(self, spec: SpaceSpec, *, normalize: bool) -> None:
        self._spec, self._normalize = spec, normalize
        self.moments = ObservationMoments(spec)
        self.largest = np.zeros(len(spec.image_bounds))
        """The largest absolute number in each image so far."""

    def read(
        self, observation: Any, acts: Array, where: str = "", *, learn: bool = False
    ) -> dict[str, Tensor]:
        """Features of a batch of observations; `learn` updates the statistics.

        Environments whose next action does not count (`acts`) are not checked. Errors
        contain `where`, the name and step of the environments.
        """
        spec, envs = self._spec, len(acts)
        features = spec.images(observation, envs)
        for index, image in enumerate(features.values()):
            if image.is_floating_point():
                _require_finite(image.flatten(1).numpy(), acts, where)
            if learn and self._normalize:
                size = float(np.abs(image.numpy()).max())
                self.largest[index] = max(self.largest[index], size)
        if "vector" in spec.observation:
            rows = spec.vector(observation, envs)
            _require_finite(rows, acts, where)
            if self._normalize:
                if learn:
                    self.moments.add(rows if acts.all() else rows[acts])
                rows = self.moments.normalize(rows)
            features = {"vector": torch.from_numpy(rows), **features}
        return features


def _require_finite(rows: Array, acts: Array, where: str) -> None:
    broken = ~np.isfinite(rows).all(axis=1) & acts
    if broken.any():
        raise NotFiniteError(
            f"the observation of environment {int(broken.argmax())}{where} holds "
            "NaN or infinity. Return finite numbers."
        )
