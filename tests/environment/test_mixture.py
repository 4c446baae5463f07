from dataclasses import replace

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.contracts.state import load, save
from esper.environment.growing import GrowingWorld
from esper.environment.mixture import Mixture, RedrawnMixture
from esper.environment.settings import WorldSettings
from esper.environment.simulated import SimulatedWorld
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.rule_based import Random
from esper.tasks.hosts import MlpHost
from tests.environment.test_growing import TINY, VARIED
from tests.worlds import PlainWorld

WIDER = replace(TINY, name="wider", host=MlpHost((5, 9, 8, 3)), horizon=3)


def worlds():
    return [
        GrowingWorld(TINY, 2, 1),
        GrowingWorld(WIDER, 3, 2),
        GrowingWorld(VARIED, 1, 3),
    ]


def play(world, observation, chance, steps):
    seen = []
    for _ in range(steps):
        masks = compute_masks(observation, world.spec)
        actions, _ = Random().decide(observation, masks, None, chance)
        result = world.step(actions)
        observation = result.observation
        seen.append((actions, result))
    return observation, seen


def flat(value):
    return list(save(value).values())


def test_a_mixture_is_its_worlds_side_by_side():
    alone, mixture = worlds(), Mixture(worlds())
    assert mixture.num_envs == 6
    begun = mixture.reset()
    assert torch.equal(
        begun.host.score, torch.cat([w.reset().host.score for w in alone])
    )
    _, seen = play(mixture, begun, torch.Generator().manual_seed(0), 9)
    for actions, result in seen:
        parts = [
            world.step(part)
            for world, part in zip(alone, actions.split([2, 3, 1]), strict=True)
        ]
        assert torch.equal(result.reward, torch.cat([p.reward for p in parts]))
        assert torch.equal(result.terminated, torch.cat([p.terminated for p in parts]))
        for whole, *few in zip(
            flat(result.observation), *(flat(p.observation) for p in parts), strict=True
        ):
            assert torch.equal(whole, torch.cat(few))
    assert [r.terminated.any().item() for _, r in seen].count(True) > 2


def test_a_mixture_goes_on_to_the_bit_from_what_was_saved():
    mixture, chance = Mixture(worlds()), torch.Generator().manual_seed(0)
    observation, _ = play(mixture, mixture.reset(), chance, 5)
    saved, drawn = save(mixture), chance.get_state()
    _, expected = play(mixture, observation, chance, 6)
    other = Mixture(worlds())
    load(other, saved)
    chance.set_state(drawn)
    _, found = play(other, observation, chance, 6)
    for (_, one), (_, two) in zip(expected, found, strict=True):
        assert torch.equal(one.reward, two.reward)


def test_worlds_in_which_other_things_can_be_said_are_refused():
    other = GrowingWorld(TINY, 2, settings=WorldSettings(blueprints=("widen_8",)))
    with pytest.raises(BadInput, match="number 1 differs from the first: 4 slots and"):
        Mixture([worlds()[0], other])
    with pytest.raises(BadInput, match="at least one world, got none"):
        Mixture([])


class Numbered(PlainWorld):
    """A world that shows the number it was made of."""

    def __init__(self, number):
        self.inner = SimulatedWorld(2, number)
        self.number = number

    spec = property(lambda self: self.inner.spec)
    num_envs = property(lambda self: self.inner.num_envs)

    def reset(self):
        return self.inner.reset()

    def step(self, actions):
        return self.inner.step(actions)


def test_a_redrawn_mixture_has_other_worlds_each_time_and_saves_only_their_number():
    def made():
        return RedrawnMixture(
            lambda number: [Numbered(10 * number), Numbered(10 * number + 1)]
        )

    world = made()
    numbers = []
    for _ in range(3):
        world.begin_round()
        numbers.append([part.number for part in world.worlds])
    assert numbers == [[0, 1], [10, 11], [20, 21]]
    kept = save(world)
    assert list(kept) == ["drawn"]
    again = made()
    load(again, kept)
    for one in (world, again):
        one.begin_round()
    assert [part.number for part in again.worlds] == [30, 31]
    seen = [one.reset().host.rent for one in (world, again)]
    assert torch.equal(*seen)
