"""The shipped Tamiyo is judged by name, and a Grower passes on what she notes."""

import numpy as np
import pytest

from esper.experiment.config import Judging
from esper.experiment.evaluate import EvaluateConfig, evaluate
from esper.experiment.judging import judge
from esper.experiment.records import is_learned
from esper.tamiyo.shipped import shipped
from tests.experiment.test_evaluate import (
    _few_tasks,  # noqa: F401
    config,
    quiet,
    stored,
    tiny,
)
from tests.test_grower import begin


@pytest.mark.usefixtures("_few_tasks")
def test_she_is_judged_by_name_and_the_plain_network_is_measured_by_her(tmp_path):
    arms = ("never", "tamiyo", "static")
    path, _ = evaluate(config(tmp_path, controllers=arms), quiet())
    rows = [row for row in stored(path) if row["controller"] == "tamiyo"]
    expected = judge(shipped(), tiny(), 2, 0)
    found = [row["return"] for row in sorted(rows, key=lambda row: row["host"])]
    np.testing.assert_array_equal(found, expected.returns)
    assert is_learned("tamiyo")


def test_nobody_is_judged_beside_her_without_being_asked():
    assert "tamiyo" not in Judging().controllers
    assert "tamiyo" not in EvaluateConfig().controllers


def test_a_grower_passes_on_what_its_controller_notes():
    strange = begin(controller="tamiyo", blueprints=["scale_shift"])
    assert "note: the controller was trained with none of these" in strange.summary()
    usual = begin(controller="tamiyo")
    assert "note: " not in usual.summary()
