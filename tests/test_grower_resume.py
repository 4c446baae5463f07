"""Save, kill, load in another process, go on: the same run, to the bit."""

import signal
import subprocess
import sys
from functools import cache

import pytest
import torch
from torch import Tensor

from esper.contracts.errors import InvalidInputError
from esper.contracts.stages import Stage
from tests.growth.hosts import bits
from tests.resume_script import BATCHES, CASES, Training


@cache
def uninterrupted(controller: str) -> dict:
    training = Training(controller)
    training.run(BATCHES)
    return training.state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a process that was killed has saved."""
    path = tmp_path_factory.mktemp("saved")
    command = [sys.executable, "-m", "tests.resume_script", str(path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    return path


@pytest.mark.parametrize(("controller", "batch"), CASES)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(controller, batch, folder):
    saved = torch.load(folder / f"{controller}-{batch}", weights_only=True)
    if (controller, batch) == ("never", 20):
        assert set(saved["stages"]) == {stage.name for stage in Stage}
    if controller != "never":
        assert set(saved["stages"]) != {"DORMANT"}
    training = Training(controller)
    torch.manual_seed(12345)  # whatever this process did before
    training.load_state_dict(saved)
    training.run(BATCHES)
    assert bits(uninterrupted(controller)) == bits(training.state_dict())


def test_loading_twice_from_one_state_gives_the_same_run():
    training = Training("never")
    training.run(12)
    state = training.state_dict()
    kept = torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) else x, state
    )
    ends = []
    for _ in range(2):
        other = Training("never")
        other.load_state_dict(kept)
        other.run(22)
        ends.append(other.state_dict())
    assert bits(ends[0]) == bits(ends[1])
    before, after = kept["grower"]["optimizer"], ends[1]["grower"]["optimizer"]
    assert bits(before) != bits(after)


def test_a_state_of_another_host_or_of_no_grower_is_not_loaded():
    training = Training("never")
    training.run(6)
    saved = training.grower.state_dict()
    before = training.state_dict()
    with pytest.raises(InvalidInputError, match="this is no saved Grower") as refused:
        training.grower.load_state_dict({"weights": 1})
    assert "\n" not in str(refused.value)
    model = {**saved["model"], "host.first.weight": torch.zeros(3, 8)}
    with pytest.raises(
        InvalidInputError, match=r"first.weight was \[3, 8\] and is \[12, 8\]"
    ):
        training.grower.load_state_dict({**saved, "model": model})
    assert bits(before) == bits(training.state_dict())
