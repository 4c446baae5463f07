"""Tasks drawn at random: what a controller is trained on if it is to serve any host.

    kind             one after the other: teachers, curves, small real tables
    hidden layers    one, or with a chance of a quarter two
    width            3 to 16, evenly on a log scale
    horizon          20 to 36 decisions
    decision_every   8 to 24 batches, evenly on a log scale
    curves           scale, noise and shear of MNIST-1D around the published ones

Teachers differ from episode to episode, everything else from task to task. Data sets
that others are judged on are not in here.
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

import numpy as np

from esper.tasks.catalogue import task
from esper.tasks.data import Splits, random_source, split
from esper.tasks.hosts import MlpHost
from esper.tasks.mnist1d import Distortion, mnist1d
from esper.tasks.task import Task
from esper.tasks.teacher import teacher

KINDS: Final = (
    "teacher",
    "mnist1d",
    "vowel",
    "segment",
    "phoneme",
    "spambase",
    "digits",
)
"""What the tasks of a family are made of, in turn."""
DEEP: Final = 0.25
"""Chance of a second hidden layer."""
WIDTHS: Final = (3, 16)
HORIZONS: Final = (20, 36)
CADENCES: Final = (8, 24)


def drawn_task(rng_seed: int, number: int) -> Task:
    """The task of this number in the family that a random seed stands for."""
    random = random_source(rng_seed, f"family, {number}")
    base = task(KINDS[number % len(KINDS)])
    inputs, classes = base.host.shape[0], base.classes
    layers = 1 + int(random.random() < DEEP)
    hidden = (_log_uniform_int(random, WIDTHS),) * layers
    varied = replace(
        base,
        name=f"family-{number + 1}",
        description=f"{base.name}, a host of its own",
        host=MlpHost((inputs, *hidden, classes)),
        horizon=int(random.integers(*HORIZONS, endpoint=True)),
        decision_every=_log_uniform_int(random, CADENCES),
    )
    if base.name == "teacher":
        return replace(varied, data=_teacher_rows)
    if base.name == "mnist1d":
        return replace(varied, data=partial(_curves, _drawn(random)))
    return varied


_rows = lru_cache(maxsize=8)(mnist1d)


@lru_cache(maxsize=64)
def _teacher_rows(rng_seed: int) -> Splits:
    """The rows of a teacher; environments that share it draw it once."""
    return teacher(rng_seed)


def _curves(distortion: Distortion, rng_seed: int) -> Splits:
    """Curves that are distorted in a way of their own, dealt out."""
    return split(_rows(distortion=distortion), rng_seed)


def _drawn(random: np.random.Generator) -> Distortion:
    """Distortions around the published ones."""
    return Distortion(
        scale=float(random.uniform(0.2, 0.6)),
        smooth_noise=float(random.uniform(0.1, 0.4)),
        white_noise=float(random.uniform(0.01, 0.1)),
        shear=float(random.uniform(0.4, 1.1)),
    )


def _log_uniform_int(random: np.random.Generator, ends: tuple[int, int]) -> int:
    """A whole number, evenly on a log scale."""
    return int(np.exp(random.uniform(np.log(ends[0]), np.log(ends[1] + 1))))
