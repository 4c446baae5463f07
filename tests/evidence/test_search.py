"""Random search finds the best schedule that it drew, whatever hosts differ in."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.environment.growing import GrowingWorld
from esper.environment.settings import WorldSettings
from esper.experiment.presets import preset
from esper.experiment.rollout import play
from esper.experiment.streams import stream_seed
from esper.tamiyo.rule_based import Never
from esper.tamiyo.schedule import (
    STANDARD,
    Schedule,
    Scheduled,
    draw_schedules,
)
from esper.tasks.catalogue import task
from evidence.execution import _WorldFactory
from evidence.search import as_json, from_json, search
from tests.worlds import ProbeWorld

WIDE = ActionSpec(slots=SlotConfig(max_slots=2), blueprints=BLUEPRINTS[5:8])
NARROW = ActionSpec(slots=SlotConfig(max_slots=2), blueprints=BLUEPRINTS[5:7])
LENGTH, ENVS = 6, 4


def schedule_rng(rng_seed):
    """The stream from which `search` draws its schedules."""
    return np.random.default_rng(stream_seed(rng_seed, "schedules"))


def late_and_small(time, bit, actions):
    """Hosts differ by hundreds; seeds cost, and small ones in the middle pay."""
    plants = actions[:, HEAD["op"]] == Op.GERMINATE
    small = actions[:, HEAD["blueprint"]] == 0
    gain = torch.where((time >= 2) & (time <= 4) & small, 0.3, -0.1)
    return 300.0 * bit + torch.where(plants, gain, 0.0)


def worlds(rng_seed, specs=(WIDE, NARROW), pay=late_and_small):
    return [
        ProbeWorld(ENVS, pay, length=LENGTH, rng_seed=rng_seed + number, spec=spec)
        for number, spec in enumerate(specs)
    ]


def worth(schedule):
    """What a schedule earns over a host that nothing is planted in."""
    world, other = worlds(0)[0], worlds(0)[0]
    grown = play(world, Scheduled(WIDE, schedule), Generator())
    return float((grown - play(other, Never(), Generator())).mean())


def test_the_best_of_all_that_were_drawn_is_found_though_hosts_differ_more():
    found = search(worlds, 1_700, rng_seed=1)
    drawn = draw_schedules(found.tried, (WIDE, NARROW), schedule_rng(1))
    values = [worth(schedule) for schedule in drawn]
    assert found.tried > 12
    assert worth(found.schedule) == max(values) > 0.5
    assert found.schedule.blueprint == "widen_8"


def test_no_more_steps_are_spent_than_allowed_and_all_are_counted():
    steps = []

    def counted(rng_seed):
        made = worlds(rng_seed)
        steps.append(sum(world.num_envs for world in made) * LENGTH)
        return made

    found = search(counted, 600, 0)
    assert found.env_steps == sum(steps) <= 600
    assert found.env_steps > 400


def test_the_value_is_the_mean_return_over_hosts_and_worlds():
    def paid(time, bit, actions):
        return 0.1 + late_and_small(time, 0 * bit, actions)

    found = search(lambda seed: worlds(seed, pay=paid), 400, 0)
    assert found.value == pytest.approx(0.6 + worth(found.schedule), abs=1e-4)


def test_never_early_and_periodic_are_always_among_those_that_are_tried():
    assert draw_schedules(9, (WIDE,), schedule_rng(5))[:3] == [*STANDARD]

    def barren(time, bit, actions):
        return -1.0 * (actions[:, HEAD["op"]] == Op.GERMINATE)

    found = search(lambda seed: worlds(seed, pay=barren), 400, 0)
    assert found.schedule == Schedule(count=0)


def test_schedules_are_drawn_over_the_whole_range_and_can_be_played_everywhere():
    drawn = draw_schedules(300, (WIDE, NARROW), schedule_rng(0))[3:]
    for spec in (WIDE, NARROW):
        Scheduled(spec, drawn)
    assert {plan.blueprint for plan in drawn} == {
        "widen_8",
        "widen_16",
        "widen_32",
        "largest",
    }
    assert {plan.count for plan in drawn} == {*range(1, 9)}
    assert {plan.patience for plan in drawn} == {1, 2, 3, 4}
    assert {plan.place for plan in drawn} == {"first", "spread", "last"}
    assert np.ptp([plan.start for plan in drawn]) > 0.45
    assert np.ptp([np.log(plan.every) for plan in drawn]) > 3.0
    assert draw_schedules(50, (NARROW, WIDE), schedule_rng(0)) != drawn[:50]


def test_a_search_repeats_is_read_as_written_and_needs_some_steps():
    found = search(worlds, 192, 0)
    assert found.tried == 3
    assert found == search(worlds, 192, 0) == from_json(as_json(found))
    assert isinstance(from_json(as_json(found))(NARROW), Scheduled)
    with pytest.raises(BadInput, match="env_steps must be at least 192 here, got 191"):
        search(worlds, 191, 0)


def test_real_hosts_are_searched():
    few = replace(task("digits"), horizon=4, decision_every=2)

    def real(rng_seed):
        settings = WorldSettings(blueprints=("widen_8", "widen_16"))
        return [GrowingWorld(few, 2, rng_seed, settings=settings)]

    found = search(real, 80, 0)
    assert np.isfinite(found.value)
    assert (found.tried, found.env_steps) == (5, 80)


def test_search_and_bandit_meet_no_host_twice():
    made = _WorldFactory(replace(preset("family"), variants=2))(3)
    for world in made:
        rents = world.reset().host.rent.tolist()
        assert len(set(rents)) == len(rents)
