"""A task refuses terms and rows that its host could not learn from."""

from dataclasses import replace

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.tasks.data import Data, Splits
from esper.tasks.hosts import MlpHost
from esper.tasks.task import Task


def rows(count, inputs=3, classes=2):
    return Data("rows", torch.rand(count, inputs), torch.arange(count) % 2, classes)


def rings(**changes):
    terms = {
        "name": "rings",
        "description": "two rings",
        "data": lambda rng_seed: Splits(rows(64), rows(10), rows(10)),
        "host": MlpHost((3, 4, 2)),
    }
    return Task(**(terms | changes))


def test_rows_that_fit_are_handed_on_with_their_number():
    task = rings(data=lambda number: Splits(rows(64), rows(10), rows(number)))
    assert [len(part) for part in task.splits(7)] == [64, 10, 7]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (Splits(rows(63), rows(9), rows(9)), "one batch of 64 rows; got 63"),
        (Splits(rows(64, 5), rows(9), rows(9)), r"shape \(3,\).*train has \(5,\) in 2"),
        (Splits(rows(64), rows(9), rows(9, 3, 4)), r"test has \(3,\) in 4"),
        (Splits(rows(64), rows(1), rows(9)), "two classes; all 1 are of class 0"),
        ((rows(64), rows(9), rows(9)), "Splits.*got tuple"),
        (None, "Splits.*got NoneType"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_rows_that_do_not_fit_are_refused_in_one_line(splits, message):
    with pytest.raises(BadInput, match=message) as caught:
        rings(data=lambda rng_seed: splits).splits(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "expected a task's name"),
        ({"data": None}, "data as a function of rng_seed; got NoneType"),
        ({"host": torch.nn.Linear(2, 2)}, "MlpHost or a CnnHost; got Linear"),
        ({"batch": 0}, "expected batch to be a whole number from 1; got 0"),
        ({"horizon": 2.5}, "expected horizon .* got 2.5"),
        ({"learning_rate": 0.0}, "learning_rate > 0 .* got 0.0 and 0.01"),
        ({"learning_rate": float("nan")}, "got nan"),
        ({"weight_decay": -1.0}, "got 0.004 and -1.0"),
        ({"loss": "squares"}, "got 'squares' and 'accuracy'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_terms_that_cannot_be_meant_are_refused_in_one_line(change, message):
    with pytest.raises(BadInput, match=message) as caught:
        replace(rings(), **change)
    assert "\n" not in str(caught.value)
