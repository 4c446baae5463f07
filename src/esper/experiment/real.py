"""Training Tamiyo on a real task, through the same loop as on the simulated world.

Afterwards she and every controller that does not learn grow the same hosts, from random
seeds that no training saw: same data, first weights and order of batches. The table has
the return (score minus rent), the score on test rows, and what was added.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from rich.console import Console

from esper.environment.growing import GrowingWorld
from esper.experiment.evaluating import print_arms
from esper.experiment.judging import judge
from esper.experiment.loop import LoopConfig, RoundRecord, train
from esper.experiment.progress import Progress
from esper.experiment.streams import stream_seed
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.named import CONTROLLERS
from esper.tamiyo.policy.likeliest import Likeliest
from esper.tasks.catalogue import task as find_task

LOOP: Final = LoopConfig(
    rounds=40,
    gae_lambda=0.95,
    final_share=0.1,
    ppo=PPOConfig(
        learning_rate=1e-3,
        max_grad_norm=1.0,
        entropy=0.01,
        head_entropy={"op": 0.03, "blueprint": 0.02},
    ),
)
"""Settings for real tasks; a rollout is one episode of every environment."""
JUDGED: Final = 16
"""Hosts that every controller is judged on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealConfig:
    """Which task, how wide and how long."""

    task: str
    rounds: int | None = None
    """Rollouts and updates; None: as many as the default loop."""
    envs: int = 16
    """Hosts that train together."""
    rng_seed: int = 0


def run_real(config: RealConfig) -> None:
    """Train on a task, judge everybody and print the table."""
    task = find_task(config.task)
    world = GrowingWorld(
        task, config.envs, rng_seed=stream_seed(config.rng_seed, "world")
    )
    loop = replace(
        LOOP,
        rounds=LOOP.rounds if config.rounds is None else config.rounds,
        steps=task.horizon,
        rng_seed=config.rng_seed,
        ppo=replace(LOOP.ppo, minibatches=min(LOOP.ppo.minibatches, config.envs)),
    )
    name = f"Tamiyo on {task.name}"
    returns: list[float] = []
    with Progress([name]) as progress:

        def tell(record: RoundRecord) -> None:
            returns.append(record.mean_return)
            progress.show(name, record)

        policy = train(world, loop, tell)
    console = Console()
    fifth = max(1, len(returns) // 5)
    console.print(
        f"Mean return of the first {fifth} rounds {np.nanmean(returns[:fifth]):.4f}, "
        f"of the last {fifth} {np.nanmean(returns[-fifth:]):.4f}."
    )
    arms = {control: judge(control, task, JUDGED, 0) for control in CONTROLLERS}
    arms["Tamiyo"] = judge(Likeliest(policy), task, JUDGED, 0)
    print_arms(console, task, arms)
