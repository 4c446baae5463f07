"""Schedules plant what they say when they say it, each environment by its own."""

from dataclasses import replace

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
from esper.environment.growing import GrowingWorld
from esper.environment.terms import Terms
from esper.tamiyo.controls import Early, Periodic
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.schedule import LARGEST, LEAN, Schedule, Scheduled, playable
from esper.tasks.catalogue import task
from tests.device_reads import count_device_reads
from tests.rollouts import SPEC, random_observation, require_legal
from tests.strategies import action_specs, observations
from tests.worlds import blank_observation

WIDE = ActionSpec(slots=SlotConfig(max_slots=4), blueprints=BLUEPRINTS[5:8])
NARROW = ActionSpec(slots=SlotConfig(max_slots=4), blueprints=BLUEPRINTS[5:7])


def timed(progress, *, first=False, spec=WIDE, envs=1, **slots):
    """Hosts at some point of their horizon, slots as given."""
    blank = blank_observation(envs, spec)
    host = replace(blank.host, progress=torch.full((envs,), progress))
    filled = {
        name: torch.as_tensor(value).expand_as(blank.slots.stage)
        for name, value in slots.items()
    }
    begins = torch.full((envs,), first)
    return replace(blank, host=host, slots=replace(blank.slots, **filled), first=begins)


def said_over(controller, episode, spec=WIDE):
    """All sentences, [decision][env]."""
    said, state = [], None
    for observation in episode:
        masks = compute_masks(observation, spec)
        actions, state = controller.decide(observation, masks, state, Generator())
        require_legal(observation, spec, actions)
        said.append(actions.tolist())
    return said


def planting_times(schedule, horizon=20, spec=WIDE):
    episode = [timed(step / horizon, spec=spec) for step in range(horizon)]
    said = said_over(Scheduled(spec, schedule), episode, spec)
    return [step for step, (row,) in enumerate(said) if row[0] == Op.GERMINATE]


@pytest.fixture(scope="module")
def world():
    """Hosts whose seeds must earn: some are pruned, and budgets run out."""
    return GrowingWorld(
        replace(task("digits"), horizon=20, decision_every=2),
        4,
        rng_seed=3,
        blueprints=("widen_8", "widen_16", "widen_32"),
        terms=Terms(rent=(0.0, 0.2), budget=(0.5, 4.0)),
        measure_every=2,
    )


EARLY = Schedule(count=32, every=0.0, until=0.3)
PERIODIC = Schedule(count=32, start=0.1, every=0.1)


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (Early, EARLY),
        (
            lambda spec: Early(spec, 0.6, blueprint="widen_16", patience=1),
            replace(EARLY, until=0.6, blueprint="widen_16", patience=1),
        ),
        (Periodic, PERIODIC),
        (
            lambda spec: Periodic(spec, 0.2, blueprint="widen_8", patience=3),
            Schedule(count=32, start=0.2, every=0.2, blueprint="widen_8", patience=3),
        ),
    ],
    ids=["early", "early, another", "periodic", "periodic, another"],
)
def test_early_and_periodic_are_schedules(world, make, schedule):
    one, other = make(world.spec), Scheduled(world.spec, schedule)
    observation, mine, theirs, plants = world.reset(), None, None, 0
    for _ in range(25):
        masks = compute_masks(observation, world.spec)
        expected, mine = one.decide(observation, masks, mine, Generator())
        actions, theirs = other.decide(observation, masks, theirs, Generator())
        assert torch.equal(actions, expected)
        plants += int((actions[:, 0] == Op.GERMINATE).sum())
        observation = world.step(actions).observation
    assert plants > 4


schedules = st.builds(
    Schedule,
    blueprint=st.sampled_from(["widen_8", "widen_16", LARGEST, "low_rank_4"]),
    count=st.integers(0, 4),
    start=st.floats(0, 1),
    every=st.floats(0, 1),
    until=st.floats(0, 1),
    patience=st.integers(0, 4),
    place=st.sampled_from([*LEAN]),
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
        masks = compute_masks(observation, SPEC)
        actions, state = together.decide(observation, masks, state, generator)
        for env, controller in enumerate(alone):
            own, states[env] = controller.decide(
                observation, masks, states[env], generator
            )
            assert torch.equal(own[env], actions[env])


@settings(max_examples=30)
@given(st.data())
def test_every_sentence_is_legal(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    names = [blueprint.name for blueprint in spec.blueprints]
    plan = replace(data.draw(schedules), blueprint=data.draw(st.sampled_from(names)))
    masks = compute_masks(observation, spec)
    actions, _ = Scheduled(spec, plan).decide(observation, masks, None, Generator())
    require_legal(observation, spec, actions)


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
    assert planting_times(schedule) == times


def test_what_is_due_at_a_decision_is_planted_at_it_whatever_rounding_does():
    for parts in (3, 7, 10, 30):
        plan = Schedule(count=99, start=1 / parts, every=1 / parts)
        steps = [*range(5, 5 * parts, 5)]
        assert planting_times(plan, horizon=5 * parts) == steps


def test_what_could_not_be_planted_is_made_up_for_and_a_new_episode_starts_at_none():
    plan = Schedule(count=2, start=0.1, every=0.1)
    full = {"stage": Stage.FOSSILIZED}
    episode = [timed(0.2, **full), *[timed(0.3)] * 3, timed(0.1, first=True)]
    said = said_over(Scheduled(WIDE, plan), episode)
    assert [row[0][0] for row in said] == [0, 1, 1, 0, 1]


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
    controller = Scheduled(spec, Schedule(blueprint=blueprint))
    ((sentence,),) = said_over(controller, [timed(0.0, spec=spec)], spec)
    assert spec.blueprints[sentence[HEAD["blueprint"]]].name == planted


def test_a_blueprint_that_cannot_be_paid_for_waits_but_the_largest_becomes_smaller():
    observation = timed(0.0, envs=2)
    size = torch.tensor([0.5, 1.0, 2.0]).expand(2, 4, 3)
    observation = replace(
        observation,
        host=replace(observation.host, budget_left=torch.full((2,), 1.5)),
        offers=replace(observation.offers, parameters=size),
    )
    plans = [Schedule(blueprint="widen_32"), Schedule()]
    ((one, other),) = said_over(Scheduled(WIDE, plans), [observation])
    assert one[0] == Op.WAIT
    assert other[:3] == [Op.GERMINATE, 0, 1]


def test_a_blueprint_that_has_nothing_below_it_is_refused():
    assert playable(NARROW, "conv") is None
    for blueprint in ("conv", "widen_9"):
        with pytest.raises(BadInput, match=f"no blueprint '{blueprint}' and no small"):
            Scheduled(NARROW, Schedule(blueprint=blueprint))


@pytest.mark.parametrize(
    ("place", "taken"),
    [("spread", [0, 1, 2, 3]), ("first", [0, 2, 1, 3]), ("last", [1, 3, 0, 2])],
)
def test_free_slots_are_taken_in_the_order_of_the_place(place, taken):
    """Two places with two slots each, as the slots of a world lie."""
    controller, state, slots = (
        Scheduled(WIDE, Schedule(every=0.0, place=place)),
        None,
        [],
    )
    for _ in range(4):
        stage = torch.tensor([[4 * (slot in slots) for slot in range(4)]])
        depth = torch.tensor([[0.5, 1.0, 0.5, 1.0]])
        observation = timed(0.0, stage=stage, depth=depth)
        masks = compute_masks(observation, WIDE)
        actions, state = controller.decide(observation, masks, state, Generator())
        slots.append(int(actions[0, HEAD["slot"]]))
    assert slots == taken


def test_seeds_that_do_not_earn_are_removed_only_by_schedules_that_prune():
    useless = timed(
        0.5,
        envs=2,
        stage=Stage.HOLDING,
        age=1,
        contribution=-1.0,
        contribution_measured=torch.tensor(True),
    )
    plans = [Schedule(prune=True), Schedule(prune=False)]
    ((one, other),) = said_over(Scheduled(WIDE, plans), [useless])
    assert (one[0], other[0]) == (Op.PRUNE, Op.FOSSILIZE)


def test_seeds_train_as_long_as_each_schedule_says():
    growing = timed(0.5, envs=2, stage=Stage.TRAINING, age=2)
    plans = [Schedule(patience=2), Schedule(patience=3)]
    ((one, other),) = said_over(Scheduled(WIDE, plans), [growing])
    assert (one[0], other[0]) == (Op.ADVANCE, Op.WAIT)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"count": -1}, "count must be a whole number from 0, got -1"),
        ({"patience": True}, "patience must be a whole number"),
        ({"start": 1.1}, r"start must be a share in \[0, 1\], got 1.1"),
        ({"every": float("nan")}, "every must be a share"),
        ({"until": -0.1}, "until must be a share"),
        ({"place": "middle"}, "place must be one of first, spread, last; got 'mid"),
    ],
)
def test_what_cannot_be_played_is_refused(wrong, words):
    with pytest.raises(BadInput, match=words):
        Schedule(**wrong)


def test_as_many_schedules_as_environments_are_needed_or_one():
    with pytest.raises(BadInput, match="schedules for 2 environments, got 3"):
        said_over(Scheduled(WIDE, [Schedule()] * 2), [timed(0.0, envs=3)])
    with pytest.raises(BadInput, match="at least one schedule"):
        Scheduled(WIDE, [])


def test_nothing_is_read_from_the_device():
    controller, state = Scheduled(SPEC, Schedule()), torch.zeros(8).long()
    observation = random_observation(8, SPEC, Generator().manual_seed(0))
    masks = compute_masks(observation, SPEC)

    def decide():
        controller.decide(observation, masks, state, Generator())

    assert count_device_reads(decide) == 0
