"""Training Tamiyo on the simulated world, as often and in as many ways as asked.

A job is one training of one variant from one random seed, judged on instances that no
training saw. Jobs are independent and run in processes of one thread each.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Final

import torch

from esper.contracts.controller import Controller
from esper.environment.simulated import SimulatedWorld
from esper.experiment.config import SIMULATED, Budget, TrainConfig
from esper.experiment.learned import load_controller
from esper.experiment.loop import RoundRecord, train
from esper.experiment.progress import Progress
from esper.experiment.settings.presets import preset
from esper.experiment.statistics import Floats
from esper.experiment.studies.optimum_share import control_returns, held_out, returns_of
from esper.experiment.studies.tables import print_study
from esper.experiment.worlds import loop_of, worlds_of
from esper.tamiyo.policy.likeliest import Likeliest
from esper.tamiyo.policy.network import PolicyConfig

VARIANTS: Final = {
    "Tamiyo": PolicyConfig(),
    "without memory": PolicyConfig(memory="none"),
    "without relevance": PolicyConfig(causal=False),
}
KINDS: Final = {"visible": False, "hidden": True}
"""Kinds of instances, and whether their payoffs are hidden."""
HELD_OUT: Final = 1024
"""Instances of each kind on which every arm is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """What to train, how often and how long."""

    rounds: int | None = None
    """Rounds per training; None: as many as the default loop."""
    envs: int = 256
    """Environments that step together."""
    rng_seed: int = 0
    """Random seed of the first training; the others count up."""
    repeats: int = 1
    """Trainings of each variant."""
    ablations: bool = False
    """Whether to train without memory and without relevance masks too."""
    processes: int = 2
    """Trainings at the same time."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training."""

    variant: str
    config: TrainConfig

    @property
    def name(self) -> str:
        """How the job is called on screen."""
        return f"{self.variant}, rng_seed {self.config.rng_seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one training: returns on held-out instances."""

    variant: str
    rng_seed: int
    visible: Floats
    hidden: Floats


def run_study(config: StudyConfig) -> None:
    """Train, judge and print the tables."""
    jobs = plan(config)
    with Progress([job.name for job in jobs]) as progress:
        outcomes = list(_outcomes(jobs, config.processes, progress.show))
    print_study(outcomes, _controls())


def plan(config: StudyConfig) -> list[Job]:
    """The jobs of a study, in the order in which they start."""
    own = preset(SIMULATED)
    rounds = own.budget.rounds if config.rounds is None else config.rounds
    own = replace(own, envs=config.envs, budget=Budget(rounds=rounds))
    variants = list(VARIANTS) if config.ablations else ["Tamiyo"]
    return [
        Job(
            variant,
            replace(
                own,
                rng_seed=rng_seed,
                learner=replace(own.learner, policy=VARIANTS[variant]),
            ),
        )
        for rng_seed in range(config.rng_seed, config.rng_seed + config.repeats)
        for variant in variants
    ]


def run_job(job: Job, tell: Callable[[str, RoundRecord], None]) -> Outcome:
    """Train and judge one policy."""
    torch.set_num_threads(1)
    (world,) = worlds_of(job.config)
    loop = loop_of(job.config, world)
    policy = train(world, loop, lambda record: tell(job.name, record))
    return Outcome(job.variant, job.config.rng_seed, **_returns(Likeliest(policy)))


def _outcomes(
    jobs: list[Job], processes: int, show: Callable[[str, RoundRecord], None]
) -> Iterable[Outcome]:
    if processes == 1 or len(jobs) == 1:
        yield from (run_job(job, show) for job in jobs)
        return
    context = get_context("spawn")
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool,
    ):
        news: Queue[Any] = manager.Queue()
        futures = [pool.submit(_run_and_tell, job, news) for job in jobs]
        # A killed process says nothing more, so do not wait for a last word.
        while not (all(future.done() for future in futures) and news.empty()):
            with suppress(Empty):
                show(*news.get(timeout=0.5))
        yield from (future.result() for future in futures)


def _run_and_tell(job: Job, news: "Queue[Any]") -> Outcome:
    return run_job(job, lambda name, record: news.put((name, record)))


def print_outcome(path: Path) -> None:
    """Judge what a run learnt as a study would, and print the tables."""
    learned = load_controller(path)
    world = SimulatedWorld(1)
    returns = _returns(learned(world.spec))
    print_study([Outcome("Tamiyo", 0, **returns)], _controls())


def _returns(controller: Controller) -> dict[str, Floats]:
    """Returns on instances of both kinds that no training saw."""
    return {
        kind: returns_of(controller, held_out(HELD_OUT, hidden=hidden))
        for kind, hidden in KINDS.items()
    }


def _controls() -> dict[str, dict[str, Floats]]:
    """The same of those that do not learn, and of the bounds."""
    return {
        kind: control_returns(held_out(HELD_OUT, hidden=hidden))
        for kind, hidden in KINDS.items()
    }
