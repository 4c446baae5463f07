"""The squares in the package are the squares of the original."""

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.tasks.satimage import SOILS, read, satimage
from esper.tasks.stored import content


def test_shapes_and_ranges_are_those_of_the_original():
    data = satimage()
    assert data.features.shape == (6435, 36)
    assert data.features.dtype == torch.float32
    assert (data.features.min(), data.features.max()) == (27, 157)


def test_the_first_and_last_rows_are_those_of_the_original():
    data = satimage()
    first, last = data.features[0].int().tolist(), data.features[-1].int().tolist()
    assert first[:8] == [92, 115, 120, 94, 84, 102, 106, 79]
    assert first[-4:] == [84, 107, 113, 87]
    assert last[:4] + last[-4:] == [67, 77, 110, 90, 76, 89, 98, 79]
    assert [SOILS[label] for label in data.labels[[0, -1]]] == [
        "grey soil",
        "damp grey soil",
    ]


def test_every_soil_occurs_as_often_as_in_the_original():
    counts = satimage().labels.bincount().tolist()
    assert counts == [1533, 703, 1358, 626, 707, 1508]


def test_no_row_comes_twice():
    assert len(satimage().features.unique(dim=0)) == 6435


def test_a_changed_byte_is_refused_in_one_line():
    changed = bytearray(content("satimage"))
    changed[1000] ^= 1
    with pytest.raises(BadInput, match=r"SHA-256 1036cd73f74f….*80,142") as caught:
        read(bytes(changed))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named_in_one_line():
    with pytest.raises(BadInput, match=r"nothing\.npz; it is missing; install esper"):
        content("nothing")
