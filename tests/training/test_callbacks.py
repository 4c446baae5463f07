"""Rows of steps in the store, and figures for TensorBoard."""

from contextlib import closing
from csv import DictReader
from dataclasses import replace
from math import nan
from types import SimpleNamespace

import pytest

from esper.environment.growing import GrowingWorld
from esper.environment.mixture import Mixture
from esper.environment.settings import OFFERED
from esper.runs.database import open_store
from esper.runs.store import Store
from esper.runs.train_config import Budget, TrainConfig
from esper.tasks.catalogue import task
from esper.testing.simulated import SimulatedWorld
from esper.training.callbacks import Log, Record, scalars
from esper.training.controller_ppo import controller_loop
from tests.runs.stores import record

HORIZON, STEPS = 6, 7
TASKS = ("teacher", "digits")


def recorded_by(path, world, tasks, rounds=2):
    """The store of a training of some rounds."""
    with Store(path) as store:
        store.begin_attempt()
        config = TrainConfig(budget=Budget(rounds=rounds))
        controller_loop(world, config, STEPS, [Record(store, tasks)]).run()
    return closing(open_store(path))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two tasks of two hosts each over two ends of their episodes."""
    worlds = [
        GrowingWorld(replace(task(name), horizon=HORIZON), 2, rng_seed=1)
        for name in TASKS
    ]
    path = tmp_path_factory.mktemp("store") / "events.sqlite"
    with recorded_by(path, Mixture.of(worlds), TASKS) as db:
        yield db


def test_every_decision_of_every_environment_is_there_once(recorded):
    found = recorded.execute("SELECT step, task, env FROM steps").fetchall()
    expected = {
        (step, name, env)
        for step in range(1, 2 * STEPS + 1)
        for name in TASKS
        for env in (0, 1)
    }
    assert {*found} == expected
    assert len(found) == len(expected)


def test_the_rewards_of_an_episode_sum_to_its_return(recorded):
    found = recorded.execute(
        'SELECT e.task, e.env, e.episode, e.step, e."return", sum(s.reward), e.test, '
        "e.macs, e.panicked FROM episodes AS e JOIN steps AS s "
        "USING (task, env, episode) GROUP BY e.task, e.env, e.episode"
    ).fetchall()
    assert {row[:4] for row in found} == {
        (name, env, episode, episode * HORIZON)
        for name in TASKS
        for env in (0, 1)
        for episode in (1, 2)
    }
    for *_, returned, total, test, macs, panicked in found:
        assert returned == pytest.approx(total, abs=1e-6)
        assert 0 < test <= 1
        assert macs >= 1
        assert panicked == 0


def test_every_event_belongs_to_the_episode_of_its_step(recorded):
    count, wrong = recorded.execute(
        "SELECT count(*), sum(s.episode <> e.episode) FROM events AS e "
        "JOIN steps AS s USING (task, env, step)"
    ).fetchone()
    assert count > 5
    assert wrong == 0
    found = recorded.execute("SELECT DISTINCT blueprint FROM choices").fetchall()
    assert {name for (name,) in found} <= {*OFFERED}
    assert found


def test_a_world_without_networks_leaves_their_figures_missing(tmp_path):
    world = SimulatedWorld(4)
    with recorded_by(tmp_path / "events.sqlite", world, ["simulated"], 6) as db:
        found = db.execute('SELECT "return", test, macs FROM episodes').fetchall()
    assert len(found) >= 3
    assert all(row[0] is not None and row[1:] == (None, None) for row in found)


def test_figures_have_names_and_what_is_not_known_is_left_out():
    named = dict(scalars(record(2)))
    assert named["round/mean_return"] == pytest.approx(0.2)
    assert named["update/value_loss"] == 0.4
    assert named["entropy/op"] == 0.5
    assert named["kl/blueprint"] == 0.02
    named = dict(scalars(record(2, kl=nan, stopped_at=None)))
    assert named.keys().isdisjoint({"update/kl", "update/stopped_at"})


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, second = (
        Log(["tensorboard", "csv"], "run", tmp_path, TrainConfig()) for _ in "12"
    )
    first.on_train_start(SimpleNamespace(env_steps=0), resumed=False)
    for number in (1, 2, 3):
        first.on_round_end(None, record(number))
    first.on_close()
    second.on_train_start(SimpleNamespace(env_steps=8), resumed=True)
    second.on_close()
    folder = str(tmp_path / "tensorboard")
    found = EventAccumulator(folder).Reload().Scalars("round/mean_return")
    points = [(point.step, round(point.value, 3)) for point in found]
    assert points == [(4, 0.1), (8, 0.2)]
    with (tmp_path / "progress.csv").open() as file:
        rows = [
            (row["step"], float(row["round/mean_return"])) for row in DictReader(file)
        ]
    assert rows == [("4", 0.1), ("8", 0.2)]
