"""Begins or resumes a run in a process of its own, to be killed from outside.

python -m tests.training.training_script FOLDER NAME
"""

import sys
from pathlib import Path

import torch

from esper.runs.records import mean_return
from esper.runs.train_config import (
    Budget,
    CheckpointConfig,
    EvalConfig,
    TrainConfig,
    World,
)
from esper.training.loop import Callback, OnRoundEnd
from esper.training.train import begin_run, resume_run

ROUNDS = 6


def config(folder, name, rounds=ROUNDS):
    return TrainConfig(
        tasks=("teacher", "digits"),
        num_envs=2,
        name=name,
        runs=str(folder),
        start_from=None,
        budget=Budget(rounds=rounds),
        world=World(horizon=4, decision_every=2),
        evaluation=EvalConfig(every=3, hosts=2, controllers=()),
        checkpoint=CheckpointConfig(every=2),
    )


class Log(Callback):
    """Warnings and evaluations of a run."""

    def __init__(self):
        self.warnings, self.evaluations = [], []

    def on_message(self, text, *, warning=False):
        if warning:
            self.warnings.append(text)

    def on_evaluation(self, loop, results):
        self.evaluations.append((loop.round, mean_return(results)))


def tell(record):
    print(f"round {record.round}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, name = Path(sys.argv[1]), sys.argv[2]
    if (folder / name).exists():
        result = resume_run(folder / name, [OnRoundEnd(tell)])
    else:
        result = begin_run(config(folder, name), [OnRoundEnd(tell)])
    sys.exit(0 if result.signal is None else 128 + result.signal)
