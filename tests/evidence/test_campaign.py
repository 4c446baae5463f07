"""A campaign does everything once, whatever happens in between."""

import io
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from esper.contracts.errors import BadInput, RunTaken
from esper.experiment.files import Lock
from evidence.campaign import run
from evidence.execution import best_rate
from evidence.jobs import all_jobs
from evidence.ledger import Ledger
from tests.evidence.protocols import TINY, text_of, tiny
from tests.evidence.test_ledger import result

TIMELESS = (
    "stage, arm, member, task, setting, rate, seed, score, test, added, macs, "
    "training_macs, area, panicked, planted"
)
FEW = (
    ("rates = [1.0]", 'rates = [1.0]\narms = ["never", "tamiyo", "replay", "static"]'),
    ('"early", "periodic", "plateau", "promise", "random", "searched", "bandit", ', ""),
    ('"replay-elsewhere", "static", "static-macs", "longer", "scratch",', ""),
    ("small = [0.1, 1.0]\n", ""),
    ('[ablations.without.without-looking]\n"world.measure_every" = "10000"\n', ""),
)
"""A part of the tiny protocol, which finds the same as the whole."""


def quiet():
    return Console(file=io.StringIO(), width=200)


def rows(folder, what=f"{TIMELESS} FROM results"):
    with closing(sqlite3.connect(folder / "campaign.sqlite")) as db:
        return sorted(db.execute(f"SELECT {what}").fetchall())


def few(tmp_path):
    path = tmp_path / "few.toml"
    path.write_text(text_of(*FEW))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Everybody, to the end, in this process."""
    folder = tmp_path_factory.mktemp("campaign") / "it"
    return folder, run(TINY, folder, processes=1, console=quiet())


def test_everything_is_done(whole):
    folder, ended = whole
    jobs = all_jobs(tiny())
    assert (ended.done, ended.failed, ended.left) == (len(jobs), (), 0)
    assert ended.signal is None
    assert {state for (state,) in rows(folder, "state FROM jobs")} == {"done"}
    found = {(row[0], row[1], row[2], row[4], row[6]) for row in rows(folder)}
    settings = {"all": ("low", "small")}
    first = {"tuning": 70, "counted": 0}
    assert found == {
        (job.kind, job.arm, job.member, setting, first[job.kind] + host)
        for job in jobs
        if job.task
        for setting in settings.get(job.setting, (job.setting,))
        for host in range(2)
    }


def test_what_was_learnt_is_kept_with_what_it_took_and_did(whole):
    folder, _ = whole
    found = rows(folder, "name, env_steps FROM trainings")
    names = ["bandit", "searched", "tamiyo-0", "tamiyo-1", "without-looking-0"]
    assert [name for name, _ in found] == names
    steps = dict(found)
    assert steps["tamiyo-0"] == 10
    assert 0 < steps["searched"] <= 90
    assert 0 < steps["bandit"] <= 90
    assert (folder / "controllers" / "tamiyo-1" / "finished.json").is_file()
    found = rows(folder, "member, setting, seed FROM recordings WHERE arm = 'tamiyo'")
    assert found == [*product((0, 1), ("low", "small"), (0, 1))]


def test_what_is_done_is_not_done_again(whole):
    folder, ended = whole
    before = rows(folder, "* FROM jobs")
    console = quiet()
    assert run(TINY, folder, processes=1, console=console) == ended
    assert rows(folder, "* FROM jobs") == before
    assert console.file.getvalue().startswith("0 jobs are to be done: about 0.0 hours")


class Stops(io.StringIO):
    """Sends this process a signal as soon as something is written."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def write(self, text):
        if self.words in text:
            self.words = "nothing more"
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def same_rows(folder):
    """What the whole campaign found of the arms and the setting of the few."""
    arms = ("never", "tamiyo", "replay", "static")
    return [row for row in rows(folder) if row[1] in arms and row[4] == "low"]


@pytest.mark.usefixtures("default_signals")
def test_a_campaign_that_was_ended_early_finds_the_same(tmp_path, whole):
    path, folder = few(tmp_path), tmp_path / "it"
    stop = Console(file=Stops("tuning/vowel/tamiyo"), width=200)
    first = run(path, folder, processes=1, console=stop)
    assert first.signal == signal.SIGTERM
    assert first.done > 0 < first.left
    second = run(path, folder, processes=1, console=quiet())
    assert (second.done, second.failed) == (first.done + first.left, ())
    assert (second.left, second.signal) == (0, None)
    assert rows(folder) == same_rows(whole[0])


def test_a_job_that_fails_is_noted_and_tried_again(tmp_path):
    path, folder = few(tmp_path), tmp_path / "it"
    (folder / "controllers").mkdir(parents=True)
    (folder / "controllers" / "tamiyo-1").touch()  # where a run should be
    ended = run(path, folder, processes=1, console=quiet())
    (failed,) = ended.failed
    assert failed.startswith("training/tamiyo/1: ")
    assert ended.left > 0
    noted = rows(folder, "id, note FROM jobs WHERE state = 'failed'")
    assert [": ".join(row) for row in noted] == [failed]
    counted = rows(folder, "member FROM results WHERE arm = 'tamiyo'")
    assert {member for (member,) in counted} == {0}
    (folder / "controllers" / "tamiyo-1").unlink()
    again = run(path, folder, processes=1, console=quiet())
    assert (again.failed, again.left) == ((), 0)


def test_only_what_is_asked_for_is_begun(tmp_path):
    folder = tmp_path / "it"
    given = {"processes": 1, "console": quiet()}
    late = run(TINY, folder, minutes=1e-9, **given)
    assert (late.done, late.failed) == (0, ())
    ended = run(TINY, folder, only=["search"], **given)
    assert (ended.done, ended.left) == (1, 0)
    assert rows(folder, "id FROM jobs WHERE state = 'done'") == [("search",)]
    with pytest.raises(BadInput, match="did you mean 'search'"):
        run(TINY, folder, only=["serch"], **given)
    with pytest.raises(BadInput, match="there is no 'letter'"):
        run(TINY, folder, tasks=["letter"], **given)
    path = few(tmp_path)
    with pytest.raises(BadInput, match="use another folder"):
        run(path, folder, **given)
    lock = Lock(folder)
    with pytest.raises(RunTaken, match="it is in use by process"):
        run(TINY, folder, **given)
    lock.release()


def test_hours_are_printed_before_anything_is_done(tmp_path):
    console = quiet()
    ended = run(TINY, tmp_path / "it", dry=True, console=console)
    printed = console.file.getvalue().splitlines()
    jobs = all_jobs(tiny())
    assert ended.left == len(jobs)
    assert [line.split("  ")[0] for line in printed[1:]] == [job.id for job in jobs]
    assert printed[1] == "training/tamiyo/0  4 s"
    counted = sum(job.kind == "counted" for job in jobs)
    tuning = sum(job.kind == "tuning" for job in jobs)
    hours = (3 * 4 + 1800 + 900 + 3 * tuning + 0.5 * counted) / 7200
    assert f"{len(jobs)} jobs are to be done: about {hours:.1f} hours" in printed[0]
    assert not (tmp_path / "it").exists()


def test_hours_follow_what_jobs_like_those_took(tmp_path):
    with Ledger(tmp_path / "campaign.sqlite", TINY.read_bytes(), {}) as ledger:
        jobs = all_jobs(tiny())
        ledger.plan((job.id, n, job.kind) for n, job in enumerate(jobs))
        ledger.finish("tuning/vowel/early/low/1", 30.0)
        ledger.finish("tuning/vowel/never/all/1", 10.0)
        ledger.finish("counted/vowel/tamiyo/0/low/0", 50.0)
    console = quiet()
    run(TINY, tmp_path, dry=True, console=console)
    printed = dict(
        line.split("  ") for line in console.file.getvalue().splitlines()[1:]
    )
    assert printed["tuning/vowel/periodic/low/1"] == "20 s"
    assert printed["counted/vowel/early/-1/low/0"] == "50 s"
    assert printed["training/tamiyo/0"] == "4 s"
    assert "tuning/vowel/early/low/1" not in printed


def test_the_best_rate_is_that_of_the_largest_score_less_rent(tmp_path):
    protocol = tiny(("rates = [1.0]", "rates = [0.5, 1.0, 2.0]"))
    some = {"stage": "tuning", "arm": "early", "task": "vowel"}
    given = [
        result(**some, rate=0.5, score=0.5),
        result(**some, rate=1.0, score=0.6, added=200.0),  # a rent of 0.2
        result(**some, rate=2.0, score=0.9, panicked=1),
        result(**some, rate=1.0, score=0.9, seed=4, setting="small"),  # is no rent
        result(**some | {"task": "letter"}, rate=1.0, score=0.9),
    ]
    with Ledger(tmp_path / "it.sqlite", b"", {}) as ledger:
        ledger.finish("a", 0.0, results=given)
        assert best_rate(ledger, "early", "vowel", protocol) == 0.5
        ledger.finish("b", 0.0, results=[result(**some, rate=1.0, score=0.8)])
        assert best_rate(ledger, "early", "vowel", protocol) == 1.0


SCRIPT = """
import sys
from pathlib import Path
from evidence.campaign import run
if __name__ == "__main__":
    print(run(Path(sys.argv[1]), Path(sys.argv[2]), processes=2))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
def test_killed_processes_leave_a_campaign_that_can_be_gone_on_with(tmp_path, whole):
    path, folder = few(tmp_path), tmp_path / "it"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(path), str(folder)]
    # Evidence is beside the package, not installed with it.
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for kind in (signal.SIGKILL, signal.SIGTERM):
        going = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        before = len(rows(folder)) if (folder / "campaign.sqlite").exists() else 0
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if (folder / "campaign.sqlite").exists() and len(rows(folder)) > before:
                break
        going.send_signal(kind)
        going.communicate(timeout=60)
    last = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    assert "failed=(), left=0, signal=None" in last.stdout
    assert rows(folder) == same_rows(whole[0])
