"""The tasks and worlds that settings stand for."""

from functools import partial
from typing import TYPE_CHECKING, Final

from esper.contracts.world import VectorWorld
from esper.environment.growing import GrowingWorld
from esper.environment.mixture import Mixture, RedrawnMixture
from esper.experiment.streams import stream_seed
from esper.tasks.task import Task

if TYPE_CHECKING:
    from esper.experiment.config import TrainConfig

TRAINING: Final = "training"
"""The stage of what a policy learns from."""
HIDDEN_SHARE: Final = 0.2
"""Share of hidden instances in the simulated world."""


def world_for(config: "TrainConfig") -> VectorWorld:
    """The world of a run: all tasks side by side, or families drawn every round."""
    if config.family:
        return RedrawnMixture(partial(worlds_of, config))
    worlds = worlds_of(config)
    return worlds[0] if len(worlds) == 1 else Mixture(worlds)


def worlds_of(config: "TrainConfig", drawing: int = 0) -> list[VectorWorld]:
    """The worlds of a run, one for each task.

    Args:
        config: The run's.
        drawing: Which family, if tasks are drawn.
    """
    if config.simulated:
        from esper.environment.simulated import SimulatedWorld

        seed = stream_seed(config.rng_seed, "world")
        return [SimulatedWorld(config.envs, seed, hidden_share=HIDDEN_SHARE)]
    again = f", {drawing}" if drawing else ""
    return [
        GrowingWorld(
            task,
            config.envs,
            stream_seed(config.rng_seed, f"world, {task.name}{again}"),
            settings=config.world,
        )
        for task in tasks_of(config, drawing=drawing)
    ]


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
    # Which tasks there are is nothing that worlds depend on.
    from esper.tasks.catalogue import task as find_task
    from esper.tasks.family import drawn_task

    if not config.family:
        return [find_task(name) for name in config.tasks]
    seed = config.rng_seed if stage == TRAINING else 0
    number = stream_seed(seed, f"family, {stage}, {drawing}")
    return [drawn_task(number, each) for each in range(config.variants)]


def check_world(config: "TrainConfig") -> VectorWorld:
    """Refuse tasks whose data are missing or that cannot be mixed.

    Returns:
        The world of the run, but with one environment for each task.
    """
    if config.simulated:
        from esper.environment.simulated import SimulatedWorld

        simulated = SimulatedWorld(1, 0, hidden_share=HIDDEN_SHARE)
        simulated.reset()
        return simulated
    if config.family:
        from esper.tasks.datasets import digits

        digits()  # some kinds are made of them, but maybe none of the first
    tasks = tasks_of(config)
    for task in tasks:
        task.splits(config.rng_seed)
    return Mixture([GrowingWorld(task, 1, 0, settings=config.world) for task in tasks])


def steps_of(config: "TrainConfig") -> int:
    """Decisions of the longest episode."""
    if config.simulated:
        from esper.environment.simulated import HORIZON

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
