"""Controllers that look: at a plateau, and at what is promised."""

import pytest
import torch
from torch import Generator

from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.tamiyo.heuristic import Plateau, PromiseGreedy
from esper.tamiyo.policy.action_masks import compute_masks
from tests.rollouts import require_legal
from tests.tamiyo.test_gardening import seen

SPEC = ActionSpec(
    slots=SlotConfig(max_slots=2),
    blueprints=tuple(b for b in BLUEPRINTS if b.name in ("depthwise", "widen_8")),
)
WAIT, GERMINATE, ADVANCE, PRUNE = 0, 1, 2, 4


def start(controller, observation):
    """Op, slot and blueprint."""
    masks = compute_masks(observation, SPEC)
    actions, state = controller.decide(observation, masks, None, Generator())
    require_legal(observation, SPEC, actions)
    assert state is None
    return tuple(actions[0, :3].tolist())


def promised(promise, parameters, *, known=True, rent=0.0, budget=torch.inf):
    """Two free slots with two offers each."""
    return seen(
        SPEC,
        host={"rent": rent, "budget_left": budget},
        offers={
            "promise": promise,
            "parameters": parameters,
            "promise_known": known,
        },
    )


def test_the_gain_per_parameter_decides_and_not_the_gain():
    observation = promised([[0.5, 0.2], [0.3, 0.1]], [[1.0, 0.5], [0.4, 0.1]])
    assert start(PromiseGreedy(), observation) == (GERMINATE, 1, 1)


def test_what_costs_nothing_is_better_than_what_costs_little():
    observation = promised([[0.5, 0.1], [0.5, 0.2]], [[0.1, 0.0], [0.1, 0.0]])
    assert start(PromiseGreedy(), observation) == (GERMINATE, 1, 1)


def test_what_the_budget_does_not_allow_is_passed_over():
    observation = promised([[0.9, 0.2], [0.9, 0.1]], [[0.5, 0.25], [0.5, 0.25]])
    assert start(PromiseGreedy(), observation) == (GERMINATE, 0, 0)
    poor = promised([[0.9, 0.2], [0.9, 0.1]], [[0.5, 0.25], [0.5, 0.25]], budget=0.25)
    assert start(PromiseGreedy(), poor) == (GERMINATE, 0, 1)


def test_nothing_is_planted_that_promises_less_than_its_rent():
    offers = ([[0.2, -0.1], [0.25, 0.1]], [[0.5, 0.0], [0.5, 0.25]])
    assert start(PromiseGreedy(), promised(*offers, rent=0.5)) == (WAIT, 0, 0)
    assert start(PromiseGreedy(), promised(*offers, rent=0.4))[0] == GERMINATE


def test_an_unknown_promise_is_worth_a_trial_when_nothing_known_pays():
    known = [[True, False], [False, True]]
    offers = ([[-0.1, 9.0], [9.0, 0.01]], [[0.5, 0.5], [0.7, 0.5]])
    pays = promised(*offers, known=known)
    assert start(PromiseGreedy(), pays) == (GERMINATE, 1, 1)
    dear = promised(*offers, known=known, rent=1.0)
    assert start(PromiseGreedy(), dear) == (GERMINATE, 1, 0)
    assert start(PromiseGreedy(SPEC), dear) == (GERMINATE, 0, 1)


def test_promises_are_blended_slowly_and_fully():
    observation = promised([[1.0, 1.0], [1.0, 1.0]], [[0.1, 0.1], [0.1, 0.1]])
    masks = compute_masks(observation, SPEC)
    actions, _ = PromiseGreedy().decide(observation, masks, None, Generator())
    assert actions[0, 3:].tolist() == [0, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("plateau", "other", "op"),
    [
        (0.25, Stage.FOSSILIZED, GERMINATE),
        (0.2, Stage.FOSSILIZED, WAIT),
        (0.25, Stage.TRAINING, WAIT),
        (0.25, Stage.BLENDING, WAIT),
        (0.25, Stage.COOLING, GERMINATE),
    ],
)
def test_plateau_plants_when_the_score_stands_still_and_no_seed_is_on_its_way(
    plateau, other, op
):
    observation = seen(SPEC, host={"plateau": plateau}, stage=[[other, 0]])
    expected = (op, 1, 1) if op == GERMINATE else (op, 0, 0)
    assert start(Plateau(SPEC, patience=0.25), observation) == expected


def test_plateau_prunes_a_holding_seed_that_does_not_earn_its_rent():
    observation = seen(
        SPEC,
        host={"plateau": 1.0},
        stage=[[0, Stage.HOLDING]],
        age=1,
        contribution=-0.1,
        contribution_measured=True,
    )
    assert start(Plateau(SPEC), observation) == (PRUNE, 1, 0)


@pytest.mark.parametrize(
    "controller", [Plateau(SPEC, seed_patience=3), PromiseGreedy(patience=3)]
)
@pytest.mark.parametrize(("age", "op"), [(2, WAIT), (3, ADVANCE)])
def test_a_seed_trains_as_long_as_it_is_told_to(controller, age, op):
    observation = seen(SPEC, stage=[[4, Stage.TRAINING]], age=age)
    assert start(controller, observation)[0] == op


@pytest.mark.parametrize("patience", [-0.1, 1.5, float("nan")])
def test_a_patience_that_is_no_share_is_refused(patience):
    with pytest.raises(BadInput, match=r"patience must be a share in \[0, 1\]"):
        Plateau(SPEC, patience)
