"""Schedules plant what is due, each environment by its own plan."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.tamiyo.schedule import (
    EARLY,
    LARGEST,
    PERIODIC,
    PLACES,
    Schedule,
    Scheduled,
    playable,
)
from tests.rollouts import SPEC, random_observation
from tests.tamiyo.decisions import decide, observed, play

WIDE = ActionSpec(slots=SlotConfig(max_slots=4), blueprints=BLUEPRINTS[5:8])
NARROW = ActionSpec(slots=SlotConfig(max_slots=4), blueprints=BLUEPRINTS[5:7])


def at(progress, envs=1, spec=WIDE, **given):
    """Hosts at some share of their horizon."""
    return observed(spec, envs, host={"progress": progress}, **given)


def first_actions(plans, observation, spec=WIDE):
    return decide(Scheduled(spec, plans), observation, spec)[0].tolist()


def planting_times(controller, horizon=20):
    taken = play(controller, [at(step / horizon) for step in range(horizon)], WIDE)
    return (taken[:, 0, 0] == Op.GERMINATE).nonzero().flatten().tolist()


schedules = st.builds(
    Schedule,
    blueprint=st.sampled_from(["widen_8", "widen_16", LARGEST, "low_rank_4"]),
    count=st.integers(0, 4),
    start=st.floats(0, 1),
    every=st.floats(0, 1),
    until=st.floats(0, 1),
    patience=st.integers(0, 4),
    place=st.sampled_from([*PLACES]),
    prune=st.booleans(),
)


@settings(max_examples=15)
@given(st.lists(schedules, min_size=1, max_size=5), st.integers(0, 99))
def test_every_environment_follows_its_own_schedule_as_if_it_were_alone(plans, seed):
    generator, state = Generator().manual_seed(seed), None
    together, alone = Scheduled(SPEC, plans), [Scheduled(SPEC, p) for p in plans]
    states = [None] * len(plans)
    for _ in range(4):
        observation = random_observation(len(plans), SPEC, generator)
        actions, state = decide(together, observation, SPEC, state)
        for env, controller in enumerate(alone):
            own, states[env] = decide(controller, observation, SPEC, states[env])
            assert torch.equal(own[env], actions[env])


@pytest.mark.parametrize(
    ("schedule", "times"),
    [
        (Schedule(count=0), []),
        (Schedule(count=3, start=0.25, every=0.2), [5, 9, 13]),
        (Schedule(count=3, start=0.25, every=0.0), [5, 6, 7]),
        (Schedule(count=9, start=0.7, every=0.1), [14, 16, 18]),
        (Schedule(count=9, start=0.7, every=0.1, until=0.9), [14, 16]),
        (Schedule(count=1), [0]),
    ],
)
def test_seeds_are_planted_when_they_are_due_and_no_more_than_are_wanted(
    schedule, times
):
    assert planting_times(Scheduled(WIDE, schedule)) == times


def test_early_and_periodic_plant_without_limit():
    assert planting_times(Scheduled(WIDE, EARLY), horizon=200) == [*range(60)]
    assert planting_times(Scheduled(WIDE, PERIODIC)) == [*range(2, 20, 2)]


def test_what_is_due_at_a_decision_is_planted_at_it_whatever_rounding_does():
    for parts in (3, 7, 10, 30):
        plan = Schedule(count=99, start=1 / parts, every=1 / parts)
        steps = [*range(5, 5 * parts, 5)]
        assert planting_times(Scheduled(WIDE, plan), horizon=5 * parts) == steps


def test_what_could_not_be_planted_is_made_up_for():
    plan = Schedule(count=2, start=0.1, every=0.1)
    episode = [at(0.2, stage=Stage.FOSSILIZED), *[at(0.3)] * 3, at(0.1, first=True)]
    assert play(Scheduled(WIDE, plan), episode, WIDE)[:, 0, 0].tolist() == [
        *(0, 1, 1, 0),
        1,  # a new episode starts at none
    ]


@pytest.mark.parametrize(
    ("blueprint", "spec", "planted"),
    [
        ("widen_8", WIDE, "widen_8"),
        ("widen_32", WIDE, "widen_32"),
        ("widen_32", NARROW, "widen_16"),
        (LARGEST, WIDE, "widen_32"),
        (LARGEST, NARROW, "widen_16"),
    ],
)
def test_the_blueprint_is_planted_or_the_largest_widening_below_it(
    blueprint, spec, planted
):
    plan = Schedule(blueprint=blueprint)
    (action,) = first_actions(plan, at(0.0, spec=spec), spec)
    assert spec.blueprints[action[HEAD["blueprint"]]].name == planted


def test_a_blueprint_above_the_budget_waits_but_the_largest_becomes_smaller():
    host = {"progress": 0.0, "budget_left": 1.5}
    seen = observed(WIDE, 2, host=host, offers={"parameters": [0.5, 1.0, 2.0]})
    one, other = first_actions([Schedule(blueprint="widen_32"), Schedule()], seen)
    assert one[0] == Op.WAIT
    assert other[:3] == [Op.GERMINATE, 0, 1]


def test_a_blueprint_that_has_nothing_below_it_is_refused():
    assert playable(NARROW, "conv") is None
    for blueprint in ("conv", "widen_9"):
        with pytest.raises(
            BadInput, match=f"is the blueprint '{blueprint}'; did you mean"
        ):
            Scheduled(NARROW, Schedule(blueprint=blueprint))


@pytest.mark.parametrize(
    ("place", "taken"),
    [("spread", [0, 1, 2, 3]), ("first", [0, 2, 1, 3]), ("last", [1, 3, 0, 2])],
)
def test_free_slots_are_taken_in_the_order_of_the_place(place, taken):
    """Two places with two slots each, as the slots of a world lie."""
    plan = Schedule(every=0.0, place=place)
    state, slots = None, []
    for _ in range(4):
        stage = torch.tensor([[4 * (slot in slots) for slot in range(4)]])
        seen = at(0.0, stage=stage, depth=[0.5, 1.0, 0.5, 1.0])
        actions, state = decide(Scheduled(WIDE, plan), seen, WIDE, state)
        slots.append(int(actions[0, HEAD["slot"]]))
    assert slots == taken


def test_each_schedule_has_its_own_pruning_and_patience():
    useless = at(
        0.5,
        2,
        stage=Stage.HOLDING,
        age=1,
        contribution=-1.0,
        contribution_measured=True,
    )
    one, other = first_actions([Schedule(), Schedule(prune=False)], useless)
    assert (one[0], other[0]) == (Op.PRUNE, Op.FOSSILIZE)
    growing = at(0.5, 2, stage=Stage.TRAINING, age=2)
    plans = [Schedule(patience=2), Schedule(patience=3)]
    one, other = first_actions(plans, growing)
    assert (one[0], other[0]) == (Op.ADVANCE, Op.WAIT)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Schedule(count=-1), "count must be a whole number from 0, got -1"),
        (lambda: Schedule(patience=True), "patience must be a whole number"),
        (lambda: Schedule(start=1.1), r"start must be a share in \[0, 1\], got 1.1"),
        (lambda: Schedule(every=float("nan")), "every must be a share"),
        (lambda: Schedule(until=-0.1), "until must be a share"),
        (lambda: Schedule(place="middle"), "one of first, spread, last; got 'mid"),
        (lambda: Scheduled(WIDE, []), "at least one schedule"),
        (
            lambda: first_actions([Schedule()] * 2, at(0.0, 3)),
            "schedules for 2 environments, got 3",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(make, words):
    with pytest.raises(BadInput, match=words):
        make()
