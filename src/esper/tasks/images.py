"""Kinds of tasks with small images, `[row, 1, side, side]`, for convolutional hosts.

Images of a bar, blobs, a shape or a texture at a random position with noise, and the
digits of scikit-learn.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from esper.tasks.data import Data
from esper.tasks.generated import (
    Floats,
    Kind,
    Random,
    as_data,
    classified,
    row_count,
    targets,
)
from esper.tasks.variants import table, with_classes

SIDES: Final = (6, 12)
"""Range of the side length in pixels."""
MAX_IMAGES: Final = 3_000
"""Maximum number of images per task."""


def _canvas(random: Random) -> tuple[int, int, Floats, Floats]:
    """Row count, side, and pixel coordinates from -1 to 1."""
    side = int(random.integers(*SIDES, endpoint=True))
    place = np.linspace(-1, 1, side)
    return min(row_count(random), MAX_IMAGES), side, place[:, None], place[None, :]


def _noisy(random: Random, images: Floats, most: float) -> Floats:
    noise = random.uniform(0.1, most) * random.standard_normal(images.shape)
    return (images + noise)[:, None]


def _column(values: NDArray[Any]) -> NDArray[Any]:
    """One value per image, shaped to broadcast over its pixels."""
    return values[:, None, None]


def digit_images(random: Random) -> Data:
    """Some or all classes of the handwritten digits."""
    data = table("digits")
    classes = int(random.integers(4, 11))
    pixels = data.features.double().numpy().reshape(-1, 8, 8)
    x, labels = with_classes(random, pixels, data.labels.numpy(), 10, classes)
    return as_data(_noisy(random, x / x.std(), 0.6), labels, classes)


def _bars(random: Random, angle: Floats) -> Floats:
    """Images of a bar at each angle."""
    _, _, high, wide = _canvas(random)
    shift = _column(random.uniform(-0.5, 0.5, len(angle)))
    across = _column(np.cos(angle)) * wide + _column(np.sin(angle)) * high - shift
    bars: Floats = np.exp(-((across / random.uniform(0.15, 0.3)) ** 2))
    return bars


def bars(random: Random) -> Data:
    """Class: direction of a bar."""
    classes = int(random.integers(2, 9))
    labels = random.integers(classes, size=min(row_count(random), MAX_IMAGES))
    jitter = random.uniform(-0.25, 0.25, len(labels))
    images = _bars(random, np.pi * (labels + jitter) / classes)
    return classified(random, _noisy(random, images, 0.6), labels, classes)


def bar_angles(random: Random) -> Data:
    """Target: slope of a bar."""
    angle = random.uniform(0, np.pi, min(row_count(random), MAX_IMAGES))
    images = _bars(random, angle)
    return targets(random, _noisy(random, images, 0.4), np.cos(2 * angle))


def blobs(random: Random) -> Data:
    """Class: number of blobs."""
    rows, _, high, wide = _canvas(random)
    classes = int(random.integers(2, 6))
    labels, size = random.integers(classes, size=rows), random.uniform(0.15, 0.3)
    images = np.zeros((rows, high.size, wide.size))
    for number in range(classes):
        y, x = (_column(random.uniform(-0.8, 0.8, rows)) for _ in range(2))
        blob = np.exp(-((high - y) ** 2 + (wide - x) ** 2) / (2 * size**2))
        images += blob * _column(labels >= number)
    return classified(random, _noisy(random, images, 0.4), labels, classes)


def shapes(random: Random) -> Data:
    """Class: disc, square, ring, frame, cross, diagonal cross or line."""
    rows, side, high, wide = _canvas(random)
    y, x = (_column(random.uniform(-0.35, 0.35, rows)) for _ in range(2))
    radius, thin = _column(random.uniform(0.4, 0.65, rows)), 1.2 / side
    y, x = np.abs(high - y), np.abs(wide - x)
    disc, square = np.hypot(x, y), np.maximum(x, y)
    kinds: list[NDArray[np.bool_]] = [
        disc < radius,
        square < 0.8 * radius,
        np.abs(disc - radius) < thin,
        np.abs(square - radius) < thin,
        (np.minimum(x, y) < thin) & (square < radius),
        (np.abs(x - y) < thin) & (square < radius),
        (y + 0 * x < thin) & (x + 0 * y < radius),
    ]
    classes = int(random.integers(3, len(kinds) + 1))
    chosen = random.permutation(len(kinds))[:classes]
    labels = random.integers(classes, size=rows)
    drawn = np.stack([kinds[kind] for kind in chosen])[labels, np.arange(rows)]
    images = drawn.astype(np.float64)
    return classified(random, _noisy(random, images, 0.6), labels, classes)


def textures(random: Random) -> Data:
    """Class: the kernel that filtered white noise."""
    rows, side, _, _ = _canvas(random)
    classes = int(random.integers(2, 6))
    kernels = random.standard_normal((classes, 3, 3))
    kernels /= np.sqrt((kernels**2).sum((1, 2), keepdims=True))
    labels = random.integers(classes, size=rows)
    white = random.standard_normal((rows, side + 2, side + 2))
    images = np.zeros((rows, side, side))
    for y in range(3):
        for x in range(3):
            part = white[:, y : y + side, x : x + side]
            images += _column(kernels[labels, y, x]) * part
    return classified(random, _noisy(random, images, 0.2), labels, classes)


IMAGES: Final[Mapping[str, Kind]] = {
    "digit-images": digit_images,
    "bars": bars,
    "blobs": blobs,
    "shapes": shapes,
    "textures": textures,
    "angle-target": bar_angles,
}
