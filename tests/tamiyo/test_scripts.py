"""Trees of scripts: shared beginnings, one that never grows, room for every seed."""

import numpy as np
import pytest
from torch import Generator

from esper.contracts.errors import InvalidInputError
from esper.environment.growing import GrowingWorld
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.scripts import PRUNE, Scripted, draw_scripts
from esper.training.recordings import world_settings
from tests.environment.test_growing import TINY

SIZES = {"scripts": 24, "decisions": 20, "places": 2, "kinds": 4, "slots": 3}


@pytest.mark.parametrize("rng_seed", range(5))
def test_scripts_part_from_one_that_never_grows(rng_seed):
    codes = draw_scripts(**SIZES, chance=np.random.default_rng(rng_seed))
    assert not codes[0].any()
    assert codes.any(axis=1)[1:].mean() > 0.8
    # Where a script first acts, another one that did the same before it waits.
    for own in codes[codes.any(axis=1)]:
        at = int(np.flatnonzero(own)[0])
        twins = codes[(codes[:, :at] == own[:at]).all(axis=1)]
        assert (twins[:, at] == 0).any()


def test_a_place_is_planted_as_often_as_it_has_slots():
    for rng_seed in range(20):
        codes = draw_scripts(**SIZES, chance=np.random.default_rng(rng_seed))
        for own in codes:
            planted = (own[own > 0] - 1) // SIZES["kinds"]
            assert np.bincount(planted, minlength=2).max() <= SIZES["slots"]
            first = np.flatnonzero(own)
            assert not len(first) or own[first[0]] != PRUNE


def test_scripts_are_for_as_many_environments():
    world = GrowingWorld(TINY, 3, settings=world_settings("end"))
    scripted = Scripted(world.spec, np.zeros((2, 4), dtype=np.int64), 1)
    seen = world.reset()
    masks = compute_masks(seen, world.spec)
    with pytest.raises(InvalidInputError, match="scripts for 2 environments, got 3"):
        scripted.decide(seen, masks, None, Generator())
