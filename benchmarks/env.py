"""What does a decision cost in a world of real hosts, and where does its time go?

A decision is one environment's step of the world: the controller's choice, the training
of a host until the next decision, and the look that follows. Whole episodes under a
controller that grows its hosts, with the beginning of the next one, turn by turn in one
process; the fastest turn counts. Instead of a naive twin, the same world with one
environment. Not included: making a world, and its first reset.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import torch
from torch import Generator

from benchmarks import timing
from benchmarks.timing import Report, micro
from esper.contracts.stages import Stage
from esper.environment import growing
from esper.environment.growing import GrowingWorld
from esper.environment.looks import contributions
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.registry import make_controller
from esper.tasks.catalogue import task as find_task

Case = tuple[str, int]
CASES: tuple[Case, ...] = (
    ("teacher", 16),
    ("mnist1d", 16),
    ("letter", 1),
    ("letter", 4),
    ("letter", 16),
    ("letter", 64),
)
CONTROLLER = "promise"
TURNS = 3
ALONE = 2
"""Hosts that a world of one environment is tried with, one after the other."""
PARTS = {
    "_train": "training",
    "_score": "score",
    "_look": "promise",
    "_act": "acting",
    "_begin": "beginning",
    "_report": "reporting",
    "_observe": "showing",
}
"""What each method of the world is for; leaving out is timed in `play`."""
OBSERVING = ("score", "leaving out", "promise")
STEP = {
    "training": ("training",),
    **{part: (part,) for part in OBSERVING},
    "observing": OBSERVING,
    "acting": ("acting",),
    "resets": ("beginning", "reporting"),
    "deciding": ("masks", "controller"),
    "rest": ("showing", "rest"),
}
"""Columns of the table of shares, and the parts that each of them sums up."""


class Stopwatch:
    """Seconds by part; what an inner part takes is not the outer one's too."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open = ["rest"]
        self._since = perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time goes to this part while it lasts, unless it opens another."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def start(self) -> None:
        """Forget everything and count from now."""
        self.seconds.clear()
        self._since = perf_counter()

    def stop(self) -> dict[str, float]:
        """What every part took since the start; together, all the time there was."""
        self._turn()
        return dict(self.seconds)

    def _turn(self) -> None:
        now = perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


class TimedWorld(GrowingWorld):
    """The same world with a stopwatch at its methods."""

    def __init__(self, watch: Stopwatch, *what: Any) -> None:  # noqa: ANN401
        super().__init__(*what)
        for name, part in PARTS.items():
            setattr(self, name, timed(watch, part, getattr(self, name)))


@dataclass(frozen=True)
class Played:
    """One turn: what it took and what was in the hosts."""

    decisions: int
    seconds: dict[str, float]
    computed: float
    """Seconds that the process was computing; less than all if it had to wait."""
    seeds: float
    """Slots in use, mean over decisions."""

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())

    @property
    def each(self) -> float:
        """Seconds per decision."""
        return self.total / self.decisions

    def share(self, *parts: str) -> float:
        """Percent of the time that these parts took."""
        return 100 * sum(self.seconds.get(part, 0.0) for part in parts) / self.total


def run() -> list[Report]:
    """Time whole episodes of every case, in turns."""
    if not timing.QUICK:
        play("teacher", 2)  # compiles what is compiled
    best: dict[Case, Played] = {}
    turns, cases = (1, (("teacher", 2),)) if timing.QUICK else (TURNS, CASES)
    for _ in range(turns):
        for case in cases:
            played = play(*case)
            if case not in best or played.total < best[case].total:
                best[case] = played
    return [costs(best), shares(best)]


def costs(best: Mapping[Case, Played]) -> Report:
    """The table of decisions per second."""
    report = Report(
        f"Whole episodes of real hosts under {CONTROLLER!r}, one core",
        (
            "task",
            "envs",
            "seeds",
            "decisions/s",
            "µs per decision",
            "core %",
            "one by one",
        ),
        notes=[
            "Included: masks and controller, resets at the end of episodes.",
            "Seeds: slots in use per host, mean over decisions.",
            "Core: share of a core that was had; trust no time far below 100.",
            "One by one: how much longer a decision takes with one environment.",
        ],
    )
    for (name, envs), played in best.items():
        alone, each = best.get((name, 1)), played.each
        ratio = alone.each / each if alone and envs > 1 else None
        core = 100 * played.computed / played.total
        report.add(name, envs, played.seeds, 1 / each, micro(each), core, ratio)
    return report


def shares(best: Mapping[Case, Played]) -> Report:
    """The table of where the time goes."""
    report = Report(
        "Shares of that time, in %",
        ("task", "envs", *STEP),
        notes=[
            "Observing: score, leaving out and promise together; allowed are 20 %. A "
            "new host's first score is counted there, with all else seen of places.",
            "Acting: actions, planting, lifecycle. Deciding: masks and controller.",
            "Resets: new episodes, and the test scores of those that ended.",
            "Rest: rewards, tracks and putting the observation together.",
        ],
    )
    for (name, envs), played in best.items():
        report.add(name, envs, *(played.share(*part) for part in STEP.values()))
    return report


def play(name: str, envs: int) -> Played:
    """A whole episode everywhere, and the beginning of the next."""
    watch, task = Stopwatch(), find_task(name)
    left_out = timed(watch, "leaving out", contributions)
    worlds = ALONE if envs == 1 else 1
    seconds: defaultdict[str, float] = defaultdict(float)
    computed, stages = 0.0, []
    with patch.object(growing, "contributions", left_out), torch.no_grad():
        for rng_seed in range(worlds):
            world = TimedWorld(watch, task, envs, rng_seed)
            controller = make_controller(CONTROLLER, world.spec)
            generator, state = Generator().manual_seed(rng_seed), None
            observation = world.reset()
            computed -= process_time()
            watch.start()
            for _ in range(task.horizon):
                with watch.part("masks"):
                    masks = compute_masks(observation, world.spec)
                with watch.part("controller"):
                    actions, state = controller.decide(
                        observation, masks, state, generator
                    )
                stages.append(observation.slots.stage)
                observation = world.step(actions).observation
            for part, took in watch.stop().items():
                seconds[part] += took
            computed += process_time()
    used = torch.stack(stages) != Stage.DORMANT
    return Played(
        decisions=worlds * task.horizon * envs,
        seconds=dict(seconds),
        computed=computed,
        seeds=float(used.sum(dim=2).float().mean()),
    )


def timed(watch: Stopwatch, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, on the watch."""

    @wraps(call)
    def on_the_watch(*what: Any, **more: Any) -> Any:  # noqa: ANN401
        with watch.part(part):
            return call(*what, **more)

    return on_the_watch
