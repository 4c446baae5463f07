"""What does `esper.PPO` remember in POPGym, beside RecurrentPPO, and at what cost?

Six tasks of POPGym (Morad et al. 2023, https://arxiv.org/abs/2303.01859), 400,000
steps each, 16 environments x 128 steps, 4 epochs, layers of 64, one set of settings for
all tasks. RecurrentPPO is shown at the better of two batch sizes, chosen by its
mean return. A return is that of the last twentieth of the training, actions sampled.
CPU-seconds are those of the whole training; "environments" is the share that stepping
them takes, measured with random actions.

`python -m benchmarks popgym` needs popgym. Finished trainings are
lines of `--ledger` and are not repeated, so the command can be stopped at any time.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any, Final

import numpy as np
from gymnasium import Env
from gymnasium.wrappers import FlattenObservation

from benchmarks import timing
from benchmarks.rl import (
    ENVS,
    MEMORY,
    OURS,
    STEPS,
    Counted,
    Counter,
    Make,
    Training,
    train_missing,
)
from benchmarks.timing import Report
from esper.rl.ppo import PPO

SEEDS: Final = 3
TOTAL: Final = 400_000
BATCHES: Final = (128, 512)
TASKS: Final = {
    "RepeatPreviousEasy": "repeat_previous",
    "AutoencodeEasy": "autoencode",
    "CountRecallEasy": "count_recall",
    "PositionOnlyCartPoleEasy": "position_only_cartpole",
    "VelocityOnlyCartPoleEasy": "velocity_only_cartpole",
    "RepeatPreviousMedium": "repeat_previous",
}
ATTENTION: Final = f"{OURS}, attention"
SIDES: Final = (OURS, ATTENTION, *(f"RecurrentPPO, batch {size}" for size in BATCHES))


def run(
    ledger: str = "benchmarks/popgym.jsonl",
    minutes: float = 1e9,
    tasks: str = ",".join(TASKS),
    sides: str = ";".join(SIDES),
    seeds: int = SEEDS,
) -> Report:
    """Train what the ledger does not have yet, then report what it has.

    Args:
        ledger: The finished trainings.
        minutes: Start no further training after this time.
        tasks: Names, separated by commas.
        sides: Names, separated by semicolons.
        seeds: Random seeds of each task and side.
    """
    if timing.QUICK:
        return report([train("RepeatPreviousEasy", OURS, 0, 4_096)])
    todo = [
        (task, side, seed, TOTAL)
        for seed in range(seeds)
        for task in tasks.split(",")
        for side in sides.split(";")
    ]
    return report(train_missing(Path(ledger), todo, train, minutes))


def make(task: str) -> Env[Any, Any]:
    """One environment."""
    kind: Any = getattr(import_module(f"popgym.envs.{TASKS[task]}"), task)
    env: Env[Any, Any] = kind()
    return env


def train(task: str, side: str, seed: int, steps: int) -> Training:
    """One training, from nothing."""
    counter = Counter()

    def counted() -> Env[Any, Any]:
        return Counted(make(task), counter)

    began = process_time()
    if side in (OURS, ATTENTION):
        memory = MEMORY if side == OURS else "attention"
        PPO(counted, memory=memory, seed=seed).learn(steps)
    else:
        _recurrent(counted, seed, int(side.split()[-1])).learn(steps)
    took = round(process_time() - began, 2)
    return Training(task, side, seed, steps, took, counter.curve(steps))


def _recurrent(make_env: Make, seed: int, batch: int) -> Any:  # noqa: ANN401
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    def flat() -> Env[Any, Any]:
        # RecurrentPPO cannot read MultiDiscrete; this gives the one-hot code it uses.
        return FlattenObservation(make_env())

    return RecurrentPPO(
        "MlpLstmPolicy",
        DummyVecEnv([flat] * ENVS),
        n_steps=STEPS,
        n_epochs=4,
        batch_size=batch,
        seed=seed,
        device="cpu",
        policy_kwargs={"net_arch": [64], "lstm_hidden_size": 64},
    )


def environment_seconds(task: str, steps: int = 20_000) -> float:
    """CPU-seconds that the environments of one training take."""
    env = make(task)
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(100)]
    began = process_time()
    for step in range(steps):
        _, _, terminated, truncated, _ = env.step(actions[step % 100])
        if terminated or truncated:
            env.reset()
    return (process_time() - began) * TOTAL / steps


def report(trainings: Sequence[Training]) -> Report:
    """Final returns and CPU-seconds, RecurrentPPO at its better batch size."""
    found = Report(
        f"POPGym, {TOTAL:,} steps, memory {MEMORY} where no other is named",
        ("task", "side", "seeds", "return", "from", "to", "CPU-s", "ratio", "without"),
        notes=[
            "return: mean, lowest and highest over random seeds; ratio: CPU-seconds of "
            "RecurrentPPO over ours; without: the same without the environments"
        ],
    )
    for task in TASKS:
        groups: dict[str, tuple[float, list[Any]]] = {}
        for side in SIDES:
            here = [t for t in trainings if t.task == task and t.side == side]
            if here:
                finals = [t.curve[-1] for t in here]
                seconds = float(np.mean([t.cpu_seconds for t in here]))
                figures = [np.mean(finals), min(finals), max(finals), seconds]
                groups[side] = (seconds, [len(here), *map(float, figures)])
        peers = [name for name in groups if name not in (OURS, ATTENTION)]
        best = max(peers, key=lambda name: groups[name][1][1], default=None)
        alone = environment_seconds(task) if best else 0.0
        for side in (OURS, ATTENTION, best):
            if side not in groups:
                continue
            ratios: list[float | None] = [None, None]
            if best and side != best:
                ours, theirs = groups[side][0], groups[best][0]
                ratios = [theirs / ours, (theirs - alone) / (ours - alone)]
            found.add(task, side, *groups[side][1], *ratios)
    return found
