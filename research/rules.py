"""Which timetables and rules do best on drawn tasks, at every rent?

Rent changes no network that grows by a timetable, so each is grown once and scored at
all rents; `by-rent` depends only on the size that it may add, its limit over the rent.
All of them are tried on the same hosts, with common random numbers. Scores are the
fraction of the never-grown host's errors that is removed on validation rows, net of
rent, mean over tasks. `UNKNOWN_END` of `esper.tamiyo.schedule` is what this command
printed for 144 tasks.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import sqrt
from multiprocessing import get_context
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Generator, Tensor

from benchmarks import timing
from benchmarks.timing import Report
from esper.contracts.actions import ActionMasks, ActionSpec
from esper.contracts.world import Controller, ControllerState, Observation
from esper.environment.growing import GrowingWorld
from esper.environment.settings import LEAST_ERROR
from esper.evaluation.evaluation import evaluate_episode
from esper.tamiyo.rule_based import ByRent
from esper.tamiyo.schedule import Schedule, Scheduled
from esper.tasks.family import drawn_task
from esper.training.recordings import world_settings

Floats = NDArray[np.float64]
FAMILY: Final = 77
"""Random seed of the drawn tasks: of no training and no evaluation."""
RENTS: Final = tuple(0.001 * 2**n for n in range(7))
SIZES: Final = tuple(2.0**n for n in range(-2, 5))
"""That `by-rent` may add, in multiples of the host."""
LIMITS: Final = tuple(0.002 * 2**n for n in range(7))
NEVER: Final = Schedule(count=0)


def _at_once(blueprint: str, count: int) -> Schedule:
    return Schedule(blueprint=blueprint, count=count, every=0.0)


EARLY: Final = {
    f"early: {blueprint} x {count}": _at_once(blueprint, count)
    for blueprint, count in (
        ("widen_x1.25", 1),
        ("widen_x1.5", 1),
        ("widen_x2", 1),
        ("widen_x1.5", 2),
        ("widen_x4", 1),
        ("widen_x2", 2),
        ("widen_x2", 3),
        ("widen_x4", 2),
    )
}
CUT: Final = {
    f"large-then-cut: {blueprint} x {count}, keep {count - 1} at {cut}": replace(
        _at_once(blueprint, count), cut=cut, keep=count - 1
    )
    for blueprint, count, cuts in (
        ("widen_x2", 1, (0.25, 0.5, 0.75)),
        ("widen_x2", 2, (0.25, 0.5, 0.75)),
        ("widen_x4", 1, (0.5,)),
        ("widen_x4", 2, (0.5,)),
    )
    for cut in cuts
}
DOUBLING: Final = {
    f"doubling: {count} from {start:g}, every {every:g}": Schedule(
        count=count, start=start, every=every, scale="octaves"
    )
    for start, every in ((2.0, 2.0), (3.5, 2.0), (5.0, 2.0), (7.0, 2.0), (3.5, 3.0))
    for count in (1, 2, 3, 6)
}
PLANS: Final[Mapping[str, Mapping[str, Schedule]]] = {
    "end": {"never": NEVER, **EARLY, **CUT},
    "anytime": {"never": NEVER, **EARLY, **DOUBLING},
}
"""By when an episode is scored; a share of an unknown horizon is not known."""
TITLES: Final = {"end": "end known", "anytime": "end unknown"}


@dataclass(frozen=True)
class GrownHosts:
    """What became of the hosts of one task, the mean over its stops: `[plan]`."""

    score: Floats
    added: Floats

    def shares(self, rent: float) -> Floats:
        """Of the first plan's errors, removed net of rent."""
        net = self.score - rent * self.added
        return (net - net[0]) / max(1 - float(self.score[0]), LEAST_ERROR)


class Affordable:
    """`by-rent` as if every environment had the rent at which a size can be paid for.

    Args:
        spec: The action space.
        sizes: That may be added, one for each environment.
    """

    def __init__(self, spec: ActionSpec, sizes: Sequence[float]) -> None:
        self._rule, self._rent = ByRent(spec, 1.0), 1.0 / torch.tensor(sizes)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """What the rule decides at those rents."""
        host = replace(observation.host, rent=self._rent)
        seen = replace(observation, host=host)
        return self._rule.decide(seen, masks, state, generator)


def run(tasks: int = 144, processes: int = 2) -> list[Report]:
    """One table for each kind of end.

    Args:
        tasks: Tasks that are drawn.
        processes: Tasks at the same time.
    """
    if timing.QUICK:
        tasks, processes = 1, 1
    return [_report(stop, _grown(stop, tasks, processes)) for stop in PLANS]


def _grown(stop: str, tasks: int, processes: int) -> list[GrownHosts]:
    grow = partial(grown, stop)
    if processes == 1:
        return [*map(grow, range(tasks))]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [*pool.map(grow, range(tasks))]


def grown(stop: str, number: int) -> GrownHosts:
    """One host of a drawn task under every timetable, and every size of `by-rent`."""
    torch.set_num_threads(1)
    task, plans = drawn_task(FAMILY, number), [*PLANS[stop].values()]
    parts: list[tuple[Floats, Floats]] = []
    makers = (
        (len(plans), lambda spec: Scheduled(spec, plans)),
        (len(SIZES), lambda spec: Affordable(spec, SIZES)),
    )
    for envs, make in makers:
        # The rent of the world is 1, so that worth tells the size at every stop.
        settings = replace(world_settings(stop), group_size=envs, rent=1.0)
        world = GrowingWorld(task, envs, number, settings=settings)
        controller: Controller = make(world.spec)
        stops = evaluate_episode(world, controller, number).stops
        assert stops is not None
        parts.append(
            (stops.weights @ stops.score, stops.weights @ (stops.score - stops.worth))
        )
    score, added = (np.concatenate(part) for part in zip(*parts, strict=True))
    return GrownHosts(score, added)


def _report(stop: str, found: Sequence[GrownHosts]) -> Report:
    names = [*PLANS[stop]]
    shares = np.array([[one.shares(rent) for rent in RENTS] for one in found])
    means = shares.mean(axis=0).T  # [plan, rent]
    report = Report(
        f"{len(found)} drawn tasks, {TITLES[stop]}: share of never's errors",
        ("timetable", *(f"rent {rent:g}" for rent in RENTS), "mean"),
    )
    for name, row in zip(names, means[: len(names)], strict=True):
        report.add(name, *map(float, row), float(row.mean()))
    sizes = means[len(names) :]
    limits = {limit: limited(sizes, limit) for limit in LIMITS}
    for limit, row in limits.items():
        report.add(f"by-rent, limit {limit:g}", *map(float, row), float(row.mean()))
    report.add("best per rent", *map(float, means[: len(names)].max(axis=0)))
    best = [names[index] for index in means[: len(names)].argmax(axis=0)]
    report.rows[-1] = (*report.rows[-1], float(means[: len(names)].max(axis=0).mean()))
    for text in plans_by_rent(best):
        report.notes.append(f"timetable-by-rent, {text}")
    for group in ("early", "large-then-cut", "doubling"):
        own = [name for name in names if name.startswith(group)]
        if own:
            top = max(own, key=lambda name: means[names.index(name)].mean())
            report.notes.append(f"best in the mean over the rents: {top}")
    limit = max(limits, key=lambda limit: float(limits[limit].mean()))
    report.notes.append(f"best limit of by-rent: {limit:g}")
    return report


def limited(sizes: Floats, limit: float) -> Floats:
    """Shares of `by-rent` with this limit at every rent, of `[size, rent]`."""
    shares = []
    for column, rent in enumerate(RENTS):
        affordable = [n for n, size in enumerate(SIZES) if size <= limit / rent * 1.01]
        shares.append(sizes[affordable[-1], column] if affordable else 0.0)
    return np.array(shares)


def plans_by_rent(best: Sequence[str]) -> list[str]:
    """Up to which rent each of the best plans is followed, in words."""
    limits = [sqrt(low * high) for low, high in pairwise(RENTS)]
    lines = [
        f"up to rent {limit:.4f}: {name}"
        for limit, (name, after) in zip(limits, pairwise(best), strict=True)
        if name != after
    ]
    return [*lines, f"above: {best[-1]}"]
