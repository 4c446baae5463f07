"""The best static schedule that random search finds with so many environment steps.

Every schedule of a round grows the same hosts: worlds are made anew from one number,
and in each sweep the schedules move on by one environment. After each round the best
third go on, to twice as many hosts, and all that was ever seen of a schedule counts.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Final

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.errors import BadInput
from esper.contracts.world import Controller, Observation, StepResult, VectorWorld
from esper.experiment.rollout import play
from esper.experiment.statistics import Floats
from esper.experiment.streams import stream, stream_seed
from esper.tamiyo.rule_based import Never
from esper.tamiyo.schedule import STANDARD, Schedule, Scheduled, draw_schedules

MakeWorlds = Callable[[int], Sequence[VectorWorld]]
"""The worlds that a number stands for; for the same number the same."""

MOST: Final = 256
"""Schedules that are tried, at most."""
KEPT: Final = 3
"""One in so many goes on to the next round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best schedule; what makes a controller of it."""

    schedule: Schedule
    value: float
    """Its mean return over all hosts that it grew."""
    tried: int
    """Schedules that were compared."""
    env_steps: int
    """Decisions that this took, over all environments."""

    def __call__(self, spec: ActionSpec) -> Controller:
        """Plays the schedule in this action space."""
        return Scheduled(spec, self.schedule)


def search(make_worlds: MakeWorlds, env_steps: int, rng_seed: int) -> Found:
    """Compare as many random schedules as the steps allow; keep the best.

    Args:
        make_worlds: Makes the worlds in which schedules are compared.
        env_steps: Decisions that may be spent, over all environments.
        rng_seed: Decides schedules and hosts.
    """
    sweeps = Sweeps(make_worlds, env_steps, rng_seed, "search")
    worlds = sweeps.worlds(0)
    price = sweeps.play(worlds, [Never() for _ in worlds]).steps
    number = _affordable((env_steps - price) // price)
    if number < len(STANDARD):
        least = price * (1 + _sweeps(len(STANDARD)))
        raise BadInput(f"env_steps must be at least {least} here, got {env_steps}.")
    chance = np.random.default_rng(stream_seed(rng_seed, "schedules"))
    tried = draw_schedules(number, [world.spec for world in worlds], chance)
    alive, totals, groups, until = np.arange(number), np.zeros(number), 0, 1
    while len(alive) > 1 and sweeps.affords(len(alive)):
        while groups < until and sweeps.affords(len(alive)):
            returns = sweeps.compare([tried[each] for each in alive], groups)
            totals[alive] += np.mean([part.mean(axis=1) for part in returns], axis=0)
            groups += 1
        best_first = np.argsort(-totals[alive], kind="stable")
        alive = alive[best_first[: ceil(len(alive) / KEPT)]]
        until = 2 * until + 1  # one group of hosts, then two more, then four more
    best = int(alive[0])
    return Found(
        schedule=tried[best],
        value=float(totals[best] / groups),
        tried=number,
        env_steps=sweeps.spent,
    )


def as_json(found: Found) -> str:
    """What was found, as text."""
    return json.dumps(asdict(found))


def from_json(text: str) -> Found:
    """What a text of `as_json` stands for."""
    table: dict[str, Any] = json.loads(text)
    return Found(**table | {"schedule": Schedule(**table["schedule"])})


@dataclass(frozen=True, slots=True)
class Sweep:
    """One episode everywhere."""

    returns: list[Floats]
    """Of every environment of each world."""
    steps: int
    """Decisions, over all environments."""


class Sweeps:
    """Plays episodes and counts what they take.

    Args:
        make_worlds: Makes the worlds that are played in.
        env_steps: Decisions that may be spent, over all environments.
        rng_seed: Decides which hosts, and all chance of controllers.
        purpose: What it is for; another word stands for other hosts.
    """

    def __init__(
        self,
        make_worlds: MakeWorlds,
        env_steps: int,
        rng_seed: int,
        purpose: str,
    ) -> None:
        self._make, self._seed, self._purpose = make_worlds, rng_seed, purpose
        self._allowed = env_steps
        self.spent = 0
        """Decisions so far."""
        self.longest = 0
        """Decisions of the dearest sweep so far."""

    def worlds(self, group: int) -> Sequence[VectorWorld]:
        """A group of hosts, as they were before any episode."""
        return self._make(stream_seed(self._seed, f"{self._purpose}, {group}"))

    def play(
        self, worlds: Sequence[VectorWorld], controllers: list[Controller]
    ) -> Sweep:
        """One episode everywhere, a controller for each world."""
        generator, returns, steps = stream(self._seed, self._purpose), [], 0
        for world, controller in zip(worlds, controllers, strict=True):
            counting = _Counting(world)
            returns.append(play(counting, controller, generator).double().cpu().numpy())
            steps += counting.steps * world.num_envs
        self.spent += steps
        self.longest = max(self.longest, steps)
        return Sweep(returns, steps)

    def affords(self, sweeps: int) -> bool:
        """Whether so many sweeps more can be paid for, as far as is known."""
        return self.spent + sweeps * self.longest <= self._allowed

    def compare(self, schedules: Sequence[Schedule], group: int) -> list[Floats]:
        """Returns [schedule, env] in each world, all on the same hosts."""
        number, parts = len(schedules), list[Floats]()
        for shift in range(number):
            worlds = self.worlds(group)
            turns = [_turns(world.num_envs, number, shift) for world in worlds]
            controllers: list[Controller] = [
                Scheduled(world.spec, [schedules[each] for each in turn])
                for world, turn in zip(worlds, turns, strict=True)
            ]
            sweep = self.play(worlds, controllers)
            if not parts:
                parts = [np.zeros((number, len(turn))) for turn in turns]
            for part, turn, returns in zip(parts, turns, sweep.returns, strict=True):
                part[turn, np.arange(len(turn))] = returns
        return parts


class _Counting(VectorWorld):
    """A world that counts its steps."""

    def __init__(self, world: VectorWorld) -> None:
        self._world, self.steps = world, 0
        self.spec, self.num_envs = world.spec, world.num_envs

    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        return self._world.reset()

    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Act everywhere."""
        self.steps += 1
        return self._world.step(actions)


def _turns(envs: int, number: int, shift: int) -> NDArray[np.int64]:
    """Which of so many each environment plays in a sweep."""
    turns: NDArray[np.int64] = (np.arange(envs) + shift) % number
    return turns


def _sweeps(number: int) -> int:
    """Sweeps that a search among so many takes."""
    total, groups = 0, 1
    while number > 1:
        total, groups = total + number * groups, groups * 2
        number = ceil(number / KEPT)
    return total


def _affordable(sweeps: int) -> int:
    """How many can be compared in so many sweeps."""
    number = 1
    while number < MOST and _sweeps(number + 1) <= sweeps:
        number += 1
    return number
