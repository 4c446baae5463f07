"""Checkpoints: what is kept, refused, damaged or forged; deaths and losses of power."""

import errno
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import tracemalloc
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from esper import __version__
from esper.contracts.errors import InvalidInputError, StorageError
from esper.files import BLANK, Manifest, discard, pack, read_safetensors, unfinished
from esper.runs.checkpoint import CheckpointFolder
from tests.runs.crash_points import InPlace, Saves
from tests.runs.disks import (
    CountingDisk,
    Died,
    DyingDisk,
    ForgetfulDisk,
    HastyDisk,
    RefusingDisk,
)

FACTS = {"config_sha256": "ab", "spec": {"slots": 3}}


def state(number):
    """A small state of every kind that occurs."""
    chance = torch.Generator().manual_seed(number)
    return {
        "policy/weight": torch.randn(5, 3, generator=chance),
        "world/rent": torch.randn(4, generator=chance, dtype=torch.float64),
        "world/clock": torch.randint(0, 99, (4,), generator=chance),
        "world/alive": torch.rand(4, generator=chance) > 0.5,
        "round": torch.tensor(number),
        "none": torch.zeros(0, 3),
        "chance": chance.get_state()[:64].clone(),
    }


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
        for name in one
    )


def folder(path, disk=None, **options):
    return CheckpointFolder(path / "checkpoints", disk or CountingDisk(), **options)


def filled(path, *steps, **options):
    made = folder(path, **options)
    for step in steps:
        made.publish(step, state(step), FACTS)
    return made


def refused(why, call, *arguments):
    """The refusal, which must be one short line."""
    with pytest.raises(InvalidInputError, match=why) as error:
        call(*arguments)
    line = str(error.value)
    assert len(line) <= 200
    assert line.isprintable()
    return line


# What is kept.


def test_a_state_comes_back_to_the_bit_with_its_facts(tmp_path):
    made = CheckpointFolder(tmp_path / "checkpoints")
    assert made.latest() is None
    path = made.publish(12, state(12), FACTS, score=0.5)
    assert path == tmp_path / "checkpoints" / "000012.safetensors"
    for loaded in (made.latest(), made.best(), made.load(12), made.load(path)):
        assert same(loaded.tensors, state(12))
        assert loaded.manifest.facts == FACTS
        assert (loaded.manifest.step, loaded.manifest.score) == (12, 0.5)
        assert loaded.rejected == ()
    assert os.listdir(tmp_path / "checkpoints") == ["000012.safetensors"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    made = folder(tmp_path, keep=2)
    for step, score in [(1, 0.1), (2, 0.9), (3, None), (4, 0.9), (5, 0.2), (6, None)]:
        made.publish(step, state(step), FACTS, score=score)
    assert made.steps() == [2, 5, 6]
    assert made.best().manifest.step == 2
    assert made.latest().manifest.step == 6
    made.publish(7, state(7), FACTS, score=1.0)
    assert made.steps() == [6, 7]
    other = filled(tmp_path / "checkpoints", 1, 2, 3, keep=1)
    assert other.steps() == [3]
    assert other.best().manifest.step == 3


def test_a_run_does_not_go_back_behind_a_good_checkpoint(tmp_path):
    made = filled(tmp_path, 5)
    for step in (4, 5):
        refused("has another state at step 5", made.publish, step, state(9), FACTS)
    assert same(made.latest().tensors, state(5))


@pytest.mark.parametrize("way", ["cut off", "changed", "renamed"])
def test_the_name_of_a_damaged_checkpoint_can_be_used_again(tmp_path, way):
    made = filled(tmp_path, 1, 2)
    first, file = (made.path / f"00000{step}.safetensors" for step in (1, 2))
    if way == "cut off":
        file.write_bytes(b"x")
    elif way == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    else:
        shutil.copy(first, file)
    made.publish(2, state(7), FACTS)
    assert same(made.latest().tensors, state(7))
    assert sorted(os.listdir(made.path)) == [first.name, file.name]


def test_damaged_checkpoints_are_passed_over_with_one_line(tmp_path):
    made = folder(tmp_path)
    for step, score in ((1, 0.3), (2, 0.7), (3, 0.9)):
        made.publish(step, state(step), FACTS, score=score)
    first, second, third = (
        made.path / f"00000{step}.safetensors" for step in (1, 2, 3)
    )
    third.write_bytes(b"PK\x03\x04 and so on")
    second.write_bytes(second.read_bytes()[:-1])
    for loaded in (made.latest(), made.best()):
        assert same(loaded.tensors, state(1))
        assert len(loaded.rejected) == 2
        (cut,) = [line for line in loaded.rejected if "000002.safetensors" in line]
        (other,) = [line for line in loaded.rejected if "000003.safetensors" in line]
        assert "is damaged: Error while deserializing" in cut
        assert "is damaged, or not a file of Esper" in other
    first.write_bytes(b"x")
    for find in (made.latest, made.best):
        refused("none of 3 checkpoints verifies: .*/00000..safe", find)


def test_what_is_not_finite_is_not_saved_but_where_it_may_be(tmp_path):
    made = folder(tmp_path)
    for bad in (float("nan"), float("inf")):
        strange = {"a": torch.tensor([1.0, bad])}
        refused(
            "'a' holds NaN or infinity and is not saved", made.publish, 1, strange, {}
        )
    assert os.listdir(tmp_path) == []
    unknown = {"world/first_loss": torch.tensor([1.0, float("nan")])}
    made.publish(1, unknown, {})
    back = made.latest().tensors["world/first_loss"]
    assert torch.equal(back.isnan(), torch.tensor([False, True]))


def test_what_is_no_checkpoint_is_refused(tmp_path):
    made = filled(tmp_path, 3)
    for name in ("7", "0000004", "-00001", "٠٠٠٠٠٤", "latest", "1e6"):
        (made.path / f"{name}.safetensors").write_bytes(b"x")
    assert made.steps() == [3]
    for which in (2, tmp_path / "missing"):
        refused("does not exist. Check the path", made.load, which)
    file, other = (made.path / f"00000{step}.safetensors" for step in (3, 9))
    file.rename(other)
    refused("000009.safetensors holds step 3", made.load, 9)
    assert made.manifests() == []
    assert made.load(other).manifest.step == 3


def test_an_unreadable_checkpoint_is_passed_over(tmp_path):
    made = filled(tmp_path, 1, 2)
    broken = CheckpointFolder(made.path, RefusingDisk(0, errno.EIO))
    loaded = broken.latest()
    assert loaded.manifest.step == 1
    assert "the system says no" in loaded.rejected[0]


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused(tmp_path, kind):
    made = filled(tmp_path, 1)
    part = made.path / "000001.safetensors"
    part.rename(tmp_path / "aside")
    if kind == "link":
        part.symlink_to(tmp_path / "aside")
    elif kind == "folder":
        part.mkdir()
    else:
        os.mkfifo(part)
    refused("not a regular file|is a link", made.load, 1)


# The file.


MADE_BY = {"esper": __version__}


def raw(header, body=b"", manifest=None):
    """A file that agrees with itself, by hand."""
    about = {"step": 1, "score": None, "facts": {}, "made_by": MADE_BY}
    seal = {"digest": BLANK.decode(), "manifest": about if manifest is None else "?"}
    text = json.dumps(seal).replace('"?"', str(manifest))
    header = {"__metadata__": {"esper": text}, **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    data = len(text).to_bytes(8, "little") + text + body
    return data.replace(BLANK, hashlib.sha256(data).hexdigest().encode(), 1)


def entry(kind="F32", shape=(1,), start=0, stop=4):
    return {"dtype": kind, "shape": [*shape], "data_offsets": [start, stop]}


def described(**changes):
    about = {"step": 1, "score": None, "facts": {}, "made_by": MADE_BY} | changes
    return raw({"a": entry()}, bytes(4), manifest=json.dumps(about))


PLAIN = Manifest(step=1, score=0.5, facts=FACTS, made_by=MADE_BY)


def read(file, data):
    file.write_bytes(data)
    return read_safetensors(file)


def test_every_changed_bit_shows(tmp_path):
    tensors = {"a": torch.arange(5.0), "b": torch.tensor([True])}
    data, file = pack(tensors, PLAIN), tmp_path / "file"
    back, manifest = read(file, data)
    assert same(back, tensors)
    assert manifest == PLAIN
    for place in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            with pytest.raises(InvalidInputError):
                read(file, bad)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        *(
            (described(**{name: bad}), "is damaged")
            for name, bad in (
                ("step", -1),
                ("step", "7"),
                ("score", float("nan")),
                ("facts", [1]),
                ("more", 1),
            )
        ),
        (raw({}, manifest="[" * 100_000), "is damaged"),
        *(
            (data, "is damaged: .*deserializing header")
            for data in (
                raw({"a": entry()}),
                raw({"a": entry(), "b": entry(start=2, stop=6)}, bytes(6)),
                raw({"a": entry(shape=(1 << 40,), stop=1 << 42)}, bytes(4)),
                raw({"a": entry(shape=(-1,))}, bytes(4)),
                raw({"a": 1}),
                raw({"a\x1b[2J" + "x" * 300: entry("F99")}),
                raw({"a": entry()}, bytes(4)) + b"x",
            )
        ),
        (raw({"a": entry("BOOL", stop=1)}, b"\x02"), "not bool"),
        (raw({"a": entry()}, b"\0\0\xc0\x7f"), "holds NaN"),
        ((2**63).to_bytes(8, "little") + b"{}", "is damaged"),
        (save({"a": torch.ones(1)}), "is damaged, or not a file of Esper"),
        *((data, "is damaged") for data in (b"", b"null", b"{}" * 9, b"\xff\xfe{}")),
        (pickle.dumps([1, 2]), "is damaged, or not a file of Esper"),
    ],
)
def test_a_file_that_lies_is_refused_in_one_line(tmp_path, data, why):
    line = refused(why, read, tmp_path / "000001.safetensors", data)
    assert "000001.safetensors" in line


def test_a_file_is_evaluated_by_its_header_before_it_is_read(tmp_path):
    """A sparse file of 3 GiB that agrees with itself, but is not what is wanted."""
    made = filled(tmp_path, 1)
    huge = {"policy/weight": entry(shape=(3 << 28,), stop=3 << 30)}
    text = raw(huge)  # its digest is wrong, which nobody may find out
    with (made.path / "000002.safetensors").open("wb") as file:
        file.write(text)
        file.truncate(len(text) + (3 << 30))
    wanted = {"policy/weight": state(1)["policy/weight"]}
    tracemalloc.start()
    line = refused("weight is float32.805306368.", made.load, 2, wanted)
    assert "expected float32[5, 3]" in line
    found = made.latest(wanted, "policy/")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(found.tensors) == ["policy/weight"]
    assert found.rejected == (line,)
    assert peak < 4 << 20


# Damage.


class Bomb:
    """Would make a file if anything unpickled it."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def flip(chance, data, end=None):
    bad = bytearray(data)
    bad[chance.randrange(end or len(bad))] ^= 1 << chance.randrange(8)
    return bytes(bad)


def splice(chance, data):
    while True:
        start, other = chance.randrange(len(data)), chance.randrange(len(data))
        length = chance.randint(1, 64)
        bad = data[:start] + data[other : other + length] + data[start + length :]
        if bad != data:
            return bad


def mutate(chance, good, other, marker):
    """A checkpoint, damaged in one way."""
    hostile = pickle.dumps(Bomb(marker), protocol=chance.choice([2, 3, 4, 5]))
    wrong = chance.choice([-1, 3, 1 << 63])
    return chance.choice(
        [
            lambda: flip(chance, good),
            lambda: flip(chance, good, end=900),
            lambda: good[: chance.randrange(len(good))],
            lambda: good + chance.randbytes(3),
            lambda: splice(chance, good),
            lambda: other,
            lambda: described(step=wrong),
            lambda: hostile,
        ]
    )()


@pytest.mark.parametrize("count", [150, pytest.param(2_000, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_all_detected_and_none_is_loaded(tmp_path, count):
    made, chance = filled(tmp_path, 1, 2), random.Random(7)
    marker = tmp_path / "ran"
    place = made.path / "000002.safetensors"
    good, other = (
        (made.path / f"00000{step}.safetensors").read_bytes() for step in (2, 1)
    )
    for number in range(count):
        place.write_bytes(mutate(chance, good, other, marker))
        message = refused(None, made.load, 2)
        if number % 20 == 0:
            loaded = made.latest()
            assert same(loaded.tensors, state(1))
            assert loaded.rejected == (message,)
    place.write_bytes(good)
    assert same(made.load(2).tensors, state(2))
    assert not marker.exists()


# Deaths, disks that refuse, losses of power.


class PruneFirst(CheckpointFolder):
    """The bad twin: room is made before the new one is there."""

    def publish(self, step, tensors, facts, *, score=None):
        for step in self.steps():
            discard(self._disk, self._file(step))
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
    except StorageError as error:
        told = str(error)
    else:
        return disk.met is None
    assert len(told) <= 200
    assert "the system says no" in told
    return False


def test_room_is_given_back_as_soon_as_a_disk_is_full(tmp_path):
    made = filled(tmp_path, 1)
    full = RefusingDisk(0, errno.ENOSPC)
    with pytest.raises(StorageError):
        CheckpointFolder(made.path, full).publish(2, state(2), FACTS)
    assert full.met == "create"
    assert unfinished(made.path) == []


class LyingDisk(CountingDisk):
    """Says that all is well and writes something else."""

    def create(self, file, data):
        super().create(file, data[:-1] + bytes([data[-1] ^ 1]))


def test_nothing_old_is_removed_when_the_new_one_does_not_read_back(tmp_path):
    made = filled(tmp_path, 1, 2, keep=2)
    with pytest.raises(StorageError, match="does not read back"):
        CheckpointFolder(made.path, LyingDisk(), keep=1).publish(3, state(3), FACTS)
    assert made.steps() == [1, 2, 3]
    assert same(made.latest().tensors, state(2))


def test_a_huge_sealed_checkpoint_of_others_takes_no_memory(tmp_path):
    """It is no state of this run: passed over, replaced, and never read into memory."""
    made = filled(tmp_path, 1)
    huge = made.path / "000005.safetensors"
    data = pack({"a": torch.zeros(8, dtype=torch.uint8)}, replace(PLAIN, step=5))
    size = 3 << 30
    text = data[8:].replace(b"[8]", b"[%d]" % size).replace(b"[0,8]", b"[0,%d]" % size)
    header = text[:-8].rstrip()
    header += b" " * (-len(header) % 8)
    huge.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(huge, 8 + len(header) + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert made.latest(state(1)).manifest.step == 1
    made.publish(2, state(2), {})
    made.publish(5, state(5), {})
    assert same(made.latest(state(5)).tensors, state(5))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
