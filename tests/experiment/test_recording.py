"""A world's steps as rows."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from esper.contracts.state import load, save
from esper.environment.growing import GrowingWorld
from esper.environment.simulated import SimulatedWorld
from esper.experiment.recording import Recorder
from esper.experiment.storage.database import open_store
from esper.experiment.store import Store
from esper.experiment.streams import stream
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.rule_based import Random
from esper.tasks.catalogue import task

HORIZON, STEPS = 6, 14


def live_through(world, recorder, seen, chance, steps):
    controller = Random()
    for _ in range(steps):
        masks = compute_masks(seen, world.spec)
        actions, _ = controller.decide(seen, masks, None, chance)
        result = world.step(actions)
        report, illegal = getattr(world, "ended", None), getattr(world, "illegal", None)
        recorder.add(1, seen, actions, result, illegal=illegal, report=report)
        seen = result.observation
    return seen


@pytest.fixture
def recorded(tmp_path):
    """A real world of two hosts that was watched over two ends of an episode."""
    path = tmp_path / "events.sqlite"
    world = GrowingWorld(replace(task("teacher"), horizon=HORIZON), 2, rng_seed=1)
    with Store(path) as store:
        store.begin_attempt()
        recorder = Recorder(store, "teacher", world.spec, 2)
        live_through(world, recorder, world.reset(), stream(0, "test"), STEPS)
    with closing(open_store(path)) as db:
        yield db


def test_every_decision_of_every_environment_is_there_once(recorded):
    found = recorded.execute("SELECT step, env FROM steps ORDER BY step, env")
    expected = [(step, env) for step in range(1, STEPS + 1) for env in (0, 1)]
    assert found.fetchall() == expected


def test_the_rewards_of_an_episode_sum_to_its_return(recorded):
    found = recorded.execute(
        'SELECT e.env, e.episode, e.step, e."return", sum(s.reward) FROM episodes AS e '
        "JOIN steps AS s USING (env, episode) GROUP BY e.env, e.episode "
        "ORDER BY e.env, e.episode"
    ).fetchall()
    places = [row[:3] for row in found]
    assert places == [
        (0, 1, HORIZON),
        (0, 2, 2 * HORIZON),
        (1, 1, HORIZON),
        (1, 2, 2 * HORIZON),
    ]
    for *_, returned, total in found:
        assert returned == pytest.approx(total, abs=1e-6)


def test_reports_of_ended_episodes_are_stored(recorded):
    found = recorded.execute("SELECT test, macs, panicked FROM episodes").fetchall()
    assert all(0 < test <= 1 and macs >= 1 for test, macs, _ in found)
    assert {panicked for *_, panicked in found} == {0}


def test_every_event_belongs_to_the_episode_of_its_step(recorded):
    wrong = recorded.execute(
        "SELECT count(*), sum(s.episode <> e.episode) FROM events AS e "
        "JOIN steps AS s USING (env, step)"
    ).fetchone()
    assert wrong[0] > 5
    assert wrong[1] == 0


def test_every_seed_was_planted_by_a_blueprint_of_the_world(recorded):
    found = recorded.execute("SELECT DISTINCT blueprint FROM choices").fetchall()
    known = {"low_rank_4", "widen_8", "widen_16", "widen_32", "residual_mlp"}
    assert {name for (name,) in found} <= known
    assert found


def test_a_world_without_reports_leaves_their_figures_missing(tmp_path):
    path, world = tmp_path / "events.sqlite", SimulatedWorld(3)
    with Store(path) as store:
        store.begin_attempt()
        recorder = Recorder(store, "simulated", world.spec, 3)
        live_through(world, recorder, world.reset(), stream(0, "test"), 40)
    with closing(open_store(path)) as db:
        found = db.execute('SELECT "return", test, macs FROM episodes').fetchall()
    assert len(found) >= 3
    assert all(row[0] is not None and row[1:] == (None, None) for row in found)


def test_a_recorder_goes_on_counting_where_its_state_was_saved(tmp_path):
    with Store(tmp_path / "events.sqlite") as store:
        store.begin_attempt()
        world, chance = SimulatedWorld(3), stream(0, "test")
        one = Recorder(store, "simulated", world.spec, 3)
        live_through(world, one, world.reset(), chance, 21)
        other = Recorder(store, "simulated", world.spec, 3)
        load(other, save(one))
    assert other.step == 21
    assert torch.equal(other.episode, one.episode)
    assert torch.equal(other.returns, one.returns)
    assert int(one.episode.min()) > 1
