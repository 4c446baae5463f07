import copy

import pytest
import torch

from esper.contracts.state import Stateful, load, save
from esper.environment.growing import GrowingWorld
from esper.tamiyo.controls import Random
from esper.tamiyo.policy.action_masks import compute_masks
from tests.environment.test_growing import TERMS, TINY, VARIED

TASKS = {"shared": TINY, "varied": VARIED}


def make(task, rng_seed=3):
    return GrowingWorld(task, 4, rng_seed, terms=TERMS)


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


def stateful(value, path="world"):
    """Every object with named state, with its path."""
    yield path, value
    for name in value.STATE:
        part = getattr(value, name)
        if isinstance(part, Stateful):
            yield from stateful(part, f"{path}/{name}")


def fingerprint(value):
    """What an attribute holds, deeply."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().tobytes()
    if hasattr(value, "tobytes"):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: fingerprint(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [fingerprint(part) for part in value]
    if hasattr(value, "__slots__") and not hasattr(value, "__dict__"):
        names = [n for n in value.__slots__ if hasattr(value, n)]
        return [fingerprint(getattr(value, name)) for name in names]
    if hasattr(value, "__dict__") and type(value).__module__.startswith("esper"):
        return {key: fingerprint(part) for key, part in vars(value).items()}
    return repr(value)


def test_whatever_changes_in_a_world_is_saved_or_derived():
    world, chance = make(VARIED), torch.Generator().manual_seed(1)
    observation, _ = play(world, world.reset(), chance, 1)  # caches are filled
    fixed = {
        (path, name): copy.deepcopy(fingerprint(value))
        for path, part in stateful(world)
        for name, value in vars(part).items()
        if name not in (*part.STATE, *part.DERIVED)
    }
    play(world, observation, chance, 17)
    for path, part in stateful(world):
        for name, value in vars(part).items():
            if name not in (*part.STATE, *part.DERIVED):
                assert (path, name) in fixed, f"{path}.{name} appeared"
                assert fingerprint(value) == fixed[path, name], f"{path}.{name}"
