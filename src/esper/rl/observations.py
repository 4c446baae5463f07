"""From raw observations to what a policy reads: split, checked and normalised."""

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


class ObservationReader(Stateful):
    """Turns observations into features, with running statistics.

    Args:
        spec: Spaces of the environment.
        normalize: Whether numbers are normalised. Images are scaled by the policy.
    """

    STATE = ("moments",)
    DERIVED = ("largest",)

    def __init__(self, spec: SpaceSpec, *, normalize: bool) -> None:
        self._spec, self._normalize = spec, normalize
        self.moments = ObservationMoments(spec)
        self.largest = np.zeros(len(spec.image_bounds))
        """The largest number seen in each image."""

    def read(
        self,
        observation: Any,  # noqa: ANN401
        acts: Array,
        where: str = "",
        *,
        learn: bool = False,
    ) -> dict[str, Tensor]:
        """Features of all environments; refuses NaN and infinity.

        Args:
            observation: As the batched observation space has it.
            acts: Environments whose next action counts; others are not checked.
            where: Name and step of the environments, for errors.
            learn: Whether the statistics count what is shown.
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
            "NaN or infinity; clip it there."
        )
