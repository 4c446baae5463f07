"""The end of a run: the best policy beside everybody else, on other hosts.

What was judged before an interruption is in the store and is not judged again.
"""

from collections.abc import Callable
from contextlib import closing

from esper.experiment.config import SIMULATED, TrainConfig
from esper.experiment.judging import judge
from esper.experiment.learned import load_controller
from esper.experiment.news import News, Progressed
from esper.experiment.run import STORE, Run
from esper.experiment.storage.database import open_store
from esper.experiment.store import Store
from esper.tasks.catalogue import task as find_task

LEARNED = "Tamiyo"


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
    jobs = [
        (task, controller)
        for task in config.tasks
        for controller in (LEARNED, *config.judging.controllers)
    ]
    best = load_controller(run.path)
    for number, (task, controller) in enumerate(jobs, start=1):
        if stop():
            return
        if (task, controller) in done:
            continue
        judged = judge(
            best if controller == LEARNED else controller,
            find_task(task),
            config.judging.hosts,
            0,
            config.world,
        )
        store.add_evaluation(
            judged, round=round, stage="judged", controller=controller, task=task
        )
        store.flush()
        news = f"{controller} on {task}: return {judged.returns.mean():.3f}"
        hear(Progressed("judging", number, len(jobs), news))


def _judged(run: Run) -> set[tuple[str, str]]:
    """Tasks and controllers that were judged before."""
    with closing(open_store(run.path / STORE)) as db:
        found = db.execute(
            "SELECT DISTINCT task, controller FROM live_evaluations "
            "WHERE stage = 'judged'"
        )
        return {(task, controller) for task, controller in found}
