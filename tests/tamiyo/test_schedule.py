"""Schedules plant what is due at all places, each environment by its own plan."""

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from esper.contracts.actions import HEAD, HEADS, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import InvalidInputError
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.tamiyo.schedule import (
    DOUBLING,
    EARLY,
    ERROR,
    GAINS,
    LARGE_THEN_CUT,
    LARGEST,
    LEAST_ERROR,
    NARROW,
    PERIODIC,
    Schedule,
    Scheduled,
    ScheduledByRent,
)
from tests.rollouts import random_observation
from tests.tamiyo.decisions import decide, observed, play

RELATIVE = [known for known in BLUEPRINTS if known.share]
SPEC = ActionSpec(SlotConfig(max_slots=4), tuple(RELATIVE))
ONE_PLACE = ActionSpec(SlotConfig(max_slots=9), tuple(RELATIVE))
TWO_PLACES = [0.5, 1.0, 0.5, 1.0]
"""Depths of two places with two slots each, as the slots of a world lie."""


def at(progress=0.0, envs=1, spec=SPEC, *, compute=0.0, **given):
    host = {"progress": progress, "compute": compute}
    return observed(spec, envs, host=host, **given)


def named(action, spec=SPEC):
    return spec.blueprints[action[HEAD["blueprint"]]].name


def planting_times(plan, moments, **given):
    """Which of the moments see a planting in a host of one place."""
    episode = [at(spec=ONE_PLACE, **moment, **given) for moment in moments]
    taken = play(Scheduled(ONE_PLACE, plan), episode, ONE_PLACE)
    return (taken[:, 0, 0] == Op.GERMINATE).nonzero().flatten().tolist()


def shares(horizon=20):
    return [{"progress": step / horizon} for step in range(horizon)]


times = st.one_of(st.floats(0, 1), st.just(inf))
schedules = st.builds(
    Schedule,
    blueprint=st.sampled_from([LARGEST, *(known.name for known in RELATIVE)]),
    count=st.integers(0, 4),
    start=st.floats(0, 1),
    every=st.floats(0, 1),
    until=times,
    scale=st.sampled_from(["share", "octaves"]),
    cut=times,
    keep=st.integers(0, 2),
)


@settings(max_examples=15)
@given(st.lists(schedules, min_size=1, max_size=5), st.integers(0, 99))
def test_many_plans_in_one_table_are_followed_as_each_alone(plans, seed):
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
    ("plan", "due"),
    [
        (Schedule(count=0), []),
        (Schedule(count=1), [0]),
        (Schedule(count=3, start=0.25, every=0.2), [5, 9, 13]),
        (Schedule(count=3, start=0.25, every=0.0), [5, 6, 7]),
        (Schedule(count=9, start=0.7), [14, 16, 18]),
        (Schedule(count=9, start=0.7, until=0.9), [14, 16]),
        (EARLY, [0, 1]),
        (PERIODIC, [*range(2, 18, 2)]),
        (DOUBLING, []),
    ],
)
def test_seeds_are_planted_when_they_are_due_and_no_more_than_are_wanted(plan, due):
    assert planting_times(plan, shares()) == due


def test_octaves_count_compute_and_do_not_see_progress():
    """Twice as wide at 31 batches, then whenever compute has grown fourfold."""
    moments = [{"progress": 0.0, "compute": octave} for octave in range(20)]
    assert planting_times(DOUBLING, moments) == [*range(5, 17, 2)]
    ended = [moment | {"progress": 1.0} for moment in moments]
    assert planting_times(DOUBLING, ended) == [*range(5, 17, 2)]


def test_what_is_due_at_a_decision_is_planted_at_it_whatever_rounding_does():
    for parts in (3, 7, 10, 30):
        plan = Schedule(count=99, start=1 / parts, every=1 / parts)
        assert planting_times(plan, shares(5 * parts)) == [*range(5, 5 * parts, 5)]


def test_what_could_not_be_planted_is_made_up_for():
    plan = Schedule(count=2, start=0.1, every=0.1)
    episode = [
        at(0.2, stage=Stage.FOSSILIZED),
        *[at(0.3)] * 3,
        at(0.1, episode_start=True),
    ]
    assert play(Scheduled(SPEC, plan), episode, SPEC)[:, 0, 0].tolist() == [
        *(Op.WAIT, Op.GERMINATE, Op.GERMINATE, Op.WAIT),
        Op.GERMINATE,  # a new episode starts at none
    ]


def test_all_places_are_planted_before_the_next_growth_is_due():
    plan = Schedule(count=2, start=0.1, every=0.5)
    state, taken = None, []
    for progress in (0.1, 0.2, 0.3, 0.6, 0.7, 0.8):
        full = torch.tensor([[4 * (slot in taken) for slot in range(4)]])
        seen = at(progress, stage=full, depth=TWO_PLACES)
        actions, state = decide(Scheduled(SPEC, plan), seen, SPEC, state)
        if actions[0, 0] == Op.GERMINATE:
            taken.append(int(actions[0, HEAD["slot"]]))
        else:
            taken.append(None)
    assert taken == [0, 1, None, 2, 3, None]


def test_a_depth_that_is_not_known_is_a_place_of_its_own():
    actions, _ = decide(Scheduled(SPEC, EARLY), at(depth=nan), SPEC)
    assert actions[0, 0] == Op.GERMINATE


def test_a_seed_is_in_the_forward_pass_with_the_next_batch():
    (action,), _ = decide(Scheduled(SPEC, EARLY), at(), SPEC)
    assert named(action) == "widen_x2"
    for head, choice in (("tempo", "AT_ONCE"), ("alpha_target", "FULL")):
        assert [*HEADS[HEAD[head]].choices][action[HEAD[head]]] == choice


def test_a_blueprint_above_the_budget_waits_but_the_largest_becomes_smaller():
    offers = {"parameters": [0.25, 0.5, 1.0, 3.0]}
    host = {"progress": 0.0, "budget_left": 0.75}
    seen = observed(SPEC, 2, host=host, offers=offers)
    plans = [Schedule(), Schedule(blueprint=LARGEST)]
    (one, other), _ = decide(Scheduled(SPEC, plans), seen, SPEC)
    assert one[0] == Op.WAIT
    assert (other[0], named(other)) == (Op.GERMINATE, "widen_x1.5")


def test_a_cut_prunes_the_youngest_until_so_many_are_left_at_every_place():
    stages, pruned = [Stage.HOLDING] * 4, []
    for progress in (0.4, 0.5, 0.6, 0.7):
        seen = at(progress, stage=[stages], age=1, depth=TWO_PLACES, episode_start=True)
        (action,), _ = decide(Scheduled(SPEC, LARGE_THEN_CUT), seen, SPEC)
        pruned.append(int(action[1]) if action[0] == Op.PRUNE else None)
        if pruned[-1] is not None:
            stages[pruned[-1]] = Stage.DORMANT
    assert pruned == [None, 3, 2, None]


def test_what_was_cut_is_not_planted_again_where_seeds_are_missing():
    """The budget refused one of two; after the cut it has room for another."""
    plan = Schedule(blueprint="widen_x2", count=2, every=0.0, cut=0.5, keep=0)
    episode = [at(0.0), at(0.5, stage=[[Stage.HOLDING, 0, 0, 0]], age=1), at(0.6)]
    assert play(Scheduled(SPEC, plan), episode, SPEC)[:, 0, 0].tolist() == [
        *(Op.GERMINATE, Op.PRUNE, Op.WAIT)
    ]


@pytest.mark.parametrize(
    ("plan", "needs"),
    [
        (EARLY, False),
        (DOUBLING, False),
        (PERIODIC, True),
        (LARGE_THEN_CUT, True),
        (Schedule(count=1), False),
        (Schedule(count=2), True),
        (Schedule(count=1, until=0.5), True),
    ],
)
def test_schedules_say_whether_they_need_an_end(plan, needs):
    """Without one progress stays 0, so that nothing of a share comes due."""
    assert Scheduled(SPEC, plan).needs_end is needs


def test_a_seed_of_which_nothing_was_measured_is_not_kept_for_good():
    holds = at(0.9, stage=Stage.HOLDING, age=1)
    assert decide(Scheduled(SPEC, EARLY), holds, SPEC)[0][0, 0] == Op.WAIT
    earns = at(
        0.9, stage=Stage.HOLDING, age=1, contribution=1.0, contribution_measured=True
    )
    assert decide(Scheduled(SPEC, EARLY), earns, SPEC)[0][0, 0] == Op.FOSSILIZE


def worth_of_widening(rent, units, score, cost, budget):
    """The blueprint of the largest worth on a host of one layer, in plain Python."""
    best, most = None, 0.0
    for kind in SPEC.blueprints:
        gain = GAINS[kind.name] / (1 + (units / NARROW) ** 2)
        expected = ERROR[0] * max(1 - score, LEAST_ERROR) ** ERROR[1]
        size = kind.share * cost
        worth = gain - rent * size / expected
        if size <= budget and worth > most:
            best, most = kind.name, worth
    return best


def test_the_factor_is_worth_its_rent():
    hosts = [
        (rent, units, score, cost, budget)
        for rent in (0.0, 0.002, 0.01, 0.04)
        for units in (3.0, 8.0, 60.0)
        for score in (0.3, 0.9, 1.0)
        for cost, budget in ((0.9, 15.0), (0.4, 15.0), (0.9, 1.0))
    ]
    rent, units, score, cost, budget = torch.tensor(hosts).T
    shares = torch.tensor([kind.share for kind in ONE_PLACE.blueprints])
    seen = observed(
        ONE_PLACE,
        len(hosts),
        host={"rent": rent, "score": score, "progress": 0.1, "budget_left": budget},
        offers={"parameters": (cost[:, None] * shares)[:, None]},
        units=units[:, None],
    )
    actions, _ = decide(ScheduledByRent(ONE_PLACE), seen, ONE_PLACE)
    found = [named(a, ONE_PLACE) if a[0] == Op.GERMINATE else None for a in actions]
    assert found == [worth_of_widening(*host) for host in hosts]
    assert len({*found}) >= 4


def test_a_size_is_chosen_once_for_all_layers_after_two_decisions():
    offers = {"parameters": torch.tensor([0.12, 0.25, 0.5, 1.5])}
    more = {"offers": offers, "depth": TWO_PLACES, "units": 6.0}
    episode = [
        # By the last score alone, nothing would be worth its rent.
        observed(SPEC, host={"progress": p, "score": s, "rent": 0.02}, **more)
        for p, s in ((0.0, 0.3), (0.05, 0.3), (0.1, 0.3), (0.15, 1.0), (0.2, 1.0))
    ]
    taken = play(ScheduledByRent(SPEC), episode, SPEC)[:, 0]
    planted = taken[:, 0] == Op.GERMINATE
    assert planted.tolist() == [False, False, True, True, False]
    assert [named(action) for action in taken[planted]] == ["widen_x2"] * 2
    assert (taken[planted, HEAD["slot"]] % 2).tolist() == [0, 1]


def test_weights_between_growing_layers_are_paid_for():
    """Each layer alone costs 0.75, both together 1.5 + 0.5 (x2) or 4.5 + 4.5 (x4)."""
    offers = {"parameters": 0.75 * torch.tensor([0.25, 0.5, 1.0, 3.0])}
    for budget, name in ((9.1, "widen_x4"), (8.9, "widen_x2"), (2.1, "widen_x2")):
        host = {"progress": 0.1, "score": 0.5, "budget_left": budget}
        seen = observed(SPEC, host=host, offers=offers, depth=TWO_PLACES, units=6.0)
        assert named(decide(ScheduledByRent(SPEC), seen, SPEC)[0][0]) == name


def test_an_unknown_end_is_waited_for_up_to_a_rent():
    host = {
        "rent": [0.001, 0.02, 0.001],
        "compute": [8.0, 8.0, 4.0],
        "end_known": False,
    }
    actions, _ = decide(ScheduledByRent(SPEC), observed(SPEC, 3, host=host), SPEC)
    assert (actions[:, 0] == Op.GERMINATE).tolist() == [True, False, False]
    assert named(actions[0]) == "widen_x2"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Schedule(count=-1), "count must be a whole number .*, got -1"),
        (lambda: Schedule(keep=True), "keep must be a whole number .*, got True"),
        (lambda: Schedule(start=-0.1), "start must be at least 0, got -0.1"),
        (lambda: Schedule(every=nan), "every must be at least 0, got nan"),
        (lambda: Schedule(cut=-1.0), "cut must be at least 0"),
        (lambda: Schedule(scale="days"), "one of share, octaves, got 'days'"),
        (lambda: Scheduled(SPEC, []), "at least one schedule"),
        (
            lambda: Scheduled(SPEC, Schedule(blueprint="widen_9")),
            "no blueprint 'widen_9'",
        ),
        (
            lambda: decide(Scheduled(SPEC, [EARLY] * 2), at(0.0, 3), SPEC),
            "schedules for 2 environments, got 3",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(make, words):
    with pytest.raises(InvalidInputError, match=words):
        make()
