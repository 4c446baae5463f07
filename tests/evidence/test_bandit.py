"""The bandit waits, chooses a schedule once, and follows it."""

import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.tamiyo.policy.features import OFFER_COLUMNS, compute_features
from esper.tamiyo.schedule import Schedule, Scheduled
from evidence.bandit import CONTEXT, LinearBandit, OneChoice, context
from tests.rollouts import SPEC, random_observation
from tests.tamiyo.decisions import observed, play

WIDE = ActionSpec(slots=SlotConfig(max_slots=4), blueprints=BLUEPRINTS[5:8])
ARMS = (
    Schedule(blueprint="widen_32", every=0.0, count=9),
    Schedule(blueprint="widen_8", every=0.0, count=2),
    Schedule(count=0),
)


def by_score():
    """Nothing below a score of 1/2, few small seeds above, many large ones at 1."""
    weights = torch.zeros(3, len(CONTEXT), dtype=torch.float64)
    weights[1, CONTEXT.index("score")], weights[1, -1] = 1.0, -0.5
    weights[0, CONTEXT.index("score")], weights[0, -1] = 3.0, -2.2
    return weights


def planted_by(controller, scores):
    """The blueprint planted at each decision, None where nothing was, [env]."""
    episode = [
        observed(
            WIDE,
            len(score),
            first=step == 0,
            host={"progress": step / 10, "score": torch.tensor(score)},
        )
        for step, score in scores
    ]
    taken = play(controller, episode, WIDE).transpose(0, 1).tolist()
    return [
        [row[HEAD["blueprint"]] if row[0] == Op.GERMINATE else None for row in rows]
        for rows in taken
    ]


def test_each_host_gets_the_schedule_that_is_best_by_its_context_at_the_choice():
    wrong, right = [1.0, 0.0, 0.7], [0.1, 0.7, 1.0]
    scores = [(step, right if step == 3 else wrong) for step in range(7)]
    assert planted_by(LinearBandit(WIDE, ARMS, by_score(), look=3), scores) == [
        [None] * 7,
        [None, None, None, 0, 0, None, None],
        [None, None, None, 2, 2, 2, 2],
    ]


def test_a_new_episode_waits_and_chooses_anew():
    controller = LinearBandit(WIDE, ARMS, by_score(), look=1)
    scores = [(0, [1.0]), (1, [1.0]), (2, [1.0]), (0, [1.0]), (1, [0.0]), (2, [1.0])]
    assert planted_by(controller, scores) == [[None, 2, 2, None, None, None]]


def test_a_choice_at_the_first_decision_is_the_schedule_itself():
    generator = Generator().manual_seed(0)
    arms = [Schedule(), Schedule(start=0.3, place="last", prune=False)]
    bandit = OneChoice(SPEC, arms, lambda seen: torch.arange(len(seen)) % 2, look=0)
    episode = [
        random_observation(16, SPEC, generator, first=torch.full((16,), step == 0))
        for step in range(5)
    ]
    expected = play(Scheduled(SPEC, arms * 8), episode, SPEC)
    assert torch.equal(play(bandit, episode, SPEC), expected)


def test_the_context_is_the_host_a_summary_of_promises_and_a_one():
    observation = random_observation(5, SPEC, Generator().manual_seed(1))
    features = compute_features(observation, SPEC)
    columns = dict(zip(CONTEXT, context(observation, SPEC).unbind(1), strict=True))
    assert torch.equal(columns["rent"], features.host[:, 3])
    assert (columns["one"] == 1.0).all()
    for index, offer in enumerate(OFFER_COLUMNS):
        if f"mean_{offer.name}" in CONTEXT:
            values = features.offers[..., index].flatten(1)
            assert_close(columns[f"mean_{offer.name}"], values.mean(dim=1))
            assert torch.equal(columns[f"max_{offer.name}"], values.amax(dim=1))
    assert sum(name.startswith("max_") for name in CONTEXT) == 3


def test_weights_of_another_shape_and_a_choice_before_the_start_are_refused():
    with pytest.raises(BadInput, match=r"weights must be \[3, 18\] for 3 arms, got"):
        LinearBandit(WIDE, ARMS, torch.zeros(2, 18))
    with pytest.raises(BadInput, match="look must be a whole number from 0, got -1"):
        LinearBandit(WIDE, ARMS, by_score(), look=-1)
