r"""Kinds of tasks by formula: rows with classes or with regression targets.

Every function draws the sizes of its task and then its rows from one generator. Labels
are computed in float64 so that they do not depend on the processor's rounding. `lifted`
adds columns of noise and shuffles or rotates all columns; `classified` replaces a
fraction of the labels, test labels included.

    scores      polynomial, periodic, additive, bumps, ...: one number per row, used as
                a target or cut into classes of equal size (`binned`)
    geometry    clusters, cells, boxes, shells, spirals
    logic       parity, multiplexer, rules, counts
    sequences   Markov chain, automaton, motif or frequency in a noisy series
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import isqrt
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from esper.tasks.data import Data, log_uniform_int
from esper.tasks.teacher import Teacher, network_outputs, taught

Random = np.random.Generator
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = Callable[[Random], Data]
"""Draws the data of one task."""

ROW_RANGE: Final = (2_000, 20_000)
"""Rows of a generated task, uniformly on a log scale."""
MAX_LABEL_NOISE: Final = 0.1
"""Maximum fraction of replaced labels."""
MAX_TARGET_NOISE: Final = 0.3
"""Maximum standard deviation of target noise, as a fraction of the targets' own."""


def as_data(
    features: NDArray[np.floating], labels: Ints | Floats, outputs: int
) -> Data:
    """Return arrays as data; with one output, labels are targets."""
    kind = np.float32 if outputs == 1 else np.int64
    rows, answers = features.astype(np.float32), labels.astype(kind)
    return Data("generated", torch.from_numpy(rows), torch.from_numpy(answers), outputs)


def classified(
    random: Random,
    features: Floats,
    labels: Ints,
    classes: int,
    most: float = MAX_LABEL_NOISE,
) -> Data:
    """Return rows with classes, up to a fraction `most` of them replaced."""
    wrong = random.random(len(labels)) < random.uniform(0, most)
    moved = labels + wrong * random.integers(1, classes, len(labels))
    return as_data(features, moved % classes, classes)


def lifted(random: Random, signal: Floats, most: int = 16) -> Floats:
    """Standardize the signal, add up to `most` columns of noise, shuffle or rotate."""
    extra = log_uniform_int(random, 1, most + 1) - 1
    noise = random.standard_normal((len(signal), extra))
    columns = np.hstack([(signal - signal.mean(0)) / signal.std(0), noise])
    if random.random() < 0.5:
        return columns[:, random.permutation(columns.shape[1])]
    return columns @ rotation(random, columns.shape[1])


def rotation(random: Random, size: int) -> Floats:
    """Return a random orthogonal matrix."""
    matrix: Floats = np.linalg.qr(random.standard_normal((size, size)))[0]
    return matrix


def binned(score: Floats, classes: int) -> Ints:
    """Return classes of equal size, by the rank of a score."""
    ranks = np.empty(len(score), np.int64)
    ranks[np.argsort(score, kind="stable")] = np.arange(len(score))
    return ranks * classes // len(score)


def row_count(random: Random) -> int:
    """Draw the number of rows."""
    return log_uniform_int(random, *ROW_RANGE)


# Teachers: random networks that label random rows.


def _teacher(
    random: Random,
    *,
    depth: tuple[int, int],
    inputs: tuple[int, int] = (4, 32),
    sparse: bool = False,
) -> Data:
    """Labels of a network; in a sparse one, first-layer units read few inputs each."""
    columns = log_uniform_int(random, *inputs)
    kind = Teacher(
        width=log_uniform_int(random, 8, 96),
        depth=int(random.integers(*depth, endpoint=True)),
        noise=random.uniform(0, MAX_LABEL_NOISE),
        inputs=columns,
        classes=log_uniform_int(random, 3, 24),
        fan_in=int(random.integers(2, 5)) if sparse else None,
    )
    return taught(random, row_count(random), kind)


def teacher_directions(random: Random) -> Data:
    """Labels of a network that reads two to four directions of the inputs."""
    data = _teacher(random, depth=(1, 3), inputs=(2, 4))
    signal = data.features.double().numpy()
    return as_data(lifted(random, signal, 30), data.labels.numpy(), data.classes)


# Scores: one number per row.


def polynomial_scores(random: Random) -> tuple[Floats, Floats]:
    """Sum of random monomials of the columns."""
    columns = log_uniform_int(random, 2, 12)
    x = random.standard_normal((row_count(random), columns))
    score = np.zeros(len(x))
    for _ in range(log_uniform_int(random, 2, 12)):
        degree = int(random.integers(2, 4))
        score += random.standard_normal() * x[
            :, random.integers(columns, size=degree)
        ].prod(1)
    return x, score


def periodic_scores(random: Random) -> tuple[Floats, Floats]:
    """Sum of waves along random directions."""
    columns = log_uniform_int(random, 1, 8)
    x = random.uniform(-1, 1, (row_count(random), columns))
    score = np.zeros(len(x))
    for _ in range(int(random.integers(1, 4))):
        direction = random.standard_normal(columns)
        direction *= random.uniform(2, 7) / np.sqrt((direction**2).sum())
        score += np.sin(x @ direction + random.uniform(0, 2 * np.pi))
    return x, score


SHAPES: Final[tuple[Callable[[Floats], Floats], ...]] = (
    lambda x: x,
    np.abs,
    lambda x: x**2,
    lambda x: np.sin(3 * x),
    lambda x: np.maximum(x, 0),
    lambda x: (x > 0.3).astype(np.float64),
    lambda x: np.exp(-4 * x**2),
)
"""Terms of an additive score."""


def additive_scores(random: Random) -> tuple[Floats, Floats]:
    """Sum of functions of one column each."""
    columns = log_uniform_int(random, 2, 12)
    x = random.standard_normal((row_count(random), columns))
    score = np.zeros(len(x))
    for column in range(columns):
        part = SHAPES[random.integers(len(SHAPES))](x[:, column])
        score += random.uniform(0.5, 1.5) * part / part.std()
    return x, score


def bump_scores(random: Random) -> tuple[Floats, Floats]:
    """Sum of Gaussian bumps, up and down, in a few dimensions."""
    columns = int(random.integers(1, 5))
    x = random.uniform(-1, 1, (row_count(random), columns))
    centres = random.uniform(-1, 1, (log_uniform_int(random, 3, 24), columns))
    heights = random.standard_normal(len(centres))
    width = random.uniform(0.3, 0.6) * isqrt(4 * columns) / 2
    score: Floats = np.exp(-distances(x, centres) / (2 * width**2)) @ heights
    return x, score


def friedman_scores(random: Random) -> tuple[Floats, Floats]:
    """One of the three functions of Friedman (1991)."""
    u = random.random((row_count(random), 5))
    number = int(random.integers(3))
    if number == 0:
        waves = 10 * np.sin(np.pi * u[:, 0] * u[:, 1])
        return u, waves + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]
    x = u[:, :4] * (100, 520 * np.pi, 1, 10) + (0, 40 * np.pi, 0, 1)
    inner = x[:, 1] * x[:, 2] - 1 / (x[:, 1] * x[:, 3])
    if number == 1:
        return x, np.sqrt(x[:, 0] ** 2 + inner**2)
    return x, np.arctan(inner / x[:, 0].clip(1e-3))


def step_scores(random: Random) -> tuple[Floats, Floats]:
    """Constant in each box of a random tree."""
    x, leaf = _boxes(random)
    return x, random.standard_normal(leaf.max() + 1)[leaf]


def network_scores(random: Random) -> tuple[Floats, Floats]:
    """One output of a random network."""
    kind = Teacher(
        width=log_uniform_int(random, 4, 48),
        depth=int(random.integers(1, 4)),
        noise=0.0,
        inputs=log_uniform_int(random, 2, 16),
    )
    x = random.standard_normal((row_count(random), kind.inputs))
    return x, network_outputs(x, kind, 1, random)[:, 0]


Scores = Callable[[Random], tuple[Floats, Floats]]
"""Draws columns of signal and the score of each row."""


def targets(random: Random, features: NDArray[np.floating], score: Floats) -> Data:
    """Return rows with standardized, noisy targets."""
    noise = random.uniform(0, MAX_TARGET_NOISE) * random.standard_normal(len(score))
    return as_data(features, (score - score.mean()) / score.std() + noise, 1)


def _predicted(scores: Scores) -> Kind:
    """Kind whose targets are a score."""

    def draw(random: Random) -> Data:
        signal, score = scores(random)
        return targets(random, lifted(random, signal, 8), score)

    return draw


def _scored(scores: Scores) -> Kind:
    """Kind whose classes are ranges of a score."""

    def draw(random: Random) -> Data:
        signal, score = scores(random)
        classes = log_uniform_int(random, 2, 12)
        labels = binned(score, classes)
        return classified(random, lifted(random, signal), labels, classes)

    return draw


# Geometry.


def distances(x: Floats, centres: Floats) -> Floats:
    """Return the squared distance of each row from each centre."""
    found: Floats = (
        (x**2).sum(1, keepdims=True) - 2 * x @ centres.T + (centres**2).sum(1)
    )
    return found


def mixture(random: Random) -> Data:
    """Gaussian clusters, several per class."""
    columns, classes = log_uniform_int(random, 2, 24), log_uniform_int(random, 3, 24)
    clusters = classes * log_uniform_int(random, 1, 6)
    centres = random.standard_normal((clusters, columns))
    cluster = random.integers(clusters, size=row_count(random))
    spread = random.uniform(0.3, 0.8) * columns**0.25
    x = centres[cluster] + spread * random.standard_normal((len(cluster), columns))
    return classified(random, lifted(random, x, 8), cluster % classes, classes)


def covariances(random: Random) -> Data:
    """Gaussians with one mean and different covariances."""
    columns, classes = log_uniform_int(random, 2, 12), log_uniform_int(random, 3, 16)
    x = random.standard_normal((row_count(random), columns))
    labels = random.integers(classes, size=len(x))
    for own in range(classes):
        scales = np.exp(random.uniform(-1.2, 1.2, columns))
        x[labels == own] = x[labels == own] * scales @ rotation(random, columns)
    return classified(random, lifted(random, x, 8), labels, classes)


def cells(random: Random) -> Data:
    """Class of the nearest prototype; several share a class."""
    columns, classes = int(random.integers(2, 9)), log_uniform_int(random, 3, 16)
    x = random.uniform(-1, 1, (row_count(random), columns))
    count = classes * log_uniform_int(random, 2, 6)
    nearest = distances(x, random.uniform(-1, 1, (count, columns))).argmin(1)
    return classified(random, lifted(random, x, 8), nearest % classes, classes)


def _boxes(random: Random) -> tuple[Floats, Ints]:
    """Rows, and the leaf of a random decision tree for each."""
    columns = log_uniform_int(random, 2, 12)
    x = random.standard_normal((row_count(random), columns))
    leaf, leaves = np.zeros(len(x), np.int64), 1
    for _ in range(log_uniform_int(random, 3, 30)):
        # Split the largest leaf, so that none is tiny.
        rows = np.flatnonzero(leaf == np.bincount(leaf).argmax())
        column = x[rows, random.integers(columns)]
        cut = np.sort(column)[int(len(rows) * random.uniform(0.3, 0.7))]
        leaf[rows[column > cut]] = leaves
        leaves += 1
    return x, leaf


def boxes(random: Random) -> Data:
    """Class of a leaf of a random decision tree."""
    x, leaf = _boxes(random)
    classes = log_uniform_int(random, 2, min(16, int(leaf.max()) + 1))
    labels = random.permutation(int(leaf.max()) + 1)[leaf] % classes
    return classified(random, lifted(random, x, 8), labels, classes)


def checkerboard(random: Random) -> Data:
    """Colour of a checkerboard in two or three dimensions."""
    columns = int(random.integers(2, 4))
    fields = int(random.integers(2, 5)) if columns == 2 else 2
    classes = int(random.integers(2, 4))
    x = random.uniform(0, fields, (row_count(random), columns))
    labels = np.floor(x).sum(1).astype(np.int64) % classes
    return classified(random, lifted(random, x, 4), labels, classes)


def shells(random: Random) -> Data:
    """Distance from the centre in some of the dimensions."""
    columns, classes = log_uniform_int(random, 2, 10), int(random.integers(2, 9))
    x = random.standard_normal((row_count(random), columns))
    labels = binned((x**2).sum(1), classes)
    return classified(random, lifted(random, x), labels, classes)


def spirals(random: Random) -> Data:
    """Arm of a spiral in a plane."""
    arms = int(random.integers(2, 6))
    rows = row_count(random)
    labels = random.integers(arms, size=rows)
    along = np.sqrt(random.uniform(0.02, 1, rows))
    turns = random.uniform(0.5, 1.5)
    angle = 2 * np.pi * (turns * along + labels / arms)
    x = along[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    x += random.uniform(0, 0.08) * random.standard_normal(x.shape)
    return classified(random, lifted(random, x), labels, arms)


def sparse_linear(random: Random) -> Data:
    """Linear classes of a few of many columns."""
    columns, relevant = log_uniform_int(random, 20, 96), int(random.integers(2, 9))
    kind = Teacher(
        width=1,
        depth=0,
        noise=random.uniform(0, MAX_LABEL_NOISE),
        inputs=relevant,
        classes=int(random.integers(2, max(3, relevant))),
    )
    data = taught(random, row_count(random), kind)
    noise = random.standard_normal((len(data), columns - relevant))
    x = np.hstack([data.features.numpy(), noise])[:, random.permutation(columns)]
    return as_data(x, data.labels.numpy(), data.classes)


def largest(random: Random) -> Data:
    """Group of columns with the largest norm."""
    classes, each = int(random.integers(3, 17)), int(random.integers(2, 5))
    x = random.standard_normal((row_count(random), classes, each))
    labels = (x**2).sum(2).argmax(1)
    return classified(random, lifted(random, x.reshape(len(x), -1), 8), labels, classes)


# Logic.


def _signs(random: Random, columns: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Columns with two clusters each, and the cluster of each row."""
    bits = random.random((row_count(random), columns)) < 0.5
    noise = random.uniform(0.1, 0.4) * random.standard_normal(bits.shape)
    return np.where(bits, 1.0, -1.0) + noise, bits


def parity(random: Random) -> Data:
    """Parity of the signs of two or three columns."""
    x, bits = _signs(random, int(random.integers(2, 4)))
    return classified(random, lifted(random, x, 8), bits.sum(1) % 2, 2)


def multiplexer(random: Random) -> Data:
    """Sign of the column whose index is encoded by other signs."""
    address = int(random.integers(1, 4))
    x, bits = _signs(random, address + 2**address)
    place = address + bits[:, :address] @ 2 ** np.arange(address)
    labels = bits[np.arange(len(bits)), place].astype(np.int64)
    return classified(random, lifted(random, x, 4), labels, 2)


def counting(random: Random) -> Data:
    """Number of columns far from zero."""
    columns = log_uniform_int(random, 3, 12)
    classes = int(random.integers(2, min(6, columns + 2)))
    x = random.standard_normal((row_count(random), columns))
    count = (np.abs(x) > 0.7).sum(1)
    labels = (count - (columns + 1 - classes) // 2).clip(0, classes - 1)
    return classified(random, lifted(random, x, 8), labels, classes)


def rules(random: Random) -> Data:
    """Class of the first rule that holds; a rule is one or two thresholds."""
    columns, classes = log_uniform_int(random, 3, 16), int(random.integers(2, 7))
    x = random.standard_normal((row_count(random), columns))
    labels, free = np.full(len(x), classes - 1), np.ones(len(x), np.bool_)
    for number in range(log_uniform_int(random, classes - 1, 10)):
        holds = free.copy()
        for column in random.integers(columns, size=random.integers(1, 3)):
            cut = random.uniform(-0.8, 0.8)
            holds &= (x[:, column] > cut) ^ (random.random() < 0.5)
        labels[holds] = number % classes
        free &= ~holds
    return classified(random, lifted(random, x, 8), labels, classes)


# Sequences.


def markov(random: Random) -> Data:
    """Symbol after a window of a random Markov chain."""
    symbols, order = int(random.integers(4, 25)), int(random.integers(1, 3))
    length = int(random.integers(order, 9))
    chances = random.dirichlet(np.full(symbols, 0.3), symbols**order).cumsum(1)
    rows, warm = row_count(random), 8
    text = random.integers(symbols, size=(rows, warm + length + 1))
    for place in range(order, text.shape[1]):
        state = text[:, place - order : place] @ symbols ** np.arange(order)
        drawn = (random.random((rows, 1)) > chances[state]).sum(1)
        text[:, place] = drawn.clip(0, symbols - 1)
    shown, labels = text[:, warm:-1], text[:, -1]
    codes = np.eye(symbols, dtype=np.float64)
    if random.random() < 0.5:
        bits = np.arange(symbols)[:, None] >> np.arange(4) & 1
        codes = 2 * bits.astype(np.float64) - 1
    return as_data(codes[shown].reshape(rows, -1), labels, symbols)


def automaton(random: Random) -> Data:
    """State of a random finite automaton after a word."""
    states, symbols = int(random.integers(2, 6)), int(random.integers(2, 4))
    # Each symbol permutes the states, so every symbol of the word matters.
    moves = np.stack([random.permutation(states) for _ in range(symbols)])
    words = random.integers(symbols, size=(row_count(random), random.integers(3, 6)))
    state = np.zeros(len(words), np.int64)
    for place in range(words.shape[1]):
        state = moves[words[:, place], state]
    x = np.eye(symbols)[words].reshape(len(words), -1)
    x += random.uniform(0.05, 0.25) * random.standard_normal(x.shape)
    return classified(random, x, state, states, 0.05)


def motif(random: Random) -> Data:
    """Motif that occurs in a noisy series."""
    length, classes = log_uniform_int(random, 12, 48), int(random.integers(3, 17))
    span = int(random.integers(5, 11))
    motifs = random.standard_normal((classes, span)).cumsum(1)
    motifs = (motifs - motifs.mean(1, keepdims=True)) / motifs.std(1, keepdims=True)
    labels = random.integers(classes, size=row_count(random))
    x = random.uniform(0.1, 0.5) * random.standard_normal((len(labels), length))
    shifts = int(random.integers(2, min(length - span, 16) + 1))
    place = random.integers(shifts, size=len(labels))
    x[np.arange(len(x))[:, None], place[:, None] + np.arange(span)] += motifs[labels]
    return classified(random, x, labels, classes)


def harmonics(random: Random) -> Data:
    """Frequency of a wave of random phase in a noisy series."""
    length, classes = log_uniform_int(random, 12, 48), int(random.integers(3, 13))
    labels = random.integers(classes, size=row_count(random))
    step = random.uniform(0.6, 1.0)
    angle = 2 * np.pi * (1 + step * labels[:, None]) * np.arange(length) / length
    x = np.sin(angle + random.uniform(0, 2 * np.pi, (len(labels), 1)))
    x += random.uniform(0.1, 0.7) * random.standard_normal(x.shape)
    return classified(random, x, labels, classes)


VECTORS: Final[Mapping[str, Kind]] = {
    "teacher": partial(_teacher, depth=(1, 1)),
    "teacher-deep": partial(_teacher, depth=(2, 4)),
    "teacher-sparse": partial(_teacher, depth=(1, 2), inputs=(12, 64), sparse=True),
    "teacher-directions": teacher_directions,
    "polynomial": _scored(polynomial_scores),
    "periodic": _scored(periodic_scores),
    "additive": _scored(additive_scores),
    "bumps": _scored(bump_scores),
    "mixture": mixture,
    "covariances": covariances,
    "cells": cells,
    "boxes": boxes,
    "checkerboard": checkerboard,
    "shells": shells,
    "spirals": spirals,
    "sparse-linear": sparse_linear,
    "largest": largest,
    "parity": parity,
    "multiplexer": multiplexer,
    "counting": counting,
    "rules": rules,
    "markov": markov,
    "automaton": automaton,
    "motif": motif,
    "harmonics": harmonics,
    "network-target": _predicted(network_scores),
    "polynomial-target": _predicted(polynomial_scores),
    "periodic-target": _predicted(periodic_scores),
    "additive-target": _predicted(additive_scores),
    "bumps-target": _predicted(bump_scores),
    "friedman-target": _predicted(friedman_scores),
    "steps-target": _predicted(step_scores),
}
