"""Checkpoints: what is kept, what is refused, and what was damaged or forged."""

import errno
import hashlib
import io
import json
import os
import pickle
import random
import shutil

import pytest
import torch
from safetensors.torch import save

from esper.contracts.errors import BadInput
from esper.experiment.checkpoint import (
    BLANK,
    KINDS,
    MAX_STEP,
    CheckpointFolder,
    manifest_of,
    pack,
    unpack,
)
from tests.experiment.checkpoints import FACTS, filled, folder, same, state
from tests.experiment.disks import RefusingDisk


def refused(why, call, *arguments):
    """The refusal, which must be one short line."""
    with pytest.raises(BadInput, match=why) as error:
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
        assert loaded.manifest.made_by["torch"] == torch.__version__
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
    assert other.best() is None


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
    (line,) = made.best().rejected
    assert line.endswith(
        "checkpoints/000002.safetensors is damaged: its content is not what was saved."
    )
    assert "000003.safetensors is a zip archive, as torch" in made.latest().rejected[0]
    first.write_bytes(b"x")
    refused("none of 3 checkpoints verifies: .*/000003.safe", made.latest)
    assert made.best() is None


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(tmp_path):
    bad = {**state(1), "world/first_loss": torch.tensor([float("nan")])}
    made = folder(tmp_path)
    for step in (-1, MAX_STEP + 1):
        refused("step must lie in 0 to", made.publish, step, state(1), {})
    refused("'world/first_loss' holds NaN", made.publish, 1, bad, {})
    refused("keep must be at least 1, got 0", lambda: folder(tmp_path, keep=0))
    assert os.listdir(tmp_path) == []
    meant = folder(tmp_path, may_be_nan=["*/first_loss"])
    meant.publish(1, bad, {})
    assert meant.latest().tensors["world/first_loss"].isnan().all()
    refused("holds NaN or infinity", made.load, 1)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    made = filled(tmp_path, 3)
    for name in ("7", "0000004", "-00001", "٠٠٠٠٠٤", "latest", "1e6"):
        (made.path / f"{name}.safetensors").write_bytes(b"x")
    assert made.steps() == [3]
    for which in (2, tmp_path / "missing"):
        refused("is no checkpoint; expected a file", made.load, which)
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
    refused("not a regular file", made.load, 1)


# The file.


def raw(header, body=b"", **metadata):
    """A file that agrees with itself, by hand."""
    about = {"step": 1, "score": None, "facts": {}, "made_by": {}}
    about = {"schema": "2", "manifest": json.dumps(about), **metadata}
    about["sha256"] = BLANK.decode()
    header = {"__metadata__": about, **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    data = len(text).to_bytes(8, "little") + text + body
    return data.replace(BLANK, hashlib.sha256(data).hexdigest().encode(), 1)


def entry(kind="F32", shape=(1,), start=0, stop=4):
    return {"dtype": kind, "shape": [*shape], "data_offsets": [start, stop]}


def described(**changes):
    about = {"step": 1, "score": None, "facts": {}, "made_by": {}} | changes
    return raw({"a": entry()}, bytes(4), manifest=json.dumps(about))


PLAIN = manifest_of(1, 0.5, FACTS)


def test_every_kind_and_shape_comes_back_to_the_bit():
    tensors = {
        f"a/{kind}/{len(shape)}": (torch.rand(shape) * 100 - 50).to(kind)
        for kind in KINDS
        for shape in ((), (3,), (2, 5), (0,), (0, 4))
    }
    tensors["chance"] = torch.Generator().manual_seed(3).get_state()
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).mT
    back, manifest = unpack("file", pack(tensors, manifest=PLAIN))
    assert manifest == PLAIN
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype, name
        torch.testing.assert_close(back[name], value, rtol=0, atol=0)


def test_every_changed_bit_shows():
    data = pack({"a": torch.arange(5.0), "b": torch.tensor([True])}, (), PLAIN)
    unpack("file", data)
    for place in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            with pytest.raises(BadInput):
                unpack("file", bytes(bad))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        *(
            (described(**{name: bad}), "is damaged")
            for name, bad in (
                ("step", -1),
                ("step", MAX_STEP + 1),
                ("step", "7"),
                ("score", "good"),
                ("score", float("nan")),
                ("facts", [1]),
                ("more", 1),
            )
        ),
        (raw({}, schema="3"), r"of schema '3', Esper .* reads 2; use the Esper that"),
        (raw({}, manifest="[" * 100_000), "is damaged"),
        (raw({}), "has 0 tensors"),
        (
            raw({str(n): entry(stop=0, shape=(0,)) for n in range(10_001)}),
            "expected 1 to 10,000",
        ),
        (raw({"a": entry()}), "not fully covered"),
        (raw({"a": entry()}, bytes(5)), "not fully covered"),
        (raw({"a": entry(), "b": entry(start=2, stop=6)}, bytes(6)), "invalid offset"),
        (raw({"a": entry(start=-4, stop=0)}, b""), "invalid"),
        (raw({"a": entry(stop=8)}, bytes(8)), "invalid shape"),
        (raw({"a": entry(shape=(1,) * 99)}, bytes(4)), "unknown kind"),
        (raw({"a": entry(shape=(1 << 40,), stop=1 << 42)}, bytes(4)), "not fully"),
        (raw({"a": entry("C64", stop=8)}, bytes(8)), "unknown kind"),
        (raw({"a": entry("F8_E4M3", stop=1)}, bytes(1)), "unknown kind"),
        (raw({"a": entry("BOOL", stop=1)}, b"\x02"), "no bool"),
        (raw({"a\x1b[2J" + "x" * 300: entry("F99")}), "invalid JSON"),
        (raw({"a": entry()}, bytes(4)) + b"x", "is damaged"),
        ((2**63).to_bytes(8, "little") + b"{}", "is damaged"),
        (save({"a": torch.ones(1)}), "is damaged"),
        *((data, "is damaged") for data in (b"", b"null", b"{}" * 9, b"\xff\xfe{}")),
        (pickle.dumps([1, 2]), "is a pickle"),
        (b"PK\x03\x04" + bytes(40), "a zip archive, as torch.save writes"),
        (b"\n <!DOCTYPE html><html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x1f\x8b" + bytes(20), "a gzip archive"),
    ],
)
def test_a_file_that_lies_is_refused_in_one_line(data, why):
    line = refused(why, unpack, "checkpoints/000001.safetensors", data)
    assert line.startswith("checkpoints/000001.safetensors")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_need_permission(bad):
    tensors = {"world/first_loss": torch.tensor([1.0, bad]), "fine": torch.ones(2)}
    why = "'world/first_loss' holds NaN or infinity"
    refused(why, pack, tensors, ["*/other", "first_loss"])
    data = pack(tensors, ["*/first_loss"], PLAIN)
    refused(why, unpack, "file", data)
    back, _ = unpack("file", data, ["world/first_loss"])
    assert torch.equal(
        back["world/first_loss"].view(torch.int32),
        tensors["world/first_loss"].view(torch.int32),
    )


def test_what_a_manifest_cannot_hold_is_refused():
    for bad in (float("nan"), float("inf"), object(), {1, 2}):
        refused("facts must be what JSON holds", manifest_of, 1, None, {"a": bad})
    large = {"a": "x" * (1 << 20)}
    refused("facts have 1,048,", manifest_of, 1, None, large)
    refused("score must be finite or None, got nan", manifest_of, 1, float("nan"), {})


def test_what_could_not_be_read_again_is_not_written():
    one = torch.ones(3)
    for tensors, why in (
        ({}, "has 0 tensors, expected 1 to 10,000"),
        ({str(n): torch.ones(()) for n in range(10_001)}, "has 10,001"),
        ({"__metadata__": one}, "cannot be called '__metadata__'"),
        ({"a\n": one}, "cannot be called"),
        ({"a": one.to(torch.complex64)}, "complex64"),
        ({"a": one.to_sparse()}, "sparse or has no data"),
        ({"a": one.to("meta")}, "sparse or has no data"),
        ({"a": one, "b": one}, "share memory"),
    ):
        refused(why, pack, tensors)


# Damage.


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
            lambda: ZIPPED,
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
