"""The harness at its smallest: what is right passes, what is bad does not."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from esper.runs.run import STORE, Run
from tests.training.killed_runs import Life, audit

SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from benchmarks.resume import Trials, forgotten_normaliser, small_ppo, warm_up

def told(trial):
    found, lives = trial
    facts = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return facts | {"good": found.good, "killed": sum(life.killed for life in lives)}

warm_up()
trials = Trials(Path(sys.argv[1]), rounds=3)
whole, _ = trials.undisturbed(forgotten_normaliser)
forgetful = [forgotten_normaliser] * 2
print(json.dumps({
    "whole": str(trials.whole),
    "killed": told(trials.after("rows 1", "saved 2", "saved 3")),
    "ppo": told(
        Trials(Path(sys.argv[1]), 3, small_ppo).after("round 1", "round 3", "saved 3")
    ),
    "forgetful": told(trials.after("saved 2", twins=forgetful, whole=whole)),
}))
"""
"""Forks need a process of one thread, which that of the tests is not."""


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("kind", "rows"), [("killed", 90), ("ppo", 5)])
def test_a_run_that_is_killed_becomes_the_same_run(trials, kind, rows):
    found = trials[kind]
    assert found["good"], found
    assert found["killed"] == 3
    assert found["acknowledged"] > rows


def test_a_forgotten_normaliser_is_caught(trials):
    assert not trials["forgetful"]["same_state"]


@pytest.fixture
def copied(trials, tmp_path):
    """The whole run, and a copy of it to do harm to."""
    whole = Path(trials["whole"])
    shutil.copytree(whole, tmp_path / "copied")
    return whole, tmp_path / "copied"


def audited(copied, *harm, said=()):
    whole, path = copied
    with closing(sqlite3.connect(path / STORE)) as db:
        for statement in harm:
            db.execute(statement)
        db.commit()
    return audit(path, [Life(said=list(said), seconds=0.0, killed=False)], whole)


def test_a_run_is_the_same_as_itself(copied):
    assert audited(copied).good


AGAIN = """INSERT INTO steps SELECT 1, 900, round, step, env, task, episode, reward,
score, loss, added, budget_left, nans FROM steps LIMIT 1"""


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        ("DELETE FROM steps WHERE seq = (SELECT max(seq) FROM steps)", "missing"),
        ("UPDATE steps SET reward = reward + 1e-9 WHERE step = 3", "same_rows"),
        ("UPDATE attempts SET last_round = 2", "missing"),
        (AGAIN, "doubled"),
        ("INSERT INTO notes SELECT 1, seq, 4, 'x', 'y', NULL FROM heads", "doubled"),
        ("INSERT INTO notes VALUES (1, 900, 4, 'gap', 'rows', NULL)", "troubles"),
    ],
)
def test_rows_that_are_wrong_are_caught(copied, harm, what):
    before, after = audited(copied), audited(copied, harm)
    assert getattr(after, what) != getattr(before, what)
    assert before.good
    assert not after.good


def test_rows_that_were_acknowledged_and_are_gone_are_caught(copied):
    before = audited(copied, said=[["rows", "1", "40"], ["rows", "1", "90"]])
    assert (before.acknowledged, before.lost) == (90, 0)
    with closing(sqlite3.connect(copied[1] / STORE)) as db:
        ((every,),) = db.execute("SELECT rows FROM attempts")
    gone = "DELETE FROM steps WHERE seq > 5"
    assert audited(copied, gone, said=[["rows", "1", str(every)]]).lost > 0
    assert audited(copied, said=[["rows", "2", "7"]]).lost == 7


def test_a_state_of_other_bits_and_an_end_that_was_not_said_are_caught(copied):
    _, path = copied
    (path / "finished.json").unlink()
    kept = Run.read(path).checkpoints()
    tensors = kept.latest().tensors
    tensors["algorithm/agent/moments/mean"] += 1e-6
    kept.publish(4, tensors, {})
    found = audited(copied)
    assert not found.same_state
    assert found.troubles == ["it is not marked as complete"]


def test_an_attempt_that_went_back_behind_a_checkpoint_is_caught(copied):
    whole, path = copied
    first = Life([["ready", "0.1", "1"], ["saved", "2"]], 1.0, killed=True)
    later = Life([["ready", "0.1", "2"]], 1.0, killed=False)
    assert "attempt 2 went on from None" in audit(path, [first, later], whole).troubles
