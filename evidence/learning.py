"""Jobs that make somebody who decides: trainings, the search and the bandit.

A training is a run in the campaign's folder, as `esper train` makes it, and goes on
from its last checkpoint. Search and fit grow the same family of hosts and may take as
many decisions.
"""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Final

from esper.contracts.step import VectorWorld
from esper.experiment.callbacks import OnRoundEnd
from esper.experiment.config import TrainConfig
from esper.experiment.pretraining import imitation_steps
from esper.experiment.records import RoundRecord
from esper.experiment.run import Run
from esper.experiment.train import begin_run, resume_run
from esper.experiment.workers import stopping
from esper.experiment.worlds import worlds_of
from evidence import contextual, search
from evidence.ledger import Trained

CONTROLLERS: Final = "controllers"
"""The folder of trainings, within the campaign's."""


def train(config: TrainConfig, arm: str, member: int, folder: Path) -> Trained | None:
    """Train a controller, or go on with it; None if a signal came first."""
    root = folder / CONTROLLERS
    path = root / f"{arm}-{member}"
    if not path.is_dir():
        begin_run(replace(config, name=path.name, runs=str(root)), [OnRoundEnd(_tell)])
    elif Run.read(path).finished is None:
        resume_run(path, [OnRoundEnd(_tell)])
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
    found = search.search(_Makes(config), env_steps, config.rng_seed)
    seconds, facts = perf_counter() - began, search.as_json(found)
    return _found("searched", found.env_steps, seconds, facts)


def fit(config: TrainConfig, env_steps: int) -> Trained:
    """Fit the bandit."""
    began = perf_counter()
    found = contextual.fit_bandit(_Makes(config), env_steps, config.rng_seed)
    seconds, facts = perf_counter() - began, contextual.as_json(found)
    return _found("bandit", found.env_steps, seconds, facts)


class _Makes:
    """The worlds of a training, from any number."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def __call__(self, rng_seed: int) -> Sequence[VectorWorld]:
        # Everybody plays on every host here: a twin would tell nothing more.
        alone = replace(self._config.world, group_size=1)
        return worlds_of(replace(self._config, world=alone, rng_seed=rng_seed))


def _found(name: str, env_steps: int, seconds: float, facts: str) -> Trained:
    return Trained(
        name=name,
        arm=name,
        member=-1,
        env_steps=env_steps,
        seconds=seconds,
        run="",
        facts=facts,
    )


def _tell(record: RoundRecord) -> None:
    """After every round: end as on a signal if the campaign is to end."""
    if stopping():
        os.kill(os.getpid(), signal.SIGTERM)
