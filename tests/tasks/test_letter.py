"""The letters in the package are the letters of the original."""

from importlib.resources import files

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.tasks.letter import letter, read


def content():
    return (files("esper.tasks") / "arrays" / "letter.npz").read_bytes()


def test_shapes_and_ranges_are_those_of_the_original():
    data = letter()
    assert data.features.shape == (20_000, 16)
    assert data.features.dtype == torch.float32
    assert data.classes == 26
    assert data.features.unique().tolist() == list(range(16))


def test_the_first_and_last_rows_are_those_of_the_original():
    data = letter()
    assert [chr(ord("A") + label) for label in data.labels[:3]] == ["T", "I", "D"]
    assert data.features[0].int().tolist() == [
        *(2, 8, 3, 5, 1, 8, 13, 0, 6, 6, 10, 8, 0, 8, 0, 8)
    ]
    assert chr(ord("A") + data.labels[-1]) == "A"
    assert data.features[-1].int().tolist() == [
        *(4, 9, 6, 6, 2, 9, 5, 3, 1, 8, 1, 8, 2, 7, 2, 8)
    ]


def test_every_letter_occurs_as_often_as_in_the_original():
    counts = letter().labels.bincount()
    assert counts.sum() == 20_000
    assert (counts.min(), counts.argmax(), counts.max()) == (734, ord("U") - 65, 813)


def test_a_changed_byte_is_refused_in_one_line():
    changed = bytearray(content())
    changed[1000] ^= 1
    with pytest.raises(BadInput, match=r"SHA-256 bafe0d5167c1….*153,259") as caught:
        read(bytes(changed))
    assert "\n" not in str(caught.value)


def test_a_cut_file_is_refused():
    with pytest.raises(BadInput, match="install esper again"):
        read(content()[:-1])


def test_the_file_is_small():
    assert len(content()) < 250_000
