r"""Labelled rows and their split into training, validation and test data.

    z = (x - mean) / max(std, 0.1 * rms(std))

Mean and standard deviation of each column come from the training rows. The floor keeps
a nearly constant column, such as a rarely lit pixel, from becoming the largest input.
It suits columns of one unit; use 0 for mixed units. A label is a class index or, with
one output, a regression target; `split` standardizes targets too.
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

from esper.contracts.checks import require_int, require_number
from esper.contracts.errors import InvalidInputError
from esper.tasks.hosts import Loss, loss_of

SHARES: Final = (0.6, 0.2, 0.2)
"""Fractions of the rows for training, validation and test."""
LEAST_DEVIATION: Final = 0.1
"""Floor of a column's standard deviation, as a fraction of that of all columns."""


@dataclass(frozen=True, slots=True)
class Data:
    """Rows of features, each with a class index or a regression target."""

    name: str
    features: Float[Tensor, "row ..."]
    labels: Num[Tensor, " row"]
    classes: int
    """Number of classes; 1 means that labels are regression targets."""

    def __post_init__(self) -> None:
        """Check types, shapes and values."""
        x, y = self.features, self.labels
        given: dict[str, object] = {"features": x, "labels": y}
        for word, value in given.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                self._refuse(f"{word} must be a tensor; got {kind}")
        if not x.is_floating_point():
            self._refuse(f"features must be float; got {x.dtype}; call .float()")
        regression = self.loss == "regression"
        if regression and not y.is_floating_point():
            self._refuse(
                f"targets must be float if there is one output; got {y.dtype}; call "
                ".float()"
            )
        if not regression and y.dtype != torch.int64:
            self._refuse(f"labels must be int64; got {y.dtype}; call .long()")
        if x.ndim == 0 or len(x) == 0 or y.shape != x.shape[:1]:
            self._refuse(
                f"each row needs one label, and at least one row is needed; got "
                f"features {tuple(x.shape)} and labels {tuple(y.shape)}"
            )
        wrong = (y < 0) | (y >= self.classes)
        if wrong.any() and not regression:
            self._refuse(
                f"labels must be in 0..{self.classes - 1}; got "
                f"{int(y.min())}..{int(y.max())}, first in row {_first(wrong)}"
            )
        for word, values in (("features", x), ("labels", y)):
            if not values.isfinite().all():
                self._refuse(
                    f"{word} must be finite; got NaN or infinity, first at "
                    f"{_first(~values.isfinite())}; drop or fill those rows"
                )

    def _refuse(self, problem: str) -> Never:
        raise InvalidInputError(f"{self.name}: {problem}.")

    @property
    def loss(self) -> Loss:
        """Kind of loss: classification or regression."""
        return loss_of(self.classes)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.labels.shape[0]

    def flat(self) -> "Data":
        """Return the same rows with flat features."""
        return replace(self, features=self.features.flatten(1))


class Splits(NamedTuple):
    """Three disjoint sets of rows, standardized by the statistics of the first."""

    train: Data
    val: Data
    """Rows that the controller may use."""
    test: Data
    """Rows for the final evaluation only."""


def check_data(data: Data, *, batch: int = 1) -> Data:
    """Return the data if it has a whole batch and labels that differ."""
    if len(data) < batch:
        raise InvalidInputError(
            f"{data.name}: at least one batch of {batch} rows is needed; got "
            f"{len(data)}; choose a smaller batch."
        )
    if bool((data.labels == data.labels[0]).all()):
        raise InvalidInputError(
            f"{data.name}: labels must differ; all {len(data)} are "
            f"{data.labels[0].item():g}."
        )
    return data


def split(
    data: Data,
    rng_seed: int,
    shares: Sequence[float] = SHARES,
    *,
    least_deviation: float = LEAST_DEVIATION,
) -> Splits:
    """Split the rows at random and standardize them.

    Args:
        data: All rows.
        rng_seed: Seed of the permutation.
        shares: Fractions of the rows for training, validation and test.
        least_deviation: Floor of a column's standard deviation, as a fraction of that
            of all columns; 0 if columns have different units.
    """
    require_number("least_deviation", least_deviation, 0.0, 1.0)
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
    """Return where the second and the third part begin."""
    if len(shares) != 3 or min(shares) <= 0 or abs(fsum(shares) - 1) > 1e-6:
        raise InvalidInputError(
            f"shares must be three positive numbers that sum to 1; got {tuple(shares)}."
        )
    first = round(count * shares[0])
    second = round(count * (shares[0] + shares[1]))
    if not 0 < first < second < count:
        raise InvalidInputError(
            f"too few rows for fractions {tuple(shares)}; got {count}."
        )
    return first, second


def random_source(rng_seed: int, purpose: str) -> np.random.Generator:
    """Return an independent generator for each seed and purpose."""
    require_int("rng_seed", rng_seed, 0)
    mixed = np.random.SeedSequence([rng_seed, crc32(purpose.encode())])
    return np.random.default_rng(mixed)


def log_uniform_int(random: np.random.Generator, low: int, high: int) -> int:
    """Draw an integer from low to high, uniformly on a log scale."""
    return int(np.exp(random.uniform(np.log(low), np.log(high + 1))))


def _first(wrong: Bool[Tensor, "*place"]) -> str:
    """Index of the first true element, such as `12` or `[12, 0, 3]`."""
    place = wrong.nonzero()[0].tolist()
    return str(place[0] if len(place) == 1 else place)
