"""Training Tamiyo on a real task, through the same loop as on the simulated world.

Whether she learnt is said of the mean return per round: those of the last fifth of the
rounds against those of the first, with an interval over rounds. Afterwards she and
every controller that does not learn grow the same hosts, from random seeds that no
training saw: same data, first weights and order of batches. The table has the return
(score minus rent), the score on test rows, and what was added.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from rich.console import Console

from esper.environment.growing import GrowingWorld
from esper.experiment.evaluating import print_arms
from esper.experiment.judging import judge
from esper.experiment.loop import LoopConfig, RoundRecord, train
from esper.experiment.progress import Progress
from esper.experiment.statistics import Floats, bootstrap
from esper.experiment.streams import stream_seed
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.named import CONTROLLERS
from esper.tamiyo.policy.likeliest import Likeliest
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.tasks.catalogue import task as find_task
from esper.tasks.task import Task

LOOP: Final = LoopConfig(
    rounds=80,
    gae_lambda=0.95,
    final_share=0.1,
    ppo=PPOConfig(
        learning_rate=3e-3,
        minibatches=2,
        max_grad_norm=1.0,
        entropy=0.01,
        head_entropy={"op": 0.03, "blueprint": 0.02},
    ),
)
"""Settings for real tasks; a rollout is one episode of every environment."""
JUDGED: Final = 16
"""Hosts that every controller is judged on."""
LEAST: Final = 8
"""Rounds in a fifth below which an interval over rounds would be too narrow."""
BARS: Final = "▁▂▃▄▅▆▇█"
COLUMNS: Final = 60
"""Bars of a sparkline, at most."""


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
    """Train on a task, say whether the return rose, judge everybody."""
    task = find_task(config.task)
    name = f"Tamiyo on {task.name}"
    returns: list[float] = []
    with Progress([name]) as progress:

        def tell(record: RoundRecord) -> None:
            returns.append(record.mean_return)
            progress.show(name, record)

        policy = train_on(task, config, tell)
    console = Console()
    for line in (f"Mean return per round: {sparkline(returns)}", verdict(returns)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    arms = {control: judge(control, task, JUDGED, 0) for control in CONTROLLERS}
    arms["Tamiyo"] = judge(Likeliest(policy), task, JUDGED, 0)
    print_arms(console, task, arms)


def train_on(
    task: Task,
    config: RealConfig,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
) -> TamiyoPolicy:
    """A policy that was trained on hosts of a task; `config.task` is not looked up."""
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
    return train(world, loop, on_round)


def verdict(returns: Sequence[float]) -> str:
    """Whether the return rose, in one line: the last fifth against the first.

    Args:
        returns: Mean return of every round, NaN where no episode ended.
    """
    known = _known(returns)
    fifth = len(known) // 5
    if fifth < LEAST:
        return (
            f"Too few rounds to tell whether the return rose: {len(known)}, and "
            f"{5 * LEAST} are needed."
        )
    first, last = known[:fifth], known[-fifth:]
    # Rounds of the two fifths are independent, so that any pairing of them will do.
    rise = bootstrap(np.stack([first, last]), lambda means: means[1] - means[0])
    word = "rose" if rise.low > 0 else "fell" if rise.high < 0 else "did not change"
    clearly = "" if rise.low > 0 or rise.high < 0 else " clearly"
    return (
        f"The return {word}{clearly}: {first.mean():.4f} in the first {fifth} rounds, "
        f"{last.mean():.4f} in the last {fifth}, by {rise:+.4f} (95 % over rounds)."
    )


def sparkline(values: Sequence[float]) -> str:
    """Values as bars from the least to the largest; neighbours share a bar."""
    known = _known(values)
    if not len(known):
        return ""
    parts = np.array_split(known, min(COLUMNS, len(known)))
    means = np.array([part.mean() for part in parts])
    share = (means - means.min()) / max(float(np.ptp(means)), 1e-12)  # all may be equal
    return "".join(BARS[round(level * (len(BARS) - 1))] for level in share.tolist())


def _known(values: Sequence[float]) -> Floats:
    known = np.asarray(values, dtype=np.float64)
    return known[np.isfinite(known)]
