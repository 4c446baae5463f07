from dataclasses import replace

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.contracts.state import load, save
from esper.environment.growing import GrowingWorld
from esper.environment.mixture import Mixture, RedrawnMixture
from esper.environment.settings import WorldSettings
from esper.environment.simulated import SimulatedWorld
from esper.tasks.hosts import MlpHost
from tests.environment.test_growing import TINY, VARIED, play, play_on

WIDER = replace(TINY, name="wider", host=MlpHost((5, 9, 8, 3)), horizon=3)


def worlds():
    tasks = ((TINY, 2), (WIDER, 3), (VARIED, 1))
    return [GrowingWorld(task, envs, 1) for task, envs in tasks]


def test_a_mixture_is_its_worlds_side_by_side():
    alone, mixture = worlds(), Mixture(worlds())
    assert mixture.num_envs == 6
    for world in alone:
        world.reset()
    ends = 0
    for _, actions, result in play(mixture, 9):
        given = actions.split([2, 3, 1])
        parts = [w.step(part) for w, part in zip(alone, given, strict=True)]
        for name in ("reward", "terminated", "illegal"):
            side_by_side = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(getattr(result, name), side_by_side), name
        seen = [save(part.observation) for part in parts]
        for name, whole in save(result.observation).items():
            assert torch.equal(whole, torch.cat([each[name] for each in seen])), name
        reported = [p.report.test for p in parts if p.report is not None]
        ends += len(reported) > 0
        assert (result.report is None) is (not reported)
        assert not reported or torch.equal(result.report.test, torch.cat(reported))
    assert ends > 2


def test_a_mixture_goes_on_to_the_bit_from_what_was_saved():
    mixture, chance = Mixture(worlds()), torch.Generator().manual_seed(0)
    observation, _ = play_on(mixture, mixture.reset(), chance, 5)
    saved, drawn = save(mixture), chance.get_state()
    _, expected = play_on(mixture, observation, chance, 6)
    other = Mixture(worlds())
    load(other, saved)
    chance.set_state(drawn)
    _, found = play_on(other, observation, chance, 6)
    assert all(map(torch.equal, found, expected))


def test_worlds_in_which_other_things_can_be_said_are_refused():
    other = GrowingWorld(TINY, 2, settings=WorldSettings(blueprints=("widen_8",)))
    with pytest.raises(BadInput, match="number 1 differs from the first: 4 slots and"):
        Mixture([worlds()[0], other])
    with pytest.raises(BadInput, match="at least one world, got none"):
        Mixture([])


def test_a_redrawn_mixture_has_other_worlds_each_time_and_saves_only_their_number():
    def made():
        return RedrawnMixture(lambda n: [SimulatedWorld(2, 10 * n + k) for k in (0, 1)])

    def rent(world):
        return world.begin_round().host.rent

    world, again = made(), made()
    first, second = rent(world), rent(world)
    expected = [SimulatedWorld(2, seed).reset().host.rent for seed in (0, 1, 10, 11)]
    assert torch.equal(torch.cat([first, second]), torch.cat(expected))
    kept = save(world)
    assert list(kept) == ["drawn"]
    load(again, kept)
    assert torch.equal(rent(world), rent(again))
