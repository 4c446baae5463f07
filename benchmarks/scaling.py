"""How long does a round take with more workers, and what would limit a thousand cores?

A training of the preset `family` is played here, shard by shard, and again by workers,
turn by turn: the same rounds to the bit, which is checked. From the first the few
numbers of a model are taken,

    round(w) = shards in order on w workers + count x (transfer + join) + update

and the second, which it has not seen, tells how wrong it is. Then the model is asked
about clusters with one shard per core. There the longest of many shards counts: shards
are drawn from those that were measured. Transfer, join and update grow with the number.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.timing import Report
from esper.runs.train_config import FAMILY, TrainConfig, preset
from esper.simic.agent.ppo import PPOAgent
from esper.training.controller_ppo import controller_loop
from esper.training.worlds import mixture_for, steps_of
from esper.workers.jobs import Workers, one_thread, packed, unpacked, workers

CORES = (2, 64, 1_024, 10_000)
DRAWS = 200
"""Rounds that are drawn for each number of cores."""
SHARDS = 1_000_000
"""Shards whose cost is printed."""


@dataclass
class Timed(Workers):
    """Does jobs here; remembers how long each took, and what sending it would."""

    shards: list[float] = field(default_factory=list)
    transfers: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def run(
        self,
        function: Callable[[Any, Any], Any],
        jobs: Sequence[Any],
        shared: Any,  # noqa: ANN401
        **more: object,
    ) -> Iterator[Any]:
        """The results, in order."""
        for job in jobs:
            with one_thread():
                began = perf_counter()
                result = function(shared, job)
                self.shards.append(perf_counter() - began)
            began = perf_counter()
            ways = [packed(each) for each in (shared, job, result)]
            unpacked(ways[-1])
            self.transfers.append(perf_counter() - began)
            self.sent.append(sum(map(len, ways)))
            yield result


@dataclass(frozen=True)
class Round:
    """What one round took, in seconds."""

    shards: list[float]
    transfer: float
    """Of all shards."""
    join: float
    """Rollouts put together."""
    update: float
    total: float
    """With workers."""

    def model(self, count: int) -> float:
        """What it should take with so many workers."""
        each = (self.transfer + self.join) / len(self.shards)
        return span(self.shards, count) + len(self.shards) * each + self.update


def span(shards: Sequence[float], count: int) -> float:
    """How long workers take who each begin the next shard when they have done one."""
    free = [0.0] * count
    heapify(free)
    for seconds in shards:
        heapreplace(free, free[0] + seconds)
    return max(free)


def run(rounds: int = 6, count: int = 2, ray: bool = False) -> list[Report]:
    """Measure, compare and extrapolate.

    Args:
        rounds: That are timed, after one that is not.
        count: Workers.
        ray: Whether they are Ray's.
    """
    config = replace(preset(FAMILY), start_from=None)
    if timing.QUICK:
        world = replace(config.world, horizon=3, decision_every=2, group_size=2)
        config = replace(config, num_envs=2, variants=2, world=world)
        rounds = 1
    timed = Timed()
    with workers(count, ray="local" if ray else None) as others:
        found = measure(config, rounds, timed, others)
    alone = [sum(each.shards) + each.join + each.update for each in found]
    return [measured(config, found, alone, count), asked(found, timed)]


def measure(
    config: TrainConfig, rounds: int, timed: Timed, others: Workers
) -> list[Round]:
    """Rounds played here and by others, turn by turn."""
    update, spent = PPOAgent.update, list[float]()

    def timed_update(self: PPOAgent) -> Any:  # noqa: ANN401
        began = perf_counter()
        record = update(self)
        spent.append(perf_counter() - began)
        return record

    PPOAgent.update = timed_update  # type: ignore[method-assign]
    try:
        here, there = (
            controller_loop(mixture_for(config), config, steps_of(config), workers=each)
            for each in (timed, others)
        )
        found = []
        for number in range(rounds + 1):
            timed.shards.clear()
            timed.transfers.clear()
            timed.sent.clear()
            began = perf_counter()
            one = here.play_round()
            middle = perf_counter()
            other = there.play_round()
            total = perf_counter() - middle
            if repr(one.update) != repr(other.update):
                raise RuntimeError(f"round {one.round} is not the same with workers.")
            transfer, took = sum(timed.transfers), spent[-2]
            join = middle - began - sum(timed.shards) - transfer - took
            if number or not rounds:
                found.append(Round([*timed.shards], transfer, join, took, total))
    finally:
        PPOAgent.update = update  # type: ignore[method-assign]
    return found


def measured(
    config: TrainConfig, found: Sequence[Round], alone: Sequence[float], count: int
) -> Report:
    """The table of rounds, with the model beside."""
    report = Report(
        f"{FAMILY}: {config.variants} x {config.num_envs} hosts, {count} workers",
        ("round", "here, s", "workers, s", "ratio", "model, s", "error, %"),
        notes=["The model knows nothing of the rounds of the workers."],
    )
    for number, (each, here) in enumerate(zip(found, alone, strict=True), start=1):
        model = each.model(count)
        error = 100 * (model / each.total - 1)
        report.add(number, here, each.total, here / each.total, model, error)
    here, total = sum(alone), sum(each.total for each in found)
    model = sum(each.model(count) for each in found)
    report.add("all", here, total, here / total, model, 100 * (model / total - 1))
    return report


def asked(found: Sequence[Round], timed: Timed) -> Report:
    """What the model says of larger clusters."""
    shards = np.array([seconds for each in found for seconds in each.shards])
    count = len(found[0].shards)
    transfer, join, update = (
        float(np.mean([getattr(each, name) for each in found])) / count
        for name in ("transfer", "join", "update")
    )
    report = Report(
        "One shard per core",
        ("cores", "round, s", "mean shard, %", "waiting, %", "learner, %", "speed-up"),
        notes=[
            f"Seconds per shard: {shards.mean():.3g} to play (deviation "
            f"{shards.std():.3g}, longest {shards.max():.3g}), {transfer:.3g} to send, "
            f"{join:.3g} to join, {update:.3g} to learn from; "
            f"{np.mean(timed.sent) / 1e6:.2f} MB.",
            f"{SHARDS:,} shards take {SHARDS * shards.mean() / 3_600:,.0f} core-hours "
            f"and {SHARDS * (transfer + join + update) / 3_600:,.1f} of the learner.",
        ],
    )
    chance, serial = np.random.default_rng(0), transfer + join + update
    for cores in CORES:
        longest = np.mean(
            [chance.choice(shards, cores).max() for _ in range(DRAWS)], dtype=float
        )
        total = longest + cores * serial
        speed = cores * (shards.mean() + join + update) / total
        waiting = longest - shards.mean()
        parts = (shards.mean(), waiting, cores * serial)
        report.add(cores, total, *(100 * part / total for part in parts), speed)
    return report
