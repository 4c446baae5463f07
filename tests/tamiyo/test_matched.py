"""Chance that is matched: so many seeds, within a range of time, of any kind."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Generator

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.tamiyo.matched import Matched
from esper.tamiyo.policy.action_masks import compute_masks
from tests.device_reads import count_device_reads
from tests.rollouts import require_legal
from tests.strategies import action_specs, observations
from tests.worlds import blank_observation

SPEC = ActionSpec(slots=SlotConfig(max_slots=3), blueprints=BLUEPRINTS[5:8])
HORIZON = 10


def matched(counts, first=0.0, last=0.9, **how):
    """The same range everywhere."""
    shares = (torch.full((len(counts),), share) for share in (first, last))
    return Matched(SPEC, torch.tensor(counts), *shares, horizon=HORIZON, **how)


def played(controller, envs, rng_seed=0, episodes=1, closed=()):
    """Sentences [decision, env, head]; slots stay empty, or full at some decisions."""
    generator, state, said = Generator().manual_seed(rng_seed), None, []
    for step in range(episodes * HORIZON):
        blank, now = blank_observation(envs, SPEC), step % HORIZON
        stage = Stage.FOSSILIZED if now in closed else Stage.DORMANT
        observation = replace(
            blank,
            first=torch.full((envs,), now == 0),
            host=replace(blank.host, progress=torch.full((envs,), now / HORIZON)),
            slots=replace(blank.slots, stage=torch.full((envs, 3), int(stage))),
        )
        masks = compute_masks(observation, SPEC)
        actions, state = controller.decide(observation, masks, state, generator)
        require_legal(observation, SPEC, actions)
        said.append(actions)
    return torch.stack(said)


def plants(said):
    return said[:, :, 0] == Op.GERMINATE


def test_as_many_seeds_are_planted_as_asked_for_and_only_within_the_range():
    counts = [0, 1, 2, 4] * 20
    planted = plants(played(matched(counts, 0.2, 0.6), len(counts)))
    assert planted.sum(dim=0).tolist() == counts
    assert not planted[:2].any()
    assert not planted[7:].any()


def test_every_decision_of_the_range_is_equally_likely():
    planted = plants(played(matched([2] * 3000, 0.2, 0.6), 3000)).sum(dim=1)
    assert planted.nonzero().flatten().tolist() == [2, 3, 4, 5, 6]
    assert chisquare(planted[2:7].numpy()).pvalue > 1e-4


def test_every_offer_that_can_be_planted_is_equally_likely():
    said = played(matched([1] * 3000), 3000)
    sentences = said[plants(said)]
    offers = sentences[:, HEAD["slot"]] * 3 + sentences[:, HEAD["blueprint"]]
    assert chisquare(torch.bincount(offers, minlength=9).numpy()).pvalue > 1e-4


def test_what_could_not_be_planted_is_made_up_for():
    planted = plants(played(matched([3] * 8, 0.2, 0.4), 8, closed=(2, 3, 4)))
    assert planted.nonzero()[:, 0].tolist() == [5] * 8 + [6] * 8 + [7] * 8


def test_more_seeds_than_decisions_in_the_range_come_after_it():
    planted = plants(played(matched([3], 0.2, 0.3), 1))
    assert planted.flatten().nonzero().flatten().tolist() == [2, 3, 4]


def test_times_are_drawn_anew_for_every_episode_and_only_by_the_generator():
    one, again, other = (
        played(matched([2] * 9), 9, rng_seed=seed, episodes=2) for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    first, second = plants(one).split(HORIZON)
    assert second.sum(dim=0).tolist() == [2] * 9
    assert not torch.equal(first, second)


@settings(max_examples=20)
@given(st.data())
def test_every_sentence_is_legal(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    envs = len(observation.first)
    controller = Matched(
        spec,
        torch.full((envs,), 5),
        torch.zeros(envs),
        torch.ones(envs),
        horizon=data.draw(st.integers(1, 9)),
    )
    masks = compute_masks(observation, spec)
    actions, _ = controller.decide(observation, masks, None, Generator())
    require_legal(observation, spec, actions)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(BadInput, match=r"each environment, got \[1\], \[2\] and \[2\]"):
        Matched(SPEC, torch.ones(1).long(), *torch.zeros(2, 2), horizon=3)
    with pytest.raises(BadInput, match="no count negative"):
        matched([-1])
    with pytest.raises(BadInput, match="expected 2 environments and 3 blueprints, got"):
        played(matched([1, 1]), 3)


def test_nothing_is_read_from_the_device():
    controller, generator = matched([2] * 4), Generator().manual_seed(0)
    observation = blank_observation(4, SPEC)
    masks = compute_masks(observation, SPEC)
    _, state = controller.decide(observation, masks, None, generator)

    def decide():
        controller.decide(observation, masks, state, generator)

    assert count_device_reads(decide) == 0
