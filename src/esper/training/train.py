"""Trainings of Tamiyo that are recorded, saved and resumed exactly, then evaluated.

Here, and only here, settings become worlds, policies and callbacks.
"""

from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Final

from esper.contracts.devices import usable_device
from esper.contracts.errors import InvalidInputError
from esper.contracts.state import leaves, load, save
from esper.contracts.world import VectorWorld
from esper.evaluation.evaluation import (
    Job,
    notes_on,
    run_validation_job,
    stored_results,
)
from esper.files import Disk, discard
from esper.runs.controllers import (
    POLICY,
    find_controller,
    load_controller,
    policy_shapes,
)
from esper.runs.database import open_store
from esper.runs.records import STATIC, TEST, VALIDATION, Results
from esper.runs.run import (
    OWN_RECORDINGS,
    START,
    STORE,
    TRAINING,
    Run,
    checkout_commit,
)
from esper.runs.settings import as_toml
from esper.runs.store import Store, usable_store
from esper.runs.train_config import RECORDINGS, WARM, TrainConfig, digest, from_toml
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.tamiyo.shipped import TrainedController, weightless_policy
from esper.training.callbacks import (
    LEARNED,
    Checkpoint,
    Evaluate,
    Record,
    TensorBoard,
    summary_writer,
)
from esper.training.controller_ppo import controller_loop
from esper.training.loop import Callback, TrainingLoop
from esper.training.pretraining import (
    given_recordings,
    own_recordings,
    recorded_policy,
    require_recorded_terms,
    warm_policy,
)
from esper.training.recordings import Recording, holds_recordings
from esper.training.recovery import Attempt, RunResult, train_on, train_to_end
from esper.training.worlds import check_worlds, mixture_for, steps_of, tasks_of
from esper.workers.jobs import Workers, machine_memory

"""What `versions.json` calls such a run."""
FINAL_HOSTS: Final = 1
"""Number of the hosts of the final evaluation, in every run; `esper evaluate` has
others unless it is told so."""


def begin_run(
    config: TrainConfig,
    callbacks: Sequence[Callback] = (),
    workers: Workers | None = None,
) -> RunResult:
    """Begin a run and train until its budget is used up, or a signal comes.

    Args:
        config: All settings.
        callbacks: Called besides those that record, evaluate and save.
        workers: Who trains and judges hosts; none: this process. Results are the same.
    """
    facts = {"kind": TRAINING, "rng_seed": config.rng_seed, "tasks": [*config.tasks]}
    if (commit := checkout_commit()) is not None:
        facts["commit"] = commit
    _check(config)
    with Run.create(Path(config.runs), config.name, as_toml(config), facts) as run:
        first = (f"Training on {_describe(config)}.", f"The run is in {run.path}.")
        attempt = partial(_attempt, config, run, callbacks, workers or Workers())
        return train_to_end(run, callbacks, first, attempt)


def resume_run(
    path: Path,
    callbacks: Sequence[Callback] = (),
    workers: Workers | None = None,
    *,
    device: str | None = None,
) -> RunResult:
    """Resume a run from its newest good checkpoint.

    Args:
        path: The folder of the run.
        callbacks: Called besides those that record, evaluate and save.
        workers: Who trains and evaluates hosts; None: this process.
        device: Device of the learner; None: as before.
    """
    with Run.open(path) as run:
        if run.finished is not None:
            raise InvalidInputError(f"run {run.name} is complete; start a new one.")
        config = settings_of(run)
        config = replace(config, device=device or config.device)
        usable_device(config.device)
        check_memory(config, check_worlds(config))
        first = (f"Resuming {run.name}: {_describe(config)}.",)
        attempt = partial(_attempt, config, run, callbacks, workers or Workers())
        return train_to_end(run, callbacks, first, attempt)


def settings_of(run: Run) -> TrainConfig:
    """The settings that a training was begun with."""
    if run.kind != TRAINING:
        raise InvalidInputError(
            f"run {run.name} was not started by esper train; it cannot be resumed."
        )
    return from_toml(run.config_toml)


def _describe(config: TrainConfig) -> str:
    return (
        f"{', '.join(config.tasks)}, {config.num_envs} environments each, "
        f"rng_seed {config.rng_seed}"
    )


def _check(config: TrainConfig) -> None:
    """Refuse what cannot be begun before anything is made."""
    usable_device(config.device)
    worlds = check_worlds(config)
    check_memory(config, worlds)
    if _starts_from_recordings(config):
        require_recorded_terms(config.world)
        if config.start_from != RECORDINGS:
            given_recordings(config, worlds[0].spec)
    elif config.start_from not in (None, WARM):
        learned = find_controller(str(config.start_from), Path(config.runs))
        if learned.config != config.learner.policy:
            raise InvalidInputError(
                f"start_from is {learned.name!r:.60}, whose policy has other sizes "
                "than learner.policy. Use the same sizes."
            )
    if config.checkpoint.tensorboard:
        summary_writer()


def _starts_from_recordings(config: TrainConfig) -> bool:
    """Whether a new policy is fitted to recordings, its own or those of a folder."""
    where = config.start_from
    return where == RECORDINGS or (where is not None and holds_recordings(Path(where)))


def check_memory(config: TrainConfig, worlds: Sequence[VectorWorld]) -> None:
    """Refuse a training that needs more memory than this machine has.

    Weights, gradients and moments are there once, and up to four times more while they
    are saved, like the state of the world. A rollout is there twice, with activations
    of about its size again for each pass through the policy, and wide memories beside.

    Args:
        config: The run's.
        worlds: From `check_worlds`, with one environment each.
    """
    policy = weightless_policy(config.learner.policy)
    envs, steps, spec = len(worlds), steps_of(config), worlds[0].spec
    learner = sum(tensor.nbytes for tensor in leaves(policy).values())
    state = sum(tensor.nbytes for tensor in leaves([*worlds]).values())
    shape = policy.state_shape
    rollout = TamiyoRolloutBuffer(envs, 1, spec, state_shape=shape).nbytes * steps
    memories = 4 * prod(shape) * envs * steps
    each = 5 * (state + rollout) + 8 * memories // config.learner.ppo.minibatches
    needed = 16 * learner + config.num_envs * each
    there = machine_memory()
    if needed > there:
        raise InvalidInputError(
            f"this training needs about {needed / 1e9:,.0f} GB of memory, this machine "
            f"has {there / 1e9:,.0f} GB; lower envs or learner.policy."
        )


def _attempt(
    config: TrainConfig,
    run: Run,
    callbacks: Sequence[Callback],
    workers: Workers,
    signals: Sequence[int],
    trouble: str | None,
    rollbacks: int,
) -> Attempt:
    """Train from the newest checkpoint, if there is one, to an end.

    Args:
        config: The run's.
        run: Where.
        callbacks: Called besides its own.
        workers: Who trains and judges hosts.
        signals: Those that came.
        trouble: What was not finite and ended the attempt before this one.
        rollbacks: How often the run went back for that.
    """
    checkpoints = run.checkpoints(keep=config.checkpoint.last)
    # Whether it fits is judged before anything is made as large as settings say.
    found = checkpoints.latest(policy_shapes(config.learner.policy), POLICY)
    mixture = mixture_for(config)
    facts = {"config": digest(config), "actions": mixture.spec.describe()}
    names = config.tasks if config.simulated else [t.name for t in tasks_of(config)]
    with usable_store(run.path / STORE, run.id) as store:
        own: list[Callback] = [Record(store, names)]
        if config.checkpoint.tensorboard:
            own.append(TensorBoard(run.path / "tensorboard"))
        own += callbacks
        if not config.simulated:  # which has no hosts
            watch = partial(_watch, config, workers)
            own.append(Evaluate(config.evaluation.every, watch))
        own.append(Checkpoint(store, checkpoints, config.checkpoint.every, facts))
        steps = steps_of(config)
        trainer = controller_loop(mixture, config, steps, own, signals, workers)
        try:
            start, trouble = train_on(
                trainer,
                run,
                store,
                checkpoints,
                found,
                facts,
                trouble,
                rollbacks,
                partial(_start_from, config, run, trainer),
            )
            if checkpoints.steps():  # from which the start is not made again
                with suppress(OSError):
                    discard(Disk(), run.path / OWN_RECORDINGS)
            if trouble is not None:
                return start, trainer, trouble
            if not trainer.interrupted():
                _evaluate_test(config, run, store, trainer)
            if not trainer.interrupted():
                run.finish(
                    {
                        "rounds": trainer.round,
                        "env_steps": trainer.env_steps,
                        **_started_with(config, run),
                    }
                )
        finally:
            trainer.call("on_close")
    return start, trainer, None


def _started_with(config: TrainConfig, run: Run) -> dict[str, int | None]:
    """Decisions on real hosts that the start took, counted when it was made."""
    if (run.path / START).exists():
        return run.facts(START)
    # Runs of older versions did not count them.
    return {"recorded_steps": None if _starts_from_recordings(config) else 0}


def _start_from(config: TrainConfig, run: Run, trainer: TrainingLoop) -> None:
    """Give a new policy the weights that the run is to start from."""

    def report(name: str, done: int, total: int, text: str) -> None:
        trainer.call("on_progress", name, done, total, text)

    if config.start_from is None:
        return
    if config.start_from == WARM:
        if config.simulated:
            return  # that is where it is going anyway
        weights = warm_policy(config, report, trainer.interrupted)
    elif _starts_from_recordings(config):
        spec, stop = trainer.algorithm.policy.spec, trainer.interrupted
        recordings: list[Recording] | None
        if config.start_from == RECORDINGS:
            folder = run.path / OWN_RECORDINGS
            workers = trainer.algorithm.workers
            recordings = own_recordings(config, spec, folder, report, stop, workers)
        else:
            recordings = given_recordings(config, spec)
        if recordings is None:
            return
        weights = recorded_policy(config, spec, recordings, report, stop)
        steps = sum(recording.steps for recording in recordings)
        run.write(START, {"recorded_steps": steps})
    else:
        weights = find_controller(config.start_from, Path(config.runs)).weights
    if weights is not None:
        load(trainer.algorithm.policy, weights)


def _watch(config: TrainConfig, workers: Workers, policy: TamiyoPolicy) -> Results:
    """Results of the policy on the hosts that choose the best checkpoint."""
    learned = TrainedController(LEARNED, config.learner.policy, save(policy))
    jobs = [
        Job(LEARNED, task, config.evaluation.hosts, 0, config.world, stage=VALIDATION)
        for task in tasks_of(config, VALIDATION)
    ]
    results = workers.run(run_validation_job, jobs, learned, about=Job.about)
    return {job.task.name: judged for job, judged in zip(jobs, results, strict=True)}


def jobs_left(
    config: TrainConfig, best: TrainedController, done: Collection[tuple[str, str]]
) -> list[Job]:
    """What is left to evaluate, and the policy again if static arms wait for it."""
    arms, jobs = (LEARNED, *config.evaluation.controllers), []
    for task in tasks_of(config, TEST):
        left = {arm for arm in arms if (task.name, arm) not in done}
        if left & {*STATIC}:
            left.add(LEARNED)
        for arm in arms:
            if arm in left:
                maker = best if arm == LEARNED else None
                hosts = config.evaluation.hosts
                jobs.append(Job(arm, task, hosts, FINAL_HOSTS, config.world, maker))
    return jobs


def _evaluate_test(
    config: TrainConfig, run: Run, store: Store, trainer: TrainingLoop
) -> None:
    """Evaluate the best policy and all other arms on hosts that are new to all.

    Results are stored arm by arm; a signal ends it. What was evaluated before an
    interruption is in the store and is not done again.
    """
    if config.simulated or not config.evaluation.controllers:
        return
    with closing(open_store(run.path / STORE, run.id)) as db:
        query = "SELECT DISTINCT task, controller FROM live_evaluations WHERE stage = ?"
        done = {(task, arm) for task, arm in db.execute(query, [TEST])}
    best = load_controller(run.path)
    jobs = jobs_left(config, best, done)
    if not jobs:
        return
    text = f"the final evaluation uses the best checkpoint, of round {best.round}"
    store.add_note_once(trainer.round, TEST, text)
    for arm, text in notes_on([job.arm for job in jobs], config.world).items():
        trainer.call("on_message", f"{arm}: {text}")
    results = stored_results(
        jobs,
        trainer.algorithm.workers,
        store,
        round=trainer.round,
        stop=trainer.interrupted,
        known=done,
    )
    with closing(results):
        for number, (job, judged) in enumerate(results, start=1):
            text = f"{job.arm} on {job.task.name}: return {judged.returns.mean():.4f}"
            trainer.call("on_progress", "judging", number, len(jobs), text)
