"""Control characters in names never reach the terminal."""

import json
from itertools import cycle

import pytest

from esper.cli import main
from tests.cli.calls import call, contents, make_run, refused

SPICES = (
    *("\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r", "\n", "\b\b\b", "\x7f", "\0"),
    *("\u202e", "\u200b", "\u2028", "\ufeff", "\udcff", "[red]x[/red]", "[bold]", "%s"),
    *("{0}", "$(reboot)", "`reboot`", "<script>", "../../x", "~", "-rf", "\U0001f600"),
)
HOSTILE = [
    *(f"{a}{spice}{b}" for spice in SPICES for a in ("a", " ", "é") for b in " \n\t"),
    *(spice * 60 for spice in SPICES),
]


def assert_plain(text):
    odd = {sign for sign in text if not sign.isprintable()} - {"\n"}
    assert not odd, text


LINES = (
    ("{}",),
    ("tasks", "{}"),
    ("tasks", "--{}"),
    ("report", "{}"),
    ("export", "{}"),
    ("grow", "--task", "{}"),
    ("grow", "--task", "letter", "--controller", "{}/{}"),
    ("grow", "--task", "letter", "--out", "no/{}.pt2"),
    ("evaluate", "--task", "{}", "--controller", "nobody"),
    ("evaluate", "--task", "nothing", "--controller", "{}"),
    ("evaluate", "--rent", "{}"),
    ("evaluate", "--hosts", "{}"),
    ("train", "--name", "{}", "--runs", "no/such"),
    ("train", "--tasks", "{}"),
    ("train", "--resume", "{}"),
    ("train", "--runs", "no/such/{}"),
    ("train", "--start_from", "{}"),
    ("train", "--config", "{}"),
    ("train", "--{}", "1"),
    ("train", "--num_envs", "{}"),
)
"""Commands with a name in them; all of them fail."""


def test_no_name_reaches_the_terminal_as_it_is(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(HOSTILE) >= 200
    tried = zip(HOSTILE * 2, cycle(LINES), strict=False)
    for name, arguments in tried:
        filled = [word.replace("{}", name) for word in arguments]
        code = main(filled)
        result = capsys.readouterr()
        assert code == 2, (filled, result)
        assert_plain(result.out)
        assert_plain(result.err)
        assert result.err.count("\n") == 1
        assert len(result.err) <= 201
    assert not [*tmp_path.iterdir()]


def odd_folders(root):
    """Create runs and other folders with hostile names; returns their number."""
    whole = make_run(root, "whole")
    for number, name in enumerate(HOSTILE):
        if "/" in name or "\0" in name or len(name.encode(errors="replace")) > 200:
            continue
        folder = root / f"{number}{name}"
        folder.mkdir()
        if number % 2:
            for file in ("config.toml", "versions.json"):
                (folder / file).write_bytes((whole / file).read_bytes())
    (root / "plain file").write_text("mine")
    (root / "loop").symlink_to("loop")
    (root / "gone").symlink_to("nowhere")
    return len([path for path in root.iterdir() if path.is_dir()])


def test_folders_with_odd_names_are_listed_as_text(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    root = tmp_path / "runs"
    root.mkdir()
    count = odd_folders(root)
    before = contents(root)
    result = call(capsys, "runs", "--runs", str(root))
    assert (result.code, result.err) == (0, "")
    assert_plain(result.out)
    assert "whole" in result.out
    assert "[bold]" in result.out
    result = call(capsys, "runs", "--runs", str(root), "--json")
    listed = json.loads(result.out)
    assert len(listed) == count
    assert all(each["name"].isprintable() for each in listed)
    assert {each["state"] for each in listed} == {"stopped", "damaged"}
    assert contents(root) == before


def test_a_word_near_an_odd_name_does_not_print_it(capsys, tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    (root / "quiet-\x1b[2Jfern").mkdir()
    result = refused(capsys, "report", "quiet-fern", "--runs", str(root))
    assert "did you mean 'quiet-?[2Jfern'" in result


def test_a_run_with_an_odd_name_cannot_be_resumed_by_it(capsys, tmp_path):
    root = tmp_path / "runs"
    make_run(root, "whole", finished=True).rename(root / "a\x1b[2Jb")
    result = refused(capsys, "train", "--resume", "a\x1b[2Jb", "--runs", str(root))
    assert "expected the name or folder of a run" in result


@pytest.mark.parametrize("place", ["missing", "file", "loop"])
def test_where_no_runs_are_none_are_listed(capsys, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    result = call(capsys, "runs", "--runs", place)
    assert result.code == 0
    assert result.out == f"No runs in {place!r}. Start one with: esper train\n"
    assert json.loads(call(capsys, "runs", "--runs", place, "--json").out) == []
