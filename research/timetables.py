"""Networks that grow by a timetable, or do not, trained on the clock of compute.

What the studies of growing share: tasks with a starting host of W/16 hidden units, W
the largest size, and C the compute of 600 batches of W; whole curves of the test score,
from which every stop, rent and control is computed afterwards.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2
from multiprocessing import get_context
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from esper.contracts.world import StepResult
from esper.environment.growing import GrowingWorld
from esper.environment.settings import WorldSettings
from esper.tamiyo.rollout import play
from esper.tamiyo.schedule import Schedule, Scheduled
from esper.tasks.catalogue import task as find_task
from esper.tasks.data import Splits
from esper.tasks.family import drawn_task
from esper.tasks.hosts import MlpHost
from esper.tasks.task import Task

Floats = NDArray[np.float64]
LARGEST: Final = 64
BATCHES: Final = 600
FIRST: Final = 8.0
"""Batches of the starting host before the second decision, at least."""
EVERY: Final = 4
"""Batches between two decisions where the end is known."""
NEVER: Final = Schedule(count=0)


@dataclass(frozen=True)
class Study:
    """A task, its networks and how long they are trained."""

    name: str
    largest: int = LARGEST
    """W: hidden units of the largest network, in every layer."""
    layers: int = 1
    batches: float = BATCHES
    """C: batches of the largest network that cost as much as an episode."""
    stop: str = "anytime"
    """Or "end": the end is known, and batches count instead of compute."""
    start: float = 1 / 16
    """Size of the starting host, as a share of W."""

    @property
    def sizes(self) -> tuple[float, ...]:
        """Sizes of static networks, from the starting host to W, by doubling."""
        count = round(log2(1 / self.start))
        return tuple(self.start * 2.0**n for n in range(count + 1))

    def host(self, share: float) -> MlpHost:
        """The network whose hidden layers have this share of W."""
        task = task_of(self.name)
        units = max(1, round(share * self.largest))
        inputs = int(np.prod(task.host.shape))
        return MlpHost((inputs, *(units,) * self.layers, task.classes))


@dataclass(frozen=True)
class Episodes:
    """Some hosts of one study under one timetable at one learning rate."""

    study: Study
    share: float
    """Size of the network at the start, against W."""
    schedule: Schedule
    rate: float
    seeds: int
    rng_seed: int


@dataclass(frozen=True)
class Curves:
    """What became of each host at every decision: `[decision, host]`."""

    times: Floats
    """Compute at the decisions, in batches of the starting host, `[decision]`."""
    score: Floats
    """On the decision rows."""
    test: Floats
    """On the test rows; at the stops only, NaN elsewhere."""
    added: Floats
    """Size beyond the starting host, as a multiple of it."""
    batches: Floats
    """Batches since the decision before."""
    macs: Floats
    """Multiply-adds per row while they were trained."""


@cache
def task_of(name: str) -> Task:
    """A task of the catalogue with flat rows, or a drawn one, such as `drawn 3`."""
    drawn = name.startswith("drawn ")
    task = drawn_task(0, int(name.split()[1])) if drawn else find_task(name)
    if task.host.kind == "mlp":
        return task
    inputs = int(np.prod(task.host.shape))
    flat = MlpHost((inputs, 8, task.classes))
    return replace(task, host=flat, data=lambda number: _flat(task.data(number)))


def _flat(splits: Splits) -> Splits:
    parts = (replace(p, features=p.features.flatten(1)) for p in splits)
    return Splits(*parts)


def world_of(what: Episodes) -> GrowingWorld:
    """The hosts of some episodes."""
    study, task = what.study, task_of(what.study.name)
    small, large = study.host(study.start), study.host(1)
    settings = WorldSettings(
        stop=study.stop,
        horizon=max(1, round(study.batches / EVERY)),
        decision_every=EVERY,
        budget=4.0 * ceil(large.parameters / small.parameters),
        seeds_per_slot=12,
        rent=0.0,
        charge_eval=False,
    )
    if study.stop == "anytime":
        compute = study.batches * large.macs / small.macs
        # Decisions a third of an octave apart, so that stops are decisions.
        horizon = 1 + int(3 * log2(compute / FIRST))
        first = compute / 2 ** ((horizon - 1) / 3)
        settings = replace(settings, clock="compute", first=first, horizon=horizon)
    task = replace(
        task, host=study.host(what.share), unit_host=small, learning_rate=what.rate
    )
    return GrowingWorld(task, what.seeds, what.rng_seed, settings=settings)


def train(what: Episodes) -> Curves:
    """Let the hosts live for one episode each."""
    torch.set_num_threads(1)
    world = world_of(what)
    parts: dict[str, list[Floats]] = {
        name: [] for name in ("score", "test", "added", "batches", "macs")
    }
    weights = world.clock.weights()

    def add(actions: torch.Tensor, result: StepResult) -> None:
        report, shown = result.report, result.observation.host
        ended = report is not None
        number = len(parts["score"]) + 1
        here = world.last_test if weights[number] > 0 else shown.score * np.nan
        parts["test"].append(here.double().numpy())
        parts["score"].append((report if ended else shown).score.double().numpy())
        parts["added"].append((report if ended else shown).added.double().numpy())
        parts["batches"].append(world.trained_steps.double().numpy())
        parts["macs"].append(world.trained_macs.double().numpy())

    play(world, Scheduled(world.spec, what.schedule), torch.Generator(), on_step=add)
    return Curves(
        world.clock.times()[1:].numpy(),
        *(np.stack(parts[name]) for name in parts),
    )


def train_all(many: Sequence[Episodes], processes: int = 2) -> list[Curves]:
    """The same for many, in processes of one thread each, in order."""
    if processes == 1:
        return [train(each) for each in many]
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return [*pool.map(train, many, chunksize=8)]


def over_stops(curves: Curves, rent: float, rows: str = "test") -> Floats:
    """Score less rent, mean over the stops, of every host."""
    at = ~np.isnan(curves.test[:, 0])
    worth: Floats = (getattr(curves, rows)[at] - rent * curves.added[at]).mean(axis=0)
    return worth


def best_rates(
    arms: Iterable[tuple[Study, float, Schedule]],
    rates: Sequence[float],
    seeds: int,
    rng_seed: int,
    processes: int,
) -> dict[tuple[Study, float, Schedule], list[Curves]]:
    """Curves of every arm at every learning rate, on hosts that are not counted."""
    arms = [*dict.fromkeys(arms)]
    many = [Episodes(*arm, rate, seeds, rng_seed) for arm in arms for rate in rates]
    found = iter(train_all(many, processes))
    return {arm: [next(found) for _ in rates] for arm in arms}
