"""Kinds of tasks made of stored tables and of distorted curves.

Tables: vowel, segment, phoneme, spambase and digits, whole or with some of their
classes, columns or rows, with merged classes, label noise, column noise or a random
rotation. Curves: MNIST-1D with random distortions. The evaluation data sets are not
used.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Final

import numpy as np

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
    targets,
)
from esper.tasks.mnist1d import Distortion, mnist1d

SOURCES: Final = ("vowel", "segment", "phoneme", "spambase", "digits")
MULTICLASS: Final = ("vowel", "segment", "digits")
"""Tables with more than two classes."""
MAX_TABLE_ROWS: Final = 5_000


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
