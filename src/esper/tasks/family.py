"""Random tasks for training a general controller.

    kind             in random order: tables, curves, teachers, formulas, series, images
    host             one or two hidden layers of 4 to 256 units (images: 2 to 16
                     channels); small hosts are more likely
    batch            32, 64 or 128 rows
    learning rate    within a factor of two of 0.12 / sqrt(mean inputs of a unit)
    horizon          20 to 36 decisions (clock `batches`)
    decision_every   8 to 24 batches on a log scale, fewer for large hosts
    compute          100 to 20,000 batches on a log scale (clock `compute`)

Host size and compute are limited so that an episode without growth takes about 0.1 s.
Three kinds are held out and drawn only by name. No kind uses the evaluation data sets.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

import numpy as np

from esper.contracts.errors import unknown
from esper.tasks.data import Data, Splits, log_uniform_int, random_source, split
from esper.tasks.generated import VECTORS, Kind
from esper.tasks.hosts import CnnHost, Host, MlpHost
from esper.tasks.task import Task
from esper.tasks.variants import IMAGES, VARIANTS

ALL_KINDS: Final[Mapping[str, Kind]] = {**VARIANTS, **VECTORS, **IMAGES}
"""Function that draws the data of each kind."""
HELD_OUT_KINDS: Final = ("spirals", "textures", "friedman-target")
"""Kinds that are not used for training or development."""
KINDS: Final = tuple(kind for kind in ALL_KINDS if kind not in HELD_OUT_KINDS)
DEEP: Final = 0.3
"""Probability of a second hidden layer."""
WIDTHS: Final = (4, 256)
CHANNELS: Final = (2, 16)
BATCHES: Final = (32, 64, 128)
HORIZONS: Final = (20, 36)
CADENCES: Final = (8, 24)
COMPUTE: Final = (100, 20_000)
LONG_WORK: Final = 2.5e8
"""Maximum of rows times multiply-adds per episode (clock `compute`)."""
LONG: Final = 8
"""Maximum ratio of the longest to the shortest training of a host."""
SMALL: Final = 3.0
"""Preference for small hosts; 1 is uniform on a log scale."""
WORK: Final = 1e8
"""Maximum of rows times multiply-adds per episode (clock `batches`)."""
LEAST_BATCHES: Final = 300
"""Batches that every host can train for within this work."""
OVERHEAD: Final = 300
"""Fixed cost of a row, in multiply-adds."""
RATE: Final = 0.12
"""Learning rate for one input per unit, fitted to 49 drawn tasks without growth."""
MOST_RATE: Final = 0.1
MOST_OF_A_CLASS: Final = 0.9
"""Maximum fraction of rows in one class."""
SMALL_SIDE: Final = 8
"""Images with a shorter side are pooled once only."""


def drawn_task(rng_seed: int, number: int, kinds: Sequence[str] = KINDS) -> Task:
    """Draw a task of a random family.

    Args:
        rng_seed: Seed of the family.
        number: Index of the task; each `len(kinds)` tasks contain every kind once.
        kinds: Kinds to draw from, such as `HELD_OUT_KINDS`.
    """
    turn, place = divmod(number, len(kinds))
    order = random_source(rng_seed, f"kinds, {turn}").permutation(len(kinds))
    kind = kinds[order[place]]
    if kind not in ALL_KINDS:
        raise unknown("unknown kind of task", kind, ALL_KINDS)
    random = random_source(rng_seed, f"family, {kind}, {number}")
    rows = _rows(kind, rng_seed, number)
    splits = partial(_splits, kind, rng_seed, number)
    return task_of_rows(f"family-{number + 1}", kind, rows, splits, random)


def task_of_rows(
    name: str,
    description: str,
    data: Data,
    splits: Callable[[int], Splits],
    random: np.random.Generator,
) -> Task:
    """Draw host, batch, learning rate and length of a task with these rows."""
    batch = BATCHES[random.integers(len(BATCHES))]
    # Some classes of a small table have hardly more rows than a batch.
    batch = max(size for size in BATCHES if size <= min(batch, len(data) // 4))
    host = _host(data, batch, random)
    most = int(WORK / (batch * (host.macs + OVERHEAD)))
    longest = int(LONG_WORK / WORK * most)
    longest = max(COMPUTE[0], min(COMPUTE[1], longest))
    horizon = int(random.integers(*HORIZONS, endpoint=True))
    cadence = log_uniform_int(random, *CADENCES)
    return Task(
        name=name,
        description=description,
        data=splits,
        host=host,
        batch=batch,
        horizon=horizon,
        decision_every=min(cadence, max(1, most // horizon)),
        compute=log_uniform_int(random, max(COMPUTE[0], longest // LONG), longest),
        learning_rate=learning_rate(host, batch) * 2 ** random.uniform(-1, 1),
    )


def learning_rate(host: Host, batch: int) -> float:
    """Return a learning rate that suits a host of this size."""
    inputs = np.mean([layer.inputs * layer.taps for layer in host.layers])
    return min(MOST_RATE, float(RATE * (batch / 64) ** 0.5 / inputs**0.5))


@lru_cache(maxsize=64)
def _rows(kind: str, rng_seed: int, number: int) -> Data:
    """Draw rows; repeat the draw if one class has nearly all of them."""
    name = f"rows, {kind}, {number}"
    while True:
        data = ALL_KINDS[kind](random_source(rng_seed, name))
        _, rows = data.labels.unique(return_counts=True)
        if rows.max() <= MOST_OF_A_CLASS * len(data):
            return data
        name += ", again"


def _splits(kind: str, rng_seed: int, number: int, split_seed: int) -> Splits:
    return split(_rows(kind, rng_seed, number), split_seed)


def _host(data: Data, batch: int, random: np.random.Generator) -> Host:
    """Draw a host for these rows within the limit of work."""
    shape = tuple(data.features.shape[1:])
    flat = len(shape) == 1
    deep = random.random() < DEEP and (flat or shape[1] >= SMALL_SIDE)
    second = random.uniform(0.5, 1)

    def of_width(units: int) -> Host:
        hidden = (units, max(2, round(units * second))) if deep else (units,)
        if flat:
            return MlpHost((*shape, *hidden, data.classes))
        channels, high, wide = shape
        return CnnHost((channels, high, wide), hidden, data.classes)

    least, most = WIDTHS if flat else CHANNELS
    affordable = WORK / (batch * LEAST_BATCHES) - OVERHEAD
    widths = range(1, most + 1)
    widest = bisect_right(widths, affordable, key=lambda units: of_width(units).macs)
    widest = max(least, widest)
    return of_width(round(least * (widest / least) ** random.random() ** SMALL))
