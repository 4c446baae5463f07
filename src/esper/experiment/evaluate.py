"""Every task with every controller that does not learn: `esper evaluate`.

A job is one controller on one task. Jobs are independent and run in processes of one
thread each. Controllers of a task are paired, so rows of one table may be compared
host by host; intervals are over hosts.
"""

import json
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import active_children, get_context
from threading import current_thread, main_thread
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.contracts.errors import BadInput
from esper.experiment.judging import Judged, judge, judged_world
from esper.experiment.progress import Progress
from esper.experiment.statistics import Floats, mean_interval
from esper.tamiyo.named import CONTROLLERS, named
from esper.tasks.catalogue import TASKS
from esper.tasks.catalogue import task as find_task
from esper.tasks.task import Task

WIDTH = 140
"""Columns of a table that is not shown in a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Who is judged on what."""

    tasks: tuple[str, ...] = ()
    """Names; none: every task that can be judged here."""
    controllers: tuple[str, ...] = ()
    """Names; none: every controller that does not learn."""
    hosts: int = 16
    """Hosts of each task."""
    rng_seed: int = 0
    """Decides which hosts."""
    processes: int = 2
    """Jobs at the same time."""


@dataclass(frozen=True, slots=True)
class Job:
    """One controller on one task."""

    task: Task
    controller: str
    hosts: int
    rng_seed: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came of it, by the names of tasks and controllers."""

    config: EvaluateConfig
    tasks: Mapping[str, Task]
    judged: Mapping[str, Mapping[str, Judged]]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why a task was left out."""


def run_evaluation(config: EvaluateConfig, *, as_json: bool = False) -> None:
    """Judge everybody and print the tables, or one document of data."""
    evaluation = evaluate(config, Console(stderr=as_json))
    if as_json:
        print(json.dumps(as_data(evaluation), indent=2, allow_nan=False))
        return
    console = Console()
    for name, arms in evaluation.judged.items():
        print_arms(console, evaluation.tasks[name], arms)
    for name, reason in evaluation.skipped.items():
        console.print(
            f"{name}: skipped: {reason}", highlight=False, markup=False, soft_wrap=True
        )


def evaluate(config: EvaluateConfig, console: Console | None = None) -> Evaluation:
    """Judge everybody; progress is shown on `console`."""
    tasks, skipped = _ready(config)
    controllers = tuple(dict.fromkeys(config.controllers or CONTROLLERS))
    jobs = [
        Job(task, controller, config.hosts, config.rng_seed)
        for task in tasks.values()
        for controller in controllers
    ]
    found: dict[str, dict[str, Judged]] = {name: {} for name in tasks}
    with (
        closing(_results(jobs, config.processes)) as results,
        Progress([*tasks], console, unit="controller") as progress,
    ):
        for job, judged in results:
            arms = found[job.task.name]
            arms[job.controller] = judged
            news = f"{job.controller}: return {judged.returns.mean():.4f}"
            progress.tell(job.task.name, len(arms), len(controllers), news)
    ordered = {
        name: {controller: arms[controller] for controller in controllers}
        for name, arms in found.items()
    }
    return Evaluation(config, tasks, ordered, skipped)


def _ready(config: EvaluateConfig) -> tuple[dict[str, Task], dict[str, str]]:
    """Tasks that can be judged, and why others cannot; refuses if they were named."""
    ready: dict[str, Task] = {}
    skipped: dict[str, str] = {}
    for task in [find_task(name) for name in config.tasks or TASKS]:
        try:
            spec = judged_world(task, 1, config.rng_seed).spec
            task.splits(config.rng_seed)
        except BadInput as error:
            if config.tasks:
                raise
            skipped[task.name] = str(error)
            continue
        ready[task.name] = task
        for controller in config.controllers:
            named(controller, spec)
    if not ready:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise BadInput(f"expected a task that can be judged here; {reasons}")
    return ready, skipped


def _results(
    jobs: Sequence[Job], processes: int
) -> Generator[tuple[Job, Judged], None, None]:
    """What came of each job, in the order in which they end."""
    if processes == 1 or len(jobs) == 1:
        yield from ((job, _carry_out(job)) for job in jobs)
        return
    others = set(active_children())
    context = get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        try:
            with _deaf_to_interrupts():
                futures = {pool.submit(_carry_out, job): job for job in jobs}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            # Leaving the pool waits for its processes, which may be busy for long.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _carry_out(job: Job) -> Judged:
    torch.set_num_threads(1)
    return judge(job.controller, job.task, job.hosts, job.rng_seed)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that start in here ignore Ctrl-C, so that only their parent speaks."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_arms(console: Console, task: Task, arms: Mapping[str, Judged]) -> None:
    """One table of everybody on one task, best return last."""
    hosts = len(next(iter(arms.values())).returns)
    table = Table(
        title=Text(f"{task.name}: {hosts} hosts ({task.host}) that no training saw"),
        title_justify="left",
    )
    table.add_column("controller")
    for column in (
        "return [95 %]",
        "above never [95 %]",
        "test score, % [95 %]",
        "parameters",
        "MACs per row",
        "panics",
    ):
        table.add_column(column, justify="right")
    never = arms.get("never")
    for name, arm in sorted(arms.items(), key=lambda pair: pair[1].returns.mean()):
        above = "" if never is None or arm is never else _above(arm, never)
        table.add_row(
            name,
            _mean(arm.returns, ".4f"),
            above,
            _mean(100 * arm.test, ".1f"),
            _size(task.host.parameters, 1 + arm.added.mean()),
            _size(task.host.macs, arm.macs.mean()),
            str(int(arm.panicked.sum())),
            style="bold" if name == "Tamiyo" else "",
        )
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(table)


def _above(arm: Judged, other: Judged) -> str:
    """How much more is returned, host by host: they are paired."""
    return _mean(arm.returns - other.returns, "+.4f")


def _mean(values: Floats, spec: str) -> str:
    """The mean over hosts, with its interval if there is more than one."""
    if len(values) < 2:
        return f"{values.mean():{spec}}"
    return f"{mean_interval(values):{spec}}"


def _size(host: int, multiple: float) -> str:
    return f"{host * multiple:,.0f} ({multiple:.2f} x)"


def as_data(evaluation: Evaluation) -> dict[str, Any]:
    """Everything in words and numbers that JSON knows."""
    return {
        "hosts": evaluation.config.hosts,
        "rng_seed": evaluation.config.rng_seed,
        "tasks": {
            name: {
                "host": str(task.host),
                "parameters": task.host.parameters,
                "macs": task.host.macs,
                "controllers": {
                    controller: _arm(task, arm)
                    for controller, arm in evaluation.judged[name].items()
                },
            }
            for name, task in evaluation.tasks.items()
        },
        "skipped": dict(evaluation.skipped),
    }


def _arm(task: Task, arm: Judged) -> dict[str, Any]:
    parameters, macs = 1 + float(arm.added.mean()), float(arm.macs.mean())
    return {
        "return": asdict(mean_interval(arm.returns)),
        "test": asdict(mean_interval(arm.test)),
        "parameters": task.host.parameters * parameters,
        "parameters_multiple": parameters,
        "macs": task.host.macs * macs,
        "macs_multiple": macs,
        "panics": int(arm.panicked.sum()),
        "per_host": {
            "return": arm.returns.tolist(),
            "test": arm.test.tolist(),
            "added": arm.added.tolist(),
            "macs_multiple": arm.macs.tolist(),
            "panicked": arm.panicked.tolist(),
        },
    }
