import hashlib
from dataclasses import replace

import pytest
import torch

from esper.contracts.state import load, save
from esper.environment.growing import GrowingWorld
from esper.environment.simulated import SimulatedWorld
from esper.experiment.loop import LoopConfig, Training
from esper.simic.agent.ppo import PPOConfig
from tests.environment.test_growing import SETTINGS, TINY, VARIED

WORLDS = {
    "shared": lambda seed: GrowingWorld(TINY, 4, seed, settings=SETTINGS),
    "varied": lambda seed: GrowingWorld(VARIED, 4, seed, settings=SETTINGS),
    "simulated": lambda seed: SimulatedWorld(4, seed, hidden_share=0.5),
}


def make(kind, rng_seed=5):
    world = WORLDS[kind](rng_seed)
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


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_training_goes_on_to_the_bit_from_what_was_saved(kind, at):
    whole = make(kind)
    for _ in range(at):
        whole.play_round()
    saved = save(whole)
    other = make(kind)
    load(other, saved)
    assert digest(other) == digest(whole)
    for _ in range(3):
        first, second = whole.play_round(), other.play_round()
        assert repr(replace(first, seconds=0.0)) == repr(replace(second, seconds=0.0))
        assert digest(other) == digest(whole)


def test_a_forgotten_part_is_noticed():
    whole = make("shared")
    whole.play_round()
    saved = save(whole)
    saved["agent/moments/mean"] = torch.zeros_like(saved["agent/moments/mean"])
    other = make("shared")
    load(other, saved)
    whole.play_round()
    other.play_round()
    assert digest(other) != digest(whole)
