"""What is asked of a run's folder and store."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from esper.experiment.run import Run
from esper.experiment.store import Store
from esper.report.facts import POINTS, SHOWN, read_facts
from tests.experiment.stores import ask, record
from tests.report.runs import (
    BLUEPRINTS,
    STEPS,
    TASKS,
    config,
    make_run,
    play,
)


@pytest.fixture(scope="module")
def path(reported):
    return reported


def test_a_run_is_told_in_numbers(path):
    facts = read_facts(path)
    assert (facts.name, facts.state, facts.tasks) == ("fern", "finished", TASKS)
    assert (facts.last_round, facts.env_steps, facts.seconds) == (6, 24, 6.0)
    assert_allclose(facts.rounds["round"], [1, 2, 3, 4, 5, 6])
    assert_allclose(facts.rounds["clip_fraction"], [0.1] * 6)
    assert_allclose(facts.heads["blueprint"]["kl"], [0.02] * 6)


def test_each_task_has_returns_of_its_own_episodes(path):
    columns = read_facts(path).returns["digits"]
    # Two environments, of which one has 0.2 more.
    assert_allclose(columns["return"], 0.1 * np.arange(1, 7) + 0.1, rtol=1e-6)
    assert_allclose(columns["added"], 0.1 * np.arange(1, 7), rtol=1e-6)


def test_lives_are_of_the_last_episode_and_count_from_its_start(path):
    lives = read_facts(path).lives["letter"]
    assert lives.lengths == {0: STEPS, 1: STEPS}
    found = [
        (life.env, life.slot, life.blueprint, life.stage, life.start, life.end)
        for life in lives.bars
    ]
    assert found == [
        (0, 0, "small", "TRAINING", 1, 2),
        (0, 0, "small", "BLENDING", 2, 3),
        (0, 0, "small", "HOLDING", 3, 4),
        (0, 0, "small", "FOSSILIZED", 4, 5),
        (0, 1, "large", "TRAINING", 1, 3),
        (1, 1, "large", "TRAINING", 2, 5),
    ]


def test_lives_of_earlier_episodes_are_left_out(tmp_path):
    path = make_run(tmp_path, blueprints=("old", "older"), rounds=2, arms=())
    with Store(path / "events.sqlite") as store:
        store.begin_attempt(2)
        play(store, ("letter",), ("new", "newer"), [3])
    lives = read_facts(path).lives
    assert {life.blueprint for life in lives["letter"].bars} == {"new", "newer"}
    assert {life.blueprint for life in lives["digits"].bars} == {"old", "older"}


def test_lives_are_those_of_the_view(path):
    last = 6
    view = ask(
        path / "events.sqlite",
        "SELECT env, slot, seed, blueprint, stage, from_step, to_step FROM seed_lives "
        f"WHERE task = 'digits' AND episode = {last} ORDER BY env, slot, from_step",
    )
    start = (last - 1) * STEPS
    shifted = [(*row[:5], row[5] - start, row[6] - start) for row in view]
    lives = read_facts(path).lives["digits"].bars
    assert [
        (x.env, x.slot, x.seed, x.blueprint, x.stage, x.start, x.end) for x in lives
    ] == shifted


def test_choices_add_up_to_those_of_the_view(path):
    for task, choices in read_facts(path).choices.items():
        view = dict(
            ask(
                path / "events.sqlite",
                "SELECT became, count(*) FROM choices "
                f"WHERE task = '{task}' GROUP BY 1",
            )
        )
        assert view == {"kept": 6, "pruned": 6, "neither": 6}
        assert sum(choice.kept for choice in choices) == view["kept"]
        assert sum(choice.pruned for choice in choices) == view["pruned"]
        assert sum(choice.planted for choice in choices) == sum(view.values())


def test_rounds_are_cut_into_thirds(path):
    choices = read_facts(path).choices["letter"]
    planted = {
        third: sum(choice.planted for choice in choices if choice.third == third)
        for third in ("early", "between", "late")
    }
    assert planted == {"early": 6, "between": 6, "late": 6}


def test_deeds_are_per_hundred_decisions(path):
    deeds = read_facts(path).deeds
    # 2 tasks x 3 seeds in each round, which the record counts as 4 decisions.
    assert_allclose(deeds["planted"], [150.0] * 6)
    assert_allclose(deeds["kept"], [50.0] * 6)
    assert_allclose(deeds["aimed"], [0.0] * 6)


def test_rounds_that_no_longer_count_are_not_told(tmp_path):
    path = make_run(tmp_path, rounds=6, arms=(), finished=False)
    with Store(path / "events.sqlite") as store:
        store.begin_attempt(2)
        play(store, TASKS, BLUEPRINTS, [3])
    facts = read_facts(path)
    assert (facts.last_round, facts.state) == (3, "stopped")
    assert_allclose(facts.deeds["planted"], [150.0] * 3)
    assert [attempt.last_round for attempt in facts.attempts] == [2, None]
    assert facts.attempts[1].resumed_after == 2
    assert facts.lives["letter"].bars[0].start == 1


def test_very_many_rounds_come_in_portions_that_lose_nothing(tmp_path):
    rounds = POINTS + 100
    with Run.create(tmp_path, "long", config(), {}) as run:
        with Store(run.path / "events.sqlite") as store:
            store.begin_attempt()
            for number in range(1, rounds + 1):
                store.add_round(record(number, refused=1))
        facts = read_facts(run.path)
    at = facts.rounds["round"]
    assert POINTS / 2 < len(at) <= POINTS < rounds
    assert (np.diff(at) > 0).all()
    assert facts.rounds["refused"].sum() == rounds == facts.refused
    assert facts.rounds["env_steps"][-1] == facts.env_steps == 4 * rounds
    assert len(facts.heads["op"]["kl"]) == len(at) == len(facts.deeds["kept"])


def test_only_some_environments_are_shown_of_very_many(tmp_path):
    path = make_run(tmp_path, rounds=1, arms=(), finished=False)
    many = SHOWN + 5
    with Store(path / "events.sqlite") as store:
        store.begin_attempt(1)
        store.add_episodes(
            round=1,
            step=STEPS,
            task="letter",
            env=torch.arange(2, many),
            episode=torch.ones(many - 2, dtype=torch.int64),
            returns=torch.zeros(many - 2),
        )
    lives = read_facts(path).lives["letter"]
    assert [*lives.lengths] == [*range(SHOWN)]
    assert lives.envs == many


def test_a_run_at_work_is_told_so(tmp_path):
    path = make_run(tmp_path, rounds=1, finished=False)
    with Run.open(path):
        assert read_facts(path).state == "running"


def test_a_configuration_that_is_no_toml_is_still_shown(tmp_path):
    path = make_run(tmp_path, rounds=1, toml="tasks = [")
    facts = read_facts(path)
    assert facts.config_toml == "tasks = ["
    assert facts.tasks == ("digits", "letter")
