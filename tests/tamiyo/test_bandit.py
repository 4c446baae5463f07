"""The bandit waits, looks once, and plays the schedule that it predicts most of."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator
from torch.testing import assert_close

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.tamiyo.bandit import CONTEXT, LinearBandit, OneLook, context
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import OFFER_COLUMNS, compute_features
from esper.tamiyo.schedule import Schedule, Scheduled
from tests.device_reads import count_device_reads
from tests.rollouts import SPEC, random_observation, require_legal
from tests.strategies import action_specs, observations
from tests.worlds import blank_observation

WIDE = ActionSpec(slots=SlotConfig(max_slots=4), blueprints=BLUEPRINTS[5:8])
ARMS = (
    Schedule(blueprint="widen_32", every=0.0, count=9),
    Schedule(blueprint="widen_8", every=0.0, count=2),
    Schedule(count=0),
)
HORIZON = 10


def by_score():
    """Nothing below a score of 1/2, few small seeds above, many large ones at 1."""
    weights = torch.zeros(3, len(CONTEXT), dtype=torch.float64)
    weights[1, CONTEXT.index("score")], weights[1, -1] = 1.0, -0.5
    weights[0, CONTEXT.index("score")], weights[0, -1] = 3.0, -2.2
    return weights


def seen_at(step, score, *, first=False):
    blank, score = blank_observation(len(score), WIDE), torch.tensor(score)
    host = replace(
        blank.host, score=score, progress=torch.full_like(score, step / HORIZON)
    )
    return replace(blank, host=host, first=torch.full_like(blank.first, first))


def planted_by(controller, episode):
    """The blueprint planted at each decision, None where nothing was, [env]."""
    said, state = [], None
    for observation in episode:
        masks = compute_masks(observation, WIDE)
        actions, state = controller.decide(observation, masks, state, Generator())
        require_legal(observation, WIDE, actions)
        said.append(
            [
                row[HEAD["blueprint"]] if row[0] == Op.GERMINATE else None
                for row in actions.tolist()
            ]
        )
    return [list(column) for column in zip(*said, strict=True)]


def test_each_host_gets_the_schedule_that_is_best_by_what_is_seen_at_the_look():
    controller = LinearBandit(WIDE, ARMS, by_score(), look=3)
    wrong, right = [1.0, 0.0, 0.7], [0.1, 0.7, 1.0]
    episode = [seen_at(step, right if step == 3 else wrong) for step in range(7)]
    assert planted_by(controller, episode) == [
        [None] * 7,
        [None, None, None, 0, 0, None, None],
        [None, None, None, 2, 2, 2, 2],
    ]


def test_a_new_episode_waits_and_chooses_anew():
    controller = LinearBandit(WIDE, ARMS, by_score(), look=1)
    episode = [
        seen_at(0, [1.0], first=True),
        seen_at(1, [1.0]),
        seen_at(2, [1.0]),
        seen_at(0, [1.0], first=True),
        seen_at(1, [0.0]),
        seen_at(2, [1.0]),
    ]
    assert planted_by(controller, episode) == [[None, 2, 2, None, None, None]]


def test_who_looks_at_once_plays_as_the_schedule_itself():
    generator, states = Generator().manual_seed(0), [None, None]
    arms = [Schedule(), Schedule(start=0.3, place="last", prune=False)]
    bandit = OneLook(SPEC, arms, lambda seen: torch.arange(len(seen)) % 2, look=0)
    schedules = Scheduled(SPEC, arms * 8)
    for step in range(5):
        begins = torch.full((16,), step == 0)
        observation = random_observation(16, SPEC, generator, first=begins)
        masks = compute_masks(observation, SPEC)
        (actions, states[0]), (expected, states[1]) = (
            controller.decide(observation, masks, state, generator)
            for controller, state in zip((bandit, schedules), states, strict=True)
        )
        assert torch.equal(actions, expected)


def test_the_context_is_the_host_a_summary_of_promises_and_a_one():
    observation = random_observation(5, SPEC, Generator().manual_seed(1))
    features = compute_features(observation, SPEC)
    seen = dict(zip(CONTEXT, context(observation, SPEC).unbind(1), strict=True))
    assert_close(seen["rent"], features.host[:, 3], rtol=0, atol=0)
    assert_close(seen["one"], torch.ones(5))
    for column, offer in enumerate(OFFER_COLUMNS):
        if f"mean_{offer.name}" not in CONTEXT:
            continue
        for env in range(5):
            values = features.offers[env, :, :, column].flatten().tolist()
            mean = sum(values) / len(values)
            assert seen[f"mean_{offer.name}"][env] == pytest.approx(mean, abs=1e-6)
            assert seen[f"max_{offer.name}"][env] == max(values)
    assert sum(name.startswith("max_") for name in CONTEXT) == 3


@settings(max_examples=20)
@given(st.data())
def test_every_sentence_is_legal(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    weights = torch.randn(2, len(CONTEXT), generator=Generator().manual_seed(0))
    bandit = LinearBandit(spec, [Schedule(), Schedule(count=0)], weights, look=0)
    masks = compute_masks(observation, spec)
    actions, _ = bandit.decide(observation, masks, None, Generator())
    require_legal(observation, spec, actions)


def test_weights_of_another_shape_and_a_look_before_the_start_are_refused():
    with pytest.raises(BadInput, match=r"weights must be \[3, 18\] for 3 arms, got"):
        LinearBandit(WIDE, ARMS, torch.zeros(2, 18))
    with pytest.raises(BadInput, match="look must be a whole number from 0, got -1"):
        LinearBandit(WIDE, ARMS, by_score(), look=-1)


def test_nothing_is_read_from_the_device():
    controller, generator = LinearBandit(WIDE, ARMS, by_score()), Generator()
    observation = seen_at(0, [0.5, 0.6])
    masks = compute_masks(observation, WIDE)
    _, state = controller.decide(observation, masks, None, generator)

    def decide():
        controller.decide(observation, masks, state, generator)

    assert count_device_reads(decide) == 0
