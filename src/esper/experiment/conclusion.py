"""The end of a run: the best policy beside everybody else, on other hosts.

What was judged before an interruption is in the store and is not judged again.
"""

from collections.abc import Callable
from contextlib import closing
from typing import Final

from esper.experiment.config import SIMULATED, STATIC, TrainConfig
from esper.experiment.evaluate import Job, results_of
from esper.experiment.learned import Learned, load_controller
from esper.experiment.news import News, Progressed
from esper.experiment.run import STORE, Run
from esper.experiment.storage.database import open_store
from esper.experiment.store import Store
from esper.experiment.worlds import tasks_of

LEARNED: Final = "Tamiyo"
"""What the policy is called in tables."""
HOSTS: Final = 1
"""The number of the hosts that everybody is judged on, in every run; `esper evaluate`
has others unless it is told so."""


def conclude(
    config: TrainConfig,
    run: Run,
    store: Store,
    round: int,
    hear: Callable[[News], None],
    stop: Callable[[], bool],
) -> None:
    """Judge everybody who is asked for, and store it."""
    if SIMULATED in config.tasks or not config.judging.controllers:
        return
    done = _judged(run)
    best = load_controller(run.path)
    jobs = _jobs(config, best, done)
    if not jobs:
        return
    if not done:
        text = f"what is judged is the checkpoint of round {best.round}, the best one"
        store.add_note(round, "judged", text)
    number = 0
    with closing(results_of(jobs, config.judging.processes, stop)) as results:
        for job, judged in results:
            task, arm = job.task.name, job.arm
            if (task, arm) not in done:
                store.add_evaluation(
                    judged, round=round, stage="judged", controller=arm, task=task
                )
                store.flush()
            number += 1
            news = f"{arm} on {task}: return {judged.returns.mean():.4f}"
            hear(Progressed("judging", number, len(jobs), news))


def _jobs(config: TrainConfig, best: Learned, done: set[tuple[str, str]]) -> list[Job]:
    """What is left to be judged, and the policy again if others are measured by it."""
    arms = (LEARNED, *config.judging.controllers)
    tasks = {task.name: task for task in tasks_of(config, "judged")}
    left = {task: [arm for arm in arms if (task, arm) not in done] for task in tasks}
    return [
        Job(
            arm,
            tasks[task],
            config.judging.hosts,
            HOSTS,
            config.world,
            best if arm == LEARNED else None,
        )
        for task, waiting in left.items()
        for arm in arms
        if arm in waiting or (arm == LEARNED and {*waiting} & {*STATIC})
    ]


def _judged(run: Run) -> set[tuple[str, str]]:
    """Tasks and controllers that were judged before."""
    with closing(open_store(run.path / STORE)) as db:
        found = db.execute(
            "SELECT DISTINCT task, controller FROM live_evaluations "
            "WHERE stage = 'judged'"
        )
        return {(task, controller) for task, controller in found}
