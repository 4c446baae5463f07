import pytest
import torch

from esper.contracts.state import load, save
from esper.environment.growing import GrowingWorld
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.rule_based import Random
from tests.census import changed, fixed
from tests.environment.test_growing import SETTINGS, TINY, VARIED

TASKS = {"shared": TINY, "varied": VARIED}


def make(task, rng_seed=3):
    return GrowingWorld(task, 4, rng_seed, settings=SETTINGS)


def play(world, observation, chance, steps):
    """Live on, and say everything that was seen."""
    seen = []
    for _ in range(steps):
        masks = compute_masks(observation, world.spec)
        actions, _ = Random().decide(observation, masks, None, chance)
        result = world.step(actions)
        observation = result.observation
        seen += [actions, result.reward, result.terminated, *leaves(observation)]
        if world.ended is not None:
            seen.append(world.ended.test)
    return observation, seen


def leaves(value):
    return list(save(value).values())


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("at", [0, 1, 5, 14])
def test_a_world_goes_on_to_the_bit_from_what_was_saved(kind, at):
    world, chance = make(TASKS[kind]), torch.Generator().manual_seed(1)
    observation, _ = play(world, world.reset(), chance, at)
    saved, drawn = save(world), chance.get_state()
    _, expected = play(world, observation, chance, 17)

    other, again = make(TASKS[kind]), torch.Generator()
    load(other, saved)
    again.set_state(drawn)
    _, found = play(other, observation, again, 17)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_loading_into_a_world_that_has_lived_leaves_nothing_of_its_past():
    world, chance = make(VARIED), torch.Generator().manual_seed(1)
    observation, _ = play(world, world.reset(), chance, 6)
    saved, drawn = save(world), chance.get_state()
    _, expected = play(world, observation, chance, 12)
    chance.set_state(drawn)
    load(world, saved)
    _, found = play(world, observation, chance, 12)
    assert all(map(torch.equal, found, expected))


def test_whatever_changes_in_a_world_is_saved_or_derived():
    world, chance = make(VARIED), torch.Generator().manual_seed(1)
    observation, _ = play(world, world.reset(), chance, 1)  # caches are filled
    before = fixed(world)
    play(world, observation, chance, 17)
    assert changed(world, before) == []
