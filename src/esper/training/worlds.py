"""The tasks and worlds that settings stand for."""

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
"""The stage of what a policy learns from."""
HIDDEN_SHARE: Final = 0.2
"""Share of hidden instances in the simulated world."""


def mixture_for(config: "TrainConfig") -> Mixture:
    """The worlds of a run: one for each task, or families drawn every round."""
    count = config.variants if config.family else len(config.tasks)
    return Mixture(partial(world_of, config), count, redrawn=config.family)


def world_of(config: "TrainConfig", number: int, drawing: int = 0) -> VectorWorld:
    """One of the worlds of a run.

    Args:
        config: The run's.
        number: Which.
        drawing: Which family, if tasks are drawn.
    """
    if config.simulated:
        from esper.testing.simulated import SimulatedWorld

        seed = stream_seed(config.rng_seed, "world")
        return SimulatedWorld(config.num_envs, seed, hidden_share=HIDDEN_SHARE)
    again = f", {drawing}" if drawing else ""
    task = _task(config, number, TRAINING, drawing)
    return GrowingWorld(
        task,
        config.num_envs,
        stream_seed(config.rng_seed, f"world, {task.name}{again}"),
        settings=config.world,
    )


def tasks_of(
    config: "TrainConfig", stage: str = TRAINING, drawing: int = 0
) -> list[Task]:
    """The tasks that a run's hosts learn; those of a family are drawn.

    Args:
        config: The run's.
        stage: What they are for; another word draws another family, the same for every
            run, so that runs can be compared.
        drawing: Which family of that stage.
    """
    count = config.variants if config.family else len(config.tasks)
    return [_task(config, number, stage, drawing) for number in range(count)]


def _task(config: "TrainConfig", number: int, stage: str, drawing: int) -> Task:
    # Which tasks there are is nothing that worlds depend on.
    from esper.tasks.catalogue import task as find_task
    from esper.tasks.family import drawn_task

    if not config.family:
        return find_task(config.tasks[number])
    seed = config.rng_seed if stage == TRAINING else 0
    key = f"family, {STAGE_KEYS[stage]}, {drawing}"
    return drawn_task(stream_seed(seed, key), number)


def check_worlds(config: "TrainConfig") -> list[VectorWorld]:
    """Refuse tasks whose data are missing or that cannot be mixed.

    Returns:
        The worlds of the run, but with one environment each.
    """
    if config.simulated:
        from esper.testing.simulated import SimulatedWorld

        simulated = SimulatedWorld(1, 0, hidden_share=HIDDEN_SHARE)
        simulated.reset()
        return [simulated]
    if config.family:
        from esper.tasks.datasets import digits

        digits()  # some kinds are made of them, but maybe none of the first
    tasks = tasks_of(config)
    for task in tasks:
        task.splits(config.rng_seed)
    worlds: list[VectorWorld] = [
        GrowingWorld(task, 1, 0, settings=config.world) for task in tasks
    ]
    Mixture.of(worlds)
    return worlds


def steps_of(config: "TrainConfig") -> int:
    """Decisions of the longest episode."""
    if config.simulated:
        from esper.testing.simulated import HORIZON

        return HORIZON
    if config.world.horizon is not None:
        return config.world.horizon
    if config.family:
        from esper.tasks.family import COMPUTE, HORIZONS

        # Of whatever will be drawn.
        if config.world.clock == "compute":
            return config.world.decisions_within(COMPUTE[1])
        return HORIZONS[1]
    return max(config.world.applied_to(task).horizon for task in tasks_of(config))
