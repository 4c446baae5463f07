import os
import signal
import sqlite3
import subprocess
import sys

import pytest
import torch

from esper.contracts.errors import BadInput, RunTaken
from esper.experiment.config import from_toml
from esper.experiment.learned import MAY_BE_NAN
from esper.experiment.run import STORE, Run
from esper.experiment.trainer import begin_run, resume_run
from tests.experiment.training_script import config

ROUNDS, SCRIPT = 6, "tests.experiment.training_script"


def state(path):
    """The newest checkpoint, but for the time it took."""
    found = Run.read(path).checkpoints(may_be_nan=MAY_BE_NAN).latest()
    tensors = dict(found.tensors)
    del tensors["training/seconds"]
    return found.manifest.step, tensors


def assert_equal(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        same = torch.equal(value.nan_to_num(7.5), other[1][name].nan_to_num(7.5))
        assert same, name


def rows(path, question):
    with sqlite3.connect(path / STORE) as db:
        return db.execute(question).fetchall()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed, in a process like those that are."""
    folder = tmp_path_factory.mktemp("runs")
    with process(folder, "whole") as alone:
        told = alone.stdout.read().split("\n")
        assert alone.wait() == 0
    assert told[:-1] == [f"round {number}" for number in range(1, ROUNDS + 1)]
    return folder / "whole"


def process(folder, name, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", SCRIPT, str(folder), name, str(ROUNDS)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def interrupted(folder, how, after):
    """A run that a signal hits after some round, and that then goes on."""
    with process(folder, "hit") as first:
        for line in first.stdout:
            if line.strip() == f"round {after}":
                first.send_signal(how)
                break
        code = first.wait()
    with process(folder, "hit") as second:
        told = second.stdout.read().split("\n")
        assert second.wait() == 0
    return folder / "hit", code, told[0]


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_run_that_was_interrupted_goes_on_to_the_bit(tmp_path, whole, how, code):
    path, ended, went_on = interrupted(tmp_path, how, after=3)
    assert ended == code
    assert went_on.startswith("round ")
    assert_equal(state(path), state(whole))
    for question in (
        "SELECT round, mean_return FROM live_rounds ORDER BY round",
        "SELECT step, env, task, reward FROM live_steps ORDER BY step, task, env",
        'SELECT step, env, task, "return" FROM live_episodes ORDER BY step, task, env',
    ):
        assert rows(path, question) == rows(whole, question)
    assert len(rows(path, "SELECT 1 FROM live_steps")) == ROUNDS * 4 * 4


def test_a_run_is_the_same_among_other_libraries_and_runs(tmp_path, whole):
    ending = begin_run(config(tmp_path, "here", ROUNDS))
    assert (ending.rounds, ending.signal) == (ROUNDS, None)
    assert_equal(state(ending.path), state(whole))


@pytest.mark.slow
@pytest.mark.timeout(900)  # all kernels are compiled
def test_a_run_is_the_same_where_code_is_compiled_and_where_it_is_loaded(tmp_path):
    found = []
    for name in ("compiled", "loaded"):
        with process(tmp_path, name, NUMBA_CACHE_DIR=str(tmp_path / "kept")) as run:
            run.communicate()
            assert run.returncode == 0
        found.append(state(tmp_path / name))
    assert any((tmp_path / "kept").rglob("engine.train*.nbc"))
    assert_equal(*found)


def test_a_run_says_what_it_was_made_of(whole):
    run = Run.read(whole)
    assert from_toml(run.config_toml) == config(whole.parent, "whole", ROUNDS)
    steps = ROUNDS * 4 * 4
    expected = {"rounds": ROUNDS, "env_steps": steps, "imitation_steps": 0}
    assert run.finished == expected
    assert state(whole)[0] == ROUNDS


def test_a_complete_run_is_not_gone_on_with(whole):
    with pytest.raises(BadInput, match="run whole is complete"):
        resume_run(whole)


def test_a_run_is_never_begun_twice(whole):
    before = state(whole)
    with pytest.raises(RunTaken):
        begin_run(config(whole.parent, "whole", ROUNDS))
    assert_equal(state(whole), before)
