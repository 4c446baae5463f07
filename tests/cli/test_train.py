"""`esper train`: starting, resuming and interrupting runs."""

import os
import re
import signal
import tomllib

import pytest

from esper.runs.run import Run
from esper.runs.train_config import Budget, TrainConfig, resolve
from esper.training.callbacks import ConsoleProgress
from tests.cli.calls import (
    call,
    contents,
    environment,
    make_run,
    process,
    refused,
    run_python,
)

SIMULATED = TrainConfig(tasks=("simulated",), num_envs=4, budget=Budget(rounds=1))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = [
    (("--num_env", "4"), "did you mean '--num_envs'"),
    (("--num_envs", "-1"), "--num_envs must be greater than or equal to 1; got -1."),
    (("--num_envs",), "--num_envs: expected one argument"),
    (("--num_envs=--",), "--num_envs: expected one argument"),
    (("more",), "unrecognized arguments: more"),
    (("--rng-seed", "-1"), "--rng_seed must be greater than or equal to 0"),
    (("--device", "nonsense"), "device 'nonsense' cannot be used here"),
    (("--device", "meta"), "device 'meta' cannot be used here. Use one of: cpu"),
    (("--rounds", "3"), "did you mean '--budget.rounds'"),
    (("--logger=tensorbord",), "did you mean 'tensorboard'?"),
    (("--start_from", "nothing"), "there is no run 'nothing' in runs"),
    (("--start_from", "x" * 300), "there is no run 'xxx"),
    (
        ("--ray", "nowhere:1", "--num_envs", "0"),
        "--num_envs must be greater than or equal",
    ),
    (("--name", ""), "--name: expected 1 to 1000 printable"),
    (("--resume",), "--resume: expected one argument"),
    (("--resume", ""), "expected the name or folder of a run, got ''"),
    (("--resume", "nothing"), "there is no run 'nothing' in runs"),
    (("--resume", "x" * 300), "there is no run 'xxx"),
    (("--resume", "a\0b"), "expected the name or folder of a run"),
    (("--resume", "a", "--runs", "b"), "there is no run 'a' in b"),
    (
        ("--resume", "x", "--num_envs", "3"),
        "--num_envs cannot be combined with --resume",
    ),
    (
        ("--learner.gamma=1", "--resume=x"),
        "--learner.gamma cannot be combined with --resume",
    ),
    (
        ("--resume", "x", "--preset", "quick"),
        "--preset cannot be combined with --resume",
    ),
]


def test_wrong_arguments_are_refused_in_one_line(capsys, here):
    for arguments, message in REFUSED:
        assert message in refused(capsys, "train", *arguments)
    assert not [*here.iterdir()]


def test_places_that_cannot_hold_runs_are_refused_at_once(capsys, here):
    (here / "file").write_text("mine")
    (here / "loop").symlink_to("loop")
    before = contents(here)
    for runs, message, code in (
        ("file", "file is not a folder", 2),
        ("file/runs", "file does not exist; create it first", 2),
        ("loop", "loop is not a folder", 2),
        ("no/such", "no does not exist; create it first", 2),
        ("x" * 300, "File name too long", 5),
        ("/proc/runs", "cannot create proc/runs", 5),
    ):
        result = refused(capsys, "train", "--runs", runs, code=code)
        assert message in result
    assert contents(here) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_only_to_be_read_is_refused(capsys, here):
    (here / "runs").mkdir(mode=0o555)
    assert "Permission denied" in refused(capsys, "train", code=5)


def test_a_complete_run_and_an_evaluation_are_not_resumed(capsys, here, monkeypatch):
    runs = here / "runs"
    path = make_run(runs, "done", finished=True)
    for number, finished in enumerate((False, True)):
        make_run(runs, f"judged{number}", kind="evaluation", finished=finished)
    before = contents(runs)
    result = call(capsys, "train", "--resume", "done")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Run done is already complete.")
    assert call(capsys, "train", "--resume", str(path)).code == 0
    for name in ("judged0", "judged1"):
        assert "was not started by esper train" in refused(
            capsys, "train", "--resume", name
        )
    monkeypatch.chdir(path)
    assert "Run done is already complete" in call(capsys, "train", "--resume=.").out
    assert contents(runs) == before


def test_a_run_in_use_is_left_alone(capsys, here):
    path = make_run(here / "runs", "busy")
    with Run.open(path):
        before = contents(path)
        result = refused(capsys, "train", "--resume", "busy", code=3)
        assert f"runs/busy is in use by process {os.getpid()} on " in result
        assert contents(path) == before


def test_damaged_runs_are_refused(capsys, here):
    for number, (file, data, message) in enumerate(
        (
            ("config.toml", b"num_envs = -1", "num_envs must be"),
            ("config.toml", b"\xff", "must be text"),
            ("config.toml", None, "it has no config.toml"),
            ("versions.json", b"[]", "a JSON object"),
            ("finished.json", b"{", "a JSON object"),
            ("checkpoints/000001.safetensors", b"\x80\x04.", "1 checkpoints verifies"),
        )
    ):
        path = make_run(here / "runs", f"hurt{number}", SIMULATED)
        if data is None:
            (path / file).unlink()
        else:
            (path / file).write_bytes(data)
        assert message in refused(capsys, "train", "--resume", path.name)


def test_a_random_seed_that_is_not_given_is_drawn():
    first, second = (resolve({}, draw_seed=True).rng_seed for _ in range(2))
    assert first != second
    assert all(0 <= seed < 2**32 for seed in (first, second))
    assert resolve({"rng_seed": "7"}, draw_seed=True).rng_seed == 7
    assert resolve({}).rng_seed == 0


TINY = (
    "train --tasks teacher --num_envs 2 --budget.rounds 4 --world.horizon 4 "
    "--name tiny --start_from none "
    "--world.decision_every 2 --evaluation.every 4 --evaluation.hosts 2 "
    "--checkpoint.every 2 "
    "--evaluation.controllers []"
)


INTERRUPTED = """
import io, os, signal, sys
from esper.cli import main

class Stdout(io.TextIOWrapper):
    interrupted = False

    def write(self, text):
        written = super().write(text)
        if "round 2/4" in text and not self.interrupted:
            self.interrupted = True
            self.flush()
            reading, writing = os.pipe()  # the reader is gone
            os.close(reading)
            os.dup2(writing, 1)
            signal.raise_signal(signal.SIGTERM)
        return written

sys.stdout = Stdout(sys.stdout.buffer, encoding="utf-8")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.usefixtures("default_signals")
def test_a_run_is_interrupted_and_completed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = ConsoleProgress.on_round_end

    def interrupt(self, trainer, record):
        shown(self, trainer, record)
        if record.round == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleProgress, "on_round_end", interrupt)
        result = call(capsys, *TINY.split())
    assert (result.code, result.err) == (130, ""), result
    result = result.out
    run = tmp_path / "runs" / "tiny"
    assert not (run / "finished.json").exists()
    printed = re.search(r"rng_seed (\d+)\.", result)[1]
    going_on = re.search(r"everything is saved. Resume with: esper (.*)\n$", result)
    assert going_on is not None, result
    done = call(capsys, *going_on[1].split())
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Resuming tiny: teacher, 2 environments each")
    assert f"rng_seed {printed}." in done.out
    assert "round 4/4" in done.out
    assert "The run is in runs/tiny.\n" in done.out
    assert "The report is in runs/tiny/report.html.\n" in done.out
    assert (run / "report.html").stat().st_size > 10_000
    stored = tomllib.loads((run / "config.toml").read_text())
    assert (stored["rng_seed"], stored["budget"]["rounds"]) == (int(printed), 4)
    listed = call(capsys, "runs", "--runs", str(run.parent)).out
    assert re.search(r"tiny +. finished +. +4 ", listed)


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
def test_a_training_stops_at_a_signal_but_not_at_a_closed_pipe(tmp_path):
    done = run_python(INTERRUPTED, *TINY.split(), cwd=tmp_path, env=environment())
    assert (done.code, done.err) == (143, ""), done.out
    run = tmp_path / "runs" / "tiny"
    assert not (run / "finished.json").exists()
    reading, writing = os.pipe()
    os.close(reading)
    done = process("train", "--resume", "tiny", cwd=tmp_path, stdout=writing)
    os.close(writing)
    assert (done.code, done.err) == (0, "")
    assert (run / "finished.json").exists()
    assert (run / "report.html").exists()
