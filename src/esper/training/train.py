"""Training runs of Tamiyo: recorded, resumable to the bit, evaluated at the end.

This module turns settings into worlds, a policy and callbacks.
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
from esper.evaluation.evaluation import Job, notes_on, run_job, stored_results
from esper.files import Disk, discard
from esper.runs.controllers import (
    POLICY,
    find_controller,
    load_controller,
    policy_shapes,
)
from esper.runs.database import open_store
from esper.runs.records import STATIC, TEST, VALIDATION, Results
from esper.runs.run import OWN_RECORDINGS, START, STORE, TRAINING, Run, checkout_commit
from esper.runs.settings import as_toml
from esper.runs.sinks import require_loggers, resumed_loggers
from esper.runs.store import Store, usable_store
from esper.runs.train_config import RECORDINGS, WARM, TrainConfig, digest, from_toml
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.network import TamiyoPolicy, without_measurements
from esper.tamiyo.shipped import TrainedController, weightless_policy
from esper.training.callbacks import LEARNED, Checkpoint, Evaluate, Log, Record
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
from esper.training.recovery import Attempt, RunResult, resume_and_train, train_to_end
from esper.training.worlds import check_worlds, mixture_for, steps_of, tasks_of
from esper.workers.jobs import Workers, machine_memory

FINAL_HOSTS: Final = 1
"""Host set of the final evaluation; `esper evaluate` uses another by default."""


def begin_run(
    config: TrainConfig,
    callbacks: Sequence[Callback] = (),
    workers: Workers | None = None,
) -> RunResult:
    """Create a run and train until its budget is used up or a signal arrives.

    Args:
        config: All settings.
        callbacks: Added to the callbacks that record, evaluate and save.
        workers: Processes that train and evaluate hosts; None: this process. Results
            do not depend on them.
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
    logger: Sequence[str] | None = None,
) -> RunResult:
    """Continue a run from its newest valid checkpoint.

    Args:
        path: The folder of the run.
        callbacks: Called in addition to those that record, evaluate and save.
        workers: Who trains and evaluates hosts; None: this process.
        device: Device of the learner; None: as before.
        logger: Loggers from now on; None: as before.
    """
    with Run.open(path) as run:
        if run.finished is not None:
            raise InvalidInputError(f"run {run.name} is complete. Start a new one.")
        config = settings_of(run)
        config = replace(config, device=device or config.device)
        config = replace(config, logger=resumed_loggers(config.logger, logger))
        usable_device(config.device)
        check_memory(config, check_worlds(config))
        first = (f"Resuming {run.name}: {_describe(config)}.",)
        attempt = partial(_attempt, config, run, callbacks, workers or Workers())
        return train_to_end(run, callbacks, first, attempt)


def settings_of(run: Run) -> TrainConfig:
    """The settings of a training run."""
    if run.kind != TRAINING:
        raise InvalidInputError(
            f"run {run.name} was not started by esper train. Choose one that was."
        )
    return from_toml(run.config_toml)


def _describe(config: TrainConfig) -> str:
    return (
        f"{', '.join(config.tasks)}, {config.num_envs} environments each, "
        f"rng_seed {config.rng_seed}"
    )


def _check(config: TrainConfig) -> None:
    """Refuse settings that cannot be trained, before any file is written."""
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
    require_loggers(config.logger)


def _starts_from_recordings(config: TrainConfig) -> bool:
    """Whether the policy is first fitted to recordings, its own or given ones."""
    where = config.start_from
    return where == RECORDINGS or (where is not None and holds_recordings(Path(where)))


def check_memory(config: TrainConfig, worlds: Sequence[VectorWorld]) -> None:
    """Refuse a training that needs more memory than this machine has.

    Saving needs up to four more copies of weights, gradients, moments and worlds. A
    rollout needs two copies, and each pass through the policy about as much again.
    `worlds` has one environment for each world, from `check_worlds`.
    """
    policy = weightless_policy(config.learner.policy, measured=config.simulated)
    envs, steps, spec = len(worlds), steps_of(config), worlds[0].spec
    learner = sum(tensor.nbytes for tensor in leaves(policy).values())
    state = sum(tensor.nbytes for tensor in leaves([*worlds]).values())
    shape = policy.state_shape
    rollout = TamiyoRolloutBuffer(envs, 1, spec, state_shape=shape).nbytes * steps
    memories = 4 * prod(shape) * envs * steps
    each = 5 * (state + rollout) + 8 * memories // config.learner.ppo.minibatches
    needed = 16 * learner + config.num_envs * each
    available = machine_memory()
    if needed > available:
        raise InvalidInputError(
            f"this training needs about {needed / 1e9:,.0f} GB of memory, this machine "
            f"has {available / 1e9:,.0f} GB. Lower num_envs or learner.policy."
        )


def _attempt(
    config: TrainConfig,
    run: Run,
    callbacks: Sequence[Callback],
    workers: Workers,
    signals: Sequence[int],
    failure: str | None,
    rollbacks: int,
) -> Attempt:
    """Train from the newest checkpoint, if any; see `train_to_end`."""
    checkpoints = run.checkpoints(keep=config.checkpoint.last)
    # Shapes are checked first: settings from a file may ask for huge tensors.
    found = checkpoints.latest(policy_shapes(config), POLICY)
    mixture = mixture_for(config)
    facts = {"config": digest(config), "actions": mixture.spec.describe()}
    names = config.tasks if config.simulated else [t.name for t in tasks_of(config)]
    with usable_store(run.path / STORE, run.id) as store:
        own: list[Callback] = [Record(store, names), *callbacks]
        if not config.simulated:  # the simulated world has no hosts
            validate = partial(_validate, config, workers)
            own.append(Evaluate(config.evaluation.every, validate))
        own.append(Log(config.logger, run.name, run.path, config))
        own.append(Checkpoint(store, checkpoints, config.checkpoint.every, facts))
        steps = steps_of(config)
        loop = controller_loop(mixture, config, steps, own, signals, workers)
        try:
            begin = partial(_load_start, config, run, loop)
            start, failure = resume_and_train(
                loop, run, store, checkpoints, found, facts, failure, rollbacks, begin
            )
            if checkpoints.steps():  # recordings are not needed any more
                with suppress(OSError):
                    discard(Disk(), run.path / OWN_RECORDINGS)
            if failure is not None:
                return start, loop, failure
            if not loop.interrupted():
                _evaluate_test(config, run, store, loop)
            if not loop.interrupted():
                done = {"rounds": loop.round, "env_steps": loop.env_steps}
                recorded = (run.path / START).exists()
                cost = run.facts(START) if recorded else {"recorded_steps": 0}
                run.finish(done | cost)
        finally:
            loop.close()
    return start, loop, None


def _load_start(config: TrainConfig, run: Run, loop: TrainingLoop) -> None:
    """Load the weights that `start_from` stands for into a new policy."""

    def report(name: str, done: int, total: int, text: str) -> None:
        loop.call("on_progress", name, done, total, text)

    where = config.start_from
    if where is None or (where == WARM and config.simulated):
        return  # the warm start of a simulated run is the run itself
    if where == WARM:
        weights = warm_policy(config, report, loop.interrupted)
    elif _starts_from_recordings(config):
        spec, stop = loop.algorithm.policy.spec, loop.interrupted
        recordings: list[Recording] | None
        if where == RECORDINGS:
            folder, workers = run.path / OWN_RECORDINGS, loop.algorithm.workers
            recordings = own_recordings(config, spec, folder, report, stop, workers)
        else:
            recordings = given_recordings(config, spec)
        if recordings is None:
            return
        weights = recorded_policy(config, spec, recordings, report, stop)
        steps = sum(recording.steps for recording in recordings)
        run.write(START, {"recorded_steps": steps})
    else:
        weights = find_controller(where, Path(config.runs)).weights
    if weights is not None:
        if not config.simulated:
            weights = without_measurements(weights)
        load(loop.algorithm.policy, weights)


def _validate(config: TrainConfig, workers: Workers, policy: TamiyoPolicy) -> Results:
    """Results of the policy on the validation hosts."""
    learned = TrainedController(LEARNED, config.learner.policy, save(policy))
    jobs = [
        Job(LEARNED, task, config.evaluation.hosts, 0, config.world, stage=VALIDATION)
        for task in tasks_of(config, VALIDATION)
    ]
    results = workers.run(run_job, jobs, learned, about=Job.about)
    return {job.task.name: result for job, result in zip(jobs, results, strict=True)}


def jobs_left(
    config: TrainConfig, best: TrainedController, done: Collection[tuple[str, str]]
) -> list[Job]:
    """Jobs that are not done; the policy is repeated if a static arm needs its size."""
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
    config: TrainConfig, run: Run, store: Store, loop: TrainingLoop
) -> None:
    """Evaluate the best policy and all other arms on the test hosts.

    Results are stored arm by arm, so an interrupted evaluation can be continued.
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
    store.add_note_once(loop.round, TEST, text)
    for arm, text in notes_on([job.arm for job in jobs], config.world).items():
        loop.call("on_message", f"{arm}: {text}")
    workers, stop = loop.algorithm.workers, loop.interrupted
    results = stored_results(
        jobs, workers, store, round=loop.round, stop=stop, known=done
    )
    with closing(results):
        for number, (job, result) in enumerate(results, start=1):
            text = f"{job.arm} on {job.task.name}: return {result.returns.mean():.4f}"
            loop.call("on_progress", "evaluating", number, len(jobs), text)
