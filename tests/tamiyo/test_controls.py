"""Controllers that do not learn speak only legal sentences."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from torch import Generator

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.controller import Controller
from esper.contracts.slots import SlotConfig
from esper.tamiyo.controls import Never, Random
from esper.tamiyo.heuristic import PromiseGreedy
from esper.tamiyo.policy.action_masks import compute_masks
from tests.rollouts import SPEC, random_observation, require_legal
from tests.worlds import blank_observation

NARROW = ActionSpec(
    slots=SlotConfig(max_slots=2),
    blueprints=BLUEPRINTS[:4],
    narrowed={"tempo": ("SLOW",), "alpha_curve": ("COSINE", "SIGMOID")},
)


def seen(spec=SPEC, envs=32, rng_seed=0, density=0.7):
    observation = random_observation(
        envs, spec, Generator().manual_seed(rng_seed), density=density
    )
    return observation, compute_masks(observation, spec)


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("spec", [SPEC, NARROW], ids=["whole", "narrowed"])
@pytest.mark.parametrize("controller", [Never(), Random(), PromiseGreedy()])
def test_every_sentence_is_legal(controller, spec, density):
    assert isinstance(controller, Controller)
    generator, state = Generator().manual_seed(0), None
    for rng_seed in range(4):
        observation, masks = seen(spec, rng_seed=rng_seed, density=density)
        actions, state = controller.decide(observation, masks, state, generator)
        require_legal(observation, spec, actions)


def test_never_waits():
    observation, masks = seen()
    actions, state = Never().decide(observation, masks, None, Generator())
    assert (actions == 0).all()
    assert state is None


def test_random_draws_each_head_evenly_from_what_is_legal_given_the_heads_before():
    """Empty slots, one of which nothing fits: WAIT and GERMINATE, two slots."""
    draws = 4000
    observation = blank_observation(draws, SPEC)
    fits = torch.ones(draws, 3, 7, dtype=torch.bool)
    fits[:, 1] = False
    fits[:, 2, 4:] = False
    offers = replace(observation.offers, fits=fits)
    observation = replace(observation, offers=offers)
    masks = compute_masks(observation, SPEC)
    actions, _ = Random().decide(observation, masks, None, Generator().manual_seed(0))
    plants = actions[actions[:, HEAD["op"]] == Op.GERMINATE]
    in_last = plants[plants[:, HEAD["slot"]] == 2]
    for drawn, choices in (
        (actions[:, HEAD["op"]], [0, 1]),
        (plants[:, HEAD["slot"]], [0, 2]),
        (in_last[:, HEAD["blueprint"]], [0, 1, 2, 3]),
        (plants[:, HEAD["tempo"]], [0, 1, 2]),
    ):
        counts = torch.bincount(drawn)
        assert counts.nonzero().flatten().tolist() == choices
        assert chisquare(counts[choices].numpy()).pvalue > 1e-4


def test_the_same_generator_gives_the_same_sentences():
    observation, masks = seen()
    draws = [
        Random().decide(observation, masks, None, Generator().manual_seed(seed))[0]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
