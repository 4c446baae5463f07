"""A process that dies, a disk that refuses, a loss of power."""

import errno
import os
import shutil

import pytest

from esper.contracts.errors import StorageTrouble
from esper.experiment.checkpoint import CheckpointFolder, name_of
from esper.experiment.files import discard, unfinished
from tests.experiment.checkpoints import FACTS, filled, folder, same, state
from tests.experiment.crash_points import InPlace, Saves
from tests.experiment.disks import (
    CountingDisk,
    Died,
    DyingDisk,
    ForgetfulDisk,
    HastyDisk,
    RefusingDisk,
)


class PruneFirst(CheckpointFolder):
    """The bad twin: room is made before the new one is there."""

    def publish(self, step, tensors, facts, *, score=None):
        for step in self.steps():
            discard(self._disk, self.path / name_of(step))
        return super().publish(step, tensors, facts, score=score)


STATES = {step: state(step) for step in (1, 2, 3)}


def test_every_crash_of_two_saves_leaves_a_whole_state(tmp_path):
    saves = Saves(tmp_path, STATES)
    left = saves.crashes()
    assert sum(map(len, left.values())) > 90
    for crash, found in left.items():
        assert None not in found, crash
    assert set(left["death before each change"]) == {1, 2, 3}
    assert saves.changes()["writes"] == 2


def test_checkpoints_that_are_written_in_place_are_caught(tmp_path):
    for crash, found in Saves(tmp_path, STATES, kind=InPlace).crashes().items():
        assert None in found, crash


@pytest.mark.parametrize(
    "twin", [{"kind": PruneFirst}, {"disk": ForgetfulDisk}, {"disk": HastyDisk}]
)
def test_a_loss_of_power_catches_bad_twins(tmp_path, twin):
    assert None in Saves(tmp_path, STATES, **twin).crashes()["loss of power"]


def base(tmp_path):
    (tmp_path / "base").mkdir()
    filled(tmp_path / "base", 1)


@pytest.mark.parametrize("when", ["before", "torn", "after"])
def test_the_next_save_removes_what_a_death_left(tmp_path, when):
    base(tmp_path)
    for at in range(1000):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "base", path)
        try:
            folder(path, DyingDisk(at, when), keep=1).publish(2, state(2), FACTS)
        except Died:
            made = folder(path, keep=1)
            made.publish(3, state(3), FACTS)
            assert os.listdir(made.path) == ["000003.safetensors"]
            continue
        break
    assert at >= 5


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
        left = folder(path).latest()
        assert same(left.tensors, state(left.manifest.step)), disk.met
        made.publish(3, state(3), FACTS)
        assert os.listdir(made.path) == ["000003.safetensors"]
    assert at >= 8


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
    full = RefusingDisk(0, errno.ENOSPC)
    with pytest.raises(StorageTrouble):
        CheckpointFolder(made.path, full).publish(2, state(2), FACTS)
    assert full.met == "create"
    assert unfinished(made.path) == []


class LyingDisk(CountingDisk):
    """Says that all is well and writes something else."""

    def create(self, file, data):
        super().create(file, data[:-1] + bytes([data[-1] ^ 1]))


def test_nothing_old_is_removed_when_the_new_one_does_not_read_back(tmp_path):
    made = filled(tmp_path, 1, 2, keep=2)
    with pytest.raises(StorageTrouble, match="does not read back"):
        CheckpointFolder(made.path, LyingDisk(), keep=1).publish(3, state(3), FACTS)
    assert made.steps() == [1, 2, 3]
    assert same(made.latest().tensors, state(2))
