"""What a run learnt becomes two files that decide as the run's policy does."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Generator

from esper.contracts.errors import BadInput, StorageTrouble
from esper.experiment.config import from_toml
from esper.experiment.learned import load_controller
from esper.experiment.ship import commit_of, ship
from esper.experiment.storage.disk import Disk
from esper.experiment.train import begin_run
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.shipped import MANIFEST, WEIGHTS, read
from tests.cli.calls import call, make_run, refused
from tests.experiment.training_script import config
from tests.rollouts import SPEC, random_observation


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return begin_run(config(tmp_path_factory.mktemp("runs"), "small", 2)).path


def test_what_is_shipped_decides_as_the_run_does(run, tmp_path):
    ship(run, tmp_path / "new", figures={"letter": 0.5})
    shipped, learned = read(tmp_path / "new"), load_controller(run)
    assert shipped.weights.keys() == learned.weights.keys()
    assert shipped.figures == {"letter": 0.5}
    known = {(b.form, b.size) for b in SPEC.blueprints} & shipped.kinds
    spec = replace(
        SPEC,
        blueprints=tuple(b for b in SPEC.blueprints if (b.form, b.size) in known),
        narrowed={"style": ("ADD",)},
    )
    generator = Generator().manual_seed(0)
    seen = random_observation(64, spec, generator, density=0.9)
    masks = compute_masks(seen, spec)
    chances = [Generator().manual_seed(1) for _ in range(2)]
    one, _ = shipped(spec).decide(seen, masks, None, chances[0])
    two, _ = learned(spec).decide(seen, masks, None, chances[1])
    assert torch.equal(one, two)


def test_the_manifest_says_how_it_was_trained_and_nothing_of_where(run, tmp_path):
    ship(run, tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    body = json.loads(text)
    told = body["training"]
    names = [each["name"] for each in body["blueprints"]]
    assert names == load_controller(run).actions["blueprints"]
    assert body["choices"]["style"] == ["ADD"]
    assert (told["rounds"], told["env_steps"]) == (2, 2 * 4 * 4)
    assert told["round"] in (0, 2)
    assert told["hours"] >= 0.0
    assert told["versions"]["torch"] == torch.__version__
    again = from_toml(told["config"])
    assert again.world.horizon == 4
    assert str(run.parent) not in text


def test_a_run_that_is_not_finished_is_refused_and_nothing_is_written(tmp_path):
    path = make_run(tmp_path, "young")
    with pytest.raises(BadInput, match="young is not finished; let it end first"):
        ship(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_are_whole_or_as_they_were(run, tmp_path):
    ship(run, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in (MANIFEST, WEIGHTS)}

    class Full(Disk):
        def create(self, file, data):
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageTrouble, match="No space left"):
        ship(run, tmp_path, disk=Full())
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after == before
    with pytest.raises(StorageTrouble, match="cannot make"):
        ship(run, tmp_path / "no" / "where")


def test_the_command_line_writes_it(run, tmp_path, capsys):
    words = ("export", str(run), "--format", "controller", "--out", str(tmp_path / "t"))
    said = call(capsys, *words)
    assert (said.code, said.err) == (0, "")
    assert said.out == f"The controller is in {tmp_path / 't'}.\n"
    assert read(tmp_path / "t").training["run"] == "small"
    young = make_run(tmp_path, "young")
    words = ("export", str(young), "--format", "controller")
    assert "young is not finished" in refused(capsys, *words)


def test_a_commit_is_found_loose_packed_detached_or_not_at_all(tmp_path):
    assert commit_of(tmp_path) is None
    git = tmp_path / ".git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of(tmp_path) is None
    (git / "packed-refs").write_text("# pack-refs\n" + "a" * 40 + " refs/heads/main\n")
    assert commit_of(tmp_path) == "a" * 40
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("b" * 40 + "\n")
    assert commit_of(tmp_path) == "b" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert commit_of(tmp_path) == "c" * 40
