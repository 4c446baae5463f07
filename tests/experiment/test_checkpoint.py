"""Checkpoints: what is kept, what is refused, and what was damaged or forged."""

import errno
import hashlib
import io
import json
import os
import pickle
import random
import shutil
from dataclasses import replace

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.experiment.checkpoint import (
    KINDS,
    MAX_STEP,
    CheckpointFolder,
    Manifest,
    made_by,
    pack,
    read_manifest,
    unpack,
    write_manifest,
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
    assert path == tmp_path / "checkpoints" / "000012"
    for loaded in (made.latest(), made.best(), made.load(12), made.load(path)):
        assert same(loaded.tensors, state(12))
        assert loaded.manifest.facts == FACTS
        assert loaded.manifest.step == 12
        assert loaded.manifest.score == 0.5
        assert loaded.manifest.made_by["torch"] == torch.__version__
        assert loaded.rejected == ()
    assert sorted(os.listdir(path)) == ["manifest.json", "state.safetensors"]
    assert os.listdir(tmp_path / "checkpoints") == ["000012"]


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
        with pytest.raises(BadInput, match="has another state at step 5"):
            made.publish(step, state(9), FACTS)
    made.publish(5, state(5), {}, score=1.0)
    assert made.latest().manifest.facts == FACTS


@pytest.mark.parametrize("way", ["cut off", "changed", "renamed"])
def test_the_name_of_a_damaged_checkpoint_can_be_used_again(tmp_path, way):
    made = filled(tmp_path, 1, 2)
    file = made.path / "000002" / "state.safetensors"
    if way == "cut off":
        file.write_bytes(b"x")
    elif way == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    else:
        shutil.rmtree(made.path / "000002")
        shutil.copytree(made.path / "000001", made.path / "000002")
    made.publish(2, state(7), FACTS)
    assert same(made.latest().tensors, state(7))
    assert sorted(os.listdir(made.path)) == ["000001", "000002"]


def test_a_damaged_newest_is_passed_over_with_one_line(tmp_path):
    made = filled(tmp_path, 1, 2, 3)
    (made.path / "000003" / "state.safetensors").write_bytes(b"PK\x03\x04 and so on")
    (made.path / "000002" / "manifest.json").unlink()
    loaded = made.latest()
    assert same(loaded.tensors, state(1))
    first, second = loaded.rejected
    assert first == (
        "checkpoints/000003/state.safetensors is a zip archive, as torch.save writes; "
        "use another checkpoint."
    )
    assert second.endswith(
        "checkpoints/000002 must hold manifest.json and state.safetensors only; "
        "missing or odd: 'manifest.json'. Use another checkpoint."
    )


def test_a_run_with_damaged_checkpoints_only_is_not_begun_anew(tmp_path):
    made = filled(tmp_path, 1, 2)
    for step in (1, 2):
        (made.path / f"00000{step}" / "state.safetensors").write_bytes(b"x")
    refused("none of 2 checkpoints verifies: checkpoints/000002/state", made.latest)


def test_the_best_falls_back_too(tmp_path):
    made = folder(tmp_path)
    made.publish(1, state(1), {}, score=0.3)
    made.publish(2, state(2), {}, score=0.7)
    (made.path / "000002" / "state.safetensors").write_bytes(b"x")
    assert made.best().manifest.step == 1
    assert "000002" in made.best().rejected[0]


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
        (made.path / name).mkdir()
    assert made.steps() == [3]
    (tmp_path / "file").write_bytes(b"x")
    for which in (2, tmp_path / "file", tmp_path / "missing"):
        refused("is no checkpoint; expected a folder", made.load, which)
    refused("must hold manifest", made.load, made.path / "latest")
    (made.path / "000003").rename(made.path / "000009")
    refused("000009 holds step 3", made.load, 9)
    assert made.manifests() == []
    assert made.load(made.path / "000009").manifest.step == 3


def test_an_unreadable_checkpoint_is_passed_over(tmp_path):
    made = filled(tmp_path, 1, 2)
    broken = CheckpointFolder(made.path, RefusingDisk(0, errno.EIO))
    loaded = broken.latest()
    assert loaded.manifest.step == 1
    assert "the system says no" in loaded.rejected[0]


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
    refused("not a regular file", made.load, 1)


# The manifest.

ONE = Manifest(
    step=7,
    score=0.25,
    facts={"spec": {"heads": [1, 2], "rate": 0.1}, "none": None},
    made_by=made_by(),
    size=12,
    sha256="c" * 64,
)


def sealed(body):
    """A manifest that agrees with itself, by hand."""
    text = json.dumps(body, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return (
        json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n"
    ).encode()


def body_of(data):
    body = json.loads(data)
    del body["sha256"]
    return body


def test_a_manifest_is_sealed_and_read_back():
    data, without = write_manifest(ONE), replace(ONE, score=None)
    assert sealed(body_of(data)) == data
    assert read_manifest("m", data) == ONE
    assert read_manifest("m", write_manifest(without)) == without


def test_every_changed_bit_shows():
    data = write_manifest(ONE)
    for place in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            with pytest.raises(BadInput):
                read_manifest("m", bytes(bad))


ENTRY = {"bytes": 1, "sha256": ""}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        *(
            (change, "not as Esper writes")
            for change in (
                {"step": -1},
                {"step": MAX_STEP + 1},
                {"step": "7"},
                {"score": "good"},
                {"facts": [1]},
                {"more": 1},
                {"files": {}},
            )
        ),
        ({"files": {"/etc/passwd": ENTRY}}, "alone"),
        ({"files": {"../state.safetensors": ENTRY}}, "alone"),
        ({"files": {"state.safetensors": ENTRY, "x": ENTRY}}, "alone"),
        ({"files": {"state.safetensors": {**ENTRY, "bytes": 1 << 40}}}, "at most 4,2"),
        ({"schema": 2}, r"schema '2', Esper .* reads 1; use the Esper that wrote it"),
        ({"schema": 0}, "schema '0'"),
        ({"schema": "1"}, "damaged|as Esper"),
    ],
)
def test_a_forged_manifest_is_refused_in_one_line(change, why):
    bad = sealed({**body_of(write_manifest(ONE)), **change})
    refused(why, read_manifest, "checkpoints/000001/manifest.json", bad)


def test_what_is_no_manifest_is_refused():
    good = write_manifest(ONE)
    for data in (
        *(b"", b"null", b"[]", b"{}", b"\xff\xfe{}", b"\xef\xbb\xbf{}"),
        b"[" * 100_000,
        b'{"schema": ' + b"9" * 5000 + b"}",
        b'{"schema": 1, "sha256": NaN, "step": NaN}',
        b" " * (1 << 21),
        good[:-1],
        good + b" ",
        good.replace(b"{", b'{\n "step": 7,', 1),
    ):
        refused("use another", read_manifest, "m", data)
    refused("an HTML page", read_manifest, "m", b"<html>Not found</html>")


def test_what_a_manifest_cannot_hold_is_refused():
    for bad in (float("nan"), float("inf"), object(), {1, 2}):
        change = replace(ONE, facts={"a": bad})
        refused("facts must be what JSON holds", write_manifest, change)
    large = replace(ONE, facts={"a": "x" * (1 << 20)})
    refused("facts make a manifest of", write_manifest, large)
    strange = replace(ONE, score=float("nan"))
    refused("score must be finite or None, got nan", write_manifest, strange)


# The numbers.


def raw(header, body=b""):
    """A file with this header, by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(kind="F32", shape=(1,), start=0, stop=4):
    return {"dtype": kind, "shape": [*shape], "data_offsets": [start, stop]}


def test_every_kind_and_shape_comes_back_to_the_bit():
    tensors = {
        f"a/{kind}/{len(shape)}": (torch.rand(shape) * 100 - 50).to(kind)
        for kind in KINDS
        for shape in ((), (3,), (2, 5), (0,), (0, 4))
    }
    tensors["chance"] = torch.Generator().manual_seed(3).get_state()
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).mT
    back = unpack("file", pack(tensors))
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype, name
        torch.testing.assert_close(back[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "too small"),
        (raw(b"{}"), "has 0 tensors"),
        (raw({"__metadata__": {"x": "y"}}), "has 0 tensors"),
        (
            raw({str(n): entry(stop=0, shape=(0,)) for n in range(10_001)}),
            "expected 1 to 10,000",
        ),
        (raw(b'{"a":' * 60_000), "invalid JSON"),
        (raw(b"\xff\xfe"), "invalid UTF-8"),
        ((2**63).to_bytes(8, "little") + b"{}", "too large"),
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
        (pickle.dumps([1, 2]), "is a pickle"),
        (b"PK\x03\x04" + bytes(40), "a zip archive, as torch.save writes"),
        (b"\n <!DOCTYPE html><html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x1f\x8b" + bytes(20), "a gzip archive"),
    ],
)
def test_a_file_that_lies_is_refused_in_one_line(data, why):
    line = refused(why, unpack, "checkpoints/000001/state.safetensors", data)
    assert line.startswith("checkpoints/000001/state.safetensors")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_need_permission(bad):
    tensors = {"world/first_loss": torch.tensor([1.0, bad]), "fine": torch.ones(2)}
    with pytest.raises(BadInput, match="'world/first_loss' holds NaN or infinity"):
        pack(tensors, ["*/other", "first_loss"])
    data = pack(tensors, ["*/first_loss"])
    with pytest.raises(BadInput, match="first_loss' holds NaN or infinity"):
        unpack("file", data)
    back = unpack("file", data, ["world/first_loss"])
    assert torch.equal(
        back["world/first_loss"].view(torch.int32),
        tensors["world/first_loss"].view(torch.int32),
    )


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
        message = refused(None, made.load, 2)
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
