import os
import shutil

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.experiment.checkpoint import CheckpointFolder
from tests.experiment.checkpoints import FACTS, filled, folder, same, state


def test_a_state_comes_back_to_the_bit_with_its_facts(tmp_path):
    made = CheckpointFolder(tmp_path / "checkpoints")
    assert made.latest() is None
    path = made.publish(12, state(12), FACTS, score=0.5)
    assert path == tmp_path / "checkpoints" / "000012"
    for loaded in (made.latest(), made.best(), made.load(12), made.load(path)):
        assert same(loaded.tensors, state(12))
        assert loaded.manifest.facts == FACTS
        assert loaded.manifest.step == 12
        assert loaded.manifest.score == 0.5
        assert loaded.manifest.made_by["torch"] == torch.__version__
        assert loaded.rejected == ()
    assert sorted(os.listdir(path)) == ["manifest.json", "state.safetensors"]
    assert os.listdir(tmp_path / "checkpoints") == ["000012"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    made = folder(tmp_path, keep=2)
    for step, score in [(1, 0.1), (2, 0.9), (3, None), (4, 0.9), (5, 0.2), (6, None)]:
        made.publish(step, state(step), FACTS, score=score)
    assert made.names() == ["000002", "000005", "000006"]
    assert made.best().manifest.step == 2
    assert made.latest().manifest.step == 6
    made.publish(7, state(7), FACTS, score=1.0)
    assert made.steps() == [6, 7]


def test_without_scores_nothing_is_the_best(tmp_path):
    made = filled(tmp_path, 1, 2, 3, keep=1)
    assert made.steps() == [3]
    assert made.best() is None


def test_a_run_does_not_go_back_behind_a_good_checkpoint(tmp_path):
    made = filled(tmp_path, 5)
    for step in (4, 5):
        with pytest.raises(BadInput, match="has another state at step 5"):
            made.publish(step, state(9), FACTS)
    made.publish(5, state(5), {}, score=1.0)
    assert made.latest().manifest.facts == FACTS


@pytest.mark.parametrize("way", ["cut off", "changed", "renamed"])
def test_the_name_of_a_damaged_checkpoint_can_be_used_again(tmp_path, way):
    made = filled(tmp_path, 1, 2)
    file = made.path / "000002" / "state.safetensors"
    if way == "cut off":
        file.write_bytes(b"x")
    elif way == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    else:
        shutil.rmtree(made.path / "000002")
        shutil.copytree(made.path / "000001", made.path / "000002")
    made.publish(2, state(7), FACTS)
    assert same(made.latest().tensors, state(7))
    assert sorted(os.listdir(made.path)) == ["000001", "000002"]


def test_a_damaged_newest_is_passed_over_with_one_line(tmp_path):
    made = filled(tmp_path, 1, 2, 3)
    (made.path / "000003" / "state.safetensors").write_bytes(b"PK\x03\x04 and so on")
    (made.path / "000002" / "manifest.json").unlink()
    loaded = made.latest()
    assert same(loaded.tensors, state(1))
    first, second = loaded.rejected
    assert first == (
        "checkpoints/000003/state.safetensors is a zip archive, as torch.save writes; "
        "use another checkpoint."
    )
    assert second.endswith(
        "checkpoints/000002 must hold manifest.json and state.safetensors only; "
        "missing or odd: 'manifest.json'. Use another checkpoint."
    )


def test_a_run_with_damaged_checkpoints_only_is_not_begun_anew(tmp_path):
    made = filled(tmp_path, 1, 2)
    for name in made.names():
        (made.path / name / "state.safetensors").write_bytes(b"x")
    with pytest.raises(
        BadInput, match="none of 2 checkpoints verifies: checkpoints/000002/state"
    ):
        made.latest()


def test_the_best_falls_back_too(tmp_path):
    made = folder(tmp_path)
    made.publish(1, state(1), {}, score=0.3)
    made.publish(2, state(2), {}, score=0.7)
    (made.path / "000002" / "state.safetensors").write_bytes(b"x")
    assert made.best().manifest.step == 1
    assert "000002" in made.best().rejected[0]


@pytest.mark.parametrize("step", [-1, 10**12 + 1])
def test_steps_out_of_range_are_refused_and_nothing_is_written(tmp_path, step):
    with pytest.raises(BadInput, match="step must lie in 0 to"):
        folder(tmp_path).publish(step, state(1), {})
    assert os.listdir(tmp_path) == []


def test_nan_is_not_saved_unless_it_is_meant(tmp_path):
    bad = {**state(1), "world/first_loss": torch.tensor([float("nan")])}
    with pytest.raises(BadInput, match="'world/first_loss' holds NaN"):
        folder(tmp_path).publish(1, bad, {})
    assert os.listdir(tmp_path) == []
    made = folder(tmp_path, may_be_nan=["*/first_loss"])
    made.publish(1, bad, {})
    assert made.latest().tensors["world/first_loss"].isnan().all()
    with pytest.raises(BadInput, match="holds NaN or infinity"):
        folder(tmp_path).load(1)


def test_other_things_in_the_folder_are_no_checkpoints(tmp_path):
    made = filled(tmp_path, 3)
    for name in ("7", "0000004", "-00001", "٠٠٠٠٠٤", "latest", "1e6"):
        (made.path / name).mkdir()
    assert made.names() == ["000003"]
