r"""Teacher and student: rows labelled by a random network, another one for each number.

    x ~ N(0, 1), 16 numbers
    h = max(z, z / 5),    z = standardised(Q x),    once for each hidden layer
    label = argmax standardised(Q h) + b

Each Q is a random matrix with orthogonal rows or columns, and standardising is over the
rows of data: no unit of the teacher is dead or the copy of another. b is moved until
the classes are about equal. Then a share of all labels, also of those that test, is
replaced by another class, so no student scores more than about 1 - noise. Width, depth
and noise are drawn too; shapes and classes are the same for every teacher.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64

from esper.contracts.errors import BadInput
from esper.tasks.data import Data, Splits, check_data, random_source, split

INPUTS: Final = 16
CLASSES: Final = 8
ROWS: Final = 6_000
WIDTHS: Final = (4, 48)
DEPTHS: Final = (1, 3)
MOST_NOISE: Final = 0.2
LEAST_SHARE: Final = 0.03
"""Share of the rows that the teacher must give to each class."""
TRIES: Final = 8
"""Teachers of one kind to draw until one gives that share."""
BALANCING: Final = 40
"""Moves of the biases towards equal classes."""
SAMPLE: Final = 2_000
"""Rows that these moves look at."""

Rows = Float32[np.ndarray, "row unit"]
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

    def __post_init__(self) -> None:
        """Refuse a network without units and labels that are only noise."""
        if self.width < 1 or self.depth < 0 or not 0 <= self.noise <= 1 - 1 / CLASSES:
            raise BadInput(
                f"expected width >= 1, depth >= 0 and noise in 0..{1 - 1 / CLASSES}; "
                f"got width {self.width}, depth {self.depth} and noise {self.noise}"
            )


def teacher(rng_seed: int, rows: int = ROWS, *, kind: Teacher | None = None) -> Splits:
    """The rows of one teacher; without a kind, of the one that the number draws."""
    if rows < 10 * CLASSES:
        raise BadInput(f"expected rows to be at least {10 * CLASSES}; got {rows}")
    kind = kind or drawn(rng_seed)
    random = random_source(rng_seed, "teacher")
    features = random.standard_normal((rows, INPUTS), dtype=np.float32)
    labels = _taught(features, kind, random)
    wrong = random.random(rows) < kind.noise
    labels = (labels + wrong * random.integers(1, CLASSES, rows)) % CLASSES
    data = Data(
        "teacher", torch.from_numpy(features), torch.from_numpy(labels), CLASSES
    )
    return split(check_data(data), rng_seed)


def drawn(rng_seed: int) -> Teacher:
    """The kind of teacher that a number stands for; widths evenly on a log scale."""
    random = random_source(rng_seed, "teacher's kind")
    least, most = np.log(WIDTHS[0]), np.log(WIDTHS[1] + 1)
    return Teacher(
        width=int(np.exp(random.uniform(least, most))),
        depth=int(random.integers(*DEPTHS, endpoint=True)),
        noise=float(random.uniform(0, MOST_NOISE)),
    )


def _taught(features: Rows, kind: Teacher, random: np.random.Generator) -> Labels:
    """Labels of the first drawn teacher that uses every class."""
    for _ in range(TRIES):
        outputs = features
        for _ in range(kind.depth):
            outputs = _mixed(outputs, kind.width, random)
            outputs = np.maximum(outputs, outputs / 5)
        outputs = _mixed(outputs, CLASSES, random)
        labels: Labels = (outputs + _bias(outputs[:SAMPLE])).argmax(1)
        if _shares(labels).min() >= LEAST_SHARE:
            return labels
    raise BadInput(
        f"expected a teacher that tells {CLASSES} classes apart; got {TRIES} of {kind} "
        f"that do not; make it wider or less deep"
    )


def _mixed(
    signal: Rows, units: int, random: np.random.Generator
) -> Float32[np.ndarray, "row {units}"]:
    """A random orthogonal map of the signal, standardised."""
    inputs = signal.shape[1]
    large, small = max(inputs, units), min(inputs, units)
    basis = np.linalg.qr(random.standard_normal((large, small), dtype=np.float32))[0]
    mixed: Rows = signal @ (basis if inputs >= units else basis.T)
    standardised: Rows = (mixed - mixed.mean(0)) / mixed.std(0).clip(1e-6)
    return standardised


def _bias(outputs: Rows) -> Float32[np.ndarray, " class"]:
    """Biases that make the classes about equal."""
    outputs = np.ascontiguousarray(outputs.T)
    bias = np.zeros((CLASSES, 1), dtype=np.float32)
    for step in range(BALANCING):
        excess = CLASSES * _shares((outputs + bias).argmax(0)) - 1
        # Smaller and smaller moves, so that the classes come to rest.
        bias[:, 0] -= 0.2 / (1 + step / 8) * excess
    return bias[:, 0]


def _shares(labels: Labels) -> Float64[np.ndarray, " class"]:
    """Share of the rows in each class."""
    shares: Float64[np.ndarray, " class"] = np.bincount(labels, minlength=CLASSES)
    return shares / len(labels)
