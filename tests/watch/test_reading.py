"""Queries about runs: what is missing stays missing, what is dead does not count."""

import json
from math import isnan, nan

import numpy as np
import pytest

from esper.contracts.errors import InvalidInputError
from esper.evaluation.statistics import mean_interval
from esper.report.data import read_run
from esper.runs.run import STORE, Run
from esper.runs.store import Store
from esper.watch import reading
from esper.watch.reading import find_by_id, list_runs, open_run, run_id
from esper.watch.server import encoded
from tests.runs.stores import record
from tests.watch.serving import TASK, fill, shown_run


def begun(root, name="fern", kind="training"):
    facts = {"kind": kind, "tasks": [TASK], "rng_seed": 0}
    return Run.create(root, name, "[budget]\nrounds = 8\n", facts)


def test_nan_missing_and_zero_are_three_things(tmp_path):
    with begun(tmp_path) as run, Store(run.path / STORE, run.id) as store:
        store.begin_attempt()
        for number, kl in enumerate((nan, None, 0.0), start=1):
            store.add("rounds", round=number, env_steps=number, kl=kl)
        store.add("steps", round=1, step=1, env=0, task=TASK, episode=1, score=nan)
        store.flush()
        with open_run(run.path) as reader:
            first, second, third = (row.kl for row in reader.rounds())
            assert isnan(first)
            assert (second, third) == (None, 0.0)
            (host,) = reader.hosts()
            assert isnan(host.score)
            assert (host.loss, host.layers, host.ended) == (None, (), False)
            assert reader.overview().seconds_left is None
            assert encoded([first, second, third]) == '["nan",null,0.0]'


def test_rows_are_read_after_a_second_and_those_of_dead_attempts_never(
    tmp_path, monkeypatch
):
    with begun(tmp_path) as run:
        with Store(run.path / STORE, run.id) as store:
            store.begin_attempt()
            fill(store, [1, 2, 3])
        with (
            Store(run.path / STORE, run.id) as store,
            open_run(run.path) as reader,
        ):
            position = reader.overview().position
            store.begin_attempt(1)
            version = reader.version()
            monkeypatch.setattr(store, "_due", 0.0)  # a second later
            fill(store, [2])
            assert reader.version() != version
            assert reader.overview().attempts == 2
            assert [row.round for row in reader.rounds()] == [1]
            store.flush()
            assert [row.round for row in reader.rounds()] == [1, 2]
            assert [row.round for row in reader.rounds(position)] == [2]
            host = reader.hosts()[0]
            assert (host.episode, host.step) == (2, 10)
            assert [layer.width for layer in host.layers] == [16, 48]
            assert reader.state == "running"


def test_many_rounds_become_a_curve_of_few_points(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_POINTS", 10)
    with begun(tmp_path) as run, Store(run.path / STORE, run.id) as store:
        store.begin_attempt()
        for number in range(1, 101):
            store.add_round(record(number))
        store.flush()
        with open_run(run.path) as reader:
            points = reader.rounds()
            assert [row.round for row in points] == [*range(10, 101, 10)]
            assert points[0].mean_return == pytest.approx(0.55)
            assert len(reader.heads()) == 10 * len({row.head for row in reader.heads()})
            assert len(reader.rounds((1, 0))) == 10


def test_runs_are_alive_finished_stopped_or_damaged(tmp_path):
    shown_run(tmp_path, "finished")
    with begun(tmp_path, "stopped"):
        pass
    (tmp_path / "damaged").mkdir()
    with begun(tmp_path, "running", "ppo"):
        found = {run.name: run for run in list_runs(tmp_path)}
        assert {name: run.state for name, run in found.items()} == {
            name: name for name in ("finished", "stopped", "damaged", "running")
        }
        assert found["running"].kind == "ppo"
    assert "has no config.toml" in found["damaged"].trouble
    with pytest.raises(InvalidInputError, match="no run with this id"):
        find_by_id(tmp_path, run_id("none"))
    with pytest.raises(InvalidInputError, match="no store"):
        open_run(find_by_id(tmp_path, run_id("stopped"))).__enter__()


def test_comparison_equals_the_intervals_of_the_report(tmp_path):
    path = shown_run(tmp_path)
    rows = read_run(path).evaluations
    with open_run(path) as reader:
        arms = {arm.controller: arm for arm in reader.comparison()}
        decision = reader.decisions(TASK, 0, 3)[-1]
    assert decision.heads["op"]["legal"] == {"WAIT": 0.9, "GERMINATE": 0.1}
    assert json.dumps(decision.features)
    assert {*arms} == {"Tamiyo", "never"}
    for name, arm in arms.items():
        own = [
            row["return"]
            for row in rows
            if (row["stage"], row["controller"]) == ("test", name)
        ]
        expected = mean_interval(np.array(own), resamples=2_000)
        assert (arm.mean, arm.low, arm.high) == (
            expected.estimate,
            expected.low,
            expected.high,
        )
