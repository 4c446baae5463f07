"""How jobs are carried out, from what the ledger holds.

The ledger is read here and nowhere else on the way to a job; an order can be sent to
another process. Arms that are made from what Tamiyo did are tuned by what it did on
the tuning hosts at its best learning rate.

A training is a run in the campaign's folder, as `esper train` makes it, and goes on
from its last checkpoint. Search and bandit grow the same family of hosts and may take
as many decisions.
"""

import json
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from esper.contracts.world import VectorWorld
from esper.experiment.config import TrainConfig
from esper.experiment.judging import compile_engine
from esper.experiment.pretraining import imitation_steps
from esper.experiment.records import RoundRecord
from esper.experiment.run import Run
from esper.experiment.train import begin_run, resume_run
from esper.experiment.trainer import OnRoundEnd
from esper.experiment.worlds import worlds_of
from evidence import contextual, search
from evidence.arms import Batch, Supplies, carry_out
from evidence.jobs import (
    AFTER_TAMIYO,
    ALL,
    BANDIT,
    SEARCH,
    TRAINING,
    TUNING,
    Job,
    elsewhere,
    rate_arm,
)
from evidence.ledger import Ledger, Recorded, Result, Trained
from evidence.protocol import (
    APART,
    Protocol,
    evidence_task,
    evidence_world,
    training_of,
)
from evidence.workers import stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a job has found, and how long it took."""

    seconds: float
    results: Sequence[Result] = ()
    recordings: Sequence[Recorded] = ()
    trained: Trained | None = None


Order = Callable[[], Done | None]
"""All that it takes to do a job; None comes of one that was interrupted."""


def do(order: Order) -> Done | None:
    """Carry out an order with one thread."""
    torch.set_num_threads(1)
    return order()


class Orders:
    """Makes orders of jobs whose needs are met.

    Args:
        protocol: What is asked for.
        ledger: What is known.
        folder: The campaign's.
    """

    def __init__(self, protocol: Protocol, ledger: Ledger, folder: Path) -> None:
        self._protocol, self._ledger, self._folder = protocol, ledger, folder

    def of(self, job: Job) -> Order:
        """All that it takes to do a job."""
        protocol, folder = self._protocol, self._folder
        if job.kind == TRAINING:
            config = training_of(job.arm, job.member, protocol)
            return partial(_train, config, job.arm, job.member, folder)
        if job.kind in (SEARCH, BANDIT):
            steps = protocol.search_env_steps
            if steps is None:
                steps = self._trained("tamiyo-0").env_steps
            find = find_schedule if job.kind == SEARCH else fit_context_bandit
            return partial(_find, find, training_of("tamiyo", 0, protocol), steps)
        rate = job.rate
        if rate is None:
            rate = best_rate(
                self._ledger, rate_arm(job.arm, protocol), job.task, protocol
            )
        task = evidence_task(job.task, protocol)
        tuning = job.kind == TUNING
        every = tuple(protocol.settings)
        settings = every if job.setting == ALL else (job.setting,)
        batch = Batch(
            stage=job.kind,
            arm=job.arm,
            member=job.member,
            task=task,
            settings=settings,
            world=evidence_world(task, settings[0], rate, protocol, job.arm),
            rate=rate,
            block=job.block,
            hosts=protocol.tuning.hosts if tuning else protocol.counted.hosts,
            record=_record(job.arm, rate if tuning else None),
        )
        return partial(_batch, batch, self._supplies(job, batch))

    def _supplies(self, job: Job, batch: Batch) -> Supplies:
        if job.arm in ("searched", "bandit"):
            return Supplies(facts=self._trained(job.arm).facts)
        if job.arm in AFTER_TAMIYO:
            return self._from_tamiyo(job, batch)
        if job.arm == "tamiyo" or job.arm in self._protocol.ablations.without:
            run = self._trained(f"{job.arm}-{job.member}").run
            return Supplies(controller=self._folder / run)
        return Supplies()

    def _from_tamiyo(self, job: Job, batch: Batch) -> Supplies:
        """What Tamiyo did on the same hosts, or where an arm wants it from."""
        protocol, ledger = self._protocol, self._ledger
        where: dict[str, str | float] = {"task": job.task, "setting": job.setting}
        arm, count = "tamiyo", protocol.controllers.count
        if job.kind == TUNING:
            rate = best_rate(ledger, "tamiyo", job.task, protocol)
            arm, count = _record("tamiyo", rate), 1
            where["rate"] = rate
        first = APART * job.block
        seeds = range(first, first + batch.hosts)
        rows = [
            row
            for row in ledger.results(stage=job.kind, arm="tamiyo", **where)
            if row.seed in seeds
        ]
        task = job.task
        if job.arm == "replay-elsewhere":
            task = elsewhere(job.task, protocol)
        known = [
            ledger.recordings(arm, member, task, job.setting) for member in range(count)
        ]
        hosts = range(batch.hosts)
        if job.arm == "random":
            pairs = [(host % count, host) for host in hosts]
        elif job.arm == "replay":
            pairs = [(job.member, (host + 1) % batch.hosts) for host in hosts]
        else:
            pairs = [(max(job.member, 0), host) for host in hosts]
        return Supplies(
            added=_mean(row.added for row in rows),
            training_macs=_mean(row.training_macs for row in rows),
            recordings=tuple(known[member][first + host] for member, host in pairs),
        )

    def _trained(self, name: str) -> Trained:
        found = self._ledger.trained(name)
        assert found is not None  # the job waited for it
        return found


def best_rate(ledger: Ledger, arm: str, task: str, protocol: Protocol) -> float:
    """The learning rate at which an arm did best on the tuning hosts of a task.

    Scores are those of decision rows, less rent; a host that panicked is worth -1.
    """
    worth: dict[float, list[float]] = {rate: [] for rate in protocol.rates}
    for row in ledger.results(stage=TUNING, arm=arm, task=task):
        if row.setting in protocol.rents:
            rent, _ = protocol.settings[row.setting]
            value = -1.0 if row.panicked else row.score - rent * row.added
            worth[row.rate].append(value)
    return max((rate for rate in worth if worth[rate]), key=lambda r: _mean(worth[r]))


def _record(arm: str, rate: float | None) -> str:
    """What recordings of an arm are kept under; those of tuning have their rate."""
    if arm != "tamiyo":
        return ""
    return arm if rate is None else f"{arm}@{rate:g}"


def _train(config: TrainConfig, arm: str, member: int, folder: Path) -> Done | None:
    trained = train_controller(config, arm, member, folder)
    return None if trained is None else Done(seconds=trained.seconds, trained=trained)


def _find(
    find: Callable[[TrainConfig, int], Trained], config: TrainConfig, env_steps: int
) -> Done:
    trained = find(config, env_steps)
    return Done(seconds=trained.seconds, trained=trained)


def _batch(batch: Batch, supplies: Supplies) -> Done:
    compile_engine(batch.task)
    began = perf_counter()
    results, recordings = carry_out(batch, supplies)
    return Done(seconds=perf_counter() - began, results=results, recordings=recordings)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / max(len(known), 1)


CONTROLLERS: Final = "controllers"
"""The folder of trainings, within the campaign's."""


def train_controller(
    config: TrainConfig, arm: str, member: int, folder: Path
) -> Trained | None:
    """Train a controller, or go on with it; None if a signal came first."""
    root = folder / CONTROLLERS
    path = root / f"{arm}-{member}"
    if not path.is_dir():
        begin_run(
            replace(config, name=path.name, runs=str(root)),
            [OnRoundEnd(_stop_if_asked)],
        )
    elif Run.read(path).finished is None:
        resume_run(path, [OnRoundEnd(_stop_if_asked)])
    facts = Run.read(path).finished
    if facts is None:
        return None
    return Trained(
        name=path.name,
        arm=arm,
        member=member,
        # What the start by imitation took is part of the price.
        env_steps=int(facts["env_steps"]) + imitation_steps(config),
        seconds=Run.read(path).seconds,
        run=f"{CONTROLLERS}/{path.name}",
        facts=json.dumps(facts),
    )


def find_schedule(config: TrainConfig, env_steps: int) -> Trained:
    """Search for the best static schedule."""
    began = perf_counter()
    found = search.search(_WorldFactory(config), env_steps, config.rng_seed)
    return _found("searched", found.env_steps, began, search.as_json(found))


def fit_context_bandit(config: TrainConfig, env_steps: int) -> Trained:
    """Fit the bandit."""
    began = perf_counter()
    found = contextual.fit_bandit(_WorldFactory(config), env_steps, config.rng_seed)
    return _found("bandit", found.env_steps, began, contextual.as_json(found))


class _WorldFactory:
    """The worlds of a training, from any number."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def __call__(self, rng_seed: int) -> Sequence[VectorWorld]:
        # Everybody plays on every host here: a twin would add nothing.
        alone = replace(self._config.world, group_size=1)
        return worlds_of(replace(self._config, world=alone, rng_seed=rng_seed))


def _found(name: str, env_steps: int, began: float, facts: str) -> Trained:
    return Trained(
        name=name,
        arm=name,
        member=-1,
        env_steps=env_steps,
        seconds=perf_counter() - began,
        run="",
        facts=facts,
    )


def _stop_if_asked(record: RoundRecord) -> None:
    """After every round: end as on a signal if the campaign is to end."""
    if stopping():
        os.kill(os.getpid(), signal.SIGTERM)
