import errno
import fcntl
import json
import os
import re
import threading
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context

import pytest
import torch

from esper.contracts.errors import (
    InvalidInputError,
    InvalidStateError,
    RunLockedError,
    StorageError,
)
from esper.runs.run import (
    Lock,
    Run,
    changes_since,
    invented_name,
    is_locked,
    validate_name,
    versions_now,
)
from tests.cli.calls import contents
from tests.runs.disks import CountingDisk, Died, DyingDisk, RefusingDisk

CONFIG = 'task = "letter"  # ü\n'


def create(root, name="one", **options):
    return Run.create(root, name, CONFIG, {"rng_seed": 3}, **options)


def test_a_run_is_begun_closed_and_opened_again(tmp_path):
    with create(tmp_path / "runs") as run:
        assert run.path == tmp_path / "runs" / "one"
        run.checkpoints().publish(5, {"a": torch.ones(2)}, {}, score=0.5)
    assert sorted(os.listdir(run.path)) == [
        "checkpoints",
        "config.toml",
        "lock",
        "versions.json",
    ]
    with Run.open(run.path) as again:
        assert again.config_toml == CONFIG
        assert again.versions["rng_seed"] == 3
        assert again.versions["torch"] == torch.__version__
        assert again.finished is None
        assert torch.equal(again.checkpoints().latest().tensors["a"], torch.ones(2))
        again.finish({"why": "budget"})
    assert Run.read(run.path).finished == {"why": "budget"}


@pytest.mark.parametrize("kind", ["run", "file", "folder", "link"])
def test_what_is_already_there_is_not_overwritten(tmp_path, kind):
    place = tmp_path / "one"
    if kind == "run":
        create(tmp_path).close()
    elif kind == "file":
        place.write_text("mine")
    elif kind == "folder":
        place.mkdir()
        (place / "mine").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    with pytest.raises(
        RunLockedError, match="one exists; choose another name, or resume it"
    ):
        create(tmp_path)
    assert contents(tmp_path) == before


UNSAFE = (
    *("", ".", "..", ".hidden", "-rf", "a/b", "a\\b", "../x", "/etc", "a\nb", "a b"),
    *("ü", "٤", "x" * 65, "a\0", "end.", "a\n", "latest", "NUL", "con.txt", "<script>"),
    *("${x}", "😀" * 300, "\u202eabc", "a\x1b[2J"),
)


def test_names_are_safe_on_every_system_or_refused_in_one_line(tmp_path):
    for name in UNSAFE:
        with pytest.raises(InvalidInputError, match="a run cannot be called") as error:
            create(tmp_path, name)
        assert len(str(error.value)) <= 200
        assert str(error.value).isprintable()
    assert os.listdir(tmp_path) == []
    for name in ("a", "Letter-3.2_b", "x" * 64, "7", "console"):
        assert validate_name(name) == name


def test_invented_names_are_safe_and_sort_by_time(tmp_path):
    start = datetime(2026, 1, 31, 23, 59, 58, tzinfo=UTC)
    names = [invented_name(start + timedelta(seconds=n)) for n in range(5)]
    assert names == sorted(names)
    for name in names:
        assert re.fullmatch(r"\d{8}-\d{6}-[a-z]+-[a-z]+", validate_name(name))
    with Run.create(tmp_path, None, CONFIG, {}) as run:
        assert os.listdir(tmp_path) == [run.name]


@pytest.mark.parametrize("when", ["before", "torn", "after"])
def test_a_death_while_a_run_is_begun_leaves_a_whole_run_or_none(tmp_path, when):
    for at in range(100):
        root = tmp_path / str(at)
        try:
            create(root, disk=DyingDisk(at, when)).close()
        except Died:
            for row in Run.list(root):
                assert (row.name, row.trouble) == ("one", "")
            continue
        break
    assert at >= 10


def test_a_disk_that_refuses_while_a_run_is_begun_leaves_nothing(tmp_path):
    open_files = len(os.listdir("/proc/self/fd"))
    for at in range(100):
        root = tmp_path / str(at)
        disk = RefusingDisk(at, errno.ENOSPC)
        try:
            create(root, disk=disk).close()
        except StorageError:
            assert [row.name for row in Run.list(root)] in ([], ["one"])
            assert not root.exists() or os.listdir(root) in ([], ["one"])
            assert len(os.listdir("/proc/self/fd")) == open_files
            continue
        break
    assert at >= 10


def test_only_runs_are_opened_and_only_their_holder_finishes_them(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    for name in ("missing", "file"):
        with pytest.raises(
            InvalidInputError, match=f"{name} is no run; expected a folder"
        ):
            Run.open(tmp_path / name)
    with pytest.raises(
        InvalidInputError, match=r"other is no run: it has no config\.toml"
    ):
        Run.open(tmp_path / "other")
    assert os.listdir(tmp_path / "other") == []
    run = create(tmp_path)
    with pytest.raises(InvalidStateError, match="one is open for reading only"):
        Run.read(run.path).finish({})
    run.close()
    with pytest.raises(InvalidStateError):
        run.finish({})


def hold(path, pipe):
    with Run.open(path):
        pipe.send("held")
        pipe.recv()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_second_process_is_told_who_is_there_until_that_one_is_killed(tmp_path):
    create(tmp_path).close()
    path, forked = tmp_path / "one", get_context("fork")
    here, there = forked.Pipe()
    holder = forked.Process(target=hold, args=(path, there))
    holder.start()
    try:
        assert here.recv() == "held"
        with pytest.raises(RunLockedError) as error:
            Run.open(path)
        assert f"one is in use by process {holder.pid} on '" in str(error.value)
        assert re.search(r" since '20\d\d-", str(error.value))
        assert len(str(error.value)) <= 200
        assert [row.state for row in Run.list(tmp_path)] == ["running"]
        assert Run.read(path).config_toml == CONFIG
    finally:
        holder.kill()
        holder.join()
    assert [row.state for row in Run.list(tmp_path)] == ["stopped"]
    Run.open(path).close()


def test_a_lock_is_held_until_it_is_released(tmp_path, monkeypatch):
    monkeypatch.setattr("esper.runs.run.LOCK_TIMEOUT", 0.05)
    file = tmp_path / "lock"
    file.write_text('{"pid": 1, "host": "x", "since": "then"}')
    assert not is_locked(tmp_path)  # by an old file
    lock = Lock(tmp_path)
    assert is_locked(tmp_path)
    assert json.loads(file.read_text())["pid"] == os.getpid()
    with pytest.raises(RunLockedError, match=f"in use by process {os.getpid()} on"):
        Lock(tmp_path)
    for text in (b"", b"{", b"[1]", b'{"pid": "x"}', b"[" * 4096):
        file.write_bytes(text)
        with pytest.raises(RunLockedError, match="in use by another process"):
            Lock(tmp_path)
    lock.close()
    lock.close()
    assert not is_locked(tmp_path)


def test_a_moment_of_looking_keeps_nobody_out(tmp_path):
    Lock(tmp_path).close()
    number = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_SH)
    looking = threading.Timer(0.1, os.close, [number])
    looking.start()
    Lock(tmp_path).close()
    looking.join()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(InvalidInputError, match="lock is not a regular file"):
        Lock(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"


def test_runs_are_listed_with_what_is_known_of_them(tmp_path):
    assert Run.list(tmp_path / "missing") == []
    going = create(tmp_path, "going")
    with create(tmp_path, "done") as done:
        done.finish({})
    with create(tmp_path, "stopped") as stopped:
        folder = stopped.checkpoints()
        folder.publish(3, {"a": torch.ones(1)}, {}, score=0.5)
        folder.publish(4, {"a": torch.zeros(1)}, {})
    (tmp_path / "file").write_text("no run")
    (tmp_path / ".hidden").mkdir()
    rows = {row.name: row for row in Run.list(tmp_path)}
    going.close()
    assert {name: row.state for name, row in rows.items()} == {
        "done": "finished",
        "going": "running",
        "stopped": "stopped",
    }
    row = rows["stopped"]
    assert (row.step, row.score, row.trouble) == (4, 0.5, "")
    files = [path for path in stopped.path.rglob("*") if path.is_file()]
    assert row.size == sum(path.stat().st_size for path in files)
    assert (rows["done"].step, rows["done"].score) == (None, None)


@pytest.mark.parametrize(
    ("damage", "trouble"),
    [
        (lambda path: (path / "config.toml").unlink(), "has no config.toml"),
        (
            lambda path: (path / "config.toml").write_bytes(b"\xff\xfe"),
            "must be text in UTF-8",
        ),
        (lambda path: os.truncate(path / "config.toml", 1 << 34), "has more than"),
        (lambda path: (path / "versions.json").write_text('{"esper"'), "is damaged"),
        (lambda path: (path / "versions.json").unlink(), "does not exist"),
        (lambda path: (path / "finished.json").write_text("[1]"), "is damaged"),
    ],
)
def test_a_damaged_run_is_listed_as_such_with_the_others(tmp_path, damage, trouble):
    for name in ("bad", "good"):
        create(tmp_path, name, disk=CountingDisk()).close()
    damage(tmp_path / "bad")
    bad, good = Run.list(tmp_path)
    assert (bad.name, bad.state) == ("bad", "damaged")
    assert trouble in bad.trouble
    assert len(bad.trouble) <= 200
    assert (good.name, good.state) == ("good", "stopped")


def test_damaged_checkpoints_and_names_made_by_others_are_listed(tmp_path):
    with create(tmp_path) as run:
        for step in (1, 2):
            run.checkpoints().publish(step, {"a": torch.ones(1)}, {})
    (run.path / "checkpoints" / "000002.safetensors").write_text("{}")
    (tmp_path / "\x1b[2J").mkdir()
    other, row = Run.list(tmp_path)
    assert (row.state, row.step) == ("stopped", 1)
    assert row.trouble == "a checkpoint is damaged"
    assert (other.name, other.state) == ("?[2J", "damaged")
    assert other.trouble.isprintable()


def test_a_process_that_drops_the_smallest_numbers_says_so():
    before = versions_now("")
    torch.set_flush_denormal(True)
    try:
        now = versions_now("")
    finally:
        torch.set_flush_denormal(False)
    assert changes_since(before, now) == ["denormals was 'True' and is 'False'"]
    assert changes_since(before, versions_now("")) == []
    assert {"numba", "kernels", "threads"} <= before.keys()
