"""Every task loads, users add their own, and families are drawn."""

import pickle

import pytest
import torch
from torch import Generator

from esper.contracts.errors import InvalidInputError
from esper.tasks import catalogue
from esper.tasks.catalogue import TASKS, register_task, table, task
from esper.tasks.data import Data, Splits
from esper.tasks.datasets import DIGESTS
from esper.tasks.hosts import MlpHost
from esper.tasks.task import Task

NAMES = ["digits", "mnist1d", *DIGESTS, "mnist5k", "text", "teacher"]
HELD_OUT = {"letter", "satimage", "penbased", "optdigits", "texture", "text", "mnist5k"}


def loaded(name, rng_seed=0):
    """A task with its rows, if its package is installed."""
    made = task(name)
    try:
        return made, made.splits(rng_seed)
    except InvalidInputError as error:
        if "pip install" in str(error):
            pytest.skip(str(error))
        raise


def rings(name="rings"):
    part = Data("rings", torch.rand(64, 2), torch.arange(64) % 3, 3)
    return Task(
        name=name,
        description="three rings",
        data=lambda rng_seed: Splits(part, part, part),
        host=MlpHost((2, 8, 3)),
    )


def test_the_names_are_those_of_the_data():
    assert list(TASKS) == NAMES
    assert [name for name in TASKS if task(name).varied] == ["teacher"]


@pytest.mark.parametrize("name", NAMES)
def test_a_task_is_decided_by_its_number_and_its_host_reads_the_rows(name):
    made, first = loaded(name, 1)
    other = made.splits(2).test.features
    kept = first.test.features.clone()
    network = made.host.build(Generator().manual_seed(0))
    with torch.inference_mode():
        logits = network(kept)
    assert logits.shape == (len(first.test), made.classes)
    right = (logits.argmax(1) == first.test.labels).double().mean()
    assert 0 <= right < max(0.4, 1.5 / made.classes), "no better than a guess"
    assert len(made.host.slots) == 2
    first.test.features.zero_()  # rows that were dealt are not the stored ones
    assert made.splits(1).test.features.equal(kept)
    assert not kept.equal(other)
    sent = pickle.loads(pickle.dumps(made))
    assert (sent.summary(), sent.host) == (made.summary(), made.host)


@pytest.mark.parametrize("name", [name for name in DIGESTS if name != "optdigits"])
def test_no_column_of_a_table_is_drowned_by_another(name):
    deviation = task(name).splits(0).train.features.std(0, correction=0)
    always_nine = 1 if name == "segment" else 0
    assert (deviation < 0.99).sum() == always_nine


def test_the_table_shows_sizes_and_what_is_missing(monkeypatch):
    def missing(rng_seed):
        raise InvalidInputError("expected rows; pip install something")

    host = MlpHost((64, 8, 8, 10))
    lost = Task(name="digits", description="none", data=missing, host=host)
    few = {"digits": lambda: lost, "teacher": TASKS["teacher"]}
    monkeypatch.setattr(catalogue, "TASKS", few)
    monkeypatch.setattr(catalogue, "_BUILDERS", few)
    lost, found = table()
    assert (lost["name"], lost["rows"]) == ("digits", None)
    assert lost["missing"].endswith("pip install something")
    assert (found["name"], found["rows"], found["missing"]) == ("teacher", 6000, "")
    assert (found["inputs"], found["classes"]) == (16, 8)
    assert (found["parameters"], found["macs"]) == (280, 256)


@pytest.mark.usefixtures("own_names")
def test_a_user_adds_a_task_with_one_function():
    assert register_task("rings")(rings) is rings
    assert task("rings").splits(0).train.classes == 3
    assert register_task("rings")(rings) is rings
