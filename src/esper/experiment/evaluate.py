"""All arms on the same hosts of some tasks: `esper evaluate`.

A job is one arm on one task. Jobs run in processes of one thread each; static arms wait
for the one that they are measured by. An evaluation is a run: a folder with its
configuration and a store whose rows are durable as soon as an arm is judged. Tables and
sentences are made of those rows. If interrupted, it stays readable and unfinished.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import torch
from pydantic import Field
from rich.console import Console

from esper.contracts.actions import NUM_HEADS
from esper.contracts.errors import BadInput
from esper.experiment.config import Count, RngSeed, World
from esper.experiment.database import open_store, rows
from esper.experiment.judging import judge, judged_world
from esper.experiment.messages import checked_name, refusal, unknown
from esper.experiment.progress import Progress, print_line
from esper.experiment.records import STATIC, Judged
from esper.experiment.run import STORE, Run, versions_now
from esper.experiment.settings import Text, as_toml, one_of, settings
from esper.experiment.static import judge_static
from esper.experiment.store import Store
from esper.experiment.summary import (
    Summary,
    headline,
    reference_of,
    return_trend,
    sparkline,
    summarise,
)
from esper.experiment.summary_tables import print_scores, print_summary
from esper.experiment.workers import workers
from esper.tamiyo.registry import CONTROLLERS, NAMES, SHIPPED, Maker
from esper.tasks.catalogue import TASKS
from esper.tasks.catalogue import task as find_task
from esper.tasks.task import Task

KIND: Final = "evaluation"
"""What `versions.json` calls such a run."""

PAUSE: Final = 0.5
"""Seconds between two looks at the stop condition."""

TaskName = Annotated[str, one_of("task", lambda: TASKS)]


@settings
class EvaluateConfig:
    """Which arms are judged on which tasks."""

    tasks: tuple[TaskName, ...] = ()
    """What the hosts learn; none: every task that can be judged here."""
    controllers: tuple[Text, ...] = (*CONTROLLERS, "static")
    """Names of controllers and static controls, or folders of runs that learnt."""
    hosts: Count = 16
    """Hosts of each task."""
    rng_seed: RngSeed = 0
    """Decides which hosts."""
    processes: Annotated[int, Field(ge=1, le=256)] = 2
    """Arms that are judged at the same time."""
    name: Text | None = None
    """What the run is called; none: a name is made up."""
    runs: Text = "runs"
    """Folder in which runs are kept."""
    world: World = field(default_factory=World)
    """How hosts grow."""

    def __post_init__(self) -> None:
        """Refuse arms that do not exist."""
        if self.name is not None:
            checked_name(self.name)
        if not self.controllers:
            raise refusal("controllers is empty; name at least one.")
        for controller in self.controllers:
            known = controller in NAMES or controller in STATIC
            if not known and not is_folder(controller):
                what = "controllers: there is no run or controller"
                raise unknown(what, controller, (*NAMES, *STATIC))


@dataclass(frozen=True, slots=True)
class Job:
    """One arm on one task."""

    arm: str
    task: Task
    hosts: int
    rng_seed: int
    world: World
    maker: Maker | None = None
    """Of a learned controller."""


class _Stopped(Exception):  # noqa: N818
    """No more results are wanted."""


def run_evaluation(config: EvaluateConfig, *, as_json: bool = False) -> Path:
    """Judge all arms, store and print the results; the folder of the run."""
    console = Console(stderr=as_json)
    path, skipped = evaluate(config, console)
    summary = summary_of(path)
    if as_json:
        document = {"run": str(path), **summary.as_data(), "skipped": dict(skipped)}
        print(json.dumps(document, indent=2, allow_nan=False))
        return path
    print_summary(console, summary)
    for name, reason in skipped.items():
        print_line(console, f"{name}: skipped: {reason}")
    print_line(console, f"Stored in {path}")
    return path


def evaluate(
    config: EvaluateConfig, console: Console | None = None
) -> tuple[Path, Mapping[str, str]]:
    """Judge all arms and store the results.

    Args:
        config: Which arms on which tasks.
        console: Where progress is shown.

    Returns:
        The folder of the run, and why tasks were left out.
    """
    arms = _arms(config)
    tasks, skipped = _ready(config)
    ahead = [
        Job(arm, task, config.hosts, config.rng_seed, config.world, maker)
        for task in tasks.values()
        for arm, maker in arms.items()
    ]
    toml = as_toml(config)
    facts = {"kind": KIND, "rng_seed": config.rng_seed, "tasks": [*tasks]}
    done = dict.fromkeys(tasks, 0)
    with (
        Run.create(Path(config.runs), config.name, toml, facts) as run,
        Store(run.path / STORE) as store,
        closing(results_of(ahead, config.processes)) as results,
        Progress([*tasks], console, unit="arm") as progress,
    ):
        store.begin_attempt(None, versions_now(toml))
        for job, judged in results:
            task = job.task.name
            store.add_evaluation(
                judged, round=0, stage="judged", controller=job.arm, task=task
            )
            store.flush()
            done[task] += 1
            text = (
                f"{job.arm}: return {judged.returns.mean():.4f}, test score "
                f"{100 * judged.test.mean():.1f} %"
            )
            progress.update(task, done[task], len(arms), text)
        for name, reason in skipped.items():
            store.add_note(0, "skipped", f"{name}: {reason}")
        store.flush()
        run.finish({"arms": len(ahead), "hosts": config.hosts})
        return run.path, skipped


def summary_of(path: Path) -> Summary:
    """What the store of a run says of what was judged in it."""
    with closing(open_store(path / STORE)) as db:
        return summarise(rows(db, "live_evaluations"))


def print_training(path: Path, console: Console | None = None) -> None:
    """Print how the return went in a training, and its final evaluation."""
    console = console or Console()
    with closing(open_store(path / STORE)) as db:
        found = db.execute("SELECT mean_return FROM live_rounds ORDER BY round")
        returns = [float("nan") if value is None else value for (value,) in found]
        notes = db.execute("SELECT text FROM live_notes WHERE kind = 'judged'")
        judged = [str(text) for (text,) in notes]
    print_line(console, f"Mean return per round: {sparkline(returns)}")
    print_line(console, return_trend(returns))
    summary = summary_of(path)
    if summary.tasks:
        print_scores(console, summary)
        for text in judged:
            print_line(console, f"{text[0].upper()}{text[1:]}.")
        for line in headline(summary):
            print_line(console, line)
    print_line(console, f"The run is in {path}.")


def is_folder(controller: str) -> bool:
    """Whether a controller's name is that of a folder with a run."""
    return "/" in controller or Path(controller).is_dir()


def _ready(config: EvaluateConfig) -> tuple[dict[str, Task], dict[str, str]]:
    """Tasks that can be judged, and why others cannot; refuses if they were named."""
    ready: dict[str, Task] = {}
    skipped: dict[str, str] = {}
    for task in [find_task(name) for name in config.tasks or TASKS]:
        try:
            judged_world(task, 1, config.rng_seed, config.world)
            task.splits(config.rng_seed)
        except BadInput as error:
            if config.tasks:
                raise
            skipped[task.name] = str(error)
            continue
        ready[task.name] = task
    if not ready:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise BadInput(f"expected a task that can be judged here; {reasons}")
    return ready, skipped


def _arms(config: EvaluateConfig) -> dict[str, Maker | None]:
    """Every arm by its name; learned ones with what makes them."""
    from esper.experiment.controllers import load_controller
    from esper.tamiyo.shipped import shipped

    arms: dict[str, Maker | None] = {}
    for given in dict.fromkeys(config.controllers):
        plain = given in CONTROLLERS or given in STATIC
        maker = None
        if not plain:
            maker = shipped() if given == SHIPPED else load_controller(given)
        name = given if maker is None else maker.name
        if name in arms or (maker is not None and name in (*CONTROLLERS, *STATIC)):
            raise refusal(f"controllers has {name!r} twice; name it once.")
        arms[name] = maker
    waiting = [name for name in arms if name in STATIC]
    if waiting and reference_of(arms) is None:
        raise refusal(
            f"controllers: {waiting[0]!r} is measured by a learned controller or by "
            "'early'; name one of them too."
        )
    return arms


def results_of(
    jobs: Sequence[Job], processes: int, stop: Callable[[], bool] = lambda: False
) -> Generator[tuple[Job, Judged], None, None]:
    """The result of each job, in the order in which they end.

    Args:
        jobs: Arms on tasks; static arms after those that they are measured by.
        processes: Jobs at the same time.
        stop: Asked every now and then; if it says so, there are no more.
    """
    ready = [job for job in jobs if job.arm not in STATIC]
    waiting = [job for job in jobs if job.arm in STATIC]
    reference = reference_of(job.arm for job in jobs)
    # What others wait for comes first.
    ready.sort(key=lambda job: job.arm != reference)

    def freed(job: Job) -> list[Job]:
        same = job.arm == reference
        return [one for one in waiting if same and one.task.name == job.task.name]

    if processes == 1 or len(jobs) == 1:
        for job in ready:
            if stop():
                return
            judged = _run_job(job)
            yield job, judged
            for after in freed(job):
                yield after, _run_job(after, judged)
        return
    with suppress(_Stopped), workers(min(processes, len(jobs))) as pool:
        running = {pool.submit(_run_job, job): job for job in ready}
        while running:
            ended, _ = wait(running, timeout=PAUSE, return_when=FIRST_COMPLETED)
            if stop():
                raise _Stopped
            for future in ended:
                job, judged = running.pop(future), future.result()
                running |= {
                    pool.submit(_run_job, after, judged): after for after in freed(job)
                }
                yield job, judged


def _run_job(job: Job, reference: Judged | None = None) -> Judged:
    torch.set_num_threads(1)
    compile_engine(job.task, job.rng_seed)
    task, hosts, number = job.task, job.hosts, job.rng_seed
    if reference is None:
        return judge(job.maker or job.arm, task, hosts, number, job.world)
    return judge_static(job.arm, task, hosts, number, reference, job.world)


_COMPILED: Final[set[str]] = set()


def compile_engine(task: Task, rng_seed: int) -> None:
    """Load what is compiled before anything is timed, once in a process."""
    if task.host.kind not in _COMPILED:
        world = judged_world(task, 1, rng_seed)
        world.reset()
        world.step(torch.zeros(1, NUM_HEADS, dtype=torch.int64))
        _COMPILED.add(task.host.kind)
