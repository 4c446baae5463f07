"""One finished run that the tests only read."""

from dataclasses import replace

import pytest

from esper.runs.train_config import EvalConfig
from esper.training.train import begin_run
from tests.training.training_script import ROUNDS, Log, config


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a run without interruptions, and its log."""
    evaluation = EvalConfig(every=3, hosts=3, controllers=("never", "early", "static"))
    own = replace(
        config(tmp_path_factory.mktemp("runs"), "whole"), evaluation=evaluation
    )
    log = Log()
    result = begin_run(own, [log])
    assert (result.rounds, result.signal) == (ROUNDS, None)
    return result.path, log
