import hashlib

import pytest
import torch

from esper.contracts.state import load, save
from esper.environment.growing import GrowingWorld
from esper.experiment.loop import LoopConfig, Training
from esper.simic.agent.ppo import PPOConfig
from tests.environment.test_growing import TERMS, TINY, VARIED

TASKS = {"shared": TINY, "varied": VARIED}


def make(task, rng_seed=5):
    world = GrowingWorld(task, 4, rng_seed, terms=TERMS)
    ppo = PPOConfig(minibatches=2, epochs=2)
    return Training(world, LoopConfig(rounds=6, steps=7, rng_seed=rng_seed, ppo=ppo))


def digest(training):
    """All that is saved, but the time it took."""
    found = hashlib.sha256()
    for name, tensor in sorted(save(training).items()):
        if name != "seconds":
            found.update(name.encode())
            found.update(tensor.contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_training_goes_on_to_the_bit_from_what_was_saved(kind, at):
    whole = make(TASKS[kind])
    for _ in range(at):
        whole.play_round()
    saved = save(whole)
    other = make(TASKS[kind])
    load(other, saved)
    assert digest(other) == digest(whole)
    for _ in range(3):
        first, second = whole.play_round(), other.play_round()
        assert (first.round, first.mean_return) == (second.round, second.mean_return)
        assert first.update == second.update
        assert digest(other) == digest(whole)


def test_a_forgotten_part_is_noticed():
    whole = make(TINY)
    whole.play_round()
    saved = save(whole)
    saved["agent/moments/mean"] = torch.zeros_like(saved["agent/moments/mean"])
    other = make(TINY)
    load(other, saved)
    whole.play_round()
    other.play_round()
    assert digest(other) != digest(whole)
