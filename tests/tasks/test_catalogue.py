"""Every task loads, and users add their own with one function."""

import pickle

import pytest
import torch
from torch import Generator

from esper.contracts.errors import BadInput
from esper.tasks import catalogue
from esper.tasks.catalogue import TASKS, register_task, table, task
from esper.tasks.data import Data, Splits
from esper.tasks.hosts import MlpHost
from esper.tasks.tables import TABLES
from esper.tasks.task import Task, accuracy

NAMES = ["digits", "mnist1d", *TABLES, "mnist5k", "text", "teacher"]


@pytest.fixture
def _own_names(monkeypatch):
    """What a test registers is forgotten afterwards."""
    before = dict(catalogue._BUILDERS)
    yield
    catalogue._BUILDERS.clear()
    catalogue._BUILDERS.update(before)


def loaded(name, rng_seed=0):
    """A task with its rows, if its package is installed."""
    made = task(name)
    try:
        return made, made.splits(rng_seed)
    except BadInput as error:
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


@pytest.mark.parametrize("name", NAMES)
def test_the_host_reads_the_rows_and_is_no_better_than_a_guess(name):
    made, splits = loaded(name)
    network = made.host.build(Generator().manual_seed(0))
    with torch.inference_mode():
        logits = network(splits.test.features)
    assert logits.shape == (len(splits.test), made.classes)
    assert 0 <= accuracy(logits, splits.test.labels) < max(0.4, 1.5 / made.classes)
    assert len(made.host.slots) == 2


@pytest.mark.parametrize("name", NAMES)
def test_another_number_gives_other_rows(name):
    _, first = loaded(name, 1)
    _, again = loaded(name, 1)
    _, other = loaded(name, 2)
    assert first.test.features.equal(again.test.features)
    assert not first.test.features.equal(other.test.features)


@pytest.mark.parametrize("name", ["digits", "letter", "vowel", "mnist1d"])
def test_dealt_rows_are_not_the_stored_ones(name):
    made, splits = loaded(name)
    splits.train.features.zero_()
    assert made.splits(0).train.features.any()


@pytest.mark.parametrize("name", [name for name in TABLES if name != "optdigits"])
def test_no_column_of_a_table_is_drowned_by_another(name):
    deviation = task(name).splits(0).train.features.std(0, correction=0)
    always_nine = 1 if name == "segment" else 0
    assert (deviation < 0.99).sum() == always_nine


def test_only_the_teacher_has_other_data_for_each_environment():
    assert [name for name in TASKS if task(name).varied] == ["teacher"]


@pytest.mark.parametrize("name", NAMES)
def test_a_task_can_be_sent_to_another_process(name):
    made = task(name)
    sent = pickle.loads(pickle.dumps(made))
    assert sent.summary() == made.summary()
    assert sent.host == made.host


def test_the_table_shows_sizes_and_what_is_missing(monkeypatch):
    def missing():
        raise BadInput("expected rows; pip install something")

    few = {"digits": lambda: task_without(missing), "teacher": TASKS["teacher"]}
    monkeypatch.setattr(catalogue, "TASKS", few)
    monkeypatch.setattr(catalogue, "_BUILDERS", few)
    lost, found = table()
    assert (lost["name"], lost["rows"]) == ("digits", None)
    assert lost["missing"].endswith("pip install something")
    assert (found["name"], found["rows"], found["missing"]) == ("teacher", 6000, "")
    assert (found["inputs"], found["classes"]) == (16, 8)
    assert (found["parameters"], found["macs"]) == (280, 256)


def task_without(missing):
    return Task(
        name="digits",
        description="none",
        data=lambda rng_seed: missing(),
        host=MlpHost((64, 8, 8, 10)),
    )


@pytest.mark.usefixtures("_own_names")
def test_a_user_adds_a_task_with_one_function():
    registered = register_task("rings")(rings)
    assert registered is rings
    assert task("rings").splits(0).train.classes == 3
    assert register_task("rings")(rings) is rings


@pytest.mark.parametrize(
    ("name", "near"), [("leter", "letter"), ("mnist", "mnist1d"), ("", "digits")]
)
def test_an_unknown_name_is_answered_with_the_nearest(name, near):
    with pytest.raises(BadInput, match=f"got '{name}'; did you mean '.*'") as caught:
        task(name)
    assert near in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("_own_names")
def test_a_taken_name_is_refused():
    with pytest.raises(BadInput, match="not taken; got 'letter'"):
        register_task("letter")(rings)
    assert task("letter").classes == 26


@pytest.mark.usefixtures("_own_names", "_as_users_call")
@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (lambda: rings("squares"), "got Task named 'squares'"),
        (lambda: None, "got NoneType$"),
    ],
)
def test_a_function_that_returns_something_else_is_refused(builder, message):
    register_task("rings")(builder)
    with pytest.raises(BadInput, match=message):
        task("rings")


@pytest.mark.usefixtures("_own_names")
def test_an_empty_name_is_refused():
    with pytest.raises(BadInput, match="expected a task's name; got ''"):
        register_task("")
