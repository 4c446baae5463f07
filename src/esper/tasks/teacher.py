r"""Teacher and student: rows labelled by a random network, another one for each number.

    x ~ N(0, 1), 16 numbers by default
    h = max(z, z / 5),    z = standardised(Q x),    once for each hidden layer
    label = argmax standardised(Q h) + b

Each Q is a random matrix with orthogonal rows or columns, and standardising is over the
rows of data: no unit of the teacher is dead or the copy of another. b is moved until
the classes are about equal. Then a share of all labels, also of those that test, is
replaced by another class, so no student scores more than about 1 - noise. `teacher`
draws width, depth and noise too; its shapes and classes are the same for every number.
Labels are computed in float64, so that they do not depend on how a processor rounds.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64

from esper.contracts.errors import InvalidInputError
from esper.tasks.data import Data, Splits, check_data, random_source, split

INPUTS: Final = 16
CLASSES: Final = 8
ROWS: Final = 6_000
WIDTHS: Final = (4, 48)
DEPTHS: Final = (1, 3)
MOST_NOISE: Final = 0.2
LEAST_SHARE: Final = 0.24
"""Rows that the teacher must give to each class, as a share of equally many."""
TRIES: Final = 8
"""Teachers of one kind to draw until one gives that share."""
BALANCING: Final = 40
"""Moves of the biases towards equal classes."""
SAMPLE: Final = 2_000
"""Rows that these moves look at."""

Rows = Float64[np.ndarray, "row unit"]
Labels = Int64[np.ndarray, " row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """How hard a teacher's labels are to learn."""

    width: int
    """Units of each hidden layer."""
    depth: int
    """Hidden layers."""
    noise: float
    """Share of labels that are wrong."""
    inputs: int = INPUTS
    classes: int = CLASSES
    fan_in: int | None = None
    """Inputs that each unit of the first layer reads; none: all."""

    def __post_init__(self) -> None:
        """Refuse a network without units and labels that are only noise."""
        most = 1 - 1 / self.classes
        if self.width < 1 or self.depth < 0 or not 0 <= self.noise <= most:
            raise InvalidInputError(
                f"expected width >= 1, depth >= 0 and noise in 0..{most}; "
                f"got width {self.width}, depth {self.depth} and noise {self.noise}"
            )


def teacher(rng_seed: int, rows: int = ROWS, *, kind: Teacher | None = None) -> Splits:
    """The rows of one teacher; without a kind, of the one that the number draws."""
    if rows < 10 * CLASSES:
        raise InvalidInputError(
            f"expected rows to be at least {10 * CLASSES}; got {rows}"
        )
    data = taught(random_source(rng_seed, "teacher"), rows, kind or drawn(rng_seed))
    return split(data, rng_seed)


def taught(random: np.random.Generator, rows: int, kind: Teacher) -> Data:
    """Random rows and the labels that a random teacher of this kind gives them."""
    features = random.standard_normal((rows, kind.inputs), dtype=np.float32)
    labels = _labels(features.astype(np.float64), kind, random)
    wrong = random.random(rows) < kind.noise
    labels = (labels + wrong * random.integers(1, kind.classes, rows)) % kind.classes
    return check_data(
        Data(
            "teacher",
            torch.from_numpy(features),
            torch.from_numpy(labels),
            kind.classes,
        )
    )


def drawn(rng_seed: int) -> Teacher:
    """The kind of teacher that a number stands for; widths evenly on a log scale."""
    random = random_source(rng_seed, "teacher's kind")
    least, most = np.log(WIDTHS[0]), np.log(WIDTHS[1] + 1)
    return Teacher(
        width=int(np.exp(random.uniform(least, most))),
        depth=int(random.integers(*DEPTHS, endpoint=True)),
        noise=float(random.uniform(0, MOST_NOISE)),
    )


def _labels(features: Rows, kind: Teacher, random: np.random.Generator) -> Labels:
    """Labels of the first drawn teacher that uses every class."""
    for _ in range(TRIES):
        outputs = network_outputs(features, kind, kind.classes, random)
        labels: Labels = (outputs + _bias(outputs[:SAMPLE])).argmax(1)
        if _shares(labels, kind.classes).min() >= LEAST_SHARE / kind.classes:
            return labels
    raise InvalidInputError(
        f"expected a teacher that tells {kind.classes} classes apart; got {TRIES} of "
        f"{kind} that do not; make it wider or less deep"
    )


def network_outputs(
    features: Rows, kind: Teacher, outputs: int, random: np.random.Generator
) -> Rows:
    """Outputs of a random network, each standardised over the rows."""
    signal, fan_in = features, kind.fan_in
    for _ in range(kind.depth):
        signal = _mixed(signal, kind.width, random, fan_in)
        signal, fan_in = np.maximum(signal, signal / 5), None
    return _mixed(signal, outputs, random, fan_in)


def _mixed(
    signal: Rows, units: int, random: np.random.Generator, fan_in: int | None
) -> Float64[np.ndarray, "row {units}"]:
    """A random map of the signal, orthogonal if it is not sparse, standardised."""
    inputs = signal.shape[1]
    if fan_in is None:
        size = max(inputs, units), min(inputs, units)
        drawn = random.standard_normal(size, dtype=np.float32).astype(np.float64)
        basis = np.linalg.qr(drawn)[0]
        weights = basis if inputs >= units else basis.T
    else:
        places = random.permuted(np.tile(np.arange(inputs), (units, 1)), axis=1)
        weights = random.standard_normal((inputs, units)) * (fan_in > places.T)
    mixed = signal @ weights
    standardised: Rows = (mixed - mixed.mean(0)) / mixed.std(0).clip(1e-6)
    return standardised


def _bias(outputs: Rows) -> Float64[np.ndarray, " class"]:
    """Biases that make the classes about equal."""
    outputs = np.ascontiguousarray(outputs.T)
    classes = len(outputs)
    bias = np.zeros((classes, 1))
    for step in range(BALANCING):
        excess = classes * _shares((outputs + bias).argmax(0), classes) - 1
        # Smaller and smaller moves, so that the classes come to rest.
        bias[:, 0] -= 0.2 / (1 + step / 8) * excess
    return bias[:, 0]


def _shares(labels: Labels, classes: int) -> Float64[np.ndarray, " class"]:
    """Share of the rows in each class."""
    shares: Float64[np.ndarray, " class"] = np.bincount(labels, minlength=classes)
    return shares / len(labels)
