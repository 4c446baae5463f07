"""The matrix of architectures and loops: a sample of it, and the whole of it slowly."""

import copy

import pytest

from benchmarks.architectures import (
    LOOPS,
    OWN,
    Run,
    as_report,
    in_pretrained,
    run,
    tried,
)
from benchmarks.zoo import ARCHITECTURES

ACTIONS = ["grow", "save", "load", "resume", "export"]


@pytest.mark.filterwarnings("ignore")  # Dynamo does not trace all of it, and says so
@pytest.mark.parametrize("kind", OWN)
def test_an_mlp_grows_in_the_users_own_loops(kind, tmp_path):
    found = tried(kind, ARCHITECTURES["MLP"], tmp_path, onnx=False)
    assert found == dict.fromkeys(ACTIONS, "works")


class Forgotten(Run):
    """A copy that nobody told of growing."""

    def attach(self):
        super().attach()
        self.copied = copy.deepcopy(self.model)

    @property
    def shipped(self):
        return self.copied


def test_what_has_not_grown_is_noticed(tmp_path):
    found = tried(Forgotten, ARCHITECTURES["MLP"], tmp_path, onnx=False)
    assert found == {"grow": "fails: RuntimeError: what is saved has not grown"}


class Broken(Run):
    """A loop that nobody can run."""

    def step(self, batch):
        raise ValueError("no")


def test_what_fails_without_a_grower_too_is_told_apart(tmp_path):
    found = tried(Broken, ARCHITECTURES["MLP"], tmp_path, onnx=False)
    assert found == {"grow": "fails without a Grower too: ValueError: no"}


def test_what_does_not_work_is_numbered_and_named():
    found = {("MLP", loop): dict.fromkeys(ACTIONS, "works") for loop in LOOPS}
    found["MLP", Run.loop]["onnx"] = "refused: no."
    found["MLP", "AMP"]["load"] = "refused: no."
    report = as_report(["MLP"], found)
    assert report.rows == [
        ("MLP", "works", "but [1]", *["works"] * (len(LOOPS) - 2), "but [2]")
    ]
    assert report.notes[:2] == ["[1] load: refused: no.", "[2] onnx: refused: no."]


def test_what_was_not_tried_is_said_to_be():
    report = as_report(["MLP"], {("MLP", "AMP"): {"grow": "works"}})
    (row,) = report.rows
    assert row == ("MLP", "not tried", "works", *["not tried"] * (len(LOOPS) - 1))


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_is_loaded_as_it_grew_or_refused(tmp_path):
    pytest.importorskip("transformers")
    found = [in_pretrained(ARCHITECTURES[n], tmp_path) for n in ("BERT", "ConvNeXt")]
    assert found[0] == {"grow": "works", "load": "works"}
    assert "ConvNextConfig has no field for the layers" in found[1]["grow"]
    assert in_pretrained(ARCHITECTURES["MLP"], tmp_path) == {}


@pytest.mark.slow
def test_every_architecture_works_in_every_loop_or_is_refused():
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    report = run(skip_onnx=True)
    assert len(report.rows) == len(ARCHITECTURES)
    assert not [note for note in report.notes if "fails:" in note]
