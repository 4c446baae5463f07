r"""MNIST-1D: ten curves under random distortions.

    place    p ~ U{36..60}, shift ~ U{0..47}: twelve points and p zeros, stretched to 72
             samples and rotated by `shift`
    scale    times 1 + 0.4 u,                          u ~ U(-1/2, 1/2)
    noise    white, 0.02, everywhere; off the curve smoothed too, 0.25 before sigma = 2
    shear    minus 0.75 u (i / 71 - 1/2),              u ~ U(-1/2, 1/2)
    sample   linearly at 40 points

Templates and constants are those of Greydanus & Kobak, "Scaling Down Deep Learning with
MNIST-1D" (2020). The rows are drawn here; `split` standardizes them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from esper.tasks.data import Data, check_data, random_source

CURVES: Final = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
"""Heights of the digits at twelve points; each starts and ends at 5."""
POINTS: Final = 12
LENGTH: Final = 40
"""Samples of a finished row."""
SMOOTHING: Final = 2.0
"""Standard deviation of the Gaussian filter of the noise, in samples."""

Rows = Float64[np.ndarray, "row sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distortion:
    """Strength of each distortion; the defaults are the published values."""

    padding: tuple[int, int] = (36, 60)
    """Minimum and maximum number of zeros after the curve; more make it narrower."""
    shifts: int = 48
    """Number of possible start positions."""
    scale: float = 0.4
    smooth_noise: float = 0.25
    white_noise: float = 0.02
    shear: float = 0.75

    @property
    def canvas(self) -> int:
        """Samples before the final resampling."""
        return POINTS + self.padding[1]


PUBLISHED: Final = Distortion()


def mnist1d(
    rng_seed: int = 0, rows: int = 5000, *, distortion: Distortion = PUBLISHED
) -> Data:
    """Draw rows of 40 samples with balanced classes."""
    random = random_source(rng_seed, "mnist1d")
    labels = random.permutation(np.arange(rows, dtype=np.int64) % len(CURVES))
    features = _draw(labels, random, distortion)
    rows_drawn = torch.from_numpy(features.astype(np.float32))
    return check_data(
        Data("mnist1d", rows_drawn, torch.from_numpy(labels), len(CURVES))
    )


def templates() -> Float64[np.ndarray, "digit point"]:
    """Return the ten curves with standard deviation 1/6, starting at zero."""
    curves = np.array(CURVES, dtype=np.float64)
    curves /= 6 * curves.std(axis=1, keepdims=True)
    return curves - curves[:, :1]


def _draw(
    labels: Int64[np.ndarray, " row"], random: np.random.Generator, how: Distortion
) -> Rows:
    """Draw one distorted curve per label."""
    size = (len(labels), 1)
    padding = random.integers(how.padding[0], how.padding[1], size, endpoint=True)
    shift = random.integers(how.shifts, size=size)
    scale = 1 + how.scale * (random.random(size) - 0.5)
    shear = how.shear * (random.random(size) - 0.5)
    smooth, white = random.standard_normal((2, len(labels), how.canvas))

    sample = np.arange(how.canvas)
    # Position of each canvas sample on the padded curve, in points.
    place = (sample - shift) % how.canvas * ((POINTS - 1 + padding) / (how.canvas - 1))
    series = scale * _heights(labels, place)
    series += how.smooth_noise * (place >= POINTS) * (smooth @ _smoother(how.canvas))
    series += how.white_noise * white
    series -= shear * (sample / (how.canvas - 1) - 0.5)
    rows: Rows = series @ _sampler(how.canvas)
    return rows


def _heights(labels: Int64[np.ndarray, " row"], place: Rows) -> Rows:
    """Height of each curve at each position, linearly interpolated, then zero."""
    padded = np.pad(templates(), ((0, 0), (0, 2)))[labels]
    place = np.minimum(place, POINTS)
    point = place.astype(np.int64)
    left, right = (np.take_along_axis(padded, point + k, axis=1) for k in (0, 1))
    heights: Rows = left + (place - point) * (right - left)
    return heights


def _smoother(length: int) -> NDArray[np.float64]:
    """Matrix of a Gaussian filter with mirrored ends."""
    reach = int(4 * SMOOTHING + 0.5)
    offsets = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (offsets / SMOOTHING) ** 2)
    weights /= weights.sum()
    source = np.pad(np.arange(length), reach, mode="symmetric")
    matrix = np.zeros((length, length))
    target = np.arange(length)
    for step, weight in enumerate(weights):
        np.add.at(matrix, (source[step : step + length], target), weight)
    return matrix


def _sampler(length: int) -> NDArray[np.float64]:
    """Matrix of linear resampling at evenly spaced positions."""
    place = np.linspace(0, length - 1, LENGTH)
    distance = np.abs(place - np.arange(length)[:, None])
    weights: NDArray[np.float64] = np.maximum(1 - distance, 0)
    return weights
