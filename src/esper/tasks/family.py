"""Tasks drawn at random: what a controller is trained on if it is to serve any host.

    kind             in random order: tables, curves, teachers, formulas, series and
                     images, with classes or with targets
    host             one or two hidden layers of 4 to 256 units (images: 2 to 16
                     channels), small ones likelier, as wide as an episode can pay for
    batch            32, 64 or 128 rows
    learning rate    within a factor of two of 0.12 / sqrt(mean inputs of a unit)
    horizon          20 to 36 decisions (clock `batches`)
    decision_every   8 to 24 batches on a log scale, fewer for large hosts
    compute          batches of an episode (clock `compute`): 100 to 20,000 on a log
                     scale, as many as an episode can pay for

What an episode can pay for is about a tenth of a second for the host as it is. Three
kinds are held out from development and drawn only by name, and data sets that
controllers are judged on are in no kind.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

import numpy as np

from esper.contracts.errors import unknown
from esper.tasks.data import Data, Splits, log_uniform_int, random_source, split
from esper.tasks.generated import VECTORS, Kind
from esper.tasks.hosts import CnnHost, Host, MlpHost
from esper.tasks.images import IMAGES
from esper.tasks.task import Task
from esper.tasks.variants import VARIANTS

ALL_KINDS: Final[Mapping[str, Kind]] = {**VARIANTS, **VECTORS, **IMAGES}
"""What draws the rows of each kind."""
HELD_OUT_KINDS: Final = ("spirals", "textures", "friedman-target")
"""Kinds that nothing is developed on."""
KINDS: Final = tuple(kind for kind in ALL_KINDS if kind not in HELD_OUT_KINDS)
DEEP: Final = 0.3
"""Chance of a second hidden layer."""
WIDTHS: Final = (4, 256)
CHANNELS: Final = (2, 16)
BATCHES: Final = (32, 64, 128)
HORIZONS: Final = (20, 36)
CADENCES: Final = (8, 24)
COMPUTE: Final = (100, 20_000)
LONG_WORK: Final = 2.5e8
"""The same by the clock `compute`: growing pays where training is long for a host."""
LONG: Final = 8
"""By how much the longest training exceeds the shortest of a host, at most."""
SMALL: Final = 3.0
"""How much likelier small hosts are than large ones; 1 is evenly on a log scale."""
WORK: Final = 1e8
"""Rows times multiply-adds of a host that an episode trains, at most."""
LEAST_BATCHES: Final = 300
"""That every host can be trained for within this work."""
OVERHEAD: Final = 300
"""Multiply-adds that take as long as whatever else is done with a row."""
RATE: Final = 0.12
"""For a unit of one input: about the best rate of 49 drawn tasks, never grown."""
MOST_RATE: Final = 0.1
MOST_OF_A_CLASS: Final = 0.9
"""Share of the rows that one class has, at most."""
SMALL_SIDE: Final = 8
"""Images with fewer pixels a side are pooled once only."""


def drawn_task(rng_seed: int, number: int, kinds: Sequence[str] = KINDS) -> Task:
    """The task of this number in the family that a random seed stands for.

    Args:
        rng_seed: Which family.
        number: Which of its tasks; every kind comes once in `len(kinds)` of them.
        kinds: What tasks are made of, such as `HELD_OUT_KINDS`.
    """
    turn, place = divmod(number, len(kinds))
    order = random_source(rng_seed, f"kinds, {turn}").permutation(len(kinds))
    kind = kinds[order[place]]
    if kind not in ALL_KINDS:
        raise unknown("there is no kind of task", kind, ALL_KINDS)
    random = random_source(rng_seed, f"family, {kind}, {number}")
    data = _rows(kind, rng_seed, number)
    batch = BATCHES[random.integers(len(BATCHES))]
    # A few classes of a small table are hardly more rows than a batch.
    batch = max(size for size in BATCHES if size <= min(batch, len(data) // 4))
    host = _host(data, batch, random)
    most = int(WORK / (batch * (host.macs + OVERHEAD)))
    longest = int(LONG_WORK / WORK * most)
    longest = max(COMPUTE[0], min(COMPUTE[1], longest))
    horizon = int(random.integers(*HORIZONS, endpoint=True))
    cadence = log_uniform_int(random, *CADENCES)
    return Task(
        name=f"family-{number + 1}",
        description=kind,
        data=partial(_splits, kind, rng_seed, number),
        host=host,
        batch=batch,
        horizon=horizon,
        decision_every=min(cadence, max(1, most // horizon)),
        compute=log_uniform_int(random, max(COMPUTE[0], longest // LONG), longest),
        learning_rate=learning_rate(host, batch) * 2 ** random.uniform(-1, 1),
    )


def learning_rate(host: Host, batch: int) -> float:
    """A rate at which a host of this size learns well."""
    inputs = np.mean([layer.inputs * layer.taps for layer in host.layers])
    return min(MOST_RATE, float(RATE * (batch / 64) ** 0.5 / inputs**0.5))


@lru_cache(maxsize=64)
def _rows(kind: str, rng_seed: int, number: int) -> Data:
    """The rows of a task; once for the shape of its host and once for its world.

    Formulas that give nearly all rows one class are drawn again.
    """
    name = f"rows, {kind}, {number}"
    while True:
        data = ALL_KINDS[kind](random_source(rng_seed, name))
        _, rows = data.labels.unique(return_counts=True)
        if rows.max() <= MOST_OF_A_CLASS * len(data):
            return data
        name += ", again"


def _splits(kind: str, rng_seed: int, number: int, split_seed: int) -> Splits:
    """The rows of a task, split."""
    return split(_rows(kind, rng_seed, number), split_seed)


def _host(data: Data, batch: int, random: np.random.Generator) -> Host:
    """A host for these rows, evenly on a log scale up to what can be paid for."""
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
