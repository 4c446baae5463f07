"""Kinds of tasks made of stored tables, of distorted curves and of small images.

Tables: vowel, segment, phoneme, spambase and digits, whole or with some of their
classes, columns or rows, with merged classes, label noise, column noise or a random
rotation. Curves: MNIST-1D with random distortions. Images `[row, 1, side, side]`, for
convolutional hosts: a bar, blobs, a shape or a texture at a random position with noise,
and the digits of scikit-learn. The evaluation data sets are not used.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from esper.tasks.data import Data, log_uniform_int
from esper.tasks.datasets import MIXED_UNITS, digits, stored
from esper.tasks.generated import (
    Floats,
    Ints,
    Kind,
    Random,
    as_data,
    classified,
    rotation,
    row_count,
    targets,
)
from esper.tasks.mnist1d import Distortion, mnist1d

SOURCES: Final = ("vowel", "segment", "phoneme", "spambase", "digits")
MULTICLASS: Final = ("vowel", "segment", "digits")
"""Tables with more than two classes."""
MAX_TABLE_ROWS: Final = 5_000
SIDES: Final = (6, 12)
"""Range of the side length in pixels."""
MAX_IMAGES: Final = 3_000
"""Maximum number of images per task."""


@cache
def table(name: str) -> Data:
    """Return a table with flat rows; columns of mixed units have deviation 1."""
    if name == "digits":
        return digits().flat()
    data = stored(name)
    if name not in MIXED_UNITS:
        return data
    deviation = data.features.double().std(dim=0).clamp(min=1e-6)
    scaled = (data.features / deviation).float()
    return replace(data, features=scaled)


def _drawn(
    random: Random, sources: tuple[str, ...] = SOURCES
) -> tuple[Floats, Ints, int]:
    """Rows, labels and classes of a random table, in random order."""
    data = table(sources[random.integers(len(sources))])
    chosen = random.permutation(len(data))[:MAX_TABLE_ROWS]
    return (
        data.features.double().numpy()[chosen],
        data.labels.numpy()[chosen],
        data.classes,
    )


def with_classes(
    random: Random, x: Floats, labels: Ints, classes: int, count: int
) -> tuple[Floats, Ints]:
    """Return the rows of `count` random classes and their new labels."""
    number = np.full(classes, -1)
    number[random.permutation(classes)[:count]] = np.arange(count)
    labels = number[labels]
    return x[labels >= 0], labels[labels >= 0]


def _some_classes(random: Random, x: Floats, labels: Ints, classes: int) -> Data:
    count = int(random.integers(2, classes))
    return as_data(*with_classes(random, x, labels, classes, count), count)


def whole_table(random: Random) -> Data:
    """Return a whole table."""
    return as_data(*_drawn(random))


def table_classes(random: Random) -> Data:
    """Some of the classes of a table."""
    return _some_classes(random, *_drawn(random, MULTICLASS))


def table_merged(random: Random) -> Data:
    """A table with classes merged into two to four."""
    x, labels, classes = _drawn(random, MULTICLASS)
    count = int(random.integers(2, 5))
    return as_data(x, random.permutation(classes)[labels] % count, count)


def table_columns(random: Random) -> Data:
    """Some of the columns of a table."""
    x, labels, classes = _drawn(random)
    least = max(3, x.shape[1] // 6)
    count = log_uniform_int(random, least, x.shape[1] - 1)
    return as_data(x[:, random.permutation(x.shape[1])[:count]], labels, classes)


def table_rows(random: Random) -> Data:
    """A few hundred rows of a table."""
    x, labels, classes = _drawn(random)
    count = log_uniform_int(random, 500, 1_200)
    return as_data(x[:count], labels[:count], classes)


def table_label_noise(random: Random) -> Data:
    """A table with up to a third of its labels replaced."""
    return classified(random, *_drawn(random), 0.33)


def table_column_noise(random: Random) -> Data:
    """A table with noisy columns and extra columns of noise."""
    x, labels, classes = _drawn(random)
    deviation = x.std(0)
    x = x + random.uniform(0.2, 1.2) * deviation * random.standard_normal(x.shape)
    extra = log_uniform_int(random, 1, 24)
    noise = deviation.mean() * random.standard_normal((len(x), extra))
    return as_data(np.hstack([x, noise]), labels, classes)


def table_rotated(random: Random) -> Data:
    """A table after a random rotation of its columns."""
    x, labels, classes = _drawn(random)
    return as_data(x @ rotation(random, x.shape[1]), labels, classes)


def column_target(random: Random) -> Data:
    """Target: one column of a table, given the others."""
    x, _, _ = _drawn(random)
    spread = x.std(0)
    varied = np.flatnonzero(spread > np.median(spread) / 2)
    column = varied[random.integers(len(varied))]
    return targets(random, np.delete(x, column, axis=1), x[:, column])


def curves(random: Random, noise: tuple[float, float] = (0.01, 0.1)) -> Data:
    """Curves of ten shapes with random distortions."""
    how = Distortion(
        padding=(int(random.integers(24, 40)), int(random.integers(44, 64))),
        shifts=int(random.integers(8, 56)),
        scale=random.uniform(0.2, 0.6),
        smooth_noise=random.uniform(0.1, 0.4),
        white_noise=random.uniform(*noise),
        shear=random.uniform(0.4, 1.1),
    )
    number = int(random.integers(2**31))
    return mnist1d(number, log_uniform_int(random, 2_000, 5_000), distortion=how)


def curves_classes(random: Random) -> Data:
    """Some of the shapes."""
    data = curves(random)
    x, labels = data.features.double().numpy(), data.labels.numpy()
    return _some_classes(random, x, labels, data.classes)


def curves_short(random: Random) -> Data:
    """Curves averaged over two or four neighbouring points."""
    data = curves(random)
    each = (2, 4)[random.integers(2)]
    short = data.features.unflatten(1, (-1, each)).double().mean(dim=2)
    return replace(data, features=short.float())


VARIANTS: Final[Mapping[str, Kind]] = {
    "table": whole_table,
    "table-classes": table_classes,
    "table-merged": table_merged,
    "table-columns": table_columns,
    "table-rows": table_rows,
    "table-label-noise": table_label_noise,
    "table-column-noise": table_column_noise,
    "table-rotated": table_rotated,
    "column-target": column_target,
    "curves": curves,
    "curves-classes": curves_classes,
    "curves-short": curves_short,
    "curves-noisy": partial(curves, noise=(0.15, 0.4)),
}


# Images.


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
