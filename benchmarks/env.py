"""What does a decision cost in a world of real hosts?

A decision is one environment's step of the world: the controller's choice, the training
of a host until the next decision, and the look that follows. Whole episodes under a
controller that grows its hosts, with the beginning of the next one, turn by turn in one
process; the fastest turn counts. Instead of a naive twin, the same world with one
environment. Not included: making a world, and its first reset. `round` tells where the
time goes.
"""

from dataclasses import dataclass
from time import perf_counter, process_time

import torch
from torch import Generator

from benchmarks import timing
from benchmarks.timing import Report, micro
from esper.contracts.stages import Stage
from esper.environment.growing import GrowingWorld
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.registry import make_controller
from esper.tasks.catalogue import task as find_task

CASES = (
    ("teacher", 16),
    ("mnist1d", 16),
    ("letter", 1),
    ("letter", 4),
    ("letter", 16),
    ("letter", 64),
)
CONTROLLER = "periodic"
TURNS = 3
ALONE = 2
"""Hosts that a world of one environment is tried with, one after the other."""


@dataclass(frozen=True)
class EpisodeTimes:
    """One turn, per decision."""

    seconds: float
    computed: float
    """Seconds that the process was computing; less than all if it had to wait."""
    seeds: float
    """Slots in use of a host."""


def run() -> Report:
    """Time whole episodes of every case, in turns."""
    cases, turns = ((("teacher", 2),), 1) if timing.QUICK else (CASES, TURNS)
    play("teacher", 2)  # compiles what is compiled
    played = {case: [play(*case) for _ in range(turns)] for case in cases}
    best = {
        case: min(each, key=lambda one: one.seconds) for case, each in played.items()
    }
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
    for (name, envs), one in best.items():
        alone, each = best.get((name, 1)), one.seconds
        ratio = alone.seconds / each if alone and envs > 1 else None
        core = 100 * one.computed / each
        report.add(name, envs, one.seeds, 1 / each, micro(each), core, ratio)
    return report


@torch.no_grad()
def play(name: str, envs: int) -> EpisodeTimes:
    """A whole episode everywhere, and the beginning of the next."""
    task = find_task(name)
    seconds, computed, stages = 0.0, 0.0, []
    worlds = ALONE if envs == 1 else 1
    for rng_seed in range(worlds):
        world = GrowingWorld(task, envs, rng_seed)
        controller = make_controller(CONTROLLER, world.spec)
        generator, state = Generator().manual_seed(rng_seed), None
        observation = world.reset()
        began, cpu = perf_counter(), process_time()
        for _ in range(task.horizon):
            masks = compute_masks(observation, world.spec)
            actions, state = controller.decide(observation, masks, state, generator)
            stages.append(observation.slots.stage)
            observation = world.step(actions).observation
        seconds += perf_counter() - began
        computed += process_time() - cpu
    used = (torch.stack(stages) != Stage.DORMANT).sum(dim=2).float().mean()
    decisions = worlds * task.horizon * envs
    return EpisodeTimes(seconds / decisions, computed / decisions, float(used))
