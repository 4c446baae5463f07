"""Controllers and static networks on hosts of a real task that no training saw.

The random seed and the task fix data, initial weights and batch order of every host.
So all arms with the same seed are paired, host by host. Some arms do not grow:

    static      all hidden layers wider: at most the reference's mean final size
    longer      the plain host, trained for as many multiply-adds as the reference
    static-x4   all hidden layers four times as wide; also 1, 2, 8 and 16
    best-size, envelope, halving   choices among those, see `sizes`

All pay rent for what they have beyond the host, and use the task's learning rate. The
reference is the trained controller, or `early`. Costs are what the world counts.
"""

from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from esper.contracts.actions import NUM_HEADS, ActionSpec
from esper.contracts.world import Controller, Observation, StepResult
from esper.environment.clock import STOPS
from esper.environment.settings import LOOKED_ROWS, SCORED_ROWS, WorldSettings
from esper.evaluation.sizes import size_baseline
from esper.runs.records import (
    LADDER,
    SIZES,
    STATIC,
    TEST,
    EvalResult,
    Floats,
    StopFigures,
    reference_of,
)
from esper.runs.store import Store
from esper.runs.streams import STAGE_KEYS, stream, stream_seed
from esper.tamiyo.registry import CONTROLLERS, Maker, controller_for
from esper.tamiyo.rollout import play
from esper.tamiyo.rule_based import Never
from esper.tamiyo.schedule import Scheduled
from esper.tasks.hosts import CnnHost, Host, MlpHost
from esper.tasks.task import Task
from esper.workers.jobs import Workers

if TYPE_CHECKING:
    from esper.environment.growing import GrowingWorld

MAX_DECISIONS: Final = 10_000
"""Limit of an episode."""


@dataclass(frozen=True, slots=True)
class Job:
    """One arm on one task."""

    arm: str
    task: Task
    hosts: int
    rng_seed: int
    world: WorldSettings
    maker: Maker | None = None
    """Makes the controller of a trained arm."""
    stage: str = TEST
    """Each stage has hosts of its own."""
    reference: EvalResult | None = None
    """The result that sets size or compute of a static arm."""

    def about(self) -> str:
        """A description for people."""
        return f"evaluating {self.arm} on {self.task.name}"


def results_of(
    jobs: Sequence[Job], workers: Workers, stop: Callable[[], bool] = lambda: False
) -> Generator[tuple[Job, EvalResult], None, None]:
    """The result of each job, in an order that does not depend on the workers.

    Static arms come last, since they need their reference. Ends early once `stop` is
    True.
    """
    ready = [job for job in jobs if job.arm not in (*STATIC, *SIZES)]
    reference = reference_of(job.arm for job in jobs)
    found: dict[tuple[str, str], EvalResult] = {}
    for job, result in _done(ready, workers, stop):
        found[job.task.name, job.arm] = result
        yield job, result
        if job.arm in LADDER:
            yield from _choices(job.task.name, jobs, found)
    if stop():
        return
    waiting = [
        replace(job, reference=found[job.task.name, str(reference)])
        for job in jobs
        if job.arm in STATIC
    ]
    yield from _done(waiting, workers, stop)


def _done(
    jobs: Sequence[Job], workers: Workers, stop: Callable[[], bool]
) -> Iterator[tuple[Job, EvalResult]]:
    results = workers.run(run_job, jobs, None, about=Job.about, stop=stop)
    return zip(jobs, results, strict=False)  # fewer if stopped


def _choices(
    task: str, jobs: Sequence[Job], found: Mapping[tuple[str, str], EvalResult]
) -> Iterator[tuple[Job, EvalResult]]:
    """Choices among the sizes of a task, once all sizes have results."""
    same = [job for job in jobs if job.task.name == task]
    ladder = [found.get((task, job.arm)) for job in same if job.arm in LADDER]
    known = [result for result in ladder if result is not None]
    if len(known) == len(ladder):
        for job in same:
            if job.arm in SIZES:
                yield job, size_baseline(job.arm, known)


def stored_results(
    jobs: Sequence[Job],
    workers: Workers,
    store: Store,
    *,
    round: int = 0,
    stop: Callable[[], bool] = lambda: False,
    known: Collection[tuple[str, str]] = (),
) -> Generator[tuple[Job, EvalResult], None, None]:
    """As `results_of`; each result is durable in the store before it is returned.

    Results in `known`, by task and arm, are not stored again.
    """
    with closing(results_of(jobs, workers, stop)) as results:
        for job, result in results:
            task = job.task.name
            if (task, job.arm) not in known:
                store.add_evaluation(
                    result, round=round, stage=TEST, controller=job.arm, task=task
                )
                store.flush()
            yield job, result


def run_job(maker: Maker | None, job: Job) -> EvalResult:
    """Evaluate the arm of a job, or the controllers of `maker` on its hosts."""
    compile_engine(job.task)
    hosts = (job.task, job.hosts, job.rng_seed)
    if job.arm in LADDER:
        return evaluate_plain(
            times_as_wide(job.task.host, LADDER[job.arm]), *hosts, job.world
        )
    if job.reference is None:
        controller = maker or job.maker or job.arm
        return evaluate_controller(controller, *hosts, job.world, stage=job.stage)
    return evaluate_static(job.arm, *hosts, job.reference, job.world)


_COMPILED: Final[set[str]] = set()


def compile_engine(task: Task) -> None:
    """Compile or load the engine before anything is timed, once in a process."""
    if task.host.kind not in _COMPILED:
        world = evaluation_world(task, 1, 0)
        world.reset()
        world.step(torch.zeros(1, NUM_HEADS, dtype=torch.int64))
        _COMPILED.add(task.host.kind)


def evaluation_world(
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: WorldSettings | None = None,
    *,
    stage: str = TEST,
) -> "GrowingWorld":
    """The hosts of a task for a random seed and a stage."""
    # Slow to import, since the engine is compiled.
    from esper.environment.growing import GrowingWorld

    number = stream_seed(rng_seed, f"{STAGE_KEYS[stage]}, {task.name}")
    # Hosts of an evaluation differ, also if training groups equal ones.
    settings = replace(settings or WorldSettings(), group_size=1)
    return GrowingWorld(task, hosts, number, settings=settings)


def evaluate_controller(
    controller: Controller | Maker | str,
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: WorldSettings | None = None,
    *,
    stage: str = TEST,
) -> EvalResult:
    """The result of one episode of a controller on every host.

    `controller` may also be a factory or a name. Each stage has hosts of its own.
    """
    settings = settings or WorldSettings()
    raw = replace(settings, relative=False)
    world = evaluation_world(task, hosts, rng_seed, raw, stage=stage)
    result = evaluate_episode(world, controller_for(controller, world.spec), rng_seed)
    return _relative(result, task, rng_seed, settings, stage)


def notes_on(arms: Iterable[str], settings: WorldSettings) -> dict[str, str]:
    """Warnings about arms, by name, if the end of an episode is unknown."""
    if settings.stop != "anytime":
        return {}
    spec = ActionSpec()
    text = (
        "its times are fractions of the horizon, which is unknown if world.stop is "
        "anytime. Only its actions at the start are carried out."
    )
    made = {arm: CONTROLLERS[arm](spec) for arm in arms if arm in CONTROLLERS}
    return {
        arm: text
        for arm, controller in made.items()
        if isinstance(controller, Scheduled) and controller.needs_end
    }


def evaluate_static(
    name: str,
    task: Task,
    hosts: int,
    rng_seed: int,
    reference: EvalResult,
    settings: WorldSettings | None = None,
) -> EvalResult:
    """The result of a `STATIC` arm on the hosts of the reference."""
    where = (task, hosts, rng_seed, settings)
    if name == "static":
        size = task.host.parameters * (1.0 + float(reference.added.mean()))
        return evaluate_plain(widened(task.host, size), *where)
    spend = float(reference.training_macs.mean())
    return evaluate_plain(task.host, *where, spend=spend)


def evaluate_plain(
    host: Host,
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: WorldSettings | None = None,
    *,
    spend: float | None = None,
) -> EvalResult:
    """The result of a network that does not grow, on the data of the test hosts.

    `host` replaces the task's own, which rent stays relative to. It trains for the
    usual number of decisions, or longer until it has cost `spend` multiply-adds.
    """
    settings = settings or WorldSettings()
    own = settings.applied_to(task)
    horizon = own.horizon
    if spend is not None and settings.clock == "batches":
        wanted = _decisions_for(spend, host, own, settings, rng_seed)
        horizon = min(max(wanted, own.horizon), MAX_DECISIONS)
    # A plain network needs no measurements, which would shorten its training.
    charged = settings.charge_eval and settings.clock != "compute"
    terms = replace(settings, horizon=horizon, relative=False, charge_eval=charged)
    trained = replace(task, host=host, unit_host=task.unit)
    # The return of every arm starts from the worth of the plain host.
    plain, wide = (
        evaluation_world(each, hosts, rng_seed, terms).reset().host
        for each in (task, trained)
    )
    ahead = wide.score - wide.rent * wide.added - plain.score
    world = evaluation_world(trained, hosts, rng_seed, terms)
    result = evaluate_episode(world, Never(), rng_seed)
    result = replace(result, returns=result.returns + ahead.double().numpy())
    return _relative(result, task, rng_seed, settings, TEST)


def _relative(
    result: EvalResult, task: Task, rng_seed: int, settings: WorldSettings, stage: str
) -> EvalResult:
    """The result relative to the same hosts that never grow, if the world is."""
    if not settings.relative:
        return result
    hosts = len(result.returns)
    world = evaluation_world(task, hosts, rng_seed, settings, stage=stage)
    world.reset()
    unit, never = (
        figure.double().cpu().numpy() for figure in (world.unit, world.never[:, -1])
    )
    stops = result.stops
    if stops is not None:
        first, worth = (stops.first + never) / unit, stops.worth / unit
        stops = replace(stops, first=first, worth=worth)
    return replace(result, returns=(result.returns - never) / unit, stops=stops)


def _decisions_for(
    spend: float, host: Host, task: Task, settings: WorldSettings, rng_seed: int
) -> int:
    """The number of decisions of a plain network for so many multiply-adds."""
    available = len(task.splits(rng_seed).val)
    # A training step costs a forward pass, and a backward pass each to the weights and
    # to the activations.
    trained = task.decision_every * task.batch * 3 * host.macs
    between, at_stop = (
        trained + settings.charge_eval * min(rows, available) * host.macs
        for rows in (LOOKED_ROWS, SCORED_ROWS)
    )
    stops = 1 if settings.stop == "end" else STOPS
    return round(stops + (spend - stops * at_stop) / between)


def widened(host: Host, parameters: int | float) -> Host:
    """The host with the widest hidden layers, in proportion, for so many parameters."""
    best, narrowest = host, min(_hidden(host))
    for more in count(1):
        wider = times_as_wide(host, Fraction(narrowest + more, narrowest))
        if wider.parameters > parameters:
            break
        best = wider
    return best


def times_as_wide(host: Host, times: int | Fraction) -> Host:
    """The host with hidden layers `times` as wide."""
    wide = tuple(int(n * times) for n in _hidden(host))
    if isinstance(host, CnnHost):
        return replace(host, channels=wide)
    return MlpHost((host.widths[0], *wide, host.widths[-1]))


def _hidden(host: Host) -> tuple[int, ...]:
    return host.widths[1:-1] if isinstance(host, MlpHost) else host.channels


def evaluate_episode(
    world: "GrowingWorld", controller: Controller, rng_seed: int
) -> EvalResult:
    """The result of one episode of a controller in every environment."""
    hosts = world.num_envs
    final = {
        name: torch.zeros(hosts, dtype=torch.float64)
        for name in ("score", "test", "added", "macs", "training_macs", "panicked")
    }
    area = torch.zeros(hosts, dtype=torch.float64)
    running = torch.ones(hosts, dtype=torch.bool)
    at_stops = _AtStops(world)

    def add(actions: Tensor, result: StepResult[Observation]) -> None:
        nonlocal running
        # After the end of an episode, the observation is of the next one.
        score = result.observation.host.score.double()
        if (report := result.report) is not None:
            score[report.env] = torch.where(report.panicked, 0.0, report.score.double())
            # A later episode of a host may end too, if it panics.
            first = running[report.env]
            for name, values in final.items():
                values[report.env[first]] = getattr(report, name)[first].double()
        at_stops.add(score, running)
        area.add_(torch.where(running, score, 0.0))
        running = running & ~(result.terminated | result.truncated)

    began = perf_counter()
    returns = play(world, controller, stream(rng_seed, "judging"), on_step=add)
    seconds = (perf_counter() - began) / hosts
    figures = {name: values.numpy() for name, values in final.items()}
    return EvalResult(
        returns=returns.double().numpy(),
        area=area.numpy() / world.task.horizon,
        seconds=np.full(hosts, seconds),
        stops=at_stops.figures(returns.double().numpy()),
        **figures | {"panicked": figures["panicked"].astype(bool)},
    )


class _AtStops:
    """Collects the figures of every host at every stop; ended hosts keep theirs."""

    def __init__(self, world: "GrowingWorld") -> None:
        self._world, self._decisions = world, 0
        self._weights = world.clock.weights().numpy()
        self._now = np.zeros((4, world.num_envs))
        self._found: list[Floats] = []

    def add(self, score: Tensor, running: Tensor) -> None:
        """Add one decision, with the scores on the validation split."""
        world = self._world
        spent = world.last_compute * world.batch_macs()
        new = (world.last_phi, score, world.last_test, spent)
        here = np.stack([figure.double().cpu().numpy() for figure in new])
        self._now = np.where(running.cpu().numpy(), here, self._now)
        self._decisions += 1
        if self._weights[self._decisions] > 0:
            self._found.append(self._now)

    def figures(self, returns: Floats) -> StopFigures:
        """All figures, given the returns of the hosts."""
        at = self._weights > 0
        weights = self._weights[at]
        # If no host is left, the last stops are never reached.
        self._found += [self._now] * (len(weights) - len(self._found))
        worth, score, test, spent = np.stack(self._found, axis=1)
        return StopFigures(
            times=self._world.clock.times().numpy()[at],
            weights=weights,
            first=weights @ worth - returns,
            worth=worth,
            score=score,
            test=test,
            spent=spent,
        )
