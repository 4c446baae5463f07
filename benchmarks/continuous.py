"""What does `esper.PPO` learn where actions are numbers, and PPO of SB3, both as given?

Six environments of Gymnasium with one set of settings: the defaults of each library,
which for Stable-Baselines3 are one environment, 2,048 steps and 10 epochs. LunarLander
has choices, the others numbers. A return is that of the last twentieth of the training,
actions sampled. CPU-seconds are those of the whole training. The same wrapper counts
steps and returns of both sides.

`python -m benchmarks continuous` needs gymnasium[box2d,mujoco] and stable-baselines3.
Finished trainings are lines of `--ledger` and are not repeated, so the command can be
stopped at any time.
"""

from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import Env

from benchmarks import timing
from benchmarks.rl import OURS, Counted, Counter, Training, filled, train_missing
from benchmarks.timing import Report
from esper.rl.ppo import PPO

SEEDS: Final = 3
PEER: Final = "SB3 PPO"
SIDES: Final = (OURS, PEER)
TASKS: Final = {
    "Pendulum-v1": 200_000,
    "Hopper-v5": 500_000,
    "HalfCheetah-v5": 500_000,
    "LunarLander-v3": 500_000,
    "BipedalWalker-v3": 500_000,
    "MountainCarContinuous-v0": 200_000,
}
"""Steps of a training, by environment."""


def run(
    ledger: str = "benchmarks/continuous.jsonl",
    minutes: float = 1e9,
    tasks: str = ",".join(TASKS),
    sides: str = ",".join(SIDES),
    seeds: int = SEEDS,
) -> Report:
    """Train what the ledger does not have yet, then report what it has.

    Args:
        ledger: The finished trainings.
        minutes: Start no further training after this time.
        tasks: Names, separated by commas.
        sides: Names, separated by commas.
        seeds: Random seeds of each task and side.
    """
    if timing.QUICK:
        return report([train("Pendulum-v1", OURS, 0, 4_096)])
    todo = [
        (task, side, seed, TASKS[task])
        for seed in range(seeds)
        for task in tasks.split(",")
        for side in sides.split(",")
    ]
    return report(train_missing(Path(ledger), todo, train, minutes))


def train(task: str, side: str, seed: int, steps: int, **options: Any) -> Training:  # noqa: ANN401
    """One training, from nothing; `options` are settings of ours."""
    counter = Counter()

    def make() -> Env[Any, Any]:
        return Counted(gymnasium.make(task, disable_env_checker=True), counter)

    began = process_time()
    if side == OURS:
        PPO(make, seed=seed, **options).learn(steps)
    else:
        import stable_baselines3 as sb3

        sb3.PPO("MlpPolicy", make(), seed=seed, device="cpu").learn(steps)
    took = round(process_time() - began, 2)
    return Training(task, side, seed, steps, took, counter.curve(steps))


def report(trainings: Sequence[Training]) -> Report:
    """Final returns and CPU-seconds."""
    found = Report(
        "Default settings, esper.PPO and PPO of Stable-Baselines3",
        ("task", "side", "seeds", "steps", "return", "from", "to", "CPU-s", "ratio"),
        notes=[
            "return: mean, lowest and highest over random seeds; ratio: CPU-seconds of "
            "SB3 over ours"
        ],
    )
    for task in TASKS:
        groups = {
            side: [t for t in trainings if t.task == task and t.side == side]
            for side in SIDES
        }
        seconds = {
            side: float(np.mean([t.cpu_seconds for t in group]))
            for side, group in groups.items()
            if group
        }
        for side, cost in seconds.items():
            group = groups[side]
            finals = np.array([filled(t.curve)[-1] for t in group])
            figures = finals.mean(), finals.min(), finals.max()
            ratio = None
            if side == PEER and OURS in seconds:
                ratio = cost / seconds[OURS]
            row = (len(group), f"{group[0].steps:,}", *map(float, figures), cost, ratio)
            found.add(task, side, *row)
    return found
