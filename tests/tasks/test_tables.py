"""The tables in the package are what their papers say, byte for byte."""

import re
from importlib.resources import files

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.tasks.digits import digits
from esper.tasks.tables import TABLES, content, read, stored

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
EVERY = pytest.mark.parametrize("name", TABLES)


def test_every_table_is_looked_at_here():
    assert list(TABLES) == list(SHAPES) == list(RANGES)
    assert [*TABLES][1:] == list(COUNTS) == list(FIRST) == list(REPEATED)


@EVERY
def test_shapes_and_ranges_are_those_of_the_original(name):
    data, table = stored(name), TABLES[name]
    assert data.features.shape == SHAPES[name]
    assert (table.inputs, table.classes) == (SHAPES[name][1], data.classes)
    assert data.features.dtype == torch.float32
    found = [data.features.min().item(), data.features.max().item()]
    assert found == pytest.approx(RANGES[name], rel=1e-7)


@pytest.mark.parametrize("name", COUNTS)
def test_every_class_occurs_as_often_as_in_the_original(name):
    assert stored(name).labels.bincount().tolist() == COUNTS[name]


@pytest.mark.parametrize("name", FIRST)
def test_the_first_row_is_that_of_the_text_file(name):
    data, (row, label) = stored(name), FIRST[name]
    assert data.features[0, : len(row)].tolist() == pytest.approx(row, rel=1e-7)
    assert data.labels[0] == label


@pytest.mark.parametrize("name", REPEATED)
def test_as_many_rows_repeat_another_as_the_papers_say(name):
    data = stored(name)
    assert len(data) - len(data.features.unique(dim=0)) == REPEATED[name]


def test_no_row_of_the_one_digits_is_among_the_other_digits():
    pytest.importorskip("sklearn")
    both = torch.cat([digits().flat().features, stored("optdigits").features])
    assert len(both.unique(dim=0)) == len(both) == 5_620


@EVERY
def test_a_changed_byte_is_refused_in_one_line(name):
    changed = bytearray(content(name))
    changed[1000] ^= 1
    message = rf"{name}\.npz with SHA-256 {TABLES[name].digest[:12]}….*{len(changed):,}"
    with pytest.raises(BadInput, match=message) as caught:
        read(name, bytes(changed))
    assert "\n" not in str(caught.value)


def test_a_cut_file_is_refused():
    with pytest.raises(BadInput, match="install esper again"):
        read("vowel", content("vowel")[:-1])


def test_one_table_is_not_taken_for_another():
    with pytest.raises(BadInput, match=r"expected vowel\.npz with SHA-256"):
        read("vowel", content("phoneme"))


def test_a_missing_file_is_named_in_one_line():
    with pytest.raises(BadInput, match=r"nothing\.npz; it is missing; install esper"):
        content("nothing")


def test_the_files_are_small():
    assert sum(len(content(name)) for name in TABLES) < 1_250_000


@EVERY
def test_the_papers_name_size_digest_and_form_of_every_file(name):
    page = (files("esper.tasks") / "arrays" / "README.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page, flags=re.MULTILINE)
    (about,) = (part for part in section if part.startswith(f"{name}.npz\n"))
    assert f"`{TABLES[name].digest}`" in about
    assert f"{len(content(name)):,} bytes" in " ".join(about.split())
    assert str([*SHAPES[name]]) in about
    assert "**Credit.**" in about
