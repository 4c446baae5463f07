"""Rules for seeds, scores for offers, and the controllers made of them."""

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Generator

from esper.contracts.actions import HEAD, HEADS, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import InvalidInputError
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.rule_based import (
    STANDARD_BLEND,
    TRAINING_STEPS,
    ByRent,
    Plateau,
    Random,
    SizePreference,
    explain_no_planting,
    next_actions,
)
from research.learning import SLOW_BLEND, PromiseGreedy
from tests.rollouts import require_legal
from tests.strategies import action_specs, observations
from tests.tamiyo.decisions import decide, observed

NAMES = [blueprint.name for blueprint in BLUEPRINTS]
KINDS = len(NAMES)
SPEC = ActionSpec(slots=SlotConfig(max_slots=3))
PAIR = ActionSpec(
    slots=SlotConfig(max_slots=2),
    blueprints=tuple(b for b in BLUEPRINTS if b.name in ("depthwise", "widen_8")),
)
NOTHING = torch.full((1, 3, KINDS), -inf)


def in_words(observation, scores=NOTHING, spec=SPEC, **settings):
    """The action by names, as far as its op uses them."""
    masks = compute_masks(observation, spec)
    actions = next_actions(observation, masks, scores, **settings)
    require_legal(observation, spec, actions)
    op = Op(int(actions[0, 0]))
    words = {"op": op.name}
    for head, choice in zip(HEADS[1:], actions[0, 1:].tolist(), strict=True):
        if op in head.used_by:
            words[head.name] = [*head.choices][choice] if head.choices else choice
    return words


def reference(observation, spec, scores, env):
    """Op, slot and blueprint, one rule after the other."""
    masks = compute_masks(observation, spec)
    slots = observation.slots

    def first(op):
        for slot in range(spec.slots.max_slots):
            stage = slots.stage[env, slot].item()
            cost = (observation.host.rent[env] * slots.parameters[env, slot]).item()
            measured = slots.contribution_measured[env, slot].item()
            earns = slots.contribution[env, slot].item() > cost
            due = {
                Op.FOSSILIZE: measured and earns,
                Op.PRUNE: measured and not earns and stage == Stage.HOLDING,
                Op.ADVANCE: stage == Stage.BLENDING
                or slots.age[env, slot].item() >= TRAINING_STEPS,
            }[op]
            if due and masks.slot[env, op, slot]:
                return slot
        return None

    for op in (Op.PRUNE, Op.ADVANCE):
        if (slot := first(op)) is not None:
            return op, slot, 0
    best = (-inf, 0, 0)
    for slot in range(spec.slots.max_slots):
        for blueprint in range(len(spec.blueprints)):
            value = scores[env, slot, blueprint].item()
            if masks.blueprint[env, slot, blueprint] and value > best[0]:
                best = (value, slot, blueprint)
    if best[0] > -inf:
        return Op.GERMINATE, *best[1:]
    kept = first(Op.FOSSILIZE)
    return (Op.WAIT, 0, 0) if kept is None else (Op.FOSSILIZE, kept, 0)


@settings(max_examples=40)
@given(st.data())
def test_every_action_is_the_legal_one_of_the_highest_priority(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    shape = observation.offers.promise.shape
    values = st.sampled_from([-inf, -1.0, 0.0, 1.0, inf, nan])
    count = shape.numel()
    drawn = data.draw(st.lists(values, min_size=count, max_size=count))
    scores = torch.tensor(drawn).view(shape)
    masks = compute_masks(observation, spec)
    actions = next_actions(observation, masks, scores)
    require_legal(observation, spec, actions)
    for env, action in enumerate(actions.tolist()):
        expected = reference(observation, spec, scores, env)
        assert tuple(action[:3]) == expected


@pytest.mark.parametrize(
    ("narrowed", "blending", "tempo", "target"),
    [
        ({}, STANDARD_BLEND, "AT_ONCE", "FULL"),
        ({"tempo": ("FAST", "STANDARD")}, STANDARD_BLEND, "STANDARD", "FULL"),
        ({}, SLOW_BLEND, "SLOW", "FULL"),
        ({"tempo": ("FAST", "SLOW")}, STANDARD_BLEND, "FAST", "FULL"),
        ({"tempo": ("FAST", "STANDARD")}, SLOW_BLEND, "STANDARD", "FULL"),
        ({"alpha_target": ("HALF", "MOST")}, STANDARD_BLEND, "AT_ONCE", "MOST"),
    ],
)
@pytest.mark.parametrize("slots", [3, 20])
def test_seeds_are_blended_by_the_nearest_allowed_choice(
    slots, narrowed, blending, tempo, target
):
    spec = ActionSpec(slots=SlotConfig(max_slots=slots), narrowed=narrowed)
    scores = torch.zeros(1, slots, KINDS)
    assert in_words(observed(spec), scores, spec, blending=blending) == {
        "op": "GERMINATE",
        "slot": 0,
        "blueprint": 0,
        "style": "ADD",
        "tempo": tempo,
        "alpha_target": target,
    }


def preferred(observation):
    """Slot and name of the planting."""
    words = in_words(observation, SizePreference(SPEC).scores(observation.offers))
    return words["slot"], NAMES[words["blueprint"]]


def test_the_largest_widening_goes_to_the_first_free_slot():
    """However large other offers are, or the same one elsewhere."""
    parameters = torch.rand(1, 3, KINDS) * 1e6
    seen = observed(SPEC, stage=[[4, 0, 0]], offers={"parameters": parameters})
    assert preferred(seen) == (1, "widen_x4")


def test_the_largest_widening_within_the_budget_is_preferred():
    costs = torch.full((1, 3, KINDS), 0.1)
    for name in ("widen_32", "widen_x2", "widen_x4"):
        costs[:, :, NAMES.index(name)] = 0.5
    for name in ("widen_16", "widen_x1.5"):
        costs[:, :2, NAMES.index(name)] = 0.5
    seen = observed(SPEC, host={"budget_left": 0.3}, offers={"parameters": costs})
    assert preferred(seen) == (2, "widen_16")


def test_without_a_widening_the_offer_with_most_parameters_is_preferred():
    fits = torch.tensor(["widen" not in name for name in NAMES])
    costs = torch.full((1, 3, KINDS), 0.1)
    costs[:, 2, NAMES.index("conv")] = 0.2
    costs[:, 1, NAMES.index("attention")] = 0.9
    offers = {"parameters": costs, "fits": fits}
    seen = observed(SPEC, host={"budget_left": 0.3}, offers=offers)
    assert preferred(seen) == (2, "conv")


def test_offers_of_another_action_space_are_refused():
    with pytest.raises(InvalidInputError, match=rf"{KINDS} blueprints .* got 2"):
        SizePreference(SPEC).scores(observed(PAIR).offers)


def test_random_draws_each_head_evenly_from_what_is_legal_given_the_heads_before():
    """Empty slots, one of which nothing fits: WAIT and GERMINATE, two slots."""
    fits = torch.zeros(3, KINDS, dtype=torch.bool)
    fits[0, :7] = fits[2, :4] = True
    seen = observed(SPEC, 4000, offers={"fits": fits})
    actions, again, other = (
        decide(Random(), seen, SPEC, generator=Generator().manual_seed(seed))[0]
        for seed in (0, 0, 1)
    )
    assert torch.equal(actions, again)
    assert not torch.equal(actions, other)
    plants = actions[actions[:, HEAD["op"]] == Op.GERMINATE]
    in_last = plants[plants[:, HEAD["slot"]] == 2]
    for drawn, choices in (
        (actions[:, HEAD["op"]], [0, 1]),
        (plants[:, HEAD["slot"]], [0, 2]),
        (in_last[:, HEAD["blueprint"]], [0, 1, 2, 3]),
        (plants[:, HEAD["tempo"]], [0, 1, 2, 3]),
    ):
        counts = torch.bincount(drawn)
        assert counts.nonzero().flatten().tolist() == choices
        assert chisquare(counts[choices].numpy()).pvalue > 1e-4


def first_choice(controller, **given):
    """Op, slot and blueprint in the action space of two slots and blueprints."""
    actions, state = decide(controller, observed(PAIR, **given), PAIR)
    plants = int(actions[0, HEAD["op"]] == Op.GERMINATE)
    assert state is None or int(state.sum()) == plants
    return tuple(actions[0, :3].tolist())


def promised(promise, parameters, *, known=True, rent=0.0, budget=inf):
    """Two free slots with two offers each."""
    return {
        "host": {"rent": rent, "budget_left": budget},
        "offers": {
            "promise": promise,
            "parameters": parameters,
            "promise_known": known,
        },
    }


LARGE = ([[0.9, 0.2], [0.9, 0.1]], [[0.5, 0.25], [0.5, 0.25]])
CHEAP = ([[0.2, -0.1], [0.25, 0.1]], [[0.5, 0.0], [0.5, 0.25]])


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        # The gain per parameter decides, not the gain.
        (promised([[0.5, 0.2], [0.3, 0.1]], [[1.0, 0.5], [0.4, 0.1]]), (1, 1, 1)),
        # What costs nothing is better than what costs little.
        (promised([[0.5, 0.1], [0.5, 0.2]], [[0.1, 0.0], [0.1, 0.0]]), (1, 1, 1)),
        (promised(*LARGE), (1, 0, 0)),
        (promised(*LARGE, budget=0.25), (1, 0, 1)),
        # Nothing is planted that promises less than its rent.
        (promised(*CHEAP, rent=0.5), (0, 0, 0)),
        (promised(*CHEAP, rent=0.4), (1, 1, 0)),
    ],
)
def test_the_largest_promise_per_parameter_is_planted(offers, chosen):
    assert first_choice(PromiseGreedy(), **offers) == chosen


def test_an_unknown_promise_is_tried_when_nothing_known_pays():
    offers = ([[-0.1, 9.0], [9.0, 0.01]], [[0.5, 0.5], [0.7, 0.5]])
    known = [[True, False], [False, True]]
    pays = promised(*offers, known=known)
    assert first_choice(PromiseGreedy(), **pays) == (1, 1, 1)
    dear = promised(*offers, known=known, rent=1.0)
    assert first_choice(PromiseGreedy(), **dear) == (1, 1, 0)


def test_promises_are_blended_slowly_and_fully():
    seen = observed(PAIR, **promised(1.0, 0.1))
    actions, _ = decide(PromiseGreedy(), seen, PAIR)
    assert actions[0, 3:].tolist() == [0, 3, 2, 0, 0]


@pytest.mark.parametrize(
    ("plateau", "other", "op"),
    [
        (0.25, Stage.FOSSILIZED, Op.GERMINATE),
        (0.2, Stage.FOSSILIZED, Op.WAIT),
        (0.25, Stage.TRAINING, Op.WAIT),
        (0.25, Stage.BLENDING, Op.WAIT),
        (0.25, Stage.COOLING, Op.GERMINATE),
    ],
)
def test_plateau_plants_when_the_score_stands_still_and_no_seed_is_on_its_way(
    plateau, other, op
):
    expected = (op, 1, 1) if op == Op.GERMINATE else (op, 0, 0)
    given = {"host": {"plateau": plateau}, "stage": [[other, 0]]}
    assert first_choice(Plateau(PAIR, patience=0.25), **given) == expected


@pytest.mark.parametrize("patience", [nan, 1.5])
def test_a_patience_that_is_no_share_is_refused(patience):
    with pytest.raises(InvalidInputError, match=r"patience must lie in \[0, 1\]"):
        Plateau(PAIR, patience)


@pytest.mark.parametrize(
    ("rent", "added", "chosen"),
    [
        (0.0, 9.0, (1, 0, 1)),
        (0.02, 0.0, (1, 0, 1)),
        (0.02, 0.5, (1, 1, 1)),  # then the larger one would cost more than the limit
        (0.02, 0.8, (0, 0, 0)),
    ],
)
def test_by_rent_widens_as_far_as_the_rent_for_all_that_is_added_allows(
    rent, added, chosen
):
    offers = promised(0.0, [[0.1, 1.0], [0.1, 0.4]], rent=rent)
    offers["host"]["added"] = added
    offers["offers"]["fits"] = [[False, True], [False, True]]
    assert first_choice(ByRent(PAIR, limit=0.02), **offers) == chosen


def test_a_limit_that_is_no_score_is_refused():
    with pytest.raises(InvalidInputError, match="limit must be at least 0, got nan"):
        ByRent(PAIR, nan)


def test_planting_comes_before_keeping():
    earning = {"contribution": 1.0, "contribution_measured": True}
    seen = observed(SPEC, stage=[[Stage.HOLDING, 0, 0]], **earning)
    assert in_words(seen, torch.zeros(1, 3, KINDS))["op"] == "GERMINATE"
    assert in_words(seen)["op"] == "FOSSILIZE"


FORBIDDEN = ActionSpec(slots=SPEC.slots, narrowed={"op": ("WAIT", "ADVANCE")})
# The free slot fits nothing; what fits is in a filled one.
FITS_FILLED = torch.tensor([[False], [True], [False]])


@pytest.mark.parametrize(
    ("observation", "spec", "reason"),
    [
        (observed(SPEC), SPEC, "the controller chose to wait"),
        (observed(FORBIDDEN), FORBIDDEN, "this run does not allow planting"),
        (
            observed(SPEC, stage=[[4, 1, 4]]),
            SPEC,
            "no slot is free (1 training, 2 fossilized)",
        ),
        (observed(SPEC, offers={"fits": False}), SPEC, "nothing fits the free slots"),
        (
            observed(SPEC, stage=[[0, 4, 4]], offers={"fits": FITS_FILLED}),
            SPEC,
            "nothing fits the free slots",
        ),
        (
            observed(SPEC, host={"budget_left": 0.3}, offers={"parameters": 0.5}),
            SPEC,
            "no blueprint fits the budget left (0.3 x host): the smallest takes "
            "0.5 x host",
        ),
    ],
)
def test_the_reason_why_nothing_was_planted(observation, spec, reason):
    masks = compute_masks(observation, spec)
    assert explain_no_planting(observation, masks) == reason


@settings(max_examples=20)
@given(st.data())
def test_there_is_a_reason_exactly_when_nothing_can_be_planted(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    masks = compute_masks(observation, spec)
    chose = explain_no_planting(observation, masks) == "the controller chose to wait"
    assert chose == bool(masks.op[0, Op.GERMINATE])
