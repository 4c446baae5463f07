import json
import pickle

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.experiment.tensor_file import KINDS, pack, unpack


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
    with pytest.raises(BadInput, match=why) as error:
        unpack("checkpoints/000001/state.safetensors", data)
    message = str(error.value)
    assert message.startswith("checkpoints/000001/state.safetensors")
    assert len(message) <= 200
    assert message.isprintable()


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
        ({}, "has 0 tensors, expected 1 to 10,000"),
        ({str(n): torch.ones(()) for n in range(10_001)}, "has 10,001"),
        ({"__metadata__": torch.ones(1)}, "cannot be called '__metadata__'"),
        ({"a\n": torch.ones(1)}, "cannot be called"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.ones(2).to_sparse()}, "sparse or has no data"),
        ({"a": torch.ones(2, device="meta")}, "sparse or has no data"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tensors, why):
    with pytest.raises(BadInput, match=why):
        pack(tensors)


def test_tensors_that_share_memory_are_refused():
    one = torch.ones(3)
    with pytest.raises(BadInput, match="share memory"):
        pack({"a": one, "b": one})
