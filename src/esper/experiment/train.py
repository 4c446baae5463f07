"""The training loop, and runs: trainings that are recorded, saved and resumed exactly.

    round  ->  rows in the store  ->  every so often: flush, then a checkpoint

A round is one rollout and one update. A checkpoint of round r is published after all
rows up to r are durable, so a store is never behind the checkpoint that a run resumes
from. A signal ends the run after its round: rows and state are saved first. Three
rounds in a row whose updates are all refused as not finite take the run back to its
last checkpoint, with new random streams.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from esper.contracts.errors import BadInput, NumericsTrouble
from esper.contracts.state import Stateful, load
from esper.contracts.world import VectorWorld
from esper.environment.mixture import Mixture
from esper.experiment.callbacks import (
    PATIENCE,
    Callback,
    CallbackList,
    Checkpoint,
    Evaluate,
    FinalEvaluation,
    OnRoundEnd,
    Record,
    TensorBoard,
    summary_writer,
)
from esper.experiment.checkpoint import Loaded
from esper.experiment.config import (
    IMITATION,
    SIMULATED,
    WARM,
    TrainConfig,
    as_toml,
    digest,
    from_toml,
)
from esper.experiment.controllers import MAY_BE_NAN, find_controller
from esper.experiment.records import RoundRecord
from esper.experiment.rollout import Transition, collect, start
from esper.experiment.run import STORE, Run, changes_since, versions_now
from esper.experiment.store import Store
from esper.experiment.streams import stream, stream_seed
from esper.experiment.workers import caught_signals
from esper.experiment.worlds import rounds_of, steps_of, tasks_of, world_for, world_of
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.tasks.task import Task

KIND: Final = "training"
"""What `versions.json` calls such a run."""
DIAGNOSIS: Final = "diagnosis.json"
"""File in the folder of a run whose updates were not finite."""
BROKEN: Final = f"{PATIENCE} rounds in a row had no update that was finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How long, how wide, and with which settings to train."""

    rounds: int = 200
    """Rollouts, each followed by an update."""
    minutes: float | None = None
    """Time after which training ends too."""
    steps: int = 16
    """Decisions per environment and rollout."""
    rng_seed: int = 0
    """Start of every random stream of the run."""
    gamma: float = 1.0
    """Discount per decision; 1 makes the return the final score minus rent."""
    gae_lambda: float = 0.95
    """Trace decay of the advantages: 0 is one-step TD, 1 is Monte Carlo."""
    final_share: float = 0.1
    """Share of learning rate and entropy weight that is left in the last round."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)

    def __post_init__(self) -> None:
        """Refuse a loop that would do nothing."""
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0.0 <= self.final_share <= 1.0:
            raise BadInput(f"final_share must lie in [0, 1], got {self.final_share}.")


class Trainer(Stateful):
    """A world, the policy that acts in it and its learner, between two rounds.

    Args:
        world: Where the policy acts; it is reset.
        config: How to train.
        callbacks: Called around steps and rounds.
        signals: Training ends after a round in which this is no longer empty.
    """

    STATE = ("world", "agent", "live", "generator", "round", "seconds", "rollbacks")
    DERIVED = ("policy", "refused_rounds", "stopping")

    def __init__(
        self,
        world: VectorWorld,
        config: LoopConfig,
        callbacks: Sequence[Callback] = (),
        signals: Sequence[int] = (),
    ) -> None:
        self.world, self.config = world, config
        self.callbacks, self._signals = CallbackList(callbacks), signals
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(config.rng_seed, "weights"))
            self.policy = TamiyoPolicy(world.spec, config.policy)
        self.generator = stream(config.rng_seed, "choices")
        buffer = TamiyoRolloutBuffer(
            world.num_envs,
            config.steps,
            world.spec,
            state_shape=self.policy.state_shape,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        order = stream_seed(config.rng_seed, "order")
        self.agent = PPOAgent(self.policy, buffer, config.ppo, rng_seed=order)
        self.live = start(world, self.policy)
        self.round = 0
        """Rounds that were played."""
        self.seconds = 0.0
        """Time that they took."""
        self.rollbacks = 0
        """How often the run went back to a checkpoint because updates were refused."""
        self.refused_rounds = 0
        """Rounds in a row, up to the last one, whose updates were all refused."""
        self.stopping = False
        """Whether a signal ends training with the last round."""

    @property
    def env_steps(self) -> int:
        """Decisions since the start, over all environments."""
        return self.round * self.config.steps * self.world.num_envs

    @property
    def done(self) -> float:
        """Share of the budget that is used up, from 0 to 1."""
        share = self.round / max(self.config.rounds - 1, 1)
        if self.config.minutes is not None:
            share = max(share, self.seconds / (60 * self.config.minutes))
        return min(share, 1.0)

    @property
    def over(self) -> bool:
        """Whether the budget is used up."""
        minutes = self.config.minutes
        late = minutes is not None and self.seconds >= 60 * minutes
        return late or self.round >= self.config.rounds

    @property
    def diverged(self) -> bool:
        """Whether so many updates in a row were refused that it should go back."""
        return self.refused_rounds >= PATIENCE

    @property
    def sound(self) -> bool:
        """Whether the state is worth going back to, or the last there will be."""
        return not self.refused_rounds or (self.over and not self.diverged)

    def interrupted(self) -> bool:
        """Whether a signal has come."""
        return bool(self._signals)

    def run(self) -> RoundRecord | None:
        """Play rounds until the budget is used up, a signal comes or it diverges.

        Returns:
            The last round, if there was one.
        """
        record = None
        self.stopping = self.interrupted()
        while not (self.over or self.stopping or self.diverged):
            record = self.play_round()
            self.stopping = self.interrupted()
            self.callbacks.call("on_round_end", self, record)
        return record

    def play_round(self) -> RoundRecord:
        """Collect a rollout and learn from it."""
        began, config, agent = time.monotonic(), self.config, self.agent
        share = 1.0 - (1.0 - config.final_share) * self.done
        agent.anneal(share)
        observation = self.world.begin_round()
        if observation is not None:
            self.live = replace(
                self.live,
                observation=observation,
                state=self.policy.initial_state(self.world.num_envs),
                returns=torch.zeros_like(self.live.returns),
            )
        self.live, finished = collect(
            self.world,
            self.policy,
            agent.buffer,
            self.live,
            self.generator,
            policy_version=agent.version,
            on_step=self._on_step,
        )
        update = agent.update()
        self.round += 1
        self.seconds += time.monotonic() - began
        record = RoundRecord(
            round=self.round,
            rounds=config.rounds,
            env_steps=self.env_steps,
            seconds=self.seconds,
            mean_return=finished.mean_return(),
            mean_score=finished.mean("score"),
            added=finished.mean("added"),
            learning_rate=share * config.ppo.learning_rate,
            update=update,
        )
        self.refused_rounds = self.refused_rounds + 1 if record.refused else 0
        return record

    def draw_streams_anew(self, rollbacks: int) -> None:
        """Give choices and minibatches other random streams after a rollback."""
        self.rollbacks = max(self.rollbacks, rollbacks)
        seed, again = self.config.rng_seed, f"again {self.rollbacks}"
        self.generator.manual_seed(stream_seed(seed, f"choices, {again}"))
        self.agent.generator.manual_seed(stream_seed(seed, f"order, {again}"))

    def report_progress(self, name: str, done: int, total: int, text: str) -> None:
        """Tell callbacks how far something is that takes a while."""
        self.callbacks.call("on_progress", name, done, total, text)

    def warn(self, text: str) -> None:
        """Send callbacks a warning."""
        self.callbacks.call("on_message", text, warning=True)

    def _on_step(self, step: Transition) -> None:
        self.callbacks.call("on_step", self, step)


def train(
    world: VectorWorld,
    config: LoopConfig,
    on_round: Callable[[RoundRecord], object] = lambda record: None,
) -> TamiyoPolicy:
    """Train a new policy in `world` and return it."""
    trainer = Trainer(world, config, [OnRoundEnd(on_round)])
    trainer.run()
    if trainer.diverged:
        raise NumericsTrouble(f"{BROKEN}; lower the learning rate.")
    return trainer.policy


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run is, and why it ended."""

    path: Path
    rounds: int
    """Rounds that it has played."""
    signal: int | None
    """The signal that ended it early, if one did."""


def begin_run(config: TrainConfig, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Begin a run and train until its budget is used up, or a signal comes.

    Args:
        config: All settings.
        callbacks: Called besides those that record, evaluate and save.
    """
    facts = {"kind": KIND, "rng_seed": config.rng_seed, "tasks": [*config.tasks]}
    root, listeners = Path(config.runs), CallbackList(callbacks)
    _check(config, root)
    with Run.create(root, config.name, as_toml(config), facts) as run:
        listeners.call("on_message", f"Training on {_describe(config)}.")
        listeners.call("on_message", f"The run is in {run.path}.")
        return _train(config, run, callbacks)


def resume_run(path: Path, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Go on with a run from its newest good checkpoint."""
    with Run.open(path) as run:
        if run.finished is not None:
            raise BadInput(f"run {run.name} is complete; begin another one.")
        config = settings_of(run)
        text = f"Going on with {run.name}: on {_describe(config)}."
        CallbackList(callbacks).call("on_message", text)
        return _train(config, run, callbacks)


def settings_of(run: Run) -> TrainConfig:
    """The settings that a training was begun with."""
    if run.versions.get("kind", KIND) != KIND:
        raise BadInput(f"run {run.name} is no training, so there is nothing to resume.")
    return from_toml(run.config_toml)


def loop_of(config: TrainConfig, world: VectorWorld) -> LoopConfig:
    """How to train: a rollout is about one episode of every environment."""
    learner = config.learner
    return LoopConfig(
        rounds=rounds_of(config, world.num_envs),
        minutes=config.budget.minutes,
        steps=steps_of(config),
        rng_seed=config.rng_seed,
        gamma=learner.gamma,
        gae_lambda=learner.gae_lambda,
        final_share=learner.final_share,
        ppo=learner.ppo,
        policy=learner.policy,
    )


def task_names(config: TrainConfig) -> list[str]:
    """What is learnt in the environments of a run, in equal shares."""
    if SIMULATED in config.tasks:
        return [SIMULATED]
    return [task.name for task in tasks_of(config)]


def _describe(config: TrainConfig) -> str:
    return (
        f"{', '.join(config.tasks)}, {config.envs} environments each, "
        f"rng_seed {config.rng_seed}"
    )


def _check(config: TrainConfig, root: Path) -> None:
    """Refuse what cannot be begun before anything is made."""
    if SIMULATED not in config.tasks:
        Mixture([_one_host(config, task) for task in tasks_of(config)])
    if config.start_from not in (None, WARM, IMITATION):
        learned = find_controller(str(config.start_from), root)
        if learned.config != config.learner.policy:
            raise BadInput(
                f"start_from is {learned.name!r:.60}, whose policy is of another size "
                "than learner.policy; give the same sizes."
            )
    if config.keeping.tensorboard:
        summary_writer()


def _one_host(config: TrainConfig, task: Task) -> VectorWorld:
    task.splits(config.rng_seed)
    return world_of(task, 1, 0, config.world)


def _train(config: TrainConfig, run: Run, callbacks: Sequence[Callback]) -> RunResult:
    """Train to the end; go back to a checkpoint as often as it diverges."""
    rollbacks = 0
    with caught_signals() as signals:
        while rollbacks <= PATIENCE:
            trainer = _attempt(config, run, callbacks, signals, rollbacks)
            if not trainer.diverged:
                signal = signals[0] if signals else None
                return RunResult(run.path, trainer.round, signal)
            rollbacks = trainer.rollbacks + 1
    raise NumericsTrouble(
        f"run {run.name}: updates were refused as not finite, also after going back "
        f"{PATIENCE} times; lower learner.ppo.learning_rate. See {DIAGNOSIS} there."
    )


def _attempt(
    config: TrainConfig,
    run: Run,
    callbacks: Sequence[Callback],
    signals: Sequence[int],
    rollbacks: int,
) -> Trainer:
    """Train from the newest checkpoint, if there is one, to an end."""
    checkpoints = run.checkpoints(keep=config.keeping.last, may_be_nan=MAY_BE_NAN)
    world = world_for(config)
    facts = {"config": digest(config), "actions": world.spec.describe()}
    with Store(run.path / STORE) as store:
        tensorboard = [TensorBoard(run.path / "tensorboard")]
        own = (
            Record(store, task_names(config)),
            *(tensorboard if config.keeping.tensorboard else ()),
            *callbacks,
            Evaluate(config),
            Checkpoint(store, checkpoints, config.keeping.every, facts),
            FinalEvaluation(config, run, store),
        )
        trainer = Trainer(world, loop_of(config, world), own, signals)
        try:
            found = checkpoints.latest()
            if found is not None:
                _restore(trainer, run, found, facts)
            else:
                _start_from(config, trainer)
            versions = versions_now(as_toml(config))
            store.begin_attempt(None if found is None else trainer.round, versions)
            if found is not None:
                _note_changes(trainer, run, versions, found, store)
            if rollbacks:
                trainer.draw_streams_anew(rollbacks)
                text = f"{BROKEN}; back to round {trainer.round}, with new streams."
                store.add_note(trainer.round, "refused", text)
                trainer.warn(text)
            trainer.stopping = trainer.interrupted()
            resumed = found is not None
            trainer.callbacks.call("on_train_start", trainer, resumed=resumed)
            last = trainer.run()
            if trainer.diverged:
                run.write(DIAGNOSIS, {"trouble": BROKEN, "last": str(last)})
                return trainer
            if not trainer.interrupted():
                trainer.callbacks.call("on_train_end", trainer)
            if not trainer.interrupted():
                _finish(config, run, trainer)
        finally:
            trainer.callbacks.call("on_close")
    return trainer


def _restore(
    trainer: Trainer, run: Run, found: Loaded, facts: Mapping[str, Any]
) -> None:
    """Load a checkpoint; refuses one that other settings have made."""
    for name, value in facts.items():
        if found.manifest.facts.get(name) != value:
            raise BadInput(
                f"the {name} of run {run.name} changed since its last checkpoint; put "
                f"it back, or begin another run with --start_from {run.name}."
            )
    load(trainer, found.tensors)


def _start_from(config: TrainConfig, trainer: Trainer) -> None:
    """Give a new policy the weights that the run is to start from."""
    from esper.experiment import pretraining  # which trains, too

    report, stop = trainer.report_progress, trainer.interrupted
    if config.start_from is None:
        return
    if config.start_from == WARM:
        if SIMULATED in config.tasks:
            return  # that is where it is going anyway
        weights = pretraining.warm_policy(config, report, stop)
    elif config.start_from == IMITATION:
        weights = pretraining.imitated_policy(config, report, stop)
    else:
        weights = find_controller(config.start_from, Path(config.runs)).weights
    # Statistics of returns belong to a world: another's are of no use here.
    policy = trainer.policy
    own = {"value_mean": policy.value_mean, "value_scale": policy.value_scale}
    if weights is not None:
        load(policy, {**weights, **own})


def _note_changes(
    trainer: Trainer,
    run: Run,
    versions: Mapping[str, Any],
    found: Loaded,
    store: Store,
) -> None:
    """Say and store why a run may not go on to the bit, or from where it was."""
    changed = [
        f"{line}; what follows may differ in some bits."
        for line in changes_since(run.versions, versions)
    ]
    for kind, lines in (("rejected", found.rejected), ("inexact", changed)):
        for line in lines:
            store.add_note(found.manifest.step, kind, line)
            trainer.warn(line)


def _finish(config: TrainConfig, run: Run, trainer: Trainer) -> None:
    from esper.experiment.pretraining import imitation_steps

    run.finish(
        {
            "rounds": trainer.round,
            "env_steps": trainer.env_steps,
            "imitation_steps": imitation_steps(config),
        }
    )
