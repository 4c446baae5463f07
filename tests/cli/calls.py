"""Runs command lines in this process, or in a process of their own."""

import os
import subprocess
import sys
from dataclasses import dataclass

from esper.cli import main
from esper.runs.run import Run
from esper.runs.settings import as_toml
from esper.runs.train_config import TrainConfig


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command line."""

    code: int
    out: str
    err: str


def call(capsys, *arguments):
    """Run a command here."""
    capsys.readouterr()
    code = main(arguments)
    result = capsys.readouterr()
    return Outcome(code, result.out, result.err)


def refused(capsys, *arguments, code=2):
    """Run a wrong command; returns its error, which is one line."""
    result = call(capsys, *arguments)
    assert result.code == code, result
    assert_one_line(result.err)
    return result.err


def assert_one_line(text):
    assert text.startswith("esper: ")
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    assert len(text) <= 201


def command(*arguments):
    """A command for a process of its own."""
    return [sys.executable, "-m", "esper.cli", *arguments]


def environment(**changes):
    """Environment variables of a process; None removes one."""
    changed = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    return {name: value for name, value in changed.items() if value is not None}


def process(*arguments, cwd=None, env=None, **streams):
    """Run a command in a process of its own, to its end."""
    done = subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(**env or {}),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_python(script, *arguments, **options):
    """Run a Python program in a process of its own, to its end."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def make_run(root, name, config=None, kind="training", finished=False):
    """Create a run without any training; returns its folder."""
    config = config or TrainConfig(name=name)
    with Run.create(root, name, as_toml(config), {"kind": kind}) as run:
        if finished:
            run.finish({"rounds": 80})
        return run.path


def contents(folder):
    """All files of a folder, to detect changes."""
    return {
        str(path): path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in sorted(folder.rglob("*"))
    }
