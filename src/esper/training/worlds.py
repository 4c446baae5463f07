"""Tasks and worlds of a run, made from its settings."""

from functools import partial
from typing import TYPE_CHECKING, Final

from esper.contracts.world import VectorWorld
from esper.environment.growing import GrowingWorld
from esper.environment.mixture import Mixture
from esper.runs.streams import STAGE_KEYS, stream_seed
from esper.tasks.task import Task

if TYPE_CHECKING:
    from esper.runs.train_config import TrainConfig

TRAINING: Final = "training"
"""The stage of the hosts that a policy learns from."""
HIDDEN_FRACTION: Final = 0.2
"""Fraction of hidden instances in the simulated world."""


def mixture_for(config: "TrainConfig") -> Mixture:
    """The worlds of a run: one per task, or families that change every round."""
    make = partial(world_of, config)
    return Mixture(make, task_count(config), redrawn=config.family)


def task_count(config: "TrainConfig") -> int:
    """Number of tasks that a run trains on at a time."""
    return config.variants if config.family else len(config.tasks)


def world_of(config: "TrainConfig", number: int, drawing: int = 0) -> VectorWorld:
    """World `number` of a run; `drawing` is the number of the family, if drawn."""
    if config.simulated:
        from esper.testing.simulated import SimulatedWorld

        seed = stream_seed(config.rng_seed, "world")
        return SimulatedWorld(config.num_envs, seed, hidden_share=HIDDEN_FRACTION)
    task = task_of(config, number, drawing=drawing)
    key = f"world, {task.name}" + (f", {drawing}" if drawing else "")
    seed = stream_seed(config.rng_seed, key)
    return GrowingWorld(task, config.num_envs, seed, settings=config.world)


def task_of(
    config: "TrainConfig", number: int, stage: str = TRAINING, drawing: int = 0
) -> Task:
    """Task `number` of a run, in family `drawing` of a stage if tasks are drawn.

    Only the families of the training stage depend on the seed of the run, so that runs
    can be compared.
    """
    from esper.tasks.catalogue import task as find_task
    from esper.tasks.family import drawn_task

    if not config.family:
        return find_task(config.tasks[number])
    seed = config.rng_seed if stage == TRAINING else 0
    key = f"family, {STAGE_KEYS[stage]}, {drawing}"
    return drawn_task(stream_seed(seed, key), number)


def tasks_of(
    config: "TrainConfig", stage: str = TRAINING, drawing: int = 0
) -> list[Task]:
    """All tasks of a run; see `task_of`."""
    count = task_count(config)
    return [task_of(config, number, stage, drawing) for number in range(count)]


def check_worlds(config: "TrainConfig") -> list[VectorWorld]:
    """The worlds of a run with one environment each.

    Refuses tasks whose data are missing or that cannot be mixed.
    """
    if config.simulated:
        from esper.testing.simulated import SimulatedWorld

        simulated = SimulatedWorld(1, 0, hidden_share=HIDDEN_FRACTION)
        simulated.reset()
        return [simulated]
    if config.family:
        from esper.tasks.datasets import digits

        digits()  # later families need this dataset, even if the first does not
    tasks = tasks_of(config)
    for task in tasks:
        task.splits(config.rng_seed)
    worlds: list[VectorWorld] = [
        GrowingWorld(task, 1, 0, settings=config.world) for task in tasks
    ]
    Mixture.of(worlds)
    return worlds


def steps_of(config: "TrainConfig") -> int:
    """Maximum number of decisions in an episode."""
    if config.simulated:
        from esper.testing.simulated import HORIZON

        return HORIZON
    if config.world.horizon is not None:
        return config.world.horizon
    if config.family:
        from esper.tasks.family import COMPUTE, HORIZONS

        if config.world.clock == "compute":
            return config.world.decisions_within(COMPUTE[1])
        return HORIZONS[1]
    return max(config.world.applied_to(task).horizon for task in tasks_of(config))
