"""Whatever changes in a run is saved with it, or follows from what is."""

from dataclasses import replace

import pytest
import torch

from esper.contracts.state import save
from esper.environment.growing import GrowingWorld
from esper.experiment.loop import Training
from esper.experiment.recording import Recorder
from esper.experiment.run import STORE
from esper.experiment.store import Store
from esper.experiment.trainer import Trainer
from esper.simic.agent.ppo import PPOAgent
from tests.census import changed, fixed, stateful
from tests.experiment.training_script import config


@pytest.fixture
def trainer(tmp_path):
    """A run that has played a round: whatever is filled once is filled."""
    settings = replace(config(tmp_path, "run", 6), envs=2)
    with Store(tmp_path / STORE) as store:
        store.begin_attempt()
        trainer = Trainer(settings, store)
        trainer.play_round()
        yield trainer


def test_whatever_changes_in_a_run_is_saved_or_derived(trainer):
    before, held = fixed(trainer), save(trainer)
    for _ in range(2):
        trainer.play_round()
    assert changed(trainer, before) == []
    after = save(trainer)
    moved = {name for name, value in after.items() if not _same(value, held[name])}
    for part in ("policy", "optimizer", "generator", "moments"):
        assert any(name.startswith(f"training/agent/{part}") for name in moved), part


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (PPOAgent, "moments"),
        (PPOAgent, "generator"),
        (Training, "live"),
        (Training, "round"),
        (Training, "world"),
        (Recorder, "step"),
        (Recorder, "episode"),
        (GrowingWorld, "_phi"),
        (GrowingWorld, "cohort"),
    ],
)
def test_whatever_is_forgotten_is_found(trainer, monkeypatch, owner, name):
    left = tuple(part for part in owner.STATE if part != name)
    monkeypatch.setattr(owner, "STATE", left)
    before = fixed(trainer)
    trainer.play_round()
    assert any(line.endswith(f".{name}") for line in changed(trainer, before))


def test_the_census_reaches_every_part(trainer):
    kinds = {type(part).__name__ for _, part in stateful(trainer)}
    assert kinds >= {
        "Trainer",
        "Training",
        "Mixture",
        "GrowingWorld",
        "Cohort",
        "Episodes",
        "PPOAgent",
        "Recorder",
    }


def _same(one, other):
    return torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
