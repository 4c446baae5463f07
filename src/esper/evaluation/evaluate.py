"""Evaluate arms on the same hosts of some tasks: `esper evaluate`.

An evaluation is a run: a folder with its configuration and a store. The rows of an arm
are durable as soon as it is evaluated. An interrupted evaluation stays readable.
"""

import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import field
from pathlib import Path
from typing import Annotated, Final

from rich.console import Console

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import refusal, unknown
from esper.environment.settings import WorldSettings
from esper.evaluation.summary import print_summary, summary_of
from esper.runs.progress import Progress, print_line
from esper.runs.records import LADDER, SIZES, STATIC, TEST, reference_of
from esper.runs.run import STORE, Run, validate_name, versions_now
from esper.runs.settings import Count, RngSeed, Text, as_toml, one_of, settings
from esper.runs.store import Store
from esper.tamiyo.registry import CONTROLLERS, NAMES, SHIPPED, Maker
from esper.tasks.catalogue import TASKS
from esper.tasks.catalogue import task as find_task
from esper.tasks.task import Task
from esper.workers.jobs import Workers

KIND: Final = "evaluation"
"""The kind of these runs in `versions.json`."""

TaskName = Annotated[str, one_of("task", lambda: TASKS)]


@settings
class EvaluateConfig:
    """Controllers and tasks of an evaluation."""

    tasks: tuple[TaskName, ...] = ()
    """Tasks to evaluate on; empty: all available tasks."""
    controllers: tuple[Text, ...] = (*CONTROLLERS, "static")
    """Controllers and static networks by name; trained runs by name or folder."""
    hosts: Count = 16
    """Hosts per task."""
    rng_seed: RngSeed = 0
    """Random seed of the hosts."""
    name: Text | None = None
    """Name of the run; none: a generated name."""
    runs: Text = "runs"
    """Folder that contains the runs."""
    world: WorldSettings = field(default_factory=WorldSettings)
    """How hosts grow."""

    def __post_init__(self) -> None:
        """Refuse unknown arms and worlds that are too large."""
        if self.name is not None:
            validate_name(self.name)
        if not self.controllers:
            raise refusal("controllers is empty; name at least one.")
        for controller in self.controllers:
            known = (*NAMES, *STATIC, *LADDER, *SIZES)
            if controller not in known and not _is_run(controller, self.runs):
                what = "controllers: there is no run or controller"
                raise unknown(what, controller, known)


def run_evaluation(
    config: EvaluateConfig, *, as_json: bool = False, workers: Workers | None = None
) -> Path:
    """Evaluate all arms and print the results; returns the run's folder."""
    from esper.evaluation.evaluation import notes_on

    console = Console(stderr=as_json)
    path, skipped = evaluate(config, console, workers)
    summary = summary_of(path)
    if as_json:
        document = {"run": str(path), **summary.as_data(), "skipped": dict(skipped)}
        print(json.dumps(document, indent=2, allow_nan=False))
        return path
    print_summary(console, summary)
    for arm, text in notes_on(config.controllers, config.world).items():
        print_line(console, f"{arm}: {text}")
    for name, reason in skipped.items():
        print_line(console, f"{name}: skipped: {reason}")
    print_line(console, f"Stored in {path}")
    return path


def evaluate(
    config: EvaluateConfig,
    console: Console | None = None,
    workers: Workers | None = None,
) -> tuple[Path, Mapping[str, str]]:
    """Evaluate all arms and store the results.

    Returns:
        The folder of the run, and why tasks were skipped.
    """
    # Slow imports, which the settings do not need.
    from esper.evaluation.evaluation import Job, notes_on, stored_results

    arms = _arms(config)
    tasks, skipped = _ready(config)
    ahead = [
        Job(arm, task, config.hosts, config.rng_seed, config.world, maker)
        for task in tasks.values()
        for arm, maker in arms.items()
    ]
    toml = as_toml(config)
    facts = {"kind": KIND, "rng_seed": config.rng_seed, "tasks": [*tasks]}
    done, workers = dict.fromkeys(tasks, 0), workers or Workers()
    with (
        Run.create(Path(config.runs), config.name, toml, facts) as run,
        Store(run.path / STORE, run.id) as store,
        closing(stored_results(ahead, workers, store)) as results,
        Progress([*tasks], console, unit="arm") as progress,
    ):
        store.begin_attempt(None, versions_now(toml))
        for job, result in results:
            task = job.task.name
            done[task] += 1
            text = (
                f"{job.arm}: return {result.returns.mean():.4f}, test score "
                f"{100 * result.test.mean():.1f} %"
            )
            progress.update(task, done[task], len(arms), text, workers.active_jobs)
        for name, reason in skipped.items():
            store.add_note(0, "skipped", f"{name}: {reason}")
        for arm, text in notes_on(arms, config.world).items():
            store.add_note(0, TEST, f"{arm}: {text}")
        store.flush()
        run.finish({"arms": len(ahead), "hosts": config.hosts})
        return run.path, skipped


def _is_run(controller: str, runs: str) -> bool:
    """Whether a name may be that of a run or of its folder."""
    places = (controller, os.path.join(runs, controller))
    return "/" in controller or any(map(os.path.isdir, places))


def _ready(config: EvaluateConfig) -> tuple[dict[str, Task], dict[str, str]]:
    """Tasks that can be evaluated, and why others cannot; refuses named ones."""
    from esper.evaluation.evaluation import evaluation_world
    from esper.evaluation.sizes import check_halving

    ready: dict[str, Task] = {}
    skipped: dict[str, str] = {}
    for task in [find_task(name) for name in config.tasks or TASKS]:
        try:
            clock = evaluation_world(task, 1, config.rng_seed, config.world).clock
            if "halving" in config.controllers:
                check_halving(clock)
            task.splits(config.rng_seed)
        except InvalidInputError as error:
            if config.tasks:
                raise
            skipped[task.name] = str(error)
            continue
        ready[task.name] = task
    if not ready:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise InvalidInputError(f"no task can be evaluated: {reasons}")
    return ready, skipped


def _arms(config: EvaluateConfig) -> dict[str, Maker | None]:
    """Every arm by name; trained ones with a maker of their controller."""
    from esper.runs.controllers import find_controller
    from esper.tamiyo.shipped import shipped

    arms: dict[str, Maker | None] = {}
    runs = Path(config.runs)
    for given in dict.fromkeys(config.controllers):
        maker, plain = None, {*CONTROLLERS, *STATIC, *LADDER, *SIZES}
        if given not in plain:
            maker = shipped() if given == SHIPPED else find_controller(given, runs)
        name = given if maker is None else maker.name
        if name in arms or (maker is not None and name in plain):
            raise refusal(f"controllers has {name!r} twice; name it once.")
        arms[name] = maker
    waiting = [name for name in arms if name in STATIC]
    if waiting and reference_of(arms) is None:
        raise refusal(
            f"controllers: {waiting[0]!r} needs the size of a trained controller or of "
            "'early'. Add one of them."
        )
    computed = [name for name in arms if name in SIZES]
    if computed and len({*arms} & {*LADDER}) < 2:
        raise refusal(
            f"controllers: {computed[0]!r} chooses among static sizes. Add at least "
            f"two of {', '.join(LADDER)}."
        )
    return arms
