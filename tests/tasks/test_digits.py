"""The digits need scikit-learn, and say so."""

import sys

import pytest

from esper.contracts.errors import BadInput
from esper.tasks.digits import digits


def test_a_missing_package_is_named_in_one_line(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match="pip install scikit-learn") as caught:
        digits()
    assert "\n" not in str(caught.value)


def test_the_images_have_one_channel_of_eight_by_eight():
    pytest.importorskip("sklearn")
    data = digits()
    assert data.features.shape == (1797, 1, 8, 8)
    assert (data.features.min(), data.features.max()) == (0, 16)
    assert data.labels[:10].tolist() == list(range(10))
