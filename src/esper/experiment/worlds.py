"""The worlds and loops that settings stand for."""

from functools import partial
from math import ceil
from typing import Final

from esper.contracts.step import VectorWorld
from esper.environment.growing import GrowingWorld
from esper.environment.instances import HORIZON
from esper.environment.mixture import Mixture, RedrawnMixture
from esper.environment.simulated import SimulatedWorld
from esper.experiment.config import FAMILY, SIMULATED, TrainConfig, World
from esper.experiment.loop import LoopConfig
from esper.experiment.streams import stream_seed
from esper.tasks.catalogue import task as find_task
from esper.tasks.family import HORIZONS, drawn_task
from esper.tasks.task import Task

TRAINING: Final = "training"
"""The stage of what a policy learns from."""
ENDLESS: Final = 1_000_000
"""Rounds of a training that only time ends."""
HIDDEN_SHARE: Final = 0.2
"""Share of hidden instances in the simulated world."""


def world_for(config: TrainConfig) -> VectorWorld:
    """All that a run lives in."""
    if FAMILY in config.tasks:
        return RedrawnMixture(partial(worlds_of, config))
    worlds = worlds_of(config)
    return worlds[0] if len(worlds) == 1 else Mixture(worlds)


def worlds_of(config: TrainConfig, drawing: int = 0) -> list[VectorWorld]:
    """The worlds that a run lives in, one for each task.

    Args:
        config: The run's.
        drawing: Which family, if tasks are drawn.
    """
    if SIMULATED in config.tasks:
        seed = stream_seed(config.rng_seed, "world")
        return [SimulatedWorld(config.envs, seed, hidden_share=HIDDEN_SHARE)]
    again = f", {drawing}" if drawing else ""
    return [
        world_of(
            task,
            config.envs,
            stream_seed(config.rng_seed, f"world, {task.name}{again}"),
            config.world,
        )
        for task in tasks_of(config, drawing=drawing)
    ]


def tasks_of(
    config: TrainConfig, stage: str = TRAINING, drawing: int = 0
) -> list[Task]:
    """The tasks that a run's hosts learn; those of a family are drawn.

    Args:
        config: The run's.
        stage: What they are for; another word draws another family, the same for every
            run, so that runs can be compared.
        drawing: Which family of that stage.
    """
    if FAMILY not in config.tasks:
        return [find_task(name) for name in config.tasks]
    seed = config.rng_seed if stage == TRAINING else 0
    number = stream_seed(seed, f"family, {stage}, {drawing}")
    return [drawn_task(number, each) for each in range(config.variants)]


def world_of(task: Task, envs: int, rng_seed: int, settings: World) -> GrowingWorld:
    """Hosts of a task that train and grow with these settings."""
    return GrowingWorld(task, envs, rng_seed, settings=settings)


def steps_of(config: TrainConfig) -> int:
    """Decisions of the longest episode."""
    if SIMULATED in config.tasks:
        return HORIZON
    if config.world.horizon is not None:
        return config.world.horizon
    if FAMILY in config.tasks:
        return HORIZONS[1]  # of whatever will be drawn
    return max(task.horizon for task in tasks_of(config))


def loop_of(config: TrainConfig, world: VectorWorld) -> LoopConfig:
    """How to train: a rollout is about one episode of every environment."""
    learner, budget, steps = config.learner, config.budget, steps_of(config)
    rounds = [ENDLESS if budget.rounds is None else budget.rounds]
    if budget.env_steps is not None:
        rounds.append(ceil(budget.env_steps / (steps * world.num_envs)))
    return LoopConfig(
        rounds=min(rounds),
        steps=steps,
        rng_seed=config.rng_seed,
        gamma=learner.gamma,
        gae_lambda=learner.gae_lambda,
        final_share=learner.final_share,
        ppo=learner.ppo,
        policy=learner.policy,
    )
