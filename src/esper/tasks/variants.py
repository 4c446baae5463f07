"""Kinds of tasks made of stored tables and of distorted curves.

Tables: vowel, segment, phoneme, spambase and digits, as they are or with a part of
their classes, columns or rows, with merged classes, wrong labels, noisy columns, or
turned by a random rotation. Curves: MNIST-1D, never as it was published, but distorted
in a way of their own. Data sets that controllers are judged on are not in here.
"""

from collections.abc import Mapping
from functools import cache
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
"""Tables that tasks are made of."""
MANY: Final = ("vowel", "segment", "digits")
"""Those with more than two classes."""
ROWS: Final = 5_000
"""Rows of a task, at most."""


@cache
def table(name: str) -> Data:
    """The rows of a table, flat; columns of mixed units have a deviation of 1."""
    if name == "digits":
        return digits().flat()
    data = stored(name)
    if name not in MIXED_UNITS:
        return data
    deviation = data.features.double().std(dim=0).clamp(min=1e-6)
    scaled = (data.features / deviation).float()
    return Data(name, scaled, data.labels, data.classes)


def _drawn(
    random: Random, sources: tuple[str, ...] = SOURCES
) -> tuple[Floats, Ints, int]:
    """Rows, labels and classes of one of the tables, in random order."""
    data = table(sources[random.integers(len(sources))])
    chosen = random.permutation(len(data))[:ROWS]
    return (
        data.features.double().numpy()[chosen],
        data.labels.numpy()[chosen],
        data.classes,
    )


def _some_classes(
    random: Random, x: Floats, labels: Ints, classes: int
) -> tuple[Floats, Ints, int]:
    """The rows of some classes, numbered anew."""
    count = int(random.integers(2, classes))
    number = np.full(classes, -1)
    number[random.permutation(classes)[:count]] = np.arange(count)
    labels = number[labels]
    return x[labels >= 0], labels[labels >= 0], count


def whole_table(random: Random) -> Data:
    """A table as it is."""
    return as_data(*_drawn(random))


def table_classes(random: Random) -> Data:
    """Some of the classes of a table."""
    return as_data(*_some_classes(random, *_drawn(random, MANY)))


def table_merged(random: Random) -> Data:
    """The classes of a table, merged into two to four."""
    x, labels, classes = _drawn(random, MANY)
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
    """A table with noise on its columns, and with columns of noise."""
    x, labels, classes = _drawn(random)
    deviation = x.std(0)
    x = x + random.uniform(0.2, 1.2) * deviation * random.standard_normal(x.shape)
    extra = log_uniform_int(random, 1, 24)
    noise = deviation.mean() * random.standard_normal((len(x), extra))
    return as_data(np.hstack([x, noise]), labels, classes)


def table_rotated(random: Random) -> Data:
    """A table whose columns are mixed by a random rotation."""
    x, labels, classes = _drawn(random)
    return as_data(x @ rotation(random, x.shape[1]), labels, classes)


def column_target(random: Random) -> Data:
    """One column of a table, from the others."""
    x, _, _ = _drawn(random)
    spread = x.std(0)
    varied = np.flatnonzero(spread > np.median(spread) / 2)
    column = varied[random.integers(len(varied))]
    return targets(random, np.delete(x, column, axis=1), x[:, column])


def _curves(random: Random, noise: tuple[float, float] = (0.01, 0.1)) -> Data:
    """Curves that are distorted in a way of their own."""
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


def curves(random: Random) -> Data:
    """Ten shapes of curves."""
    return _curves(random)


def curves_classes(random: Random) -> Data:
    """Some of the shapes."""
    data = _curves(random)
    given = data.features.double().numpy(), data.labels.numpy(), data.classes
    return as_data(*_some_classes(random, *given))


def curves_short(random: Random) -> Data:
    """Curves at half or a quarter of their points, each the mean of its neighbours."""
    data = _curves(random)
    each = (2, 4)[random.integers(2)]
    short = data.features.unflatten(1, (-1, each)).double().mean(dim=2)
    return Data(data.name, short.float(), data.labels, data.classes)


def curves_noisy(random: Random) -> Data:
    """Curves under much noise."""
    return _curves(random, (0.15, 0.4))


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
    "curves-noisy": curves_noisy,
}
