"""How the kinds of drawn tasks differ: what their hosts reach, and what size would add.

Three hosts for each of some tasks of every kind, trained for the task's compute at its
learning rate and never grown: as drawn; with all hidden layers four times as wide for
as many batches; the same for as much compute, so for fewer batches. Scores are of the
test rows, means over the hosts of a task.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from benchmarks import timing
from benchmarks.timing import Report
from esper.environment.growing import GrowingWorld
from esper.environment.settings import WorldSettings
from esper.tamiyo.registry import make_controller
from esper.tamiyo.rollout import play
from esper.tasks.family import ALL_KINDS, HELD_OUT_KINDS, drawn_task
from esper.tasks.hosts import CnnHost, Host, MlpHost
from esper.tasks.task import Task

WIDER: Final = 4
COLUMNS: Final = (
    "kind",
    "inputs",
    "outputs",
    "units",
    "batches",
    "score",
    f"{WIDER} x wider",
    "for its price",
    "seconds",
)
BY_COMPUTE: Final = WorldSettings(clock="compute", charge_eval=False)


def run(tasks: int = 6, hosts: int = 3, rng_seed: int = 0) -> Report:
    """One row for each kind.

    Args:
        tasks: Tasks of each kind.
        hosts: Hosts of each task and size.
        rng_seed: Which family.
    """
    kinds = [*ALL_KINDS]
    if timing.QUICK:
        tasks, hosts, kinds = 1, 1, ["parity", "bars"]
    first = drawn_task(rng_seed, 0, kinds[:1])
    trained(first, first.host, 8, hosts)  # loads data and compiled loops
    report = Report("kinds of drawn tasks", COLUMNS)
    for kind in kinds:
        report.add(*_row(kind, tasks, hosts, rng_seed))
    return report


def _row(kind: str, tasks: int, hosts: int, rng_seed: int) -> tuple[str, ...]:
    drawn = [drawn_task(rng_seed, number, (kind,)) for number in range(tasks)]
    never, wide, paid, seconds = [], [], [], []
    for task in drawn:
        score, took = trained(task, task.host, task.compute, hosts)
        never.append(score)
        seconds.append(took)
        large = wider(task.host)
        wide.append(trained(task, large, task.compute, hosts)[0] - score)
        fewer = task.compute * task.host.macs / large.macs
        paid.append(trained(task, large, fewer, hosts)[0] - score)
    return (
        f"{kind} (held out)" if kind in HELD_OUT_KINDS else kind,
        span([int(np.prod(task.host.shape)) for task in drawn]),
        span([task.classes for task in drawn]),
        span([task.host.layers[0].outputs for task in drawn]),
        span([task.compute for task in drawn]),
        span([round(score, 2) for score in never]),
        f"{np.mean(wide):+.3f}",
        f"{np.mean(paid):+.3f}",
        f"{np.mean(seconds):.3f}",
    )


def wider(host: Host) -> Host:
    """The host with all hidden layers four times as wide."""
    if isinstance(host, CnnHost):
        return replace(host, channels=tuple(WIDER * n for n in host.channels))
    inputs, *hidden, outputs = host.widths
    return MlpHost((inputs, *(WIDER * n for n in hidden), outputs))


def trained(task: Task, host: Host, batches: float, hosts: int) -> tuple[float, float]:
    """Mean test score after so many batches, and seconds of the CPU per host."""
    sized = replace(task, host=host, compute=max(8, round(batches)))
    world = GrowingWorld(sized, hosts, settings=BY_COMPUTE)
    controller = make_controller("never", world.spec)
    start = time.process_time()
    play(world, controller, torch.Generator())
    took = time.process_time() - start
    return float(world.last_test.mean()), took / hosts


def span(numbers: Sequence[float]) -> str:
    """Least and most."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
