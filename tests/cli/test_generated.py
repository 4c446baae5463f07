"""Random command lines, most of them wrong.

Each prints an error, help or a list. Commands that could start work get an invalid
option.
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path

import pytest

from esper.cli import COMMANDS, main, parser
from tests.cli.calls import assert_one_line

WORDS = (
    *("", " ", "-", "--", "---", "-x", "-h", "--help", "=", "=x", "--=", "'", '"'),
    *("\\", "0", "-1", "1", "16", "4.0", "1e9", "1e999", "nan", "-inf", "٤", "0x10"),
    *("9" * 5_000, "x" * 300, "x" * 100_000, "[" * 2_000, "a." * 3_000, "a," * 3_000),
    *("none", "true", "[]", "{}", "[0, 1]", "{op = 1}", "1979-05-27", "%s", "1_0"),
    "$x",
    *("\0", "a\0b", "\n", "a\nb", "\r", "\x1b[2J", "\x7f", "\u202e", "\ufeff"),
    "\udcff",
    *("é", "日本", "\U0001f600", "e\u0301", "ß", ".", "..", "/", "//", "~", "../../x"),
    *("letter", "letter,digits", "never", "early", "static", "quick", "simulated"),
    *("/dev/null", "/dev/zero", "/proc/self/mem", "/etc/passwd", "CON", "nul.txt", "*"),
    *("gae", "bash", "zsh", "csv", "parquet", "grown.pt2", "runs", "runs/x", "missing"),
)
IMPOSSIBLE = {
    "train": [["--runs", "missing/parent/runs"], ["--num_envs", "0"], ["--nothing"]],
    "grow": [["--out", "missing/parent/x.pt2"], ["--rng-seed", "-1"]],
    "record": [["--tasks", "0"], ["--stop", "never"]],
    "evaluate": [["--task", "nothing"], ["--hosts", "0"], ["--rent", "inf"]],
}
"""Invalid options of commands that could run for long."""


def options_of(name):
    """Every option of a command."""
    below = next(a for a in parser(COMMANDS)._actions if a.dest == "command").choices
    return [*below[name]._option_string_actions]


def twisted(chance, word):
    """A word with a random error."""
    at = chance.randrange(len(word) + 1)
    return chance.choice(
        (
            word[:at] + word[at + 1 :],
            word[:at] + chance.choice("-_.=x \0é") + word[at:],
            word.upper(),
            word + word,
            word.replace("-", "_"),
            word[:-1],
        )
    )


def generated(chance, options):
    """One command line."""
    names = [name for name in COMMANDS if name != "tasks" or chance.random() < 0.2]
    name = chance.choice(names)
    arguments = [name if chance.random() < 0.9 else twisted(chance, name)]
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 6))):
        option = chance.choice(options[name])
        if chance.random() < 0.3:
            option = twisted(chance, option)
        value = chance.choice(WORDS)
        arguments += chance.choice(
            ([option, value], [option, value], [f"{option}={value}"], [option], [value])
        )
    if chance.random() < 0.05:
        arguments.insert(0, chance.choice(WORDS))
    return arguments + chance.choice(IMPOSSIBLE.get(name, [[]]))


class Writes:
    """Records paths that this process writes, creates, renames or removes."""

    def __init__(self):
        self.on, self.paths = False, []
        sys.addaudithook(self._record)

    def _record(self, event, arguments):
        if not self.on:
            return
        if event == "open":
            path, mode, flags = arguments
            if not (mode and set(mode) & set("wax+")) and not flags & 0o103:
                return
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.rmdir"):
            path = arguments[0]
        else:
            return
        if isinstance(path, str | bytes):
            self.paths.append(path)


@pytest.fixture(scope="module")
def writes():
    return Writes()


@pytest.mark.parametrize("count", [80, pytest.param(2_000, marks=pytest.mark.slow)])
def test_random_command_lines_do_no_harm(capsys, tmp_path, monkeypatch, writes, count):
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    options = {name: options_of(name) for name in COMMANDS}
    for arguments in (["train", "--x"], ["grow", "--task=x"], ["tasks"]):
        main(arguments)  # imports what it needs
    capsys.readouterr()
    chance, codes = random.Random(count), []
    for _ in range(count):
        arguments = generated(chance, options)
        began = time.process_time()
        writes.on = True
        try:
            code = main(arguments)
        finally:
            writes.on = False
        result = capsys.readouterr()
        assert time.process_time() - began < 5, arguments
        assert "Traceback" not in result.out + result.err
        if code == 0:
            assert result.err == "", arguments
            assert result.out, arguments
        else:
            assert code in (2, 5), (arguments, result)
            assert_one_line(result.err)
        codes.append(code)
    assert codes.count(2) > 0.4 * count
    assert codes.count(0) > 0.05 * count
    assert not [*here.rglob("*")]
    assert not [*temporary.rglob("*")]
    outside = [Path(str(path)) for path in writes.paths if path != "/dev/null"]
    # Python and torch write to their own caches.
    compiled = ("__pycache__", Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name)
    assert not [path for path in outside if not {*compiled} & {*path.parts}]
