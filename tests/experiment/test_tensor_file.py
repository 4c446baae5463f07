import json
import pickle
import tracemalloc

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.experiment.tensor_file import KINDS, MAX_BYTES, check_header, pack, unpack


def raw(header, body=b""):
    """A file with this header, by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(kind="F32", shape=(1,), start=0, stop=4):
    return {"dtype": kind, "shape": [*shape], "data_offsets": [start, stop]}


def test_every_kind_and_shape_comes_back_to_the_bit():
    tensors = {
        f"a/{kind}/{len(shape)}": (torch.rand(shape) * 100 - 50).to(dtype)
        for kind, dtype in KINDS.items()
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
        (b"", "0 bytes"),
        (b"\x00" * 8, "8 bytes"),
        (raw(b"{}"), "name 1 to"),
        (raw(b"[]"), "name 1 to"),
        (raw(b"{" * 60_000), "not JSON"),
        (raw(b'{"a":' * 60_000), "not JSON"),
        (raw(b'{"a": ' + b"9" * 5000 + b"}"), "not JSON"),
        (raw(b"\xff\xfe"), "not JSON"),
        ((2**63).to_bytes(8, "little") + b"{}", "header claims"),
        ((1 << 21).to_bytes(8, "little") + bytes(1 << 22), "header claims"),
        (raw({"a": entry()}), "need 4 bytes, it has 0"),
        (raw({"a": entry()}, bytes(5)), "need 4 bytes, it has 5"),
        (raw({"a": entry(), "b": entry()}, bytes(4)), "gap or overlap"),
        (raw({"a": entry(), "b": entry(start=2, stop=6)}, bytes(6)), "gap or overlap"),
        (raw({"a": entry(start=4, stop=8)}, bytes(8)), "gap or overlap"),
        (raw({"a": entry(start=-4, stop=0)}, b""), "does not fill"),
        (raw({"a": entry(stop=8)}, bytes(8)), "does not fill"),
        (raw({"a": entry(shape=(-1,))}, bytes(4)), "impossible shape"),
        (raw({"a": entry(shape=(1,) * 99)}, bytes(4)), "impossible shape"),
        (raw({"a": entry(shape=(1 << 40,), stop=1 << 42)}, bytes(4)), "larger than"),
        (raw({"a": entry(shape=(0, 1 << 62), stop=0)}), "larger than"),
        (raw({"a": entry(shape=(True,))}, bytes(4)), "not described"),
        (raw({"a": entry(shape=(1.0,))}, bytes(4)), "not described"),
        (raw({"a": {**entry(), "more": 1}}, bytes(4)), "not described"),
        (raw({"a": 7}), "not described"),
        (raw({"__metadata__": {"x": "y"}}), "not described"),
        (raw({"a": entry("C64", stop=8)}, bytes(8)), "unknown kind 'C64'"),
        (raw({"a": entry("BOOL", stop=1)}, b"\x02"), "no bool"),
        (raw({"a\x1b[2J" + "x" * 300: entry("F99")}), "unknown kind"),
        (raw(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)), "not JSON"),
        (
            raw({str(n): entry(stop=0, shape=(0,)) for n in range(10_001)}),
            "1 to 10,000",
        ),
        (pickle.dumps([1, 2]), "is a pickle"),
        (b"PK\x03\x04" + bytes(40), "a zip archive, as torch.save writes"),
        (b"\n <!DOCTYPE html><html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x1f\x8b" + bytes(20), "a gzip archive"),
    ],
)
def test_a_file_that_lies_is_refused_in_one_line(data, why):
    with pytest.raises(BadInput, match=why) as error:
        unpack("checkpoints/000001/state.safetensors", data)
    message = str(error.value)
    assert message.startswith("checkpoints/000001/state.safetensors")
    assert len(message) <= 200
    assert message.isprintable()


def test_no_room_is_made_for_what_a_header_claims():
    size = MAX_BYTES // 4
    data = raw({"a": entry(shape=(size // 4,), stop=size)}, bytes(4))
    tracemalloc.start()
    with pytest.raises(BadInput, match="need"):
        unpack("file", data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


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


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({}, "1 to 10,000 tensors, got 0"),
        ({str(n): torch.ones(()) for n in range(10_001)}, "got 10,001"),
        ({"__metadata__": torch.ones(1)}, "cannot be called '__metadata__'"),
        ({"a\n": torch.ones(1)}, "cannot be called"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.ones(2).to_sparse()}, "sparse or has no data"),
        ({"a": torch.ones(2, device="meta")}, "sparse or has no data"),
        ({"x" * 2000 + str(n): torch.ones(1) for n in range(600)}, "of them names"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tensors, why):
    with pytest.raises(BadInput, match=why):
        pack(tensors)


def test_tensors_that_share_memory_are_refused():
    one = torch.ones(3)
    with pytest.raises(BadInput, match="share memory"):
        pack({"a": one, "b": one})


def test_the_opening_is_enough_to_check_a_file():
    data = pack({"a": torch.rand(1000)})
    check_header("file", data[:200], len(data))
    with pytest.raises(BadInput, match="need 4,000 bytes, it has 3,999"):
        check_header("file", data[:200], len(data) - 1)
