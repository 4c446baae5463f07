"""A process that dies, a disk that refuses, a loss of power."""

import errno
import hashlib
import os
import shutil

import pytest

from esper.contracts.errors import StorageTrouble
from esper.experiment.checkpoint import (
    CheckpointFolder,
    Manifest,
    made_by,
    name_of,
    write_manifest,
)
from esper.experiment.files import discard, unfinished
from esper.experiment.tensor_file import pack
from tests.experiment.checkpoints import FACTS, filled, folder, same, state
from tests.experiment.disks import (
    CountingDisk,
    Died,
    DyingDisk,
    PowerCut,
    RecordingDisk,
    RefusingDisk,
)


class InPlace(CheckpointFolder):
    """The bad twin: the one checkpoint is written over."""

    def publish(self, step, tensors, facts, *, score=None):
        data = pack(tensors)
        target = self.path / name_of(1)
        discard(self._disk, target)
        entry = Manifest(
            step=1,
            score=None,
            facts=facts,
            made_by=made_by(),
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        self._disk.mkdir(target)
        for name, content in {
            "state.safetensors": data,
            "manifest.json": write_manifest(entry),
        }.items():
            self._disk.create(target / name, content)
            self._disk.sync_file(target / name)
        self._disk.sync_folder(target)
        self._disk.sync_folder(self.path)
        return target


class PruneFirst(CheckpointFolder):
    """The bad twin: room is made before the new one is there."""

    def publish(self, step, tensors, facts, *, score=None):
        for name in self.names():
            discard(self._disk, self.path / name)
        return super().publish(step, tensors, facts, score=score)


class ForgetfulDisk(RecordingDisk):
    """The bad twin: files are not synced."""

    def sync_file(self, file):
        pass


class HastyDisk(RecordingDisk):
    """The bad twin: folders are not synced."""

    def sync_folder(self, folder):
        pass


def base(tmp_path):
    (tmp_path / "base").mkdir()
    filled(tmp_path / "base", 1)


def what_is_left(path, allowed):
    """Which of the states is the newest one, or what went wrong."""
    try:
        loaded = folder(path).latest()
    except Exception as error:
        return f"error: {error}"
    for number in allowed:
        if loaded is not None and same(loaded.tensors, state(number)):
            return number
    return f"neither: {loaded}"


def after_dying(tmp_path, kind):
    """What is left after a death at each change of two saves, one by one."""
    base(tmp_path)
    results, at = [], 0
    for when in ("before", "torn", "after"):
        for at in range(1000):
            path = tmp_path / f"{when}-{at}"
            shutil.copytree(tmp_path / "base", path)
            made = kind(path / "checkpoints", DyingDisk(at, when), keep=1)
            try:
                for step in (2, 3):
                    made.publish(step, state(step), FACTS)
            except Died:
                results.append((path, what_is_left(path, (1, 2, 3))))
                continue
            break
    return results, at


def test_a_death_at_any_change_leaves_a_whole_state_and_the_next_save_cleans(tmp_path):
    results, points = after_dying(tmp_path, CheckpointFolder)
    assert points >= 25
    assert len(results) == 3 * points
    assert {left for _, left in results} == {1, 2, 3}
    for path, _ in results:
        made = folder(path, keep=1)
        made.publish(4, state(4), FACTS)
        assert os.listdir(made.path) == ["000004"]


@pytest.mark.parametrize("twin", [InPlace, PruneFirst])
def test_the_same_deaths_catch_bad_twins(tmp_path, twin):
    results, _ = after_dying(tmp_path, twin)
    assert any(left not in (1, 2, 3) for _, left in results)


def after_power_loss(tmp_path, kind):
    """What is left after a loss of power at each change of a save, and at its end."""
    base(tmp_path)
    before, disk = PowerCut(tmp_path / "base"), kind()
    folder(tmp_path / "base", disk, keep=1).publish(2, state(2), FACTS)
    results = []
    for length in range(len(disk.log) + 1):
        cut = before.after(disk.log[:length])
        for loss in ("none", "all", *range(5)):
            path = tmp_path / f"{length}-{loss}"
            cut.restore(path, loss)
            results.append((length == len(disk.log), what_is_left(path, (1, 2))))
    return results


def test_a_loss_of_power_leaves_a_whole_state_and_never_undoes_a_save(tmp_path):
    results = after_power_loss(tmp_path, RecordingDisk)
    assert len(results) >= 90
    assert {left for _, left in results} == {1, 2}
    assert {left for done, left in results if done} == {2}


@pytest.mark.parametrize("twin", [ForgetfulDisk, HastyDisk])
def test_the_same_losses_catch_a_missing_sync(tmp_path, twin):
    results = after_power_loss(tmp_path, twin)
    whole = {left for _, left in results} == {1, 2}
    kept = {left for done, left in results if done} == {2}
    assert not (whole and kept)


@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT],
    ids=errno.errorcode.get,
)
def test_a_disk_that_refuses_any_call_leaves_the_last_state(tmp_path, code):
    base(tmp_path)
    for at in range(1000):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "base", path)
        disk = RefusingDisk(at, code)
        made = folder(path, disk, keep=1)
        if disk_is_fine(made, disk):
            break
        assert what_is_left(path, (1, 2)) in (1, 2), disk.met
        made.publish(3, state(3), FACTS)
        assert os.listdir(made.path) == ["000003"]
    assert at >= 18


def disk_is_fine(made, disk):
    try:
        made.publish(2, state(2), FACTS)
    except StorageTrouble as error:
        told = str(error)
    else:
        return disk.met is None
    assert len(told) <= 200
    assert "the system says no" in told
    return False


def test_room_is_given_back_as_soon_as_a_disk_is_full(tmp_path):
    made = filled(tmp_path, 1)
    full = RefusingDisk(3, errno.ENOSPC)
    with pytest.raises(StorageTrouble):
        CheckpointFolder(made.path, full).publish(2, state(2), FACTS)
    assert full.met == "create"
    assert unfinished(made.path) == []


class LyingDisk(CountingDisk):
    """Says that all is well and writes something else."""

    def create(self, file, data):
        changed = data[:-1] + bytes([data[-1] ^ 1])
        super().create(file, changed if file.suffix == ".safetensors" else data)


def test_nothing_old_is_removed_when_the_new_one_does_not_read_back(tmp_path):
    made = filled(tmp_path, 1, 2, keep=2)
    with pytest.raises(StorageTrouble, match="does not read back"):
        CheckpointFolder(made.path, LyingDisk(), keep=1).publish(3, state(3), FACTS)
    assert made.steps() == [1, 2, 3]
    assert same(made.latest().tensors, state(2))
