"""How much of the exact optimum does the controller reach on the simulated world?

It is trained from as many random seeds as asked and judged on instances that no
training saw, beside controllers that do not learn. 0 % is the better of never and
random, 100 % the exact optimum of the very instances that were played; intervals are
over instances, drawn anew for all arms together. About two minutes for each training.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from queue import Empty, Queue
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import timing
from benchmarks.optimum import best_memoryless_returns, optimal_returns
from benchmarks.timing import Report
from esper.contracts.world import Controller
from esper.environment.instances import Instances, draw_instances
from esper.environment.simulated import SimulatedWorld
from esper.experiment.config import SIMULATED, Budget, TrainConfig
from esper.experiment.presets import preset
from esper.experiment.progress import Progress
from esper.experiment.records import RoundRecord
from esper.experiment.rollout import play
from esper.experiment.statistics import Floats, Interval, bootstrap, mean_interval
from esper.experiment.streams import stream
from esper.experiment.train import loop_of, train
from esper.experiment.worlds import worlds_of
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.policy.sampling import GreedyPolicy
from esper.tamiyo.rule_based import Never, PromiseGreedy, Random

OPTIMUM, MEMORYLESS = "optimum", "best without memory"
CONTROLS: Mapping[str, Controller] = {
    "never": Never(),
    "random": Random(),
    "heuristic": PromiseGreedy(),
}
VARIANTS: Final = {
    "Tamiyo": PolicyConfig(),
    "without memory": PolicyConfig(memory="none"),
    "without relevance": PolicyConfig(causal=False),
}
KINDS: Final = {"visible": False, "hidden": True}
"""Kinds of instances, and whether their payoffs are hidden."""
HELD_OUT: Final = 1024
"""Instances of each kind on which every arm is judged."""
TITLES = {
    "visible": "Visible instances, never trained on: everything needed is seen",
    "hidden": "Hidden instances, never trained on: what was seen must be remembered",
}


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


def run(
    rounds: int = 280,
    repeats: int = 1,
    ablations: bool = False,
    rng_seed: int = 0,
    envs: int = 256,
    processes: int = 2,
) -> list[Report]:
    """Train, judge and print the tables, which are the result.

    Args:
        rounds: Rounds per training.
        repeats: Trainings of each variant.
        ablations: Whether to train without memory and without relevance masks too.
        rng_seed: Random seed of the first training; the others count up.
        envs: Environments that step together.
        processes: Trainings at the same time.
    """
    jobs = plan(rounds, repeats, ablations, rng_seed, envs)
    with Progress([job.name for job in jobs]) as progress:

        def show(name: str, record: RoundRecord) -> None:
            progress.update(name, record.round, record.rounds, record.headline())

        outcomes = list(_outcomes(jobs, processes, show))
    print_study(outcomes, _controls())
    return []


def plan(
    rounds: int, repeats: int, ablations: bool, rng_seed: int, envs: int
) -> list[Job]:
    """The jobs of a study, in the order in which they start."""
    own = preset(SIMULATED)
    own = replace(own, envs=envs, budget=Budget(rounds=rounds))
    variants = list(VARIANTS) if ablations else ["Tamiyo"]
    return [
        Job(
            variant,
            replace(
                own,
                rng_seed=number,
                learner=replace(own.learner, policy=VARIANTS[variant]),
            ),
        )
        for number in range(rng_seed, rng_seed + repeats)
        for variant in variants
    ]


def run_job(job: Job, tell: Callable[[str, RoundRecord], None]) -> Outcome:
    """Train and judge one policy."""
    torch.set_num_threads(1)
    (world,) = worlds_of(job.config)
    loop = loop_of(job.config, world)
    policy = train(world, loop, lambda record: tell(job.name, record))
    return Outcome(job.variant, job.config.rng_seed, **_returns(GreedyPolicy(policy)))


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


def _instances(hidden: bool) -> Instances:
    return held_out(16 if timing.QUICK else HELD_OUT, hidden=hidden)


def _returns(controller: Controller) -> dict[str, Floats]:
    """Returns on instances of both kinds that no training saw."""
    return {
        kind: returns_of(controller, _instances(hidden))
        for kind, hidden in KINDS.items()
    }


def _controls() -> dict[str, dict[str, Floats]]:
    """The same of those that do not learn, and of the bounds."""
    return {kind: control_returns(_instances(hidden)) for kind, hidden in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Score:
    """One arm on one set of instances."""

    name: str
    mean_return: Interval
    share: Interval
    """Percent of the way from the better of never and random to the optimum."""


def held_out(num: int, *, hidden: bool) -> Instances:
    """Instances from a random stream that no training draws from."""
    generator = stream(0, f"held out, hidden {hidden}")
    return draw_instances(num, generator, torch.full((num,), hidden))


def returns_of(controller: Controller, instances: Instances) -> Floats:
    """Return of `controller` on each instance."""
    world = SimulatedWorld.from_instances(instances)
    returns = play(world, controller, stream(0, "judging"))
    return returns.double().numpy()


def control_returns(instances: Instances) -> dict[str, Floats]:
    """Returns of the controllers that do not learn, and the bounds."""
    arms = {name: returns_of(arm, instances) for name, arm in CONTROLS.items()}
    if bool(instances.hidden.all()):
        arms[MEMORYLESS] = best_memoryless_returns(instances).numpy()
    arms[OPTIMUM] = optimal_returns(instances).numpy()
    return arms


def scores(arms: Mapping[str, Floats]) -> list[Score]:
    """Mean return and share of the optimum of every arm, with intervals."""
    never, random, optimum = arms["never"], arms["random"], arms[OPTIMUM]
    return [
        Score(
            name,
            mean_interval(returns),
            _share_interval(np.stack([never, random, returns, optimum])),
        )
        for name, returns in arms.items()
    ]


def share_of_optimum(arms: Mapping[str, Floats], name: str) -> float:
    """Percent of the optimum that one arm reaches."""
    rows: Sequence[Floats] = [arms[key] for key in ("never", "random", name, OPTIMUM)]
    return float(_share(np.stack(rows).mean(axis=1, keepdims=True))[0])


def _share_interval(arms: Floats) -> Interval:
    count = arms.shape[1]
    return bootstrap(
        [count], lambda drawn: _share(arms @ drawn.T / count), student=True
    )


def _share(means: Floats) -> Floats:
    never, random, arm, optimum = means
    base = np.maximum(never, random)
    share: Floats = 100.0 * (arm - base) / (optimum - base)
    return share


def print_study(
    outcomes: Sequence[Outcome], controls: Mapping[str, Mapping[str, Floats]]
) -> None:
    """Print one table per kind of instance, then each training's figure."""
    console = Console()
    for kind, arms in controls.items():
        variants = sorted({outcome.variant for outcome in outcomes})
        means = {
            variant: np.mean(
                [getattr(o, kind) for o in outcomes if o.variant == variant], axis=0
            )
            for variant in variants
        }
        _print_table(console, kind, {**arms, **means})
        _print_repeats(console, kind, outcomes, arms)


def _print_table(console: Console, kind: str, arms: Mapping[str, Floats]) -> None:
    table = Table(title=TITLES[kind], title_justify="left")
    table.add_column("controller")
    table.add_column("return [95 % interval]", justify="right")
    table.add_column("% of optimum [95 % interval]", justify="right")
    for score in sorted(scores(arms), key=lambda score: score.mean_return.estimate):
        style = "bold" if score.name == "Tamiyo" else ""
        table.add_row(
            score.name,
            f"{score.mean_return:.4f}",
            f"{score.share:.1f}",
            style=style,
        )
    console.print(table)


def _print_repeats(
    console: Console,
    kind: str,
    outcomes: Sequence[Outcome],
    arms: Mapping[str, Floats],
) -> None:
    """Each training on its own, so that a lucky one cannot hide an unlucky one."""
    for variant in sorted({outcome.variant for outcome in outcomes}):
        shares = [
            share_of_optimum({**arms, "it": getattr(outcome, kind)}, "it")
            for outcome in outcomes
            if outcome.variant == variant
        ]
        line = ", ".join(f"{share:.1f} %" for share in shares)
        console.print(f"{variant}, each training: {line}", highlight=False)
    if kind == "hidden":
        bound = share_of_optimum(arms, MEMORYLESS)
        console.print(
            f"the best policy without memory reaches {bound:.1f} %", highlight=False
        )
