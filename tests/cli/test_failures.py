"""Exit codes and messages of errors, crashes and signals."""

import errno
import subprocess
import sys
import tempfile

import pytest

from esper.cli.output import report_failure
from esper.contracts.errors import (
    IllegalActionError,
    InvalidInputError,
    InvalidStateError,
    NumericsError,
    RunLockedError,
    StorageError,
)
from esper.contracts.messages import one_line
from tests.cli.calls import Outcome, assert_one_line, environment, run_python
from tests.workers.test_jobs import gone


def test_every_kind_of_trouble_has_its_exit_code(capsys):
    for error, code in (
        (InvalidInputError("wrong"), 2),
        (IllegalActionError("wrong"), 2),
        (InvalidStateError("too early"), 2),
        (RunLockedError("taken"), 3),
        (NumericsError("not finite"), 4),
        (StorageError("full"), 5),
    ):
        assert report_failure(error) == code
        assert capsys.readouterr().err == f"esper: {error}\n"
    error = PermissionError(errno.EACCES, "Permission denied", "/a/\x1b[2J/b")
    assert report_failure(error) == 5
    result = capsys.readouterr().err
    assert result == "esper: cannot use '/a/\\x1b[2J/b': Permission denied.\n"


ENDLESS = """
import signal
from esper.cli.output import sudden_interrupts
from esper.workers.jobs import caught_signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a shell
with sudden_interrupts(), caught_signals() as caught:
    try:
        1 / 0
    except ZeroDivisionError:
        try:
            signal.raise_signal(signal.SIGINT)
            print(caught, flush=True)
            signal.raise_signal(signal.SIGINT)
        finally:
            print("never", flush=True)
"""


def test_the_second_interrupt_ends_a_command_at_once_and_in_one_line():
    """Also while an error is handled, where an exception would leave a traceback."""
    assert run_python(ENDLESS) == Outcome(130, "[2]\n", "esper: interrupted\n")


def failing():
    return 1 / 0


def test_a_bug_of_ours_leaves_its_traceback_in_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError) as caught:
        failing()
    assert report_failure(caught.value) == 70
    result = capsys.readouterr()
    (file,) = tmp_path.iterdir()
    assert result.out == ""
    line = f"esper: a bug in Esper: ZeroDivisionError; details in {file}\n"
    assert result.err == line
    assert "in failing" in file.read_text()


def test_a_bug_is_reported_even_if_no_file_can_be_written(capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    assert report_failure(ZeroDivisionError("by\nzero")) == 70
    assert "ZeroDivisionError; by?zero" in capsys.readouterr().err


def test_lines_of_others_are_cut_and_cleaned(capsys):
    assert report_failure(InvalidInputError("a\x1b[2J\r\n" + "b" * 500)) == 2
    result = capsys.readouterr().err
    assert_one_line(result)
    assert result.startswith("esper: a?[2J??bbb")
    assert one_line("abc", 3) == "abc"
    assert one_line("abcd", 3) == "ab…"


linux = pytest.mark.skipif(sys.platform != "linux", reason="no child elsewhere")


def outliving(command):
    """Start a Python expression with `outlived`."""
    text = (
        "import os, signal, sys, time\n"
        "from esper.cli.output import outlived\n"
        f"sys.exit(outlived(lambda: {command}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


@pytest.mark.parametrize(("end", "code"), [("0", 0), ("3", 3), ("os._exit(2)", 2)])
def test_a_command_that_is_outlived_ends_as_it_would(end, code):
    process = outliving(end)
    assert process.communicate() == ("", "")
    assert process.returncode == code


@linux
@pytest.mark.parametrize(
    "end", ["os._exit(1)", "os.abort()", "os.kill(os.getpid(), 9)"]
)
def test_a_command_that_ray_ends_is_reported_in_one_line(end):
    process = outliving(end)
    error = process.communicate()[1]
    assert process.returncode == 6
    assert_one_line(error)
    assert "Check that the Ray node runs here, then resume" in error


@linux
def test_signals_are_passed_on_to_the_command():
    wait = "print(os.getpid(), flush=True) or time.sleep(60) or 0"
    for command in (f"(signal.signal(15, lambda *_: os._exit(7)), {wait})[1]", wait):
        process = outliving(command)
        process.stdout.readline()
        process.terminate()
        assert process.communicate()[1] == ""
        assert process.returncode == (143 if command == wait else 7)


@linux
def test_a_command_ends_with_the_process_that_outlives_it():
    process = outliving("print(os.getpid(), flush=True) or time.sleep(600)")
    child = int(process.stdout.readline())
    process.kill()
    process.communicate()
    assert gone(child)
