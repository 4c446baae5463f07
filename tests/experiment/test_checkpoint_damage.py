"""Checkpoints that were damaged, mixed up, or made to do harm."""

import errno
import hashlib
import io
import os
import pickle
import random

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.experiment.checkpoint import (
    CheckpointFolder,
    Manifest,
    made_by,
    write_manifest,
)
from esper.experiment.files import Disk
from tests.experiment.checkpoints import FACTS, filled, same, state
from tests.experiment.disks import RefusingDisk
from tests.experiment.test_manifest import body_of, sealed


class Bomb:
    """Would make a file if anything unpickled it."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def torch_saved(tensors):
    stream = io.BytesIO()
    torch.save(tensors, stream)
    return stream.getvalue()


ZIPPED = torch_saved({"a": torch.ones(2)})


def forged(state_bytes, **changes):
    """A manifest that agrees with bytes that are no good."""
    entry = Manifest(
        step=2,
        score=None,
        facts=FACTS,
        made_by=made_by(),
        size=len(state_bytes),
        sha256=hashlib.sha256(state_bytes).hexdigest(),
    )
    return sealed({**body_of(write_manifest(entry)), **changes})


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
    """Files of a checkpoint, damaged in one way."""
    numbers, manifest = good["state.safetensors"], good["manifest.json"]
    hostile = pickle.dumps(Bomb(marker), protocol=chance.choice([2, 3, 4, 5]))
    name = chance.choice(
        ["/etc/passwd", "../000001/state.safetensors", "a/b", "\x1b[2J"]
    )
    ways = [
        lambda: {"state.safetensors": flip(chance, numbers)},
        lambda: {"state.safetensors": flip(chance, numbers, end=600)},
        lambda: {"manifest.json": flip(chance, manifest)},
        lambda: {"state.safetensors": numbers[: chance.randrange(len(numbers))]},
        lambda: {"manifest.json": manifest[: chance.randrange(len(manifest))]},
        lambda: {"state.safetensors": numbers + chance.randbytes(3)},
        lambda: {
            "manifest.json": manifest + chance.choice([b" ", b"\n", b"{}", b"\0"])
        },
        lambda: {"state.safetensors": splice(chance, numbers)},
        lambda: {"manifest.json": splice(chance, manifest)},
        lambda: {"state.safetensors": other["state.safetensors"]},
        lambda: {"manifest.json": other["manifest.json"]},
        lambda: dict(other),
        lambda: {"state.safetensors": manifest, "manifest.json": numbers},
        lambda: {f"extra{chance.randrange(99)}": b"more"},
        lambda: {"state.safetensors": None},
        lambda: {"manifest.json": None},
        lambda: {"manifest.json": forged(numbers, files={name: {"bytes": 1}})},
        lambda: {
            "manifest.json": forged(numbers, step=chance.choice([-1, 3, 1 << 63]))
        },
        lambda: {"state.safetensors": hostile},
        lambda: {"state.safetensors": hostile, "manifest.json": forged(hostile)},
        lambda: {"manifest.json": hostile},
        lambda: {"state.safetensors": ZIPPED, "manifest.json": forged(ZIPPED)},
    ]
    return chance.choice(ways)()


@pytest.mark.parametrize("count", [150, pytest.param(2_000, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_all_detected_and_none_is_loaded(tmp_path, count):
    made, chance = filled(tmp_path, 1, 2), random.Random(7)
    marker = tmp_path / "ran"
    good, other = (
        {part.name: part.read_bytes() for part in (made.path / name).iterdir()}
        for name in ("000002", "000001")
    )
    place = made.path / "000002"
    for number in range(count):
        change = mutate(chance, good, other, marker)
        for name, data in change.items():
            (place / name).unlink() if data is None else (place / name).write_bytes(
                data
            )
        with pytest.raises(BadInput) as error:
            made.load(2)
        message = str(error.value)
        assert len(message) <= 200, message
        assert message.isprintable(), message
        if number % 20 == 0:
            loaded = made.latest()
            assert same(loaded.tensors, state(1))
            assert loaded.rejected == (message,)
        for name in change:
            if name in good:
                (place / name).write_bytes(good[name])
            else:
                (place / name).unlink()
    assert same(made.load(2).tensors, state(2))
    assert not marker.exists()


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.timeout(20)
def test_a_part_that_is_no_file_is_refused(tmp_path, file, kind):
    made = filled(tmp_path, 1)
    part = made.path / "000001" / file
    part.rename(tmp_path / "aside")
    if kind == "link":
        part.symlink_to(tmp_path / "aside")
    elif kind == "folder":
        part.mkdir()
    else:
        os.mkfifo(part)
    with pytest.raises(BadInput, match="not a regular file"):
        made.load(1)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    made = filled(tmp_path, 1)
    (tmp_path / "file").write_bytes(b"x")
    for which in (2, tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(BadInput, match="is no checkpoint; expected a folder"):
            made.load(which)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="must hold manifest"):
        made.load(tmp_path / "empty")


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path):
    made = filled(tmp_path, 1)
    (made.path / "000001").rename(made.path / "000009")
    with pytest.raises(BadInput, match="000009 holds step 1"):
        made.load(9)
    assert made.manifests() == []
    assert made.load(made.path / "000009").manifest.step == 1


def test_an_unreadable_checkpoint_is_passed_over(tmp_path):
    made = filled(tmp_path, 1, 2)
    broken = CheckpointFolder(made.path, RefusingDisk(0, errno.EIO))
    loaded = broken.latest()
    assert loaded.manifest.step == 1
    assert "the system says no" in loaded.rejected[0]


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(BadInput, match="keep must be at least 1, got 0"):
        CheckpointFolder(tmp_path, Disk(), keep=0)
