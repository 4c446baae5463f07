"""Before any step the learner must say exactly what the actor said.

Collect, do not step, evaluate every minibatch: every head's log-probability and every
value must be the stored one. Most mistakes of recurrent, masked, factored PPO show
here; the twins at the end make each of them and must be caught by the same check.
"""

from dataclasses import replace

import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.slots import SlotConfig
from esper.experiment.rollout import collect, start
from esper.simic.agent.distribution import sample
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from tests.rollouts import (
    SPEC,
    TINY,
    HashWorld,
    evaluate_batch,
    fill_ragged,
    make_buffer,
    make_policy,
    take,
)

TOLERANCE = 1e-5
MEMORIES = [
    *((name, layers) for name in ("mingru", "lstm") for layers in (1, 2, 3)),
    ("none", 1),
]


@torch.no_grad()
def differences(policy, batch, minibatches=3):
    """Largest change of a log-probability of each head, of any choice, of a value."""
    heads = torch.zeros(8)
    anything, values = torch.zeros(()), torch.zeros(())
    for part in batch.minibatches(minibatches, Generator().manual_seed(0)):
        new = evaluate_batch(policy, part)
        valid = part.valid_mask
        moved = (new.log_probs - part.log_probs).abs()[valid]
        heads = torch.cat((heads[None], moved)).amax(dim=0)
        moved = (new.distribution - part.distribution).abs()[valid]
        anything = torch.cat((anything[None], moved.flatten())).max()
        predicted = policy.value_mean + policy.value_scale * new.normalized_values
        moved = (predicted - part.values).abs()[valid]
        values = torch.cat((values[None], moved)).max()
    return heads, anything, values


def require_ratio_one(policy, batch):
    heads, anything, values = differences(policy, batch)
    assert (heads < TOLERANCE).all(), heads
    assert anything < 10 * TOLERANCE
    size = batch.values[batch.valid_mask].abs().max().clamp(min=1.0)
    assert values < TOLERANCE * size  # rounding grows with what is rounded
    opened = (batch.rows.sum(-1) > 1) & batch.valid_mask.unsqueeze(-1)
    return opened.sum(dim=(0, 1))


@pytest.mark.parametrize(("memory", "layers"), MEMORIES)
def test_t17_t22_every_memory_over_rows_that_start_in_mid_episode(memory, layers):
    """The second of two rollouts, rows of different lengths, several episodes each."""
    policy = make_policy(
        config=replace(TINY, memory=memory, layers=layers), strength=1.0
    )
    buffer = make_buffer(policy, 8, 20)
    standing = fill_ragged(policy, buffer, acted=0.7, rng_seed=1)
    opened = require_ratio_one(policy, take(buffer))
    buffer.reset()
    fill_ragged(policy, buffer, acted=0.7, standing=standing, rng_seed=2)
    batch = take(buffer)
    opened += require_ratio_one(policy, batch)
    assert (opened > 0).all()
    assert buffer.step_counts.unique().numel() > 2
    assert not batch.first[:, 0].all()
    assert batch.first[:, 1:].any()


@pytest.mark.parametrize("density", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_t1_masks_of_every_density(density):
    policy = make_policy(strength=2.0)
    buffer = make_buffer(policy, 12, 16)
    fill_ragged(policy, buffer, density=density)
    require_ratio_one(policy, take(buffer))


@pytest.mark.parametrize("steps", [1, 2, 33])
@pytest.mark.parametrize("ends", [0.0, 0.05, 1.0])
def test_rows_and_episodes_of_every_length(steps, ends):
    policy = make_policy(strength=2.0)
    buffer = make_buffer(policy, 4, steps)
    standing = fill_ragged(policy, buffer, ends=ends)
    buffer.reset()
    fill_ragged(policy, buffer, ends=ends, standing=standing, rng_seed=3)
    require_ratio_one(policy, take(buffer))


@pytest.mark.parametrize("memory", ["mingru", "lstm"])
def test_t15_strong_weights_so_that_every_choice_hangs_on_those_before(memory):
    """Rounding grows with the logits, so does the tolerance; a wrong op shows."""
    policy = make_policy(config=replace(TINY, memory=memory), strength=20.0)
    with torch.no_grad():
        policy.op_embedding.weight.mul_(5.0)
    buffer = make_buffer(policy, 6, 24)
    fill_ragged(policy, buffer)
    batch = take(buffer)
    heads, _, values = differences(policy, batch)
    certain = batch.distribution[batch.rows].min()
    assert certain < -50
    assert (heads < 5e-4).all()
    assert values < 5e-4
    other = batch.actions.clone()
    other[..., 0] = (other[..., 0] + 1) % 6
    assert differences(policy, replace(batch, actions=other))[0][1:].max() > 1.0


def test_wide_policies_and_whole_action_spaces():
    spec = ActionSpec(slots=SlotConfig(max_slots=5), blueprints=BLUEPRINTS)
    policy = make_policy(spec, PolicyConfig(), strength=0.3)
    buffer = make_buffer(policy, 6, 12)
    fill_ragged(policy, buffer)
    require_ratio_one(policy, take(buffer))


def test_t30_after_the_value_statistics_moved():
    policy = make_policy(strength=0.5)
    world, buffer = HashWorld(6, reward_scale=100.0), make_buffer(policy, 6, 10)
    agent = PPOAgent(policy, buffer, PPOConfig(minibatches=2))
    live, generator = start(world, policy), Generator().manual_seed(0)
    for _ in range(3):
        live, _ = collect(
            world, policy, buffer, live, generator, policy_version=agent.version
        )
        agent.update()
    assert policy.value_scale > 10
    collect(world, policy, buffer, live, generator, policy_version=agent.version)
    batch = take(buffer)
    heads, _, values = differences(policy, batch)
    assert (heads < TOLERANCE).all()
    assert values < TOLERANCE * float(policy.value_scale)


def test_t39_training_mode_changes_nothing():
    policy = make_policy(strength=2.0).eval()
    buffer = make_buffer(policy, 6, 10)
    fill_ragged(policy, buffer)
    require_ratio_one(policy.train(), take(buffer))


def test_t23_after_an_update_memory_has_drifted_a_little_and_only_a_little():
    """Rows start from memory of the old weights: measure what one update does to it."""
    policy = make_policy(strength=0.1)
    world, buffer = HashWorld(8, ends=0.0), make_buffer(policy, 8, 16)
    agent = PPOAgent(policy, buffer, PPOConfig(minibatches=2, learning_rate=3e-4))
    live, generator = start(world, policy), Generator().manual_seed(0)
    live, _ = collect(world, policy, buffer, live, generator, policy_version=0)
    batch, stored = take(buffer), live.state.clone()
    with torch.no_grad():
        _, same = policy.encode(batch.features, batch.first, batch.state)
    assert_close(same, stored, rtol=1e-5, atol=1e-5)
    record = agent.update()
    assert record.steps_taken > 0
    with torch.no_grad():
        _, fresh = policy.encode(batch.features, batch.first, batch.state)
    drift = (fresh - stored).norm() / stored.norm()
    assert 1e-4 < drift < 0.1


@pytest.fixture(scope="module")
def rollout():
    """A policy and what it collected in the second of two rollouts."""
    policy = make_policy(strength=2.0)
    buffer = make_buffer(policy, 8, 20)
    standing = fill_ragged(policy, buffer)
    buffer.reset()
    fill_ragged(policy, buffer, standing=standing, rng_seed=2)
    batch = take(buffer)
    require_ratio_one(policy, batch)
    return policy, batch


def test_the_twin_that_starts_from_no_memory_is_caught(rollout):
    policy, batch = rollout
    forgets = replace(batch, state=torch.zeros_like(batch.state))
    heads, _, values = differences(policy, forgets)
    assert heads.max() > 1e-3
    assert values > 1e-3


@pytest.mark.parametrize("by", [-1, 1])
def test_the_twin_that_resets_a_step_off_is_caught(rollout, by):
    policy, batch = rollout
    shifted = replace(batch, first=batch.first.roll(by, dims=1))
    heads, _, values = differences(policy, shifted)
    assert heads.max() > 1e-3
    assert values > 1e-3


def test_the_twin_that_never_resets_is_caught(rollout):
    policy, batch = rollout
    runs_on = replace(batch, first=torch.zeros_like(batch.first))
    assert differences(policy, runs_on)[2] > 1e-3


def test_the_twin_that_learns_without_masks_is_caught(rollout):
    policy, batch = rollout
    unmasked = replace(batch, rows=SPEC.allowed.expand_as(batch.rows))
    assert (differences(policy, unmasked)[0] > 1e-3).all()


def test_the_twin_that_draws_the_op_again_is_caught(rollout):
    policy, batch = rollout
    again = batch.actions.clone()
    again[..., 0] = sample(
        batch.distribution[..., 0, :], batch.rows[..., 0, :], Generator().manual_seed(9)
    )
    heads, _, _ = differences(policy, replace(batch, actions=again))
    assert (heads[1:] > 1e-3).all()


def test_the_twin_with_stale_value_statistics_is_caught(rollout):
    policy, batch = rollout
    policy.value_scale.mul_(1.5)
    try:
        assert differences(policy, batch)[2] > 1e-3
    finally:
        policy.value_scale.div_(1.5)
