import errno
import os
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch

from esper import files
from esper.contracts.errors import InvalidInputError, StorageError
from esper.contracts.messages import short
from esper.files import (
    Disk,
    discard,
    manifest_of,
    pack,
    publish,
    read_safetensors,
    storage,
    temporary_name,
)
from tests.runs.disks import (
    ForgetfulDisk,
    PowerCut,
    RecordingDisk,
)


def test_a_file_is_published_over_an_older_one(tmp_path):
    for data in (b"one", b"two"):
        publish(Disk(), tmp_path / "file", data)
        assert (tmp_path / "file").read_bytes() == data
    assert os.listdir(tmp_path) == ["file"]


def test_file_and_folder_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number)))
    publish(Disk(), tmp_path / "file", b"data")
    inodes = [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]
    assert [status.st_ino for status in synced] == inodes


def written_in_place(disk, file, data):
    """The bad twin: no other name."""
    disk.unlink(file)
    disk.create(file, data)
    disk.sync_file(file)
    disk.sync_folder(file.parent)


@pytest.mark.parametrize(
    ("disk", "write", "holds"),
    [
        (RecordingDisk, publish, True),
        (RecordingDisk, written_in_place, False),
        (ForgetfulDisk, publish, False),
    ],
)
def test_power_loss_anywhere_leaves_the_old_or_the_new_file(
    tmp_path, disk, write, holds
):
    old, new = b"the old one", b"the new one"
    live = tmp_path / "live"
    live.mkdir()
    (live / "file").write_bytes(old)
    recorder, before, left = disk(), PowerCut(live), set()
    write(recorder, live / "file", new)
    for length in range(len(recorder.log) + 1):
        cut = before.after(recorder.log[:length])
        for loss in ("none", "all", *range(8)):
            target = tmp_path / f"{length}-{loss}"
            cut.restore(target, loss)
            file = target / "file"
            left.add(file.read_bytes() if file.exists() else None)
    assert (left == {old, new}) is holds


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES]
)
def test_what_the_system_says_becomes_one_line(tmp_path, code):
    with (
        pytest.raises(StorageError, match=r"cannot write .*x: ") as error,
        storage(tmp_path / "x", "write"),
    ):
        raise OSError(code, os.strerror(code))
    assert os.strerror(code) in str(error.value)
    assert len(str(error.value)) <= 200
    assert isinstance(error.value, OSError)


def test_only_the_first_bytes_are_read(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(3_000_000))
    assert Disk().read(file, 10) == bytes(10)
    assert len(Disk().read(file, 1 << 40)) == 3_000_000


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_nothing_but_a_regular_file_is_read(tmp_path, kind):
    odd = tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "link":
        (tmp_path / "secret").write_bytes(b"secret")
        odd.symlink_to(tmp_path / "secret")
    else:
        odd.mkdir()
    with pytest.raises(
        InvalidInputError, match=r"odd is not a regular file|odd is a link"
    ):
        Disk().read(odd, 9)


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"x")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone" / "inner").mkdir()
    discard(Disk(), tmp_path / "gone")
    discard(Disk(), tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
    assert (tmp_path / "kept" / "file").read_bytes() == b"x"


def test_a_path_is_shown_by_its_end_without_control_characters(tmp_path):
    assert short(tmp_path / "runs" / "a" / "b").endswith("runs/a/b")
    assert short(tmp_path / "\x1b[2J\n") == short(tmp_path / "?[2J?")
    assert len(short(tmp_path / ("x" * 200))) == 72
    assert temporary_name(tmp_path / "x").parent == tmp_path


def test_what_a_dead_process_left_is_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hour_ago = time.time() - 3600
    names = {
        "dead": f".file.tmp-{ended.pid}",
        "young": f".file.tmp-{ended.pid}0",
        "alive": f".file.tmp-{os.getppid()}",
        "odd": ".file.tmp-x",
    }
    for kind, name in names.items():
        (tmp_path / name).write_bytes(b"half")
        if kind != "young":
            os.utime(tmp_path / name, (hour_ago, hour_ago))
    publish(Disk(), tmp_path / "file", b"whole")
    left = {*os.listdir(tmp_path)} - {"file"}
    assert left == {names[kind] for kind in ("young", "alive", "odd")}


def test_others_read_what_is_packed_and_equal_content_has_equal_bytes():
    tensors = {
        "b": torch.arange(6).view(2, 3),
        "a": torch.tensor([True, False]),
        "c": torch.randn(3).bfloat16(),
        "d": torch.zeros(()).expand(1),
    }
    data = pack(tensors, manifest_of({"x": (1, 2)}))
    assert data == pack(dict(reversed(tensors.items())), manifest_of({"x": [1, 2]}))
    found = safetensors.torch.load(data)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


class SwappingDisk(Disk):
    """Another process replaces the file, or cuts it, after it was opened."""

    def __init__(self, swap):
        self._swap = swap

    def open(self, file):
        stream = super().open(file)
        self._swap(file)
        return stream


def test_tensors_come_from_the_file_whose_digest_was_checked(tmp_path):
    file, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path, value in ((file, 1.0), (other, 2.0)):
        data = pack({"x": torch.full((3,), value)}, manifest_of({}, 0))
        path.write_bytes(data)
    tensors, _ = read_safetensors(file, disk=SwappingDisk(lambda f: other.replace(f)))
    assert tensors["x"].tolist() == [1.0] * 3


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    file.write_bytes(pack({"x": torch.ones(10**6)}, manifest_of({}, 0)))
    mapped = files._mapped

    def cut(*given):
        found = mapped(*given)
        os.truncate(file, file.stat().st_size - 4)
        return found

    monkeypatch.setattr(files, "_mapped", cut)
    with pytest.raises(InvalidInputError, match="changed while it was read"):
        read_safetensors(file)
