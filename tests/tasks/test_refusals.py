"""What cannot be meant is refused in one line."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch

from esper.contracts.errors import InvalidInputError
from esper.tasks.catalogue import register_task, task
from esper.tasks.data import Data, Splits, check_data, split
from esper.tasks.hosts import CnnHost, MlpHost
from esper.tasks.task import Task
from esper.tasks.teacher import Teacher, teacher

FEW, BITS = torch.zeros(2, 2), torch.tensor([0, 1])
NARROW = Teacher(width=1, depth=1, noise=0.0)


def rows(count, inputs=3, classes=2, kinds=2):
    labels = torch.arange(count) % kinds
    return Data("rows", torch.rand(count, inputs), labels, classes)


def rings(name="rings", **changes):
    parts = Splits(rows(64), rows(10), rows(10))
    host = MlpHost((3, 4, 2))
    made = Task(name=name, description="two", data=lambda rng_seed: parts, host=host)
    return replace(made, **changes)


def splits(*parts):
    return rings(data=lambda rng_seed: Splits(*parts)).splits(0)


def registered(make):
    register_task("rings")(make)
    return task("rings")


DATA = [
    (torch.zeros(3, 2), torch.zeros(4).long(), r"\(3, 2\) and labels \(4,\)"),
    (torch.zeros(0, 2), torch.zeros(0).long(), "at least one row"),
    (torch.tensor(1.0), torch.tensor([0]), r"features \(\) and labels \(1,\)"),
    (FEW, torch.zeros(2, 1).long(), r"labels \(2, 1\)"),
    (FEW, torch.tensor([-1, 0]), r"0\.\.4; got -1\.\.0"),
    (FEW, torch.tensor([0, 5]), r"got 0\.\.5, first in row 1"),
    (torch.tensor([[0.0], [nan]]), BITS, r"at \[1, 0\]"),
    (torch.zeros(1, 3, 2, 2) - inf, torch.tensor([0]), r"at \[0, 0, 0, 0\]"),
    (FEW.byte(), BITS, r"torch\.uint8; call \.fl"),
    (FEW, torch.tensor([0.0, 1.0]), r"int64; got torch\.float32"),
    (FEW.numpy(), BITS, "features .* ndarray"),
    (FEW, [0, 1], "labels must be a tensor; got list"),
]
TARGETS = [
    (BITS, r"targets must be float .* got torch\.int64"),
    (torch.tensor([0.0, nan]), "labels must be finite; .* first at 1"),
]
TERMS = [
    ({"name": ""}, "a task name must be"),
    ({"data": None}, "data must be a function of rng_seed; got NoneType"),
    ({"host": torch.nn.Linear(2, 2)}, "MlpHost or a CnnHost; got Linear"),
    ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
    ({"horizon": 2.5}, "horizon must .* got 2.5"),
    ({"compute": 0}, "compute must .* got 0"),
    ({"learning_rate": 0.0}, "learning_rate must be > 0 .* got 0.0 and 0.01"),
    ({"learning_rate": nan}, "got nan"),
    ({"weight_decay": -1.0}, "got 0.004 and -1.0"),
]
SPLITS = [
    (lambda: split(rows(9), 0, least_deviation=-0.1), r"lie in \[0, 1\], got -0.1"),
    (lambda: split(rows(9), 0, least_deviation=nan), r"lie in \[0, 1\], got nan"),
    (lambda: split(rows(50), 0, (0.5, 0.5)), "three positive"),
    (lambda: split(rows(50), 0, (0.6, 0.6, -0.2)), "three positive"),
    (lambda: split(rows(50), 0, (0.6, 0.2, 0.1)), "three positive"),
    (lambda: split(rows(3), 0), "too few rows .* got 3"),
    (lambda: split(rows(50), -1), "at least 0, got -1"),
    (lambda: check_data(rows(63), batch=64), "one batch of 64 rows .* got 63"),
    (lambda: check_data(Data("still", FEW, torch.ones(2), 1)), "differ; all 2 are 1"),
    (lambda: check_data(rows(9, kinds=1)), "must differ; all 9 are 0"),
    (lambda: splits(rows(63), rows(9), rows(9)), "one batch of 64 rows .* got 63"),
    (lambda: splits(rows(64, 5), rows(9), rows(9)), r"\(3,\).*train has \(5,\) in 2"),
    (lambda: splits(rows(64), rows(9), rows(9, 3, 4)), r"test has \(3,\) in 4"),
    (lambda: splits(rows(64), rows(1), rows(9)), "must differ; all 1 are 0"),
    (lambda: rings(data=lambda n: None).splits(0), "Splits.*got NoneType"),
    (lambda: rings(data=lambda n: (1, 2, 3)).splits(0), "Splits.*got tuple"),
]
WIDTHS = [(16, 26), (), (16, 0, 3), (16, 2.5, 3), (16, True, 3), [4, 4, 4]]
CNNS = [
    (((1, 3, 28), (4, 8), 10), r"halved 2 times; got image \(1, 3, 28\)"),
    (((1, 28, 28, 28), (4, 8), 10), "image must be"),
    (((28, 28), (4, 8), 10), "image must be a tuple of at least 3"),
    (((1, 28, 28), (), 10), "channels must be a tuple of at least 1"),
    (((1, 28, 28), (4, -8), 10), r"got \(4, -8\)"),
    (
        ((1, 28, 28), (4, 8), 0),
        "num_outputs must be a whole number .* got 0",
    ),
]
NAMES = [
    (lambda: task("leter"), "got 'leter'; did you mean 'letter'"),
    (lambda: task(""), "did you mean"),
    (lambda: register_task("letter")(rings), "name 'letter' is taken"),
    (lambda: register_task(""), "non-empty string; got ''"),
    (lambda: registered(lambda: rings("squares")), "got Task named 'squares'"),
    (lambda: registered(lambda: None), "got NoneType$"),
]


@pytest.mark.usefixtures("own_names", "unchecked")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((lambda x=x, y=y: Data("wrong", x, y, 5), words) for x, y, words in DATA),
        *((lambda y=y: Data("wrong", FEW, y, 1), words) for y, words in TARGETS),
        *((lambda change=change: rings(**change), words) for change, words in TERMS),
        *SPLITS,
        *(
            (lambda w=w: MlpHost(w), "widths must be a tuple of at least 3")
            for w in WIDTHS
        ),
        *((lambda sizes=sizes: CnnHost(*sizes), words) for sizes, words in CNNS),
        (lambda: teacher(0, kind=NARROW), "width=1.*make it wider"),
        *NAMES,
    ],
)
def test_what_cannot_be_meant_is_refused(call, words):
    with pytest.raises(InvalidInputError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert task("letter").classes == 26
