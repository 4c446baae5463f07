"""Data that a report reads from the folder and store of a run."""

import shutil
import sqlite3

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from esper.contracts.errors import InvalidInputError
from esper.evaluation.summary import summarise
from esper.report.data import MAX_BINS, SHOWN_ENVS, read_run
from esper.report.plots import swimlanes
from esper.report.style import plot_style
from esper.runs.run import Run
from esper.runs.store import Store
from tests.report.runs import BLUEPRINTS, STEPS, TASKS, config, make_run, play
from tests.runs.stores import ask, record


def test_figures_of_rounds_heads_and_episodes(reported):
    run = read_run(reported)
    assert (run.name, run.state, run.tasks) == ("fern", "finished", TASKS)
    assert (run.last_round, run.env_steps, run.seconds) == (6, 24, 6.0)
    assert_allclose(run.rounds["round"], [1, 2, 3, 4, 5, 6])
    assert_allclose(run.rounds["clip_fraction"], [0.1] * 6)
    assert_allclose(run.heads["blueprint"]["kl"], [0.02] * 6)
    # Two environments, of which one has 0.2 more.
    columns = run.returns["digits"]
    assert_allclose(columns["return"], 0.1 * np.arange(1, 7) + 0.1, rtol=1e-6)
    assert_allclose(columns["added"], 0.1 * np.arange(1, 7), rtol=1e-6)
    # 2 tasks x 3 seeds in each round, which the record counts as 4 decisions.
    assert_allclose(run.actions["planted"], [150.0] * 6)
    assert_allclose(run.actions["kept"], [50.0] * 6)
    assert_allclose(run.actions["aimed"], [0.0] * 6)


def test_spans_are_those_of_the_view_counted_from_the_start_of_the_episode(reported):
    episodes = read_run(reported).last_episodes["letter"]
    assert episodes.lengths == {0: STEPS, 1: STEPS}
    found = [*episodes.spans]
    assert [(*row[:2], *row[3:]) for row in found] == [
        (0, 0, "small", "TRAINING", 1, 2),
        (0, 0, "small", "BLENDING", 2, 3),
        (0, 0, "small", "HOLDING", 3, 4),
        (0, 0, "small", "FOSSILIZED", 4, 5),
        (0, 1, "large", "TRAINING", 1, 3),
        (1, 1, "large", "TRAINING", 2, 5),
    ]
    last = 6
    view = ask(
        reported / "events.sqlite",
        "SELECT env, slot, seed, blueprint, stage, from_step, to_step FROM seed_lives "
        f"WHERE task = 'letter' AND episode = {last} ORDER BY env, slot, from_step",
    )
    start = (last - 1) * STEPS
    assert found == [(*row[:5], row[5] - start, row[6] - start) for row in view]


def test_seeds_of_earlier_episodes_are_left_out(tmp_path):
    path = make_run(tmp_path, blueprints=("old", "older"), rounds=2, arms=())
    with Store(path / "events.sqlite", Run.read(path).id) as store:
        store.begin_attempt(2)
        play(store, ("letter",), ("new", "newer"), [3])
    episodes = read_run(path).last_episodes
    assert {span.blueprint for span in episodes["letter"].spans} == {"new", "newer"}
    assert {span.blueprint for span in episodes["digits"].spans} == {"old", "older"}


def test_seed_counts_add_up_to_those_of_the_view(reported):
    for task, counts in read_run(reported).seed_counts.items():
        view = dict(
            ask(
                reported / "events.sqlite",
                "SELECT became, count(*) FROM choices "
                f"WHERE task = '{task}' GROUP BY 1",
            )
        )
        assert view == {"kept": 6, "pruned": 6, "neither": 6}
        assert sum(count.kept for count in counts) == view["kept"]
        assert sum(count.pruned for count in counts) == view["pruned"]
        planted = dict.fromkeys(("early", "middle", "late"), 0)
        for count in counts:
            planted[count.third] += count.planted
        assert planted == {"early": 6, "middle": 6, "late": 6}


def test_rounds_that_no_longer_count_are_left_out(tmp_path):
    path = make_run(tmp_path, rounds=6, arms=(), finished=False)
    with Store(path / "events.sqlite", Run.read(path).id) as store:
        store.begin_attempt(2)
        play(store, TASKS, BLUEPRINTS, [3])
    run = read_run(path)
    assert (run.last_round, run.state) == (3, "stopped")
    assert_allclose(run.actions["planted"], [150.0] * 3)
    assert [attempt["last_round"] for attempt in run.attempts] == [2, None]
    assert run.attempts[1]["resumed_after"] == 2
    assert run.last_episodes["letter"].spans[0].start == 1


def test_very_many_rounds_come_in_bins_that_lose_nothing(tmp_path):
    rounds = MAX_BINS + 100
    with Run.create(tmp_path, "long", config(), {}) as run:
        with Store(run.path / "events.sqlite", run.id) as store:
            store.begin_attempt()
            for number in range(1, rounds + 1):
                store.add_round(record(number, refused=1))
        data = read_run(run.path)
        assert data.state == "running"
    at = data.rounds["round"]
    assert MAX_BINS / 2 < len(at) <= MAX_BINS < rounds
    assert (np.diff(at) > 0).all()
    assert data.rounds["refused"].sum() == rounds == data.refused
    assert data.rounds["env_steps"][-1] == data.env_steps == 4 * rounds
    assert len(data.heads["op"]["kl"]) == len(at) == len(data.actions["kept"])


@pytest.mark.parametrize("value", [10**9, -(10**6), 2**63 - 1, -(2**63)])
@pytest.mark.parametrize(
    ("table", "column"),
    [
        *(("events", name) for name in ("round", "step", "env", "episode", "slot")),
        *(("episodes", name) for name in ("round", "step", "env", "episode")),
        *(("rounds", name) for name in ("round", "env_steps")),
        ("evaluations", "host"),
        ("evaluations", "round"),
    ],
)
def test_no_number_of_a_store_decides_how_much_is_drawn(
    numbered, tmp_path, table, column, value
):
    path = tmp_path / "run"
    shutil.copytree(numbered, path)
    with sqlite3.connect(path / "events.sqlite") as db:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE round > 1", (value,))
    db.close()
    try:
        run = read_run(path)
    except InvalidInputError:
        return
    summarise(run.evaluations, resamples=10)
    for episodes in run.last_episodes.values():
        assert episodes.envs <= 4
        assert len(episodes.lengths) <= SHOWN_ENVS
        for span in episodes.spans:
            assert 0 <= span.start <= span.end <= max(episodes.lengths.values())


@pytest.mark.parametrize(
    "change", ["episodes SET env = 1000000000", "events SET step = 900"]
)
def test_episodes_that_cannot_be_are_drawn_all_the_same(numbered, tmp_path, change):
    path = tmp_path / "run"
    shutil.copytree(numbered, path)
    with sqlite3.connect(path / "events.sqlite") as db:
        db.execute(f"UPDATE {change}")
    db.close()
    with plot_style():
        assert swimlanes("seeds", "letter", read_run(path).last_episodes["letter"]).svg


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    arms = ("Tamiyo", "never")
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder, tasks=("letter",), rounds=3, arms=arms)


def test_only_some_environments_are_shown_of_very_many(tmp_path):
    path = make_run(tmp_path, rounds=1, arms=(), finished=False, toml="tasks = [")
    many = SHOWN_ENVS + 5
    with Store(path / "events.sqlite", Run.read(path).id) as store:
        store.begin_attempt(1)
        store.add(
            "episodes",
            round=1,
            step=STEPS,
            task="letter",
            env=torch.arange(2, many),
            episode=1,
            **{"return": torch.zeros(many - 2)},
        )
    run = read_run(path)
    assert [*run.last_episodes["letter"].lengths] == [*range(SHOWN_ENVS)]
    assert run.last_episodes["letter"].envs == many
    # A configuration that cannot be read is still shown.
    assert (run.config_toml, run.tasks) == ("tasks = [", ("digits", "letter"))
