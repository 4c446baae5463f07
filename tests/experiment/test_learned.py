"""What a run learnt controls any world, and is told with what it was worth."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import esper
from esper.contracts.errors import BadInput
from esper.environment.growing import GrowingWorld
from esper.environment.settings import WorldSettings
from esper.experiment.callbacks import _jobs
from esper.experiment.config import Judging
from esper.experiment.evaluate import print_training
from esper.experiment.learned import (
    find_controller,
    load_controller,
    newest_controller,
)
from esper.experiment.train import begin_run
from esper.tamiyo.policy.action_masks import compute_masks
from tests.environment.test_growing import TINY
from tests.experiment.training_script import config


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """A small run that was judged beside two others."""
    folder = tmp_path_factory.mktemp("runs")
    judging = Judging(
        every=2, hosts=3, controllers=("never", "early", "static"), processes=1
    )
    return begin_run(replace(config(folder, "small", 2), judging=judging))


def test_a_run_is_found_by_name_by_folder_and_by_checkpoint(ending):
    by_folder = load_controller(ending.path)
    assert by_folder.name == "small"
    root, step = ending.path.parent, ending.path / "checkpoints" / "000002"
    for found in (
        find_controller("small", root),
        find_controller(str(ending.path), root / "elsewhere"),
        newest_controller(root),
    ):
        assert found.weights.keys() == by_folder.weights.keys()
    last = find_controller(str(step), root)
    assert not any(torch.isnan(weight).any() for weight in last.weights.values())


def test_what_was_learnt_decides_in_a_world_with_other_slots(ending):
    learned = load_controller(ending.path)
    world = GrowingWorld(TINY, 3, settings=WorldSettings(seeds_per_slot=3))
    controller = learned(world.spec)
    observation, state = world.reset(), None
    for _ in range(3):
        masks = compute_masks(observation, world.spec)
        actions, state = controller.decide(observation, masks, state, torch.Generator())
        observation = world.step(actions).observation
        assert not world.illegal.any()


def test_making_a_controller_draws_no_random_number(ending):
    learned = load_controller(ending.path)
    world = GrowingWorld(TINY, 1)
    torch.manual_seed(5)
    learned(world.spec)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_what_was_learnt_grows_a_users_own_network(ending):
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
    with pytest.raises(BadInput, match="run esper train first"):
        newest_controller(tmp_path)


def test_the_end_of_a_run_is_told_with_its_figures(ending):
    console = Console(record=True, width=200)
    print_training(ending.path, console)
    text = console.export_text()
    for words in (
        "Mean return per round:",
        "Too few rounds to tell",
        ": 3 unseen hosts of each",
        "Tamiyo's return on 3 unseen hosts of ",
        "the best of the others, early",
        "the plain network, static",
        f"The run is in {ending.path}.",
    ):
        assert words in text.replace("\n", ""), words


def test_who_was_judged_before_an_interruption_is_not_judged_again(ending):
    settings = config(ending.path.parent, "small", 2)
    settings = replace(
        settings, judging=Judging(controllers=("never", "early", "static"))
    )
    best = load_controller(ending.path)
    everybody = {
        (task, arm)
        for task in ("teacher", "digits")
        for arm in ("Tamiyo", "never", "early", "static")
    }
    assert _jobs(settings, best, everybody) == []
    left = everybody - {("digits", "static"), ("digits", "early")}
    jobs = _jobs(settings, best, left)
    # The plain network is measured by Tamiyo, who is judged again but not stored.
    assert [(job.task.name, job.arm) for job in jobs] == [
        ("digits", "Tamiyo"),
        ("digits", "early"),
        ("digits", "static"),
    ]
