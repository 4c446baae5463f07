"""What a Grower writes to a run and to other loggers, also after SIGKILL."""

import csv
import json
import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest
import torch
from torch.nn.functional import cross_entropy

import esper
from esper.contracts.errors import (
    EsperWarning,
    InvalidInputError,
    RunLockedError,
)
from esper.growth.history import layer_widths
from esper.report.page import write_report
from esper.runs.database import TABLES, open_store, rows
from esper.runs.run import STORE, Run
from esper.runs.sinks import PROGRESS
from tests.growth.hosts import make_batch, make_host
from tests.resume_script import BATCHES, PER_DECISION, SAVED, Training

DECISIONS = BATCHES // PER_DECISION
WHERE = ("attempt", "seq", "seconds")
"""Columns that differ between runs with the same rows."""


def read(run):
    """Rows that count of every table, without what differs between equal runs."""
    found = {}
    with closing(open_store(run / STORE)) as db:
        for table in TABLES:
            whole = rows(db, f"live_{table}")
            found[table] = [
                {name: repr(value) for name, value in row.items() if name not in WHERE}
                for row in whole
            ]
    return found


def attempts(run):
    with closing(open_store(run / STORE)) as db:
        query = "SELECT resumed_after, last_round FROM attempts ORDER BY attempt"
        return db.execute(query).fetchall()


@pytest.fixture(scope="module", params=["never", "tamiyo"])
def trained(request, tmp_path_factory):
    """A training without interruptions, its run, and what its own logger got."""
    run, mine = tmp_path_factory.mktemp("runs") / "run", Mine()
    training = Training(request.param, [run, mine])
    training.run(BATCHES)
    training.grower.close()
    return training, run, mine


class Mine:
    def __init__(self):
        self.rows = []

    def log(self, values, step):
        self.rows.append((step, values))


def test_a_run_has_every_decision_and_loggers_get_the_same_numbers(trained):
    training, run, mine = trained
    grower, store = training.grower, read(run)
    assert Run.list(run.parent)[0].state == "finished"
    history = grower.history
    for table, name in (("steps", "score"), ("rounds", "mean_score")):
        assert [r[name] for r in store[table]] == [repr(d.metric) for d in history]
    assert [r["loss"] for r in store["steps"]] == [repr(d.loss) for d in history]
    assert [r["env_steps"] for r in store["rounds"]] == [
        repr(PER_DECISION * n) for n in range(1, DECISIONS + 1)
    ]
    assert [r["action"] for r in store["decisions"]] == [
        repr(d.action) for d in history
    ]
    widths = {r["name"]: int(r["width"]) for r in store["layers"]}
    assert {repr(n): w for n, w in layer_widths(grower.model).items()} == widths
    assert len(store["layers"]) > len(widths)
    assert len(store["events"]) == sum(len(d.events) for d in history)
    words = {r["what"].strip("'") for r in store["events"]}
    stages = {"planted", "blending", "holding", "kept", "pruned", "cleared"}
    assert words <= stages
    assert stages - {"cleared"} <= words or not training.by_hand
    assert "None" not in {r["blueprint"] for r in store["events"]}
    assert [s for s, v in mine.rows if "decision/metric" in v] == [
        *range(PER_DECISION, BATCHES + 1, PER_DECISION)
    ]
    losses = [v["batch/loss"] for _, v in mine.rows]
    assert [s for s, _ in mine.rows] == [*range(1, BATCHES + 1)]
    assert sum(losses[:PER_DECISION]) / PER_DECISION == pytest.approx(history[0].loss)
    final = [v for _, v in mine.rows][-1]
    assert final["decision/parameters"] == history[-1].parameters
    table = csv.DictReader((run / PROGRESS).read_text().splitlines())
    assert [float(row["batch/loss"]) for row in table] == losses


def test_decisions_name_what_was_legal_and_how_likely_it_was(trained):
    training, run, _ = trained
    with closing(open_store(run / STORE)) as db:
        found = [*rows(db, "live_decisions")]
    for row, decision in zip(found, training.grower.history, strict=True):
        features, heads = json.loads(row["features"]), json.loads(row["heads"])
        assert features["host"]["score"] == pytest.approx(decision.metric, rel=5e-3)
        assert all(seed["stage"] != "DORMANT" for seed in features["seeds"])
        verb = {"wait": "WAIT", "plant": "GERMINATE", "prune": "PRUNE"}
        assert heads["op"]["chosen"] == verb[decision.action.split()[0]]
        for head in heads.values():
            assert head["chosen"] in head["legal"]
            chances = head["legal"].values()
            if training.by_hand:  # a rule has no probabilities
                assert {*chances} == {None}
            else:
                assert sum(chances) == pytest.approx(1.0, abs=0.01)
        if "blueprint" in heads:
            assert heads["blueprint"]["chosen"] == decision.action.split()[1]
            slot = training.grower.model.slots[int(heads["slot"]["chosen"])]
            assert decision.action.split()[3] == slot
            prices = features["offers"][heads["slot"]["chosen"]]
            assert heads["blueprint"]["legal"].keys() <= prices.keys()
        assert (row["value"] is None) == training.by_hand


def test_a_killed_training_goes_on_in_the_same_run_without_a_row_twice(
    trained, tmp_path
):
    uninterrupted, run, _ = trained
    controller = "never" if uninterrupted.by_hand else "tamiyo"
    command = [sys.executable, "-m", "tests.resume_script", str(tmp_path), controller]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    killed = read(tmp_path / "run")
    assert len(killed["rounds"]) > SAVED // PER_DECISION  # of which two stop to count
    again = Training(controller, tmp_path / "run")
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    again.run(BATCHES)
    again.grower.close()
    assert read(tmp_path / "run") == read(run)
    assert attempts(tmp_path / "run") == [
        (None, SAVED // PER_DECISION),
        (SAVED // PER_DECISION, None),
    ]
    logs = [(path / PROGRESS).read_text() for path in (run, tmp_path / "run")]
    assert logs[0] == logs[1]


def test_a_state_that_is_loaded_in_the_same_process_starts_another_attempt(tmp_path):
    training = Training("never", tmp_path / "run")
    training.run(7)
    state = training.state_dict()
    training.run(12)
    training.load_state_dict(state)
    training.run(12)
    training.grower.close()
    assert [row["step"] for row in read(tmp_path / "run")["steps"]] == ["1", "2"]
    assert attempts(tmp_path / "run") == [(None, 1), (1, None)]
    query = "SELECT attempt, count(*), max(seq) FROM all_rows GROUP BY attempt"
    with closing(open_store(tmp_path / "run" / STORE)) as db:
        counts = db.execute(query).fetchall()
    assert [rows == last for _, rows, last in counts] == [True, True]
    assert Run.list(tmp_path)[0].state == "finished"
    again = Training("never", tmp_path / "run")
    again.load_state_dict(state)
    again.run(8)
    again.grower.close(finished=False)
    assert Run.list(tmp_path)[0].state == "stopped"


def short(logger, batches=2, **options):
    """A Grower after one decision."""
    host = make_host("vector")
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    x, y = make_batch("vector", 16)
    grower = esper.Grower(
        host, optimizer, ("first->second",), example=x, logger=logger, **options
    )
    for _ in range(batches):
        optimizer.zero_grad()
        cross_entropy(host(x), y).backward()
        optimizer.step()
    grower.step(metric=0.5)
    return grower


def test_folders_of_other_trainings_are_refused_in_one_line(tmp_path):
    grower = short(tmp_path / "run")
    Run.create(tmp_path, "other", "", {"kind": "evaluation"}).close()
    (tmp_path / "file").write_text("")
    for logger, kind, why in (
        (tmp_path / "run", RunLockedError, r"in use .* this one\. Use grower\.close"),
        (tmp_path / "other", RunLockedError, "has another training, of kind 'evalu"),
        (tmp_path / "file", RunLockedError, "exists; choose another name"),
        ("tensorbord", InvalidInputError, "did you mean 'tensorboard'"),
        (3, InvalidInputError, "logger must be a name, a folder or an object"),
    ):
        with pytest.raises(kind, match=why) as refused:
            short(logger)
        assert "\n" not in str(refused.value)
    state = grower.state_dict()
    grower.close(finished=False)
    with pytest.raises(RunLockedError, match=r"has another training\. Give another"):
        short(tmp_path / "run")
    assert len(read(tmp_path / "run")["rounds"]) == 1
    assert Run.list(tmp_path)[-1].state == "stopped"
    host = make_host("vector")
    before = dict(host.named_modules())
    with pytest.raises(RunLockedError):
        esper.Grower(
            host,
            torch.optim.SGD(host.parameters(), 0.1),
            example=make_batch("vector", 4)[0],
            logger=tmp_path / "other",
        )
    assert dict(host.named_modules()) == before
    assert state["runs"] == [Run.read(tmp_path / "run").id]


def test_a_logger_that_fails_is_left_out_with_a_warning(tmp_path):
    class Broken(Mine):
        def log(self, values, step):
            super().log(values, step)
            raise OSError("no\nnetwork")

    broken, mine = Broken(), Mine()
    with pytest.warns(EsperWarning, match=r"logger Broken .*OSError: no network") as w:
        grower = short([broken, mine])
    assert len(w) == 1
    grower.step(metric=0.5)
    assert len(broken.rows) == 1
    assert len(mine.rows) == 2


def test_a_run_without_close_is_complete_after_all_planned_decisions(tmp_path):
    code = "from tests.test_grower_log import short; kept = short('~/run', decisions=1)"
    home = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=home)
    (run,) = Run.list(tmp_path)
    assert run.state == "finished"
    assert len(read(tmp_path / "run")["decisions"]) == 1
    assert read(tmp_path / "run")["steps"][0]["loss"] == "None"  # not measured
    with pytest.raises(InvalidInputError, match="Use esper watch, or call"):
        write_report(tmp_path / "run")


def test_fit_writes_a_run_which_is_free_again_after_an_error(tmp_path):
    x, y = make_batch("vector", 32)
    pairs = [(x, y)]

    def fit(epochs, metric=None):
        esper.fit(
            make_host("vector"), pairs, pairs, loss=cross_entropy, epochs=epochs,
            metric=metric, progress=False, logger=tmp_path / f"run-{epochs}",
        )  # fmt: skip

    fit(2)
    with pytest.raises(ZeroDivisionError):
        fit(3, metric=lambda model: 1 / 0)
    assert [run.state for run in Run.list(tmp_path)] == ["finished", "stopped"]
    assert len(read(tmp_path / "run-2")["rounds"]) == 2
