"""What is each part of Tamiyo's training worth?

The training of the family preset at a third of its length (100 recordings, which all
variants share, and 10 rounds), whole and without one part each, three controllers of
each variant. All are evaluated on the same test hosts of drawn tasks:
share of never's errors removed, net of rents that are drawn too.

A training that is done is one line of `--ledger` and is not done again: the command can
be stopped at any time.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from rich.console import Console

from benchmarks import timing
from benchmarks.timing import Report
from esper.contracts.errors import InvalidInputError
from esper.evaluation.evaluation import evaluate_controller
from esper.runs.controllers import load_controller
from esper.runs.progress import Progress
from esper.runs.train_config import preset, resolve
from esper.tasks.family import drawn_task
from esper.training.recordings import RecordConfig, record
from esper.training.train import begin_run
from esper.workers.jobs import workers
from research.crossed import crossed_interval

WHOLE: Final = "whole"
VARIANTS: Final[Mapping[str, Mapping[str, str]]] = {
    WHOLE: {},
    "without the start from recordings": {"start_from": "none"},
    "without PPO after the start (one round)": {"budget.rounds": "1"},
    "without memory": {"learner.policy.memory": "none"},
    "with heads that are not causal": {"learner.policy.causal": "false"},
    "without common random numbers": {"world.group_size": "1"},
    "with one kind of task (teacher)": {
        "tasks": "teacher",
        "num_envs": "56",
        "start_from": "recordings",
    },
}
RECORDED, FAMILY = 8200, 8300
"""Random seeds of the recordings, and of the drawn tasks that judge."""
LONGEST: Final = 3600.0
"""Seconds that a training may take."""


@dataclass(frozen=True)
class Trained:
    """One controller, as the ledger has it."""

    variant: str
    seed: int
    shares: list[list[float]]
    """Of never's errors removed, `[task, host]`."""


@dataclass(frozen=True)
class Size:
    """How long trainings are, and what judges them."""

    recordings: int = 100
    rounds: int = 10
    tasks: int = 24
    hosts: int = 6
    more: tuple[tuple[str, str], ...] = (("evaluation.hosts", "8"),)
    """Other settings of the trainings."""


TINY: Final = Size(
    1, 1, 1, 2, (("evaluation.hosts", "1"), ("variants", "1"), ("num_envs", "8"))
)


def run(
    ledger: str = "docs/evidence/ablations.jsonl", seeds: int = 3, processes: int = 2
) -> Report:
    """Train what the ledger does not have yet, and compare.

    Args:
        ledger: File of what was trained.
        seeds: Controllers of each variant.
        processes: Trainings at the same time.
    """
    size, file = Size(), Path(ledger)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if timing.QUICK:
            size, seeds, processes = TINY, 1, 1
            file = folder / "ledger.jsonl"
        wanted = [(name, seed) for seed in range(seeds) for name in VARIANTS]
        if timing.QUICK:
            wanted = wanted[:2]
        done = {(each.variant, each.seed) for each in read(file)}
        left = [job for job in wanted if job not in done]
        if left:
            _train(left, file, folder / "recordings", size, processes)
        return report(read(file))


def _train(
    left: Sequence[tuple[str, int]],
    ledger: Path,
    recordings: Path,
    size: Size,
    processes: int,
) -> None:
    config = RecordConfig(stop="end", tasks=size.recordings, rng_seed=RECORDED)
    count = 0 if processes == 1 else processes
    title = "trainings"
    with (
        workers(count, deadline=LONGEST) as pool,
        Progress([title], Console(stderr=True), unit="training") as progress,
    ):
        record(config, recordings, pool)
        found = pool.run(trained, left, (size, recordings), about=_about)
        for number, each in enumerate(found, start=1):
            with ledger.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(each)) + "\n")
            progress.update(title, number, len(left), each.variant, pool.active_jobs)


def _about(job: tuple[str, int]) -> str:
    return f"{job[0]}, {job[1]}"


def read(ledger: Path) -> list[Trained]:
    """What was trained so far."""
    if not ledger.exists():
        return []
    lines = ledger.read_text(encoding="utf-8").splitlines()
    return [Trained(**json.loads(line)) for line in lines]


def trained(shared: tuple[Size, Path], job: tuple[str, int]) -> Trained:
    """Train one controller of a variant, and judge it."""
    (size, recordings), (variant, seed) = shared, job
    with TemporaryDirectory() as runs:
        options = {
            "preset": "family",
            "start_from": str(recordings),
            "recordings": str(size.recordings),
            "budget.rounds": str(size.rounds),
            "evaluation.every": str(size.rounds),
            "evaluation.controllers": "never",
            "checkpoint.every": str(size.rounds),
        }
        own = {"rng_seed": str(seed), "runs": runs, "name": "one"}
        ended = begin_run(resolve(options | VARIANTS[variant] | own | dict(size.more)))
        if ended.signal is not None:  # half a training is none
            raise InvalidInputError(
                "a training was interrupted; run the command again."
            )
        controller = load_controller(Path(runs) / "one")
    world = preset("family").world
    shares = [
        evaluate_controller(
            controller, drawn_task(FAMILY, number), size.hosts, FAMILY, world
        )
        for number in range(size.tasks)
    ]
    return Trained(variant, seed, [each.returns.tolist() for each in shares])


def report(done: Sequence[Trained]) -> Report:
    """Means of the controllers and interquartile means, less those of the whole."""
    found = Report(
        "Tamiyo at a third of her training, without one part each",
        ("", "mean of each", "IQM", "from", "to", "less whole", "from", "to"),
        notes=["Share of never's errors removed, net of rent, on drawn tasks."],
    )
    shares = {
        name: np.stack([each.shares for each in own], axis=1)
        for name in VARIANTS
        if (own := [each for each in done if each.variant == name])
    }
    for name, own in shares.items():
        whole = [*shares[WHOLE][:, : own.shape[1]]]
        means = ", ".join(f"{mean:.3f}" for mean in own.mean(axis=(0, 2)))
        row: list[timing.Cell] = [name, means]
        for figure in (crossed_interval([*own]), crossed_interval([*own], whole)):
            row += [figure.estimate, figure.low, figure.high]
        found.add(*row)
    return found
