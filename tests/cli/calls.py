"""How a command line is tried: in this process, or in one with streams of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass

from esper.cli import main
from esper.experiment.config import TrainConfig, as_toml
from esper.experiment.run import Run


@dataclass(frozen=True)
class Said:
    """What came of a command line."""

    code: int
    out: str
    err: str


def call(capsys, *words):
    """Run a command here."""
    capsys.readouterr()
    code = main(words)
    said = capsys.readouterr()
    return Said(code, said.out, said.err)


def refused(capsys, *words, code=2):
    """What was said of a command that cannot be meant: one line that fits."""
    said = call(capsys, *words)
    assert said.code == code, said
    assert_one_line(said.err)
    return said.err


def assert_one_line(text):
    assert text.startswith("esper: ")
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    assert len(text) <= 201


def arguments(*words):
    """A command for a process of its own."""
    return [sys.executable, "-m", "esper.cli", *words]


def surroundings(**changes):
    """Variables of a process; None takes one away."""
    changed = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    return {name: value for name, value in changed.items() if value is not None}


def process(*words, cwd=None, env=None, **streams):
    """Run a command in a process of its own, to its end."""
    done = subprocess.run(
        arguments(*words),
        cwd=cwd,
        env=surroundings(**env or {}),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def begun(root, name, config=None, kind="training", finished=False):
    """The folder of a run that nothing was trained in."""
    config = config or TrainConfig(name=name)
    with Run.create(root, name, as_toml(config), {"kind": kind}) as run:
        if finished:
            run.finish({"rounds": 80})
        return run.path


def contents(folder):
    """All there is in a folder, to see whether something was written."""
    return {
        str(path): path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in sorted(folder.rglob("*"))
    }
