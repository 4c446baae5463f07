"""Closed or full streams and narrow encodings never cause a traceback."""

import os
import subprocess
import sys

import pytest

from tests.cli.calls import command, environment, process


def piped_to_head(*arguments):
    """Exit code and errors of a command whose pipe is closed."""
    reading, writing = os.pipe()
    with subprocess.Popen(
        command(*arguments),
        env=environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    ) as sender:
        os.close(writing)
        os.close(reading)
        return sender.wait(), sender.stderr.read()


@pytest.mark.parametrize("arguments", [("--help",), ("blueprints",)])
def test_a_closed_pipe_is_no_error(arguments):
    assert piped_to_head(*arguments) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_output_that_does_not_fit_is_an_error_of_storage():
    with open("/dev/full", "w") as full:
        result = process("blueprints", stdout=full)
        refusal = process("tran", stderr=full)
    assert result.code == 5
    assert result.err == (
        "esper: cannot write output: [Errno 28] No space left on device\n"
    )
    assert (refusal.code, refusal.out) == (2, "")


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [
        (">&-", "blueprints", 0),
        ("2>&-", "tasks x", 2),
        (">&- 2>&-", "tran", 2),
        ("<&-", "--help", 0),
    ],
)
def test_streams_may_be_closed_before_we_begin(tmp_path, closed, arguments, code):
    script = f'"{sys.executable}" -m esper.cli {arguments} {closed}'
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True}
    done = subprocess.run(["sh", "-c", script], **options, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stdout == "" or arguments == "--help"
    assert not [*tmp_path.iterdir()]


PLACES = [
    {"TERM": None, "HOME": None, "COLUMNS": None},
    {"COLUMNS": "1", "TERM": "dumb"},
    {"COLUMNS": "0", "LINES": "0", "TERM": ""},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
]


@pytest.mark.parametrize("place", PLACES)
def test_no_environment_variable_is_needed(tmp_path, place):
    result = process("blueprints", cwd=tmp_path, env=place)
    assert (result.code, result.err) == (0, "")
    assert result.out.count("\n") > 10
    assert "Traceback" not in result.out


def test_characters_that_cannot_be_encoded_are_replaced(tmp_path):
    place = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    result = process("report", "é" * 300, cwd=tmp_path, env=place)
    assert result.code == 2
    assert result.err.isascii()
    assert result.err.startswith("esper: argument RUN: expected a path")
    assert result.err.count("\n") == 1
