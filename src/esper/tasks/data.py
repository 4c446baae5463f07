r"""Labelled rows, and their split into what trains, what decides and what tests.

A label is the number of a class, or, in data of one output, a target; `split` gives
targets mean 0 and deviation 1, too.

    z = (x - mean) / max(deviation, 0.1 * rms(deviation))

Mean and deviation are those of each column of the training rows alone. The floor keeps
a nearly constant column nearly constant: without it, a pixel that is lit once in a
thousand images becomes the largest input of all. It is a share of the root mean square
over all columns, so it is for columns of one unit; a share of 0 is for all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Final, NamedTuple, Never
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from esper.contracts.errors import InvalidInputError
from esper.tasks.hosts import Loss, loss_of

SHARES: Final = (0.6, 0.2, 0.2)
"""Shares of the rows that train, that decide and that test."""
LEAST_DEVIATION: Final = 0.1
"""Floor of a column's deviation, as a share of the deviation of all columns."""


@dataclass(frozen=True, slots=True)
class Data:
    """Rows of features, each with the class it belongs to, or with a target."""

    name: str
    features: Float[Tensor, "row ..."]
    labels: Num[Tensor, " row"]
    classes: int
    """Classes of the labels; 1: the labels are targets."""

    def __post_init__(self) -> None:
        """Refuse what no loss could be computed from."""
        x, y = self.features, self.labels
        given: dict[str, object] = {"features": x, "labels": y}
        for word, value in given.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                self._refuse(f"{word} as a tensor; got {kind}; call torch.as_tensor")
        if not x.is_floating_point():
            self._refuse(f"floating-point features; got {x.dtype}; call .float()")
        regression = self.loss == "regression"
        if regression and not y.is_floating_point():
            self._refuse(
                f"floating-point targets, as there is one output; got {y.dtype}; call "
                ".float(), or count at least two classes"
            )
        if not regression and y.dtype != torch.int64:
            self._refuse(
                f"labels as int64; got {y.dtype}; number the classes from 0 and call "
                ".long()"
            )
        if x.ndim == 0 or len(x) == 0 or y.shape != x.shape[:1]:
            self._refuse(
                f"one label for each of at least one row; got features "
                f"{tuple(x.shape)} and labels {tuple(y.shape)}"
            )
        wrong = (y < 0) | (y >= self.classes)
        if wrong.any() and not regression:
            self._refuse(
                f"labels in 0..{self.classes - 1}; got {int(y.min())}..{int(y.max())}, "
                f"first in row {_first(wrong)}; count the classes again"
            )
        for word, values in (("features", x), ("labels", y)):
            if not values.isfinite().all():
                self._refuse(
                    f"finite {word}; got NaN or infinity, first at "
                    f"{_first(~values.isfinite())}; drop or fill those rows"
                )

    def _refuse(self, wanted: str) -> Never:
        raise InvalidInputError(f"{self.name}: expected {wanted}")

    @property
    def loss(self) -> Loss:
        """What is learnt: to classify the rows, or to predict their targets."""
        return loss_of(self.classes)

    def __len__(self) -> int:
        """How many rows there are."""
        return self.labels.shape[0]

    def to(self, device: torch.device | str) -> "Data":
        """The same rows on another device."""
        return replace(
            self, features=self.features.to(device), labels=self.labels.to(device)
        )

    def flat(self) -> "Data":
        """The same rows, each as a flat list of numbers."""
        return replace(self, features=self.features.flatten(1))


class Splits(NamedTuple):
    """Three disjoint sets of rows, standardised by the statistics of the first."""

    train: Data
    """The rows a network learns from."""
    val: Data
    """The rows that decide whether and how it grows."""
    test: Data
    """The rows that are looked at once, at the end."""


def check_data(data: Data, *, batch: int = 1) -> Data:
    """The same data, if a network can learn something from it.

    A class without a row is allowed: it can only be guessed wrongly.
    """
    if len(data) < batch:
        raise InvalidInputError(
            f"{data.name}: expected at least one batch of {batch} rows; got "
            f"{len(data)}; choose a smaller batch or find more rows"
        )
    if bool((data.labels == data.labels[0]).all()):
        if data.loss == "regression":
            raise InvalidInputError(
                f"{data.name}: expected targets that differ; all {len(data)} are "
                f"{float(data.labels[0])}; there is nothing to predict"
            )
        raise InvalidInputError(
            f"{data.name}: expected rows of at least two classes; all {len(data)} are "
            f"of class {int(data.labels[0])}; accuracy would mean nothing"
        )
    return data


def split(
    data: Data,
    rng_seed: int,
    shares: Sequence[float] = SHARES,
    *,
    least_deviation: float = LEAST_DEVIATION,
) -> Splits:
    """Split the rows at random; the same number gives the same split.

    Args:
        data: All rows.
        rng_seed: Decides which row goes where.
        shares: How large the three parts are.
        least_deviation: Floor of a column's deviation, as a share of the deviation of
            all columns; 0 where columns are of different units.
    """
    if not 0 <= least_deviation <= 1:
        raise InvalidInputError(
            f"expected least_deviation between 0 and 1; got {least_deviation}"
        )
    first, second = borders(len(data), shares)
    order = random_source(rng_seed, "split").permutation(len(data))
    rows = torch.from_numpy(order).to(data.labels.device)
    parts = [
        replace(data, features=data.features[part], labels=data.labels[part])
        for part in (rows[:first], rows[first:second], rows[second:])
    ]
    if data.loss == "regression":
        spread, centre = torch.var_mean(parts[0].labels.double(), correction=0)
        scale = float(spread.sqrt()) or 1.0
        parts = [
            replace(part, labels=((part.labels - centre) / scale).float())
            for part in parts
        ]
    # In double precision; a constant column becomes zero.
    variance, mean = torch.var_mean(parts[0].features.double(), dim=0, correction=0)
    deviation = variance.sqrt().maximum(least_deviation * variance.mean().sqrt())
    deviation = torch.where(deviation > 0, deviation, 1.0)
    train, val, test = (
        replace(part, features=((part.features - mean) / deviation).float())
        for part in parts
    )
    return Splits(train, val, test)


def borders(count: int, shares: Sequence[float]) -> tuple[int, int]:
    """Where the second and the third of three parts begin."""
    if len(shares) != 3 or min(shares) <= 0 or abs(fsum(shares) - 1) > 1e-6:
        raise InvalidInputError(
            f"expected three positive shares that add up to 1; got {tuple(shares)}"
        )
    first = round(count * shares[0])
    second = round(count * (shares[0] + shares[1]))
    if not 0 < first < second < count:
        raise InvalidInputError(
            f"expected enough rows for every share of {tuple(shares)}; got {count}"
        )
    return first, second


def random_source(rng_seed: int, purpose: str) -> np.random.Generator:
    """A random source of its own: one for each number and each purpose."""
    if rng_seed < 0:
        raise InvalidInputError(f"expected rng_seed to be 0 or more; got {rng_seed}")
    mixed = np.random.SeedSequence([rng_seed, crc32(purpose.encode())])
    return np.random.default_rng(mixed)


def log_uniform_int(random: np.random.Generator, low: int, high: int) -> int:
    """A whole number from low to high, evenly on a log scale."""
    return int(np.exp(random.uniform(np.log(low), np.log(high + 1))))


def _first(wrong: Bool[Tensor, "*place"]) -> str:
    """Where the first true element stands, such as `12` or `[12, 0, 3]`."""
    place = wrong.nonzero()[0].tolist()
    return str(place[0] if len(place) == 1 else place)
