"""A start from recordings: the loss of trees against a slow twin, and learning."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from esper.contracts.actions import HEAD, Op
from esper.contracts.errors import InvalidInputError
from esper.environment.growing import GrowingWorld
from esper.environment.settings import WorldSettings
from esper.runs.train_config import RECORDINGS, Budget, TrainConfig, preset
from esper.simic.agent.distribution import evaluate_choices
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.training import pretraining
from esper.training.pretraining import (
    draw_trees,
    fit,
    given_recordings,
    recorded_policy,
    tree_loss,
)
from esper.training.recordings import RecordConfig, record, record_task, world_settings
from esper.training.train import begin_run
from esper.training.worlds import mixture_for
from tests.environment.test_growing import LONG

SMALL = PolicyConfig(width=16, slot_width=8, offer_width=8)
TERMS = WorldSettings(rent=(0.001, 0.1), budget=(0.5, 31.0))


@pytest.fixture(scope="module", params=["end", "anytime"])
def recording(request):
    return record_task(LONG, world_settings(request.param), 2, 10, 3)


@pytest.fixture
def policy(recording):
    world = GrowingWorld(LONG, 1, settings=world_settings("end"))
    return TamiyoPolicy(world.spec, SMALL)


def value_of_tree(actions, log_probs, leaves, used, at, members):
    """Worth of a node under the policy, by recursion over its branches."""
    members = [m for m in members if used[m]]
    if at == actions.shape[1]:
        return float(leaves[members[0]])
    branches = {}
    for member in members:
        branches.setdefault(tuple(actions[member, at].tolist()), []).append(member)
    logits = torch.tensor([float(log_probs[b[0], at]) for b in branches.values()])
    worth = [
        value_of_tree(actions, log_probs, leaves, used, at + 1, own)
        for own in branches.values()
    ]
    return float((logits.double().softmax(0) * torch.tensor(worth).double()).sum())


def test_the_worth_of_a_tree_is_that_of_the_recursion(recording, policy):
    trees = draw_trees(recording, policy, TERMS, np.random.default_rng(1))
    state = policy.initial_state(recording.envs)
    with torch.no_grad():
        logits, values = policy.evaluate_actions(
            trees.features, trees.actions, trees.episode_start, state
        )
        chosen = evaluate_choices(logits, values, trees.rows, trees.actions).log_probs
    roots = [
        value_of_tree(
            trees.actions[own],
            chosen.sum(dim=-1)[own],
            trees.gain[own, -1],
            trees.used[tree],
            0,
            range(10),
        )
        for tree, own in enumerate((slice(0, 10), slice(10, 20)))
    ]
    found = tree_loss(policy, trees, 0.1)["root"]
    assert_close(float(found), float(np.mean(roots)), rtol=1e-4, atol=1e-5)


def test_scripts_beyond_the_budget_do_not_count(recording, policy):
    for seed in range(8):
        trees = draw_trees(recording, policy, TERMS, np.random.default_rng(seed))
        assert trees.used[:, 0].all()  # never costs nothing
        terms = tree_loss(policy, trees, 0.1)
        assert all(torch.isfinite(term) for term in terms.values())
        terms["loss"].backward()
        for parameter in policy.parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("gain", [0.5, -0.5])
def test_a_policy_learns_the_better_choice(recording, policy, gain, monkeypatch):
    def priced(*given):
        """Trees in which growing at all brings or costs half of the errors."""
        trees = draw_trees(*given)
        grown = (trees.actions[..., HEAD["op"]] == Op.GERMINATE).any(dim=1)
        priced_gain = torch.zeros_like(trees.gain)
        priced_gain[:, -1] = gain * grown
        return replace(trees, gain=priced_gain)

    monkeypatch.setattr(pretraining, "draw_trees", priced)
    trees = priced(recording, policy, TERMS, np.random.default_rng(99))
    best = (trees.gain[:, -1].view(2, -1) * trees.used).amax(dim=1).mean()
    before = tree_loss(policy, trees, 0.1)["root"]
    monkeypatch.setattr(pretraining, "PASSES", 40)
    monkeypatch.setattr(pretraining, "LEARNING_RATE", 1e-2)
    fit(policy, [recording], TERMS, 0)
    after = tree_loss(policy, trees, 0.1)["root"]
    assert best - after < 0.5 * (best - before)


def test_recordings_need_a_world_in_which_seeds_take_part_at_once():
    for tasks in (("simulated",), ("teacher",)):
        with pytest.raises(InvalidInputError, match=r"world\.at_once"):
            TrainConfig(tasks=tasks, start_from=RECORDINGS, budget=Budget(rounds=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Recordings with a known end."""
    made = tmp_path_factory.mktemp("recordings")
    record(RecordConfig(stop="end", tasks=2, scripts=4), made)
    return made


def family(folder, **changes):
    return replace(
        preset("family"), start_from=str(folder), runs=str(folder), **changes
    )


def test_trainings_share_the_recordings_of_a_folder(folder, monkeypatch):
    monkeypatch.setattr(pretraining, "PASSES", 1)
    config = family(folder, learner=replace(preset("family").learner, policy=SMALL))
    spec = mixture_for(config).spec
    told = []
    given = given_recordings(config, spec)
    weights = recorded_policy(config, spec, given, lambda name, *_: told.append(name))
    assert told == ["fitting"], "nothing is recorded again"
    again = recorded_policy(config, spec, given, lambda *_: None)
    changed = replace(config, rng_seed=1)
    other = recorded_policy(changed, spec, given, lambda *_: None)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not all(torch.equal(weights[name], other[name]) for name in weights)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"stop": "anytime", "clock": "compute"},
            r"recorded with stop 'end', but world.stop is",
        ),
        ({"at_once": False}, r"world\.at_once"),
        ({"clock": "compute"}, "recorded with clock 'batches', but world.clock is"),
        ({"budget": (0.5, 60.0)}, "up to 60, but recordings only cover 31 times"),
    ],
)
def test_recordings_of_another_world_are_refused_before_a_run_is_made(
    folder, changes, words
):
    before = sorted(folder.iterdir())
    config = family(folder, world=replace(preset("family").world, **changes))
    starts = [str(folder), RECORDINGS] if "budget" in changes else [str(folder)]
    for start in starts:
        with pytest.raises(InvalidInputError, match=words) as refused:
            begin_run(replace(config, start_from=start))
        assert "\n" not in str(refused.value)
    assert sorted(folder.iterdir()) == before
