"""Replayed recordings, and the matched random baseline."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from torch import Generator

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.tamiyo.rule_based import Random
from evidence.baselines import MatchedRandom, Replay
from tests.rollouts import random_observation
from tests.tamiyo.decisions import observed, play

SPEC = ActionSpec(slots=SlotConfig(max_slots=3), blueprints=BLUEPRINTS[5:8])
HORIZON = 10


def matched(counts, first=0.0, last=0.9):
    """The same range everywhere."""
    shares = (torch.full((len(counts),), share) for share in (first, last))
    return MatchedRandom(SPEC, torch.tensor(counts), *shares, horizon=HORIZON)


def played(controller, envs, rng_seed=0, episodes=1, closed=()):
    """Actions [decision, env, head]; slots stay empty, or full at some decisions."""
    episode = [
        observed(
            SPEC,
            envs,
            first=step == 0,
            host={"progress": step / HORIZON},
            stage=Stage.FOSSILIZED if step in closed else Stage.DORMANT,
        )
        for step in range(HORIZON)
    ]
    generator = Generator().manual_seed(rng_seed)
    return play(controller, episode * episodes, SPEC, generator)


def plants(actions):
    return actions[:, :, 0] == Op.GERMINATE


def test_as_many_seeds_are_planted_as_asked_for_and_only_within_the_range():
    counts = [0, 1, 2, 4] * 20
    planted = plants(played(matched(counts, 0.2, 0.6), len(counts)))
    assert planted.sum(dim=0).tolist() == counts
    assert not planted[:2].any()
    assert not planted[7:].any()


def test_every_decision_of_the_range_and_every_offer_is_equally_likely():
    actions = played(matched([2] * 3000, 0.2, 0.6), 3000)
    planted = plants(actions).sum(dim=1)
    assert planted.nonzero().flatten().tolist() == [2, 3, 4, 5, 6]
    assert chisquare(planted[2:7].numpy()).pvalue > 1e-4
    seeds = actions[plants(actions)]
    offers = seeds[:, HEAD["slot"]] * 3 + seeds[:, HEAD["blueprint"]]
    assert chisquare(torch.bincount(offers, minlength=9).numpy()).pvalue > 1e-4


def test_what_could_not_be_planted_in_the_range_is_made_up_for():
    planted = plants(played(matched([3] * 8, 0.2, 0.4), 8, closed=(2, 3, 4)))
    assert planted.nonzero()[:, 0].tolist() == [5] * 8 + [6] * 8 + [7] * 8
    planted = plants(played(matched([3], 0.2, 0.3), 1))  # more than there is time for
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


def test_shapes_that_do_not_agree_are_refused():
    with pytest.raises(BadInput, match=r"each environment, got \[1\], \[2\] and \[2\]"):
        MatchedRandom(SPEC, torch.ones(1).long(), *torch.zeros(2, 2), horizon=3)
    with pytest.raises(BadInput, match="no count negative"):
        matched([-1])
    with pytest.raises(BadInput, match="expected 2 environments and 3 blueprints, got"):
        played(matched([1, 1]), 3)


PLANT, KEEP, WAIT = [1, 2, 2, 1, 2, 0, 0, 0], [5, 1, *[0] * 6], [0] * 8
EMPTY, HOLDING = observed(SPEC), observed(SPEC, stage=Stage.HOLDING)


def replayed(recording, episode):
    return play(Replay(torch.tensor(recording)), episode, SPEC).tolist()


def test_replay_repeats_a_recording_then_waits_and_restarts_with_the_episode():
    again = replace(EMPTY, first=torch.tensor([True]))
    taken = replayed([PLANT, KEEP], [EMPTY, HOLDING, EMPTY, again, HOLDING])
    assert taken == [[PLANT], [KEEP], [WAIT], [PLANT], [KEEP]]


def test_replay_gives_each_environment_its_own_recording():
    other = [1, 0, 1, 0, 0, 0, 0, 0]
    recording = [[PLANT, other], [other, PLANT]]
    assert replayed(recording, [observed(SPEC, 2)] * 2) == recording
    with pytest.raises(BadInput, match="recording is of 2 environments, got 3"):
        replayed(recording, [observed(SPEC, 3)])


@pytest.mark.parametrize(
    ("recorded", "taken"),
    [
        (KEEP, WAIT),
        ([1, 3, 0, 0, 0, 0, 0, 0], WAIT),
        ([1, -1, 0, 0, 0, 0, 0, 0], WAIT),
        ([1, 0, len(SPEC.blueprints), 0, 0, 0, 0, 0], WAIT),
        ([1, 0, 0, 2, 0, 0, 0, 0], WAIT),
        ([1, 0, 0, 0, 0, -1, 0, 0], WAIT),
        ([6, 0, 0, 0, 0, 0, 0, 0], WAIT),
        ([-1, 0, 0, 0, 0, 0, 0, 0], WAIT),
        ([*PLANT[:6], 99, -5], PLANT),  # heads that the op does not use
    ],
)
def test_illegal_recorded_actions_become_wait(recorded, taken):
    assert replayed([recorded], [EMPTY]) == [[taken]]


def test_replaying_actions_to_the_same_hosts_gives_the_same_actions():
    generator = Generator().manual_seed(0)
    episode = [random_observation(32, SPEC, generator) for _ in range(6)]
    recorded = play(Random(), episode, SPEC, generator)
    assert torch.equal(play(Replay(recorded), episode, SPEC), recorded)


@pytest.mark.parametrize(
    "recording",
    [torch.zeros(3, 8), torch.zeros(3, 7).long(), torch.zeros(8).long()],
)
def test_a_recording_of_another_shape_or_type_is_refused(recording):
    with pytest.raises(BadInput, match=r"actions must be int64 \[time, 8\] or"):
        Replay(recording)
