"""Training Tamiyo on a real task, through the same loop as on the simulated world.

Afterwards she and every controller that does not learn grow the same hosts, from random
seeds that no training saw: same data, first weights and order of batches. The table has
the return (score minus rent), the score on test rows, and what was added.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from esper.contracts.controller import Controller
from esper.environment.growing import GrowingWorld
from esper.experiment.loop import LoopConfig, RoundRecord, train
from esper.experiment.progress import Progress
from esper.experiment.statistics import Floats, mean_interval
from esper.experiment.streams import stream, stream_seed
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.named import CONTROLLERS, named
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.likeliest import Likeliest
from esper.tasks.catalogue import task as find_task
from esper.tasks.task import Task

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


@dataclass(frozen=True, slots=True)
class Judged:
    """A controller on the judged hosts."""

    returns: Floats
    test: Floats
    """Share of test rows that the final networks guess right."""
    added: Floats
    """Parameters added, as a multiple of the host's."""
    macs: Floats
    """Multiply-adds per row, as a multiple of the host's."""


def run_real(config: RealConfig) -> None:
    """Train on a task, judge everybody and print the table."""
    task = find_task(config.task)
    world = GrowingWorld(
        task, config.envs, rng_seed=stream_seed(config.rng_seed, "world")
    )
    loop = replace(LOOP, steps=task.horizon, rng_seed=config.rng_seed)
    if config.rounds is not None:
        loop = replace(loop, rounds=config.rounds)
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
    arms = dict(judge_controls(task))
    arms["Tamiyo"] = judge(Likeliest(policy), task)
    print_arms(console, task, arms)


def judge_controls(task: Task) -> Iterator[tuple[str, Judged]]:
    """Every controller that does not learn."""
    world = GrowingWorld(task, 1)
    for name in CONTROLLERS:
        yield name, judge(named(name, world.spec), task)


def judge(controller: Controller, task: Task, hosts: int = JUDGED) -> Judged:
    """One episode of a controller on hosts that no training saw."""
    world = GrowingWorld(task, hosts, rng_seed=stream_seed(0, f"judged, {task.name}"))
    generator, state = stream(0, "judging"), None
    observation = world.reset()
    returns = torch.zeros(hosts)
    ended: dict[str, torch.Tensor] = {}
    open_ = torch.ones(hosts, dtype=torch.bool)
    for _ in range(task.horizon):
        masks = compute_masks(observation, world.spec)
        with torch.no_grad():
            actions, state = controller.decide(observation, masks, state, generator)
        result = world.step(actions)
        returns += torch.where(open_, result.reward, 0.0)
        if world.ended is not None:
            for env_index, env in enumerate(world.ended.env.tolist()):
                if bool(open_[env]):
                    for field in ("test", "added", "macs"):
                        values = ended.setdefault(field, torch.zeros(hosts))
                        values[env] = getattr(world.ended, field)[env_index]
        open_ &= ~result.terminated
        observation = result.observation
    return Judged(
        returns.double().numpy(),
        *(ended[field].double().numpy() for field in ("test", "added", "macs")),
    )


def print_arms(console: Console, task: Task, arms: dict[str, Judged]) -> None:
    """One table of everybody, best return last."""
    hosts = len(next(iter(arms.values())).returns)
    table = Table(
        title=f"{task.name}: {hosts} hosts ({task.host}) that no training saw",
        title_justify="left",
    )
    table.add_column("controller")
    for column in ("return [95 %]", "test score, % [95 %]", "parameters", "MACs"):
        table.add_column(column, justify="right")
    for name, arm in sorted(arms.items(), key=lambda pair: pair[1].returns.mean()):
        table.add_row(
            name,
            f"{mean_interval(arm.returns):.4f}",
            f"{mean_interval(100 * arm.test):.1f}",
            f"{1 + arm.added.mean():.2f} x",
            f"{arm.macs.mean():.2f} x",
            style="bold" if name == "Tamiyo" else "",
        )
    console.print(table)
