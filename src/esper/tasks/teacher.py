r"""Teacher-student data: rows labelled by a random network, one per random seed.

    x ~ N(0, 1), 16 columns by default
    h = max(z, z / 5),    z = standardized(Q x),    once per hidden layer
    label = argmax standardized(Q h) + b

Each Q is a random matrix with orthogonal rows or columns; standardizing is over the
rows of data. b is adjusted until the classes are about equal. Then a fraction `noise`
of all labels, test labels included, is replaced by another class. Labels are computed
in float64 so that they do not depend on the processor's rounding.
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
"""Minimum size of each class, as a fraction of equal sizes."""
TRIES: Final = 8
"""Maximum number of teachers to draw until one has such classes."""
BALANCING: Final = 40
"""Steps that adjust the biases towards equal classes."""
SAMPLE: Final = 2_000
"""Rows that these steps use."""

Rows = Float64[np.ndarray, "row unit"]
Labels = Int64[np.ndarray, " row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """Size of a teacher network and noise of its labels."""

    width: int
    """Units of each hidden layer."""
    depth: int
    """Hidden layers."""
    noise: float
    """Fraction of wrong labels."""
    inputs: int = INPUTS
    classes: int = CLASSES
    fan_in: int | None = None
    """Inputs of each unit in the first layer; none: all."""


def teacher(rng_seed: int, rows: int = ROWS, *, kind: Teacher | None = None) -> Splits:
    """Return the data of one teacher; `kind` defaults to a random one."""
    data = taught(random_source(rng_seed, "teacher"), rows, kind or drawn(rng_seed))
    return split(data, rng_seed)


def taught(random: np.random.Generator, rows: int, kind: Teacher) -> Data:
    """Draw rows and label them by a random teacher of this kind."""
    features = random.standard_normal((rows, kind.inputs), dtype=np.float32)
    labels = _labels(features.astype(np.float64), kind, random)
    wrong = random.random(rows) < kind.noise
    labels = (labels + wrong * random.integers(1, kind.classes, rows)) % kind.classes
    x, y = torch.from_numpy(features), torch.from_numpy(labels)
    return check_data(Data("teacher", x, y, kind.classes))


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
    """Labels of the first drawn teacher with large enough classes."""
    for _ in range(TRIES):
        outputs = network_outputs(features, kind, kind.classes, random)
        labels: Labels = (outputs + _bias(outputs[:SAMPLE])).argmax(1)
        if _shares(labels, kind.classes).min() >= LEAST_SHARE / kind.classes:
            return labels
    raise InvalidInputError(
        f"{TRIES} draws of {kind} gave no teacher with {kind.classes} balanced "
        "classes; make it wider or less deep."
    )


def network_outputs(
    features: Rows, kind: Teacher, outputs: int, random: np.random.Generator
) -> Rows:
    """Return the outputs of a random network, standardized over the rows."""
    signal, fan_in = features, kind.fan_in
    for _ in range(kind.depth):
        signal = _mixed(signal, kind.width, random, fan_in)
        signal, fan_in = np.maximum(signal, signal / 5), None
    return _mixed(signal, outputs, random, fan_in)


def _mixed(
    signal: Rows, units: int, random: np.random.Generator, fan_in: int | None
) -> Float64[np.ndarray, "row {units}"]:
    """Random linear map, orthogonal unless sparse, standardized."""
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
    standardized: Rows = (mixed - mixed.mean(0)) / mixed.std(0).clip(1e-6)
    return standardized


def _bias(outputs: Rows) -> Float64[np.ndarray, " class"]:
    """Biases that make the class sizes about equal."""
    outputs = np.ascontiguousarray(outputs.T)
    classes = len(outputs)
    bias = np.zeros((classes, 1))
    for step in range(BALANCING):
        excess = classes * _shares((outputs + bias).argmax(0), classes) - 1
        # Decreasing steps, so that the biases converge.
        bias[:, 0] -= 0.2 / (1 + step / 8) * excess
    return bias[:, 0]


def _shares(labels: Labels, classes: int) -> Float64[np.ndarray, " class"]:
    """Fraction of the rows in each class."""
    shares: Float64[np.ndarray, " class"] = np.bincount(labels, minlength=classes)
    return shares / len(labels)
