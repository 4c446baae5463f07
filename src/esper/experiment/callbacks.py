"""What happens around the rounds of a training: record, evaluate, save, final results.

A callback overrides the hooks it needs. `begin_run` puts its own around those it is
given: rows and TensorBoard before them, evaluation and checkpoints after them, so that
a round is known everywhere when it is saved.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from esper.contracts.errors import BadInput, StorageTrouble
from esper.contracts.state import save
from esper.experiment.checkpoint import CheckpointFolder
from esper.experiment.config import SIMULATED, TrainConfig
from esper.experiment.controllers import Learned, load_controller
from esper.experiment.database import open_store
from esper.experiment.evaluate import Job, results_of
from esper.experiment.judging import judge
from esper.experiment.records import STATIC, Judged, RoundRecord
from esper.experiment.rollout import Transition
from esper.experiment.run import STORE, Run
from esper.experiment.seed_events import events_between
from esper.experiment.store import Store
from esper.experiment.worlds import tasks_of
from esper.simic.agent.metrics import HeadRecord, UpdateRecord
from esper.tamiyo.policy.sampling import with_temperature

if TYPE_CHECKING:
    from esper.experiment.train import Trainer

PATIENCE: Final = 3
"""Failures in a row that are borne: refused checkpoints, refused updates."""
LEARNED: Final = "Tamiyo"
"""What the policy is called in tables."""
WATCHED: Final = "watched"
"""Stage of the periodic evaluation: hosts that choose the best checkpoint."""
JUDGED: Final = "judged"
"""Stage of the final evaluation: hosts that decided nothing so far."""
FINAL_HOSTS: Final = 1
"""Number of the hosts of the final evaluation, in every run; `esper evaluate` has
others unless it is told so."""

Results = Mapping[str, Judged]
"""Results of the policy by task."""


class Callback:
    """Hooks into a training; each does nothing unless it is overridden."""

    def on_message(self, text: str, *, warning: bool = False) -> None:
        """Something to be read by people."""

    def on_progress(self, name: str, done: int, total: int, text: str) -> None:
        """One step of something that takes a while before or after the rounds."""

    def on_train_start(self, trainer: "Trainer", *, resumed: bool) -> None:
        """Before the first round; `resumed`: from a checkpoint."""

    def on_step(self, trainer: "Trainer", step: Transition) -> None:
        """After every step of the world."""

    def on_round_end(self, trainer: "Trainer", record: RoundRecord) -> None:
        """After every round."""

    def on_evaluation(self, trainer: "Trainer", results: Results) -> None:
        """After a periodic evaluation."""

    def on_train_end(self, trainer: "Trainer") -> None:
        """When the budget is used up; not after a signal or an error."""

    def on_close(self) -> None:
        """At the very end, whatever it was."""


class CallbackList:
    """Several callbacks, called one after the other."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = tuple(callbacks)

    def call(self, hook: str, *args: Any, **options: Any) -> None:  # noqa: ANN401
        """Call one hook of all, by name."""
        for callback in self.callbacks:
            getattr(callback, hook)(*args, **options)


class OnRoundEnd(Callback):
    """Calls a function with the record of every round."""

    def __init__(self, function: Callable[[RoundRecord], object]) -> None:
        self._function = function

    def on_round_end(self, trainer: "Trainer", record: RoundRecord) -> None:
        """Call it."""
        self._function(record)


class Record(Callback):
    """Writes rounds, steps, episodes, lifecycle events and evaluations into a store.

    Args:
        store: Where to.
        tasks: What is learnt in the environments, in equal shares.
    """

    def __init__(self, store: Store, tasks: Sequence[str]) -> None:
        self._store, self._tasks = store, tasks

    def on_step(self, trainer: "Trainer", step: Transition) -> None:
        """The rows of one step."""
        world, result = trainer.world, step.result
        each = world.num_envs // len(self._tasks)
        when = {
            "round": trainer.round + 1,
            "step": trainer.round * trainer.config.steps + step.index + 1,
        }

        def where(env: Tensor) -> dict[str, Any]:
            """The columns that say which episode each row is about."""
            numbers = env.tolist()
            return {
                "task": [self._tasks[number // each] for number in numbers],
                "env": [number % each for number in numbers],
                "episode": step.episode[env],
            }

        host, ended = step.observation.host, result.terminated | result.truncated
        self._store.add(
            "steps",
            **when,
            **where(torch.arange(world.num_envs)),
            reward=result.reward,
            score=host.score,
            loss=host.loss,
            added=host.added,
            budget_left=host.budget_left,
        )
        changes = events_between(
            step.observation.slots,
            result.observation.slots,
            ended=ended,
            actions=step.actions,
            illegal=result.illegal,
        )
        names = [blueprint.name for blueprint in world.spec.blueprints]
        self._store.add_events(changes, names, **when, **where(changes.env))
        if bool(ended.any()):
            report = result.report
            env = ended.nonzero().flatten() if report is None else report.env
            figures = ("score", "test", "added", "macs", "panicked")
            self._store.add(
                "episodes",
                **when,
                **where(env),
                **{"return": step.returns[env]},
                **{name: getattr(report, name, None) for name in figures},
            )

    def on_round_end(self, trainer: "Trainer", record: RoundRecord) -> None:
        """The rows of one round."""
        self._store.add_round(record)

    def on_evaluation(self, trainer: "Trainer", results: Results) -> None:
        """The rows of a periodic evaluation."""
        for task, judged in results.items():
            self._store.add_evaluation(
                judged,
                round=trainer.round,
                stage=WATCHED,
                controller=LEARNED,
                task=task,
            )


class TensorBoard(Callback):
    """Writes the figures of every round for TensorBoard, by env-steps.

    Args:
        folder: What `tensorboard --logdir` is pointed at.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = str(folder)
        self._writer: Any = None

    def on_train_start(self, trainer: "Trainer", *, resumed: bool) -> None:
        """Open the files; figures beyond a checkpoint are no longer shown."""
        later = trainer.env_steps + 1 if resumed else None
        self._writer = summary_writer()(self._folder, purge_step=later)

    def on_round_end(self, trainer: "Trainer", record: RoundRecord) -> None:
        """Write the figures of one round."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.env_steps)

    def on_close(self) -> None:
        """Finish writing."""
        if self._writer is not None:
            self._writer.close()


class Evaluate(Callback):
    """Evaluates the policy every so often on the same hosts.

    They choose the best checkpoint, so the final evaluation has others. The simulated
    world has no hosts.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def on_train_start(self, trainer: "Trainer", *, resumed: bool) -> None:
        """Where it starts from."""
        if not resumed and not trainer.stopping:
            self._evaluate(trainer)

    def on_round_end(self, trainer: "Trainer", record: RoundRecord) -> None:
        """If it is time to; a signal must not choose another best checkpoint."""
        due = record.round % self._config.judging.every == 0 or trainer.over
        if due and trainer.sound:
            self._evaluate(trainer)

    def _evaluate(self, trainer: "Trainer") -> None:
        if SIMULATED in self._config.tasks:
            return
        hosts, settings = self._config.judging.hosts, self._config.world
        policy = with_temperature(trainer.policy)
        results = {
            task.name: judge(policy, task, hosts, 0, settings, stage=WATCHED)
            for task in tasks_of(self._config, WATCHED)
        }
        trainer.callbacks.call("on_evaluation", trainer, results)


class Checkpoint(Callback):
    """Saves the trainer every so often: rows first, then its state.

    A disk that refuses is tried again at the next checkpoint, three times in a row.

    Args:
        store: Made durable before each checkpoint, so it is never behind one.
        folder: Where checkpoints go.
        every: Rounds between two checkpoints.
        facts: Written into each; see `CheckpointFolder.publish`.
    """

    def __init__(
        self,
        store: Store,
        folder: CheckpointFolder,
        every: int,
        facts: Mapping[str, Any],
    ) -> None:
        self._store, self._folder = store, folder
        self._every, self._facts = every, dict(facts)
        self._failures = 0
        self._score: float | None = None

    def on_evaluation(self, trainer: "Trainer", results: Results) -> None:
        """Remember how good the policy is."""
        self._score = mean_return(results)

    def on_train_start(self, trainer: "Trainer", *, resumed: bool) -> None:
        """Save where it starts from."""
        if not resumed and not trainer.stopping:
            self._save(trainer, last=False)

    def on_round_end(self, trainer: "Trainer", record: RoundRecord) -> None:
        """Save if it is time to."""
        last = trainer.over or trainer.stopping
        due = last or self._score is not None or record.round % self._every == 0
        # What is gone back to, or gone on from, should be sound.
        if due and trainer.sound:
            self._save(trainer, last=last)

    def _save(self, trainer: "Trainer", *, last: bool) -> None:
        score, self._score = self._score, None
        try:
            self._store.flush()
            self._folder.publish(trainer.round, save(trainer), self._facts, score=score)
            self._failures = 0
        except StorageTrouble as trouble:
            self._failures += 1
            if last or self._failures == PATIENCE:
                raise
            trainer.warn(f"{trouble} Training goes on.")


class FinalEvaluation(Callback):
    """Evaluates the best policy and every other arm on hosts that are new to all.

    What was evaluated before an interruption is in the store and is not done again.
    """

    def __init__(self, config: TrainConfig, run: Run, store: Store) -> None:
        self._config, self._run, self._store = config, run, store

    def on_train_end(self, trainer: "Trainer") -> None:
        """Evaluate and store, arm by arm; a signal ends it."""
        config = self._config
        if SIMULATED in config.tasks or not config.judging.controllers:
            return
        done, best = self._done(), load_controller(self._run.path)
        jobs = _jobs(config, best, done)
        if not jobs:
            return
        if not done:
            text = (
                f"what is judged is the checkpoint of round {best.round}, the best one"
            )
            self._store.add_note(trainer.round, JUDGED, text)
        results = results_of(jobs, config.judging.processes, trainer.interrupted)
        with closing(results):
            for number, (job, judged) in enumerate(results, start=1):
                task, arm = job.task.name, job.arm
                if (task, arm) not in done:
                    self._store.add_evaluation(
                        judged,
                        round=trainer.round,
                        stage=JUDGED,
                        controller=arm,
                        task=task,
                    )
                    self._store.flush()
                text = f"{arm} on {task}: return {judged.returns.mean():.4f}"
                trainer.report_progress("judging", number, len(jobs), text)

    def _done(self) -> set[tuple[str, str]]:
        """Tasks and arms that are in the store."""
        with closing(open_store(self._run.path / STORE)) as db:
            found = db.execute(
                "SELECT DISTINCT task, controller FROM live_evaluations "
                "WHERE stage = ?",
                [JUDGED],
            )
            return {(task, controller) for task, controller in found}


def mean_return(results: Results) -> float:
    """Mean return over tasks that count alike."""
    means = [float(judged.returns.mean()) for judged in results.values()]
    return sum(means) / len(means)


def scalars(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """The figures of a round by name; what is NaN or missing is left out."""
    named = {"round/mean_return": record.mean_return, "round/seconds": record.seconds}
    update = record.update
    named |= {
        f"update/{field.name}": getattr(update, field.name)
        for field in fields(UpdateRecord)
        if field.name != "heads"
    }
    named |= {
        f"{field.name}/{head}": getattr(figures, field.name)
        for head, figures in update.heads.items()
        for field in fields(HeadRecord)
    }
    for name, value in named.items():
        if value is not None and not isnan(value):
            yield name, float(value)


def summary_writer() -> Any:  # noqa: ANN401
    """The class that writes for TensorBoard; refuses if it is not installed."""
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        raise BadInput(
            "TensorBoard is not installed: pip install 'esper-lite[tensorboard]'."
        ) from None


def _jobs(config: TrainConfig, best: Learned, done: set[tuple[str, str]]) -> list[Job]:
    """What is left to evaluate, and the policy again if static arms wait for it."""
    arms = (LEARNED, *config.judging.controllers)
    jobs = []
    for task in tasks_of(config, JUDGED):
        left = {arm for arm in arms if (task.name, arm) not in done}
        jobs += [
            Job(
                arm,
                task,
                config.judging.hosts,
                FINAL_HOSTS,
                config.world,
                best if arm == LEARNED else None,
            )
            for arm in arms
            if arm in left or (arm == LEARNED and left & {*STATIC})
        ]
    return jobs
