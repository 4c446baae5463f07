"""What holds of every controller: legal actions, no device reads, a name."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from esper.contracts.errors import InvalidInputError
from esper.contracts.world import Controller
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.registry import CONTROLLERS, NAMES, controller_for, make_controller
from esper.tamiyo.restricted import Restricted
from esper.tamiyo.rule_based import ByRent, Never, Plateau, Random
from esper.tamiyo.schedule import Schedule, Scheduled, ScheduledByRent
from research.learning import PromiseGreedy
from tests.device_reads import count_device_reads
from tests.rollouts import SPEC, random_observation
from tests.strategies import action_specs, floats, observations
from tests.tamiyo.decisions import decide


def schedules(spec):
    names = [blueprint.name for blueprint in spec.blueprints]
    return [
        Schedule(blueprint="largest"),
        Schedule(blueprint=names[0], count=0),
        Schedule(blueprint=names[0], every=0.0, scale="octaves"),
        Schedule(blueprint=names[-1], every=0.0, cut=0.1, keep=1),
    ]


def by_name(name):
    return lambda spec, envs: CONTROLLERS[name](spec)


MAKERS = {
    **{name: by_name(name) for name in CONTROLLERS},
    "promise": lambda spec, envs: PromiseGreedy(),
    "scheduled": lambda spec, envs: Scheduled(spec, (schedules(spec) * envs)[:envs]),
}


@settings(max_examples=20)
@given(st.data())
def test_every_action_is_legal(data):
    spec = data.draw(action_specs())
    values = data.draw(st.sampled_from([None, floats()]))
    seen = data.draw(observations(spec, values=values))
    later, generator = (
        replace(seen, episode_start=~seen.episode_start),
        Generator().manual_seed(0),
    )
    for make in MAKERS.values():
        controller, state = make(spec, len(seen.episode_start)), None
        assert isinstance(controller, Controller)
        for observation in (seen, later, seen):
            _, state = decide(controller, observation, spec, state, generator)


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_read_from_the_device(name):
    controller, generator = MAKERS[name](SPEC, 8), Generator().manual_seed(0)
    seen = random_observation(8, SPEC, generator)
    masks = compute_masks(seen, SPEC)
    _, state = controller.decide(seen, masks, None, generator)
    reads = count_device_reads(lambda: controller.decide(seen, masks, state, generator))
    assert reads == 0


def test_names_make_their_controllers():
    kinds = {
        "never": Never,
        "random": Random,
        "early": Scheduled,
        "periodic": Scheduled,
        "doubling": Scheduled,
        "large-then-cut": Scheduled,
        "plateau": Plateau,
        "by-rent": ByRent,
        "timetable-by-rent": ScheduledByRent,
        "tamiyo": Restricted,
    }
    assert [*NAMES] == [*CONTROLLERS, "tamiyo"] == [*kinds]
    for name, kind in kinds.items():
        assert type(make_controller(name, SPEC)) is kind


def test_a_controller_is_given_as_itself_its_class_or_its_name():
    controller = Never()
    assert controller_for(controller, SPEC) is controller
    assert type(controller_for(Plateau, SPEC)) is Plateau
    assert type(controller_for(lambda spec: Never(), SPEC)) is Never
    assert type(controller_for("random", SPEC)) is Random


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("erly", "'erly'; did you mean 'early'"),
        ("", "no controller ''"),
        ("tamyio", "'tamiyo'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, match):
    with pytest.raises(InvalidInputError, match=match):
        make_controller(name, SPEC)
