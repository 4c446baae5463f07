"""Save, kill, load in another process, go on: the same run, to the bit."""

import signal
import subprocess
import sys
from functools import cache

import pytest
import torch
from torch import Tensor

from esper.contracts.errors import BadInput
from esper.contracts.stages import Stage
from tests.resume_script import BATCHES, Training


@cache
def uninterrupted(controller: str) -> dict:
    training = Training(controller)
    training.run(BATCHES)
    return training.state_dict()


def differences(one: object, other: object, where: str = "") -> list[str]:
    """Every place at which two states differ; NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        if same and one.is_floating_point():
            same = torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7))
        elif same:
            same = torch.equal(one, other)
        return [] if same else [where]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{where}: {one.keys() ^ other.keys()}"]
        return [
            d
            for key in one
            for d in differences(one[key], other[key], f"{where}/{key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{where}/{i}")]
    same = one == other or (one != one and other != other)
    return [] if same else [f"{where}: {one} and {other}"]


@pytest.mark.parametrize(
    ("controller", "batch"),
    [("never", 20), ("never", 18), ("random", 23), ("promise", 17)],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(controller, batch, tmp_path):
    path = tmp_path / "saved.pt"
    command = [sys.executable, "-m", "tests.resume_script", controller, str(batch)]
    done = subprocess.run([*command, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    saved = torch.load(path, weights_only=True)
    if (controller, batch) == ("never", 20):
        assert set(saved["stages"]) == {stage.name for stage in Stage}
    if controller != "never":
        assert set(saved["stages"]) != {"DORMANT"}
    training = Training(controller)
    torch.manual_seed(12345)  # whatever this process did before
    training.load_state_dict(saved)
    training.run(BATCHES)
    assert differences(uninterrupted(controller), training.state_dict()) == []


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
    assert differences(*ends) == []
    assert differences(
        kept["grower"]["optimizer"], other.state_dict()["grower"]["optimizer"]
    )


def test_what_belongs_to_another_host_or_to_nobody_is_not_loaded():
    training = Training("never")
    training.run(6)
    saved = training.grower.state_dict()
    before = training.state_dict()
    with pytest.raises(BadInput, match="this is no saved Grower") as refused:
        training.grower.load_state_dict({"weights": 1})
    assert "\n" not in str(refused.value)
    model = {**saved["model"], "host.first.weight": torch.zeros(3, 8)}
    with pytest.raises(BadInput, match=r"first.weight was \[3, 8\] and is \[12, 8\]"):
        training.grower.load_state_dict({**saved, "model": model})
    assert differences(before, training.state_dict()) == []
