"""Controllers and static networks on hosts of a real task that no training saw.

The number and the task decide data, first weights and order of batches, whoever
controls: arms that are judged with the same number are paired, host by host. Some arms
do not grow:

    static    the host with all hidden layers wider, from the start: as many parameters
              as the reference ended with on average, or the most that are not more
    longer    the host as it is, trained on until it has cost as many multiply-adds as
              the reference; the learning rate's rise and fall are stretched along

    static-x4   the host with all hidden layers four times as wide; so for 1, 2, 8, 16

    best-size, envelope, halving   choices among those, see `sizes`

All pay rent for what they have more than the host, at the task's own learning rate,
tuned for none. The reference is the learned controller, or `early`.

The cost of training a host, scoring of its decision rows included, is what the world
counts, in multiply-adds.
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
from esper.contracts.errors import InvalidInputError
from esper.contracts.world import Controller, StepResult
from esper.environment.clock import STOPS
from esper.environment.settings import LOOKED_ROWS, SCORED_ROWS, WorldSettings
from esper.evaluation.sizes import size_control
from esper.growth.analysis.macs import step_macs
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

LONGEST: Final = 10_000
"""Decisions of an episode, at most."""


@dataclass(frozen=True, slots=True)
class Job:
    """One arm on one task."""

    arm: str
    task: Task
    hosts: int
    rng_seed: int
    world: WorldSettings
    maker: Maker | None = None
    """Of a learned controller."""
    stage: str = TEST
    """Another stage stands for other hosts."""
    reference: EvalResult | None = None
    """What a static arm is measured by."""

    def about(self) -> str:
        """What it is, for people."""
        return f"judging {self.arm} on {self.task.name}"


def results_of(
    jobs: Sequence[Job], workers: Workers, stop: Callable[[], bool] = lambda: False
) -> Generator[tuple[Job, EvalResult], None, None]:
    """The result of each job, in an order that does not depend on the workers.

    Args:
        jobs: Arms on tasks, with those that others are measured by or computed from.
        workers: Who does them.
        stop: Asked every now and then; if it says so, there are no more.
    """
    ready = [job for job in jobs if job.arm not in (*STATIC, *SIZES)]
    reference = reference_of(job.arm for job in jobs)
    found: dict[tuple[str, str], EvalResult] = {}
    for job, judged in _done(ready, workers, stop):
        found[job.task.name, job.arm] = judged
        yield job, judged
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
    results = workers.run(_run_job, jobs, None, about=Job.about, stop=stop)
    return zip(jobs, results, strict=False)  # fewer if it is stopped


def _choices(
    task: str, jobs: Sequence[Job], found: Mapping[tuple[str, str], EvalResult]
) -> Iterator[tuple[Job, EvalResult]]:
    """Choices among the sizes of a task, once all of them are judged."""
    same = [job for job in jobs if job.task.name == task]
    ladder = [found.get((task, job.arm)) for job in same if job.arm in LADDER]
    known = [judged for judged in ladder if judged is not None]
    if len(known) == len(ladder):
        for job in same:
            if job.arm in SIZES:
                yield job, size_control(job.arm, known)


def stored_results(
    jobs: Sequence[Job],
    workers: Workers,
    store: Store,
    *,
    round: int = 0,
    stop: Callable[[], bool] = lambda: False,
    known: Collection[tuple[str, str]] = (),
) -> Generator[tuple[Job, EvalResult], None, None]:
    """The same, with rows that are durable before a result is given.

    Args:
        jobs: As for `results_of`, like `workers` and `stop`.
        workers: See there.
        store: Where rows go.
        round: That they belong to.
        stop: See there.
        known: Task and arm of results that are stored already.
    """
    with closing(results_of(jobs, workers, stop)) as results:
        for job, judged in results:
            task = job.task.name
            if (task, job.arm) not in known:
                store.add_evaluation(
                    judged, round=round, stage=TEST, controller=job.arm, task=task
                )
                store.flush()
            yield job, judged


def _run_job(shared: None, job: Job) -> EvalResult:
    compile_engine(job.task)
    hosts = (job.task, job.hosts, job.rng_seed)
    if job.arm in LADDER:
        return judge_plain(
            times_as_wide(job.task.host, LADDER[job.arm]), *hosts, job.world
        )
    if job.reference is None:
        return judge(job.maker or job.arm, *hosts, job.world)
    return judge_static(job.arm, *hosts, job.reference, job.world)


def watch_job(maker: Maker, job: Job) -> EvalResult:
    """Judge a learned controller on the hosts of a stage."""
    hosts = (job.task, job.hosts, job.rng_seed)
    return judge(maker, *hosts, job.world, stage=job.stage)


_COMPILED: Final[set[str]] = set()


def compile_engine(task: Task) -> None:
    """Load what is compiled before anything is timed, once in a process."""
    if task.host.kind not in _COMPILED:
        world = judged_world(task, 1, 0)
        world.reset()
        world.step(torch.zeros(1, NUM_HEADS, dtype=torch.int64))
        _COMPILED.add(task.host.kind)


def judged_world(
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: WorldSettings | None = None,
    *,
    stage: str = TEST,
) -> "GrowingWorld":
    """The hosts of a task that a number and a stage stand for."""
    # The engine is compiled; only what trains hosts waits for it.
    from esper.environment.growing import GrowingWorld

    number = stream_seed(rng_seed, f"{STAGE_KEYS[stage]}, {task.name}")
    # EvalResult hosts differ from each other, whatever the training groups.
    settings = replace(settings or WorldSettings(), group_size=1)
    return GrowingWorld(task, hosts, number, settings=settings)


def judge(
    controller: Controller | Maker | str,
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: WorldSettings | None = None,
    *,
    stage: str = TEST,
) -> EvalResult:
    """One episode of a controller on every host.

    Args:
        controller: A controller, a factory of one, or the name of one.
        task: What the hosts learn.
        hosts: How many.
        rng_seed: Decides which hosts.
        settings: How they grow; None: the defaults.
        stage: Another stage stands for other hosts.
    """
    settings = settings or WorldSettings()
    raw = replace(settings, relative=False)
    world = judged_world(task, hosts, rng_seed, raw, stage=stage)
    judged = play_and_judge(world, controller_for(controller, world.spec), rng_seed)
    return relative(judged, task, hosts, rng_seed, settings, stage=stage)


def notes_on(arms: Iterable[str], settings: WorldSettings) -> dict[str, str]:
    """What should be known of some arms, by their names, where the end is unknown."""
    if settings.stop != "anytime":
        return {}
    spec, text = (
        ActionSpec(),
        (
            "its times are fractions of the horizon, which is unknown if world.stop is "
            "anytime. Only its actions at the start are carried out."
        ),
    )
    made = {arm: CONTROLLERS[arm](spec) for arm in arms if arm in CONTROLLERS}
    return {
        arm: text
        for arm, controller in made.items()
        if isinstance(controller, Scheduled) and controller.needs_end
    }


def judge_static(
    name: str,
    task: Task,
    hosts: int,
    rng_seed: int,
    reference: EvalResult,
    settings: WorldSettings | None = None,
) -> EvalResult:
    """One of the `STATIC` arms on the hosts that the reference was judged on."""
    if name not in STATIC:
        raise InvalidInputError(
            f"no static arm {name!r}; there are {', '.join(STATIC)}."
        )
    where = (task, hosts, rng_seed, settings)
    if name == "static":
        size = task.host.parameters * (1.0 + float(reference.added.mean()))
        return judge_plain(widened(task.host, size), *where)
    spend = float(reference.training_macs.mean())
    least = (settings or WorldSettings()).horizon or task.horizon
    return judge_plain(task.host, *where, spend=spend, least=least)


def judge_plain(
    host: Host,
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: WorldSettings | None = None,
    *,
    spend: float | None = None,
    least: int = 1,
    stage: str = TEST,
) -> EvalResult:
    """A network that does not grow, on the data of the hosts that a number stands for.

    Args:
        host: Trained in place of the task's own, which rent is relative to.
        task: What is learnt.
        hosts: How many.
        rng_seed: Decides which hosts.
        settings: How others grow; None: the defaults.
        spend: Multiply-adds to train for; None: as many decisions as others have.
        least: Decisions to train for, at least, however little there is to spend.
        stage: As for `judge`.
    """
    settings = settings or WorldSettings()
    own = settings.applied_to(task)
    horizon = own.horizon
    if spend is not None and settings.clock == "batches":
        horizon = _decisions_for(spend, host, own, settings, rng_seed)
        horizon = min(max(horizon, least), LONGEST)
    # Nobody looks at a plain network: by that clock it would train less for it.
    charged = settings.charge_eval and settings.clock != "compute"
    terms = replace(settings, horizon=horizon, relative=False, charge_eval=charged)
    trained = replace(task, host=host, unit_host=task.unit)
    # All arms begin with the worth of the same plain host, whatever they are.
    plain, wide = (
        judged_world(each, hosts, rng_seed, terms, stage=stage).reset().host
        for each in (task, trained)
    )
    ahead = wide.score - wide.rent * wide.added - plain.score
    world = judged_world(trained, hosts, rng_seed, terms, stage=stage)
    judged = play_and_judge(world, Never(), rng_seed)
    judged = replace(judged, returns=judged.returns + ahead.double().numpy())
    return relative(judged, task, hosts, rng_seed, settings, stage=stage)


def relative(
    judged: EvalResult,
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: WorldSettings,
    *,
    stage: str,
) -> EvalResult:
    """Results against the same hosts that never grow, if rewards are relative."""
    if not settings.relative:
        return judged
    world = judged_world(task, hosts, rng_seed, settings, stage=stage)
    world.reset()
    unit, never = (
        figure.double().cpu().numpy() for figure in (world.unit, world.never[:, -1])
    )
    stops = judged.stops
    if stops is not None:
        first, worth = (stops.first + never) / unit, stops.worth / unit
        stops = replace(stops, first=first, worth=worth)
    return replace(judged, returns=(judged.returns - never) / unit, stops=stops)


def _decisions_for(
    spend: float, host: Host, task: Task, settings: WorldSettings, rng_seed: int
) -> int:
    """Decisions of a plain network that cost so many multiply-adds, to the nearest."""
    available = len(task.splits(rng_seed).val)
    trained = task.decision_every * task.batch * step_macs(host.macs)
    between, at_stop = (
        trained + settings.charge_eval * min(rows, available) * host.macs
        for rows in (LOOKED_ROWS, SCORED_ROWS)
    )
    stops = 1 if settings.stop == "end" else STOPS
    return round(stops + (spend - stops * at_stop) / between)


def widened(host: Host, parameters: int | float) -> Host:
    """The host with hidden layers as wide as so many parameters allow, in proportion.

    It is never narrower than it was.
    """
    best, narrowest = host, min(_hidden(host))
    for more in count(1):
        wider = times_as_wide(host, Fraction(narrowest + more, narrowest))
        if wider.parameters > parameters:
            break
        best = wider
    return best


def times_as_wide(host: Host, times: int | Fraction) -> Host:
    """The host with so many times as many units in every hidden layer."""
    wide = tuple(int(n * times) for n in _hidden(host))
    if isinstance(host, CnnHost):
        return replace(host, channels=wide)
    return MlpHost((host.widths[0], *wide, host.widths[-1]))


def _hidden(host: Host) -> tuple[int, ...]:
    return host.widths[1:-1] if isinstance(host, MlpHost) else host.channels


def play_and_judge(
    world: "GrowingWorld", controller: Controller, rng_seed: int
) -> EvalResult:
    """Results of one episode of a controller in every environment."""
    hosts = world.num_envs
    final = {
        name: torch.zeros(hosts, dtype=torch.float64)
        for name in ("score", "test", "added", "macs", "training_macs", "panicked")
    }
    area = torch.zeros(hosts, dtype=torch.float64)
    running = torch.ones(hosts, dtype=torch.bool)
    at_stops = _AtStops(world)

    def add(actions: Tensor, result: StepResult) -> None:
        nonlocal running
        # Where an episode has ended, the next observation is of another one.
        score = result.observation.host.score.double()
        if (report := result.report) is not None:
            score[report.env] = torch.where(report.panicked, 0.0, report.score.double())
            # A host that ended before does so again if its next episode panics.
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
    """Collects what every host has at every stop; one that has ended stays as it was.

    Args:
        world: Where the hosts live.
    """

    def __init__(self, world: "GrowingWorld") -> None:
        self._world, self._decisions = world, 0
        self._weights = world.clock.weights().numpy()
        self._now = np.zeros((4, world.num_envs))
        self._found: list[Floats] = []

    def add(self, score: Tensor, running: Tensor) -> None:
        """One decision later, with the scores on decision rows."""
        world = self._world
        spent = world.last_compute * world.batch_macs()
        new = (world.last_phi, score, world.last_test, spent)
        here = np.stack([figure.double().cpu().numpy() for figure in new])
        self._now = np.where(running.cpu().numpy(), here, self._now)
        self._decisions += 1
        if self._weights[self._decisions] > 0:
            self._found.append(self._now)

    def figures(self, returns: Floats) -> StopFigures:
        """All of them, given the returns of the hosts."""
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
