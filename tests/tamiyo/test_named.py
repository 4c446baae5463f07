"""Controllers by name: all are there, and all speak only legal sentences."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from esper.contracts.controller import Controller
from esper.contracts.errors import BadInput
from esper.tamiyo.controls import Early, Never, Periodic, Random
from esper.tamiyo.familiar import Familiar
from esper.tamiyo.heuristic import Plateau, PromiseGreedy
from esper.tamiyo.named import CONTROLLERS, NAMES, named
from esper.tamiyo.policy.action_masks import compute_masks
from tests.rollouts import SPEC, require_legal
from tests.strategies import action_specs, floats, observations


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("never", Never),
        ("random", Random),
        ("early", Early),
        ("periodic", Periodic),
        ("plateau", Plateau),
        ("promise", PromiseGreedy),
        ("tamiyo", Familiar),
    ],
)
def test_a_name_makes_its_controller(name, kind):
    controller = named(name, SPEC)
    assert type(controller) is kind
    assert isinstance(controller, Controller)


def test_there_are_no_others_and_only_tamiyo_learnt():
    assert [*NAMES] == [*CONTROLLERS, "tamiyo"]
    assert [*CONTROLLERS] == [
        "never",
        "random",
        "early",
        "periodic",
        "plateau",
        "promise",
    ]


def test_an_unknown_name_is_refused_with_the_nearest_one_and_the_list():
    with pytest.raises(BadInput, match=r"'erly'; did you mean 'early'\?.*never, ran"):
        named("erly", SPEC)
    with pytest.raises(BadInput, match="no controller ''"):
        named("", SPEC)
    with pytest.raises(BadInput, match=r"did you mean 'tamiyo'\?.*promise, tamiyo\."):
        named("tamyio", SPEC)


@settings(max_examples=40)
@given(st.data())
def test_every_sentence_of_every_controller_is_legal(data):
    spec = data.draw(action_specs())
    values = data.draw(st.sampled_from([None, floats()]))
    seen = data.draw(observations(spec, values=values))
    masks, generator = compute_masks(seen, spec), Generator().manual_seed(0)
    later = replace(seen, first=~seen.first)
    for name in CONTROLLERS:
        controller, state = named(name, spec), None
        for observation in (seen, later, seen):
            actions, state = controller.decide(observation, masks, state, generator)
            require_legal(observation, spec, actions)
