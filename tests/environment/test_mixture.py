import pickle
from dataclasses import replace

import pytest
import torch

from esper.contracts.errors import InvalidInputError
from esper.contracts.state import save
from esper.environment.growing import GrowingWorld
from esper.environment.mixture import Mixture
from esper.environment.settings import WorldSettings
from esper.tasks.hosts import MlpHost
from esper.testing.simulated import SimulatedWorld
from tests.environment.test_growing import TINY, VARIED, play_on

WIDER = replace(TINY, name="wider", host=MlpHost((5, 9, 8, 3)), horizon=3)
TASKS = ((TINY, 2), (WIDER, 3), (VARIED, 1))


def make(number, round):
    task, envs = TASKS[number]
    return GrowingWorld(task, envs, 1 + round)


def other_rents(number, round):
    return SimulatedWorld(2, 10 * round + number)


def test_environments_of_a_mixture_are_those_of_its_worlds():
    mixture = Mixture(make, 3)
    assert (mixture.counts, mixture.num_envs, mixture.group_size) == ([2, 3, 1], 6, 1)
    assert mixture.spec == make(0, 0).spec


@pytest.mark.parametrize("sent", [False, True], ids=["here", "elsewhere"])
def test_a_world_goes_on_to_the_bit_from_what_was_kept(sent):
    mixture, chance = Mixture(make, 3), torch.Generator().manual_seed(0)
    world = mixture.world(2)
    observation, _ = play_on(world, world.reset(), chance, 5)
    kept, drawn = mixture.keep(2, world), chance.get_state()
    _, expected = play_on(world, observation, chance, 6)
    chance.set_state(drawn)
    if sent:
        mixture = pickle.loads(pickle.dumps(mixture))
        assert mixture.world(2) is not world
    again = mixture.world(2, 7, {**kept})
    _, found = play_on(again, observation, chance, 6)
    assert all(map(torch.equal, found, expected))


def test_a_world_that_is_as_it_was_left_is_not_filled_again():
    mixture = Mixture(make, 3)
    world = mixture.world(0)
    world.reset()
    kept = mixture.keep(0, world)
    kept["cohort/values"].zero_()
    assert float(save(mixture.world(0, 1, kept))["cohort/values"].abs().sum()) > 0
    assert float(save(mixture.world(0, 1, {**kept}))["cohort/values"].abs().sum()) == 0


def test_worlds_in_which_other_things_can_be_said_are_refused():
    other = GrowingWorld(TINY, 2, settings=WorldSettings(blueprints=("widen_8",)))
    with pytest.raises(
        InvalidInputError, match="number 1 differs from the first: 4 slots and"
    ):
        Mixture.of([make(0, 0), other])
    with pytest.raises(InvalidInputError, match="at least one world, got none"):
        Mixture.of([])


def test_a_redrawn_mixture_has_other_worlds_in_every_round_and_keeps_nothing():
    mixture = pickle.loads(pickle.dumps(Mixture(other_rents, 2, redrawn=True)))
    rents = [
        mixture.world(number, round).reset().host.rent
        for round in (0, 1)
        for number in (0, 1)
    ]
    expected = [SimulatedWorld(2, seed).reset().host.rent for seed in (0, 1, 10, 11)]
    assert torch.equal(torch.cat(rents), torch.cat(expected))
    assert mixture.keep(0, mixture.world(0)) is None
