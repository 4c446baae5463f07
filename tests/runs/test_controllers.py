"""The policy of a run controls any world, and is exported as two files."""

import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import Generator, nn

import esper
from esper.contracts.actions import HEAD, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import InvalidInputError, StorageError
from esper.environment.growing import GrowingWorld
from esper.environment.settings import OPS, WorldSettings
from esper.evaluation.summary import print_training
from esper.files import Disk
from esper.rl.training import begin_ppo
from esper.runs.controllers import (
    export_controller,
    find_controller,
    load_controller,
    newest_controller,
)
from esper.runs.run import Run, checkout_commit
from esper.runs.train_config import EvalConfig, from_toml
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.shipped import MANIFEST, WEIGHTS, read
from esper.training.train import jobs_left
from tests.cli.calls import call, make_run, refused
from tests.environment.test_growing import TINY
from tests.rollouts import SPEC, random_observation
from tests.test_grower import begin
from tests.training.killed_runs import small_ppo
from tests.training.training_script import config


@pytest.fixture(scope="module")
def ending(finished):
    return SimpleNamespace(path=finished[0])


def test_a_run_is_found_by_name_by_folder_and_by_checkpoint(ending):
    by_folder = load_controller(ending.path)
    assert by_folder.name == "whole"
    root, step = ending.path.parent, ending.path / "checkpoints" / "000006.safetensors"
    for found in (
        find_controller("whole", root),
        find_controller(str(ending.path), root / "elsewhere"),
        newest_controller(root),
    ):
        assert found.weights.keys() == by_folder.weights.keys()
    last = find_controller(str(step), root)
    assert not any(torch.isnan(weight).any() for weight in last.weights.values())


def test_what_was_learned_decides_in_a_world_with_other_slots(ending):
    learned = load_controller(ending.path)
    world = GrowingWorld(TINY, 3, settings=WorldSettings(seeds_per_slot=3))
    controller = learned(world.spec)
    observation, state = world.reset(), None
    for _ in range(3):
        masks = compute_masks(observation, world.spec)
        actions, state = controller.decide(observation, masks, state, torch.Generator())
        result = world.step(actions)
        observation = result.observation
        assert not result.illegal.any()


def test_what_was_learned_chooses_among_what_it_was_trained_with(ending):
    learned = load_controller(ending.path)
    world = GrowingWorld(TINY, 8)
    names = [blueprint.name for blueprint in world.spec.blueprints]
    choices = {**learned.choices, "tempo": ["SLOW"]}
    narrow = replace(learned, blueprints=names[-1:], choices=choices)
    observation = world.reset()
    masks = compute_masks(observation, world.spec)
    planted, chosen = [], [HEAD["blueprint"], HEAD["tempo"]]
    for each in (learned, narrow):
        controller, found = each(world.spec), set()
        for seed in range(20):
            stream = Generator().manual_seed(seed)
            actions, _ = controller.decide(observation, masks, None, stream)
            plants = actions[actions[:, HEAD["op"]] == Op.GERMINATE]
            found |= {*map(tuple, plants[:, chosen].tolist())}
        planted.append(found)
    assert len(planted[0]) > 1
    assert planted[1] == {(len(names) - 1, 3)}


def test_a_run_without_a_controller_is_refused_and_passed_over(ending, tmp_path):
    agent = begin_ppo(small_ppo(tmp_path, "agent", 2)).path
    with pytest.raises(InvalidInputError, match="run agent has no trained controller"):
        load_controller(agent)
    with pytest.raises(InvalidInputError, match="no finished training"):
        newest_controller(tmp_path)
    (found,) = Run.list(tmp_path)
    assert found.score is not None


def test_making_a_controller_draws_no_random_number(ending):
    learned = load_controller(ending.path)
    world = GrowingWorld(TINY, 1)
    torch.manual_seed(5)
    learned(world.spec)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_what_was_learned_grows_a_users_own_network(ending):
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.randn(64, 8), torch.randint(3, (64,))
    grower = esper.Grower(
        model,
        optimizer,
        ["0->2"],
        example=data[0],
        controller=esper.load_controller(ending.path),
        decisions=4,
    )
    for _ in range(4):
        loss = grower.loss(lambda: nn.functional.cross_entropy(model(data[0]), data[1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        grower.step(metric=0.5)
    assert len(grower.history) == 4
    assert grower.export()(data[0]).shape == (64, 3)


def test_a_folder_without_a_finished_training_says_what_to_do(tmp_path):
    with pytest.raises(InvalidInputError, match="run esper train first"):
        newest_controller(tmp_path)


def test_the_end_of_a_run_is_told_with_its_figures(ending):
    console = Console(record=True, width=200)
    print_training(ending.path, console)
    text = console.export_text()
    for words in (
        "Mean return per round:",
        "On the validation hosts: ",
        ": 3 unseen hosts of each",
        "On 3 unseen hosts of ",
        ", 'Tamiyo' ",
        f"The run is in {ending.path}.",
    ):
        assert words in text.replace("\n", ""), words


def test_who_was_evaluated_before_an_interruption_is_not_evaluated_again(ending):
    settings = config(ending.path.parent, "whole")
    settings = replace(
        settings, evaluation=EvalConfig(controllers=("never", "early", "static"))
    )
    best = load_controller(ending.path)
    everybody = {
        (task, arm)
        for task in ("teacher", "digits")
        for arm in ("Tamiyo", "never", "early", "static")
    }
    assert jobs_left(settings, best, everybody) == []
    left = everybody - {("digits", "static"), ("digits", "early")}
    jobs = jobs_left(settings, best, left)
    # The plain network is measured by Tamiyo, who is evaluated again but not stored.
    assert [(job.task.name, job.arm) for job in jobs] == [
        ("digits", "Tamiyo"),
        ("digits", "early"),
        ("digits", "static"),
    ]


def test_what_is_shipped_decides_as_the_run_does(ending, tmp_path):
    export_controller(ending.path, tmp_path / "new", figures={"letter": 0.5})
    shipped, learned = read(tmp_path / "new"), load_controller(ending.path)
    assert shipped.weights.keys() == learned.weights.keys()
    assert shipped.figures == {"letter": 0.5}
    spec = replace(
        SPEC,
        blueprints=tuple(b for b in BLUEPRINTS if b.name in shipped.blueprints),
        narrowed={"style": ("ADD",), "op": OPS},
    )
    generator = Generator().manual_seed(0)
    seen = random_observation(64, spec, generator, density=0.9)
    masks = compute_masks(seen, spec)
    chances = [Generator().manual_seed(1) for _ in range(2)]
    one, _ = shipped(spec).decide(seen, masks, None, chances[0])
    two, _ = learned(spec).decide(seen, masks, None, chances[1])
    assert torch.equal(one, two)


def test_the_manifest_says_how_it_was_trained_and_nothing_of_where(ending, tmp_path):
    export_controller(ending.path, tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    body = json.loads(text)
    training = body["training"]
    known = load_controller(ending.path).blueprints
    assert body["blueprints"] == [*known]
    assert body["choices"]["style"] == ["ADD"]
    assert (training["rounds"], training["env_steps"]) == (6, 6 * 4 * 4)
    assert training["round"] in (0, 3, 6)
    assert training["hours"] >= 0.0
    assert training["versions"]["torch"] == torch.__version__
    again = from_toml(training["config"])
    assert again.world.horizon == 4
    assert str(ending.path.parent) not in text


def test_an_exported_controller_is_found_by_its_folder(ending, tmp_path, monkeypatch):
    export_controller(ending.path, tmp_path / "mine")
    learned = load_controller(ending.path)
    monkeypatch.chdir(tmp_path)
    for found in (
        find_controller("mine", tmp_path / "runs"),
        find_controller(str(tmp_path / "mine"), tmp_path / "runs"),
        load_controller(tmp_path / "mine"),
    ):
        assert (found.name, found.round) == ("mine", learned.round)
        assert found.config == learned.config
        for name, weight in learned.weights.items():
            assert torch.equal(found.weights[name], weight)
        assert {*found.blueprints} == {*learned.blueprints}
    manifest = tmp_path / "mine" / MANIFEST
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**body, "training": {}}))
    assert load_controller(tmp_path / "mine").round == 0
    (tmp_path / "mine" / WEIGHTS).write_bytes(b"other")
    with pytest.raises(InvalidInputError, match="is not what was exported"):
        find_controller("mine", tmp_path / "runs")


def test_the_manifest_has_the_figures_and_the_commit_of_the_run(ending, tmp_path):
    export_controller(ending.path, tmp_path)
    body = json.loads((tmp_path / MANIFEST).read_text())
    assert {*body["figures"]} == {"teacher", "digits"}
    own = body["figures"]["digits"]
    assert {*own} == {"Tamiyo", "never", "early", "static"}
    assert own["Tamiyo"].keys() == {"hosts", "return", "test", "added"}
    assert own["Tamiyo"]["hosts"] == 3
    versions = Run.read(ending.path).versions
    assert body["training"]["versions"].get("commit") == versions.get("commit")
    assert ("commit" in versions) == (checkout_commit() is not None)


def test_the_commit_is_that_of_the_checkout_itself(tmp_path):
    def git(*words):
        about = ["-c", "user.name=n", "-c", "user.email=e", "-C", tmp_path / "own"]
        return subprocess.check_output(["git", *about, *words], text=True).strip()

    (tmp_path / "own" / "inside").mkdir(parents=True)
    git("init", "-q")
    assert checkout_commit(tmp_path / "own") is None
    git("commit", "-q", "--allow-empty", "-m", "first")
    git("worktree", "add", "-q", tmp_path / "other")
    commit = git("rev-parse", "HEAD")
    assert checkout_commit(tmp_path / "own") == commit
    assert checkout_commit(tmp_path / "other") == commit
    assert checkout_commit(tmp_path / "own" / "inside") is None


def test_a_run_that_is_not_finished_is_refused_and_nothing_is_written(tmp_path):
    path = make_run(tmp_path, "young")
    with pytest.raises(
        InvalidInputError, match="young is not finished; resume it first"
    ):
        export_controller(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_are_whole_or_as_they_were(ending, tmp_path):
    export_controller(ending.path, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in (MANIFEST, WEIGHTS)}

    class Full(Disk):
        def create(self, file, data):
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        export_controller(ending.path, tmp_path, disk=Full())
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after == before
    with pytest.raises(StorageError, match="cannot make"):
        export_controller(ending.path, tmp_path / "no" / "where")


def test_the_command_line_writes_it(ending, tmp_path, capsys):
    arguments = (
        "export",
        str(ending.path),
        "--format",
        "controller",
        "--out",
        str(tmp_path / "t"),
    )
    result = call(capsys, *arguments)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"The controller is in {tmp_path / 't'}.\n"
    assert read(tmp_path / "t").training["run"] == "whole"
    young = make_run(tmp_path, "young")
    arguments = ("export", str(young), "--format", "controller")
    assert "young is not finished" in refused(capsys, *arguments)


def test_a_grower_passes_on_what_its_controller_notes():
    strange = begin(controller="tamiyo", blueprints=["scale_shift"])
    assert "note: the controller was trained with none of these" in strange.summary()
    usual = begin(controller="tamiyo")
    assert "note: the controller" not in usual.summary()
