"""Imitation of the better timetables of a group, and runs on families of tasks."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from esper.contracts.actions import HEAD, Op
from esper.contracts.errors import BadInput
from esper.environment.mixture import Mixture
from esper.experiment import pretraining
from esper.experiment.config import IMITATION, Budget, TrainConfig, World, preset
from esper.experiment.pretraining import imitate, preferred, tried
from esper.experiment.worlds import worlds_of
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.tamiyo.schedule import Schedule

SMALL = PolicyConfig(width=16, slot_width=8, offer_width=8)


def test_twins_are_followed_by_how_well_they_did():
    returns = torch.tensor([0.5, 0.5, 0.1, 0.1 + 0.01 * torch.log(torch.tensor(3.0))])
    weights = preferred(returns, 2, temperature=0.01)
    expected = torch.tensor([1.0, 1.0, 0.5, 1.5])
    assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def a_world(envs=4):
    config = replace(
        preset("family"),
        envs=envs,
        variants=1,
        world=World(
            horizon=3,
            decision_every=2,
            slots=4,
            blueprints=("widen_x2",),
            group_size=envs,
        ),
    )
    return Mixture(worlds_of(config))


def test_a_trial_is_one_episode_and_says_what_could_have_been_said():
    world = a_world()
    trial = tried(world, [Schedule(count=0), *[Schedule()] * 3], 5, causal=True)
    assert trial.valid[0].tolist() == [True] * 3 + [False] * 2
    assert trial.first[:, 0].all()
    chosen = trial.rows.gather(-1, trial.actions.unsqueeze(-1))
    assert chosen.all()
    ops = trial.actions[:, 0, HEAD["op"]].tolist()
    assert ops == [Op.WAIT.value] + [Op.GERMINATE.value] * 3


@pytest.mark.parametrize("best", [Op.WAIT, Op.GERMINATE])
def test_a_policy_learns_what_the_best_twin_said(monkeypatch, best):
    monkeypatch.setattr(pretraining, "PASSES", 60)
    world = a_world()
    trial = tried(world, [*[Schedule(count=0)] * 2, *[Schedule()] * 2], 3, causal=True)
    plants = torch.tensor([0.0, 0.0, 1.0, 1.0])
    liked = plants if best is Op.GERMINATE else 1 - plants
    trial = replace(trial, returns=liked)
    torch.manual_seed(0)
    policy = TamiyoPolicy(world.spec, SMALL)
    imitate(policy, [trial], 4, rng_seed=0)
    state = policy.initial_state(4)
    logits, _ = policy.scores(trial.features, trial.actions, trial.first, state)
    rows = trial.rows[:, 0, 0]
    likeliest = torch.where(rows, logits[:, 0, 0], -torch.inf).argmax(dim=-1)
    assert likeliest.tolist() == [best.value] * 4


def test_imitation_needs_hosts_to_compare():
    with pytest.raises(BadInput, match="imitation"):
        TrainConfig(tasks=("simulated",), start_from=IMITATION, budget=Budget(rounds=1))
    with pytest.raises(BadInput, match="imitation"):
        TrainConfig(envs=1, start_from=IMITATION, budget=Budget(rounds=1))
