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
from esper.simic.agent.distribution import sample
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.rollout import collect, start
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
    *(
        (name, layers)
        for name in ("conv-mingru", "attention", "lstm")
        for layers in (1, 2, 3)
    ),
    *(("mingru", 2), ("gru", 2), ("none", 1)),
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
    opened = (batch.masks.sum(-1) > 1) & batch.valid_mask.unsqueeze(-1)
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
    assert not batch.episode_start[:, 0].all()
    assert batch.episode_start[:, 1:].any()


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("steps", "ends"), [(1, 0.05), (2, 1.0), (33, 0.0)])
def test_masks_of_every_density_and_rows_and_episodes_of_every_length(
    density, steps, ends
):
    policy = make_policy(strength=2.0).eval()
    buffer = make_buffer(policy, 4, steps)
    standing = fill_ragged(policy, buffer, ends=ends, density=density)
    buffer.reset()
    fill_ragged(
        policy, buffer, ends=ends, density=density, standing=standing, rng_seed=3
    )
    require_ratio_one(policy.train(), take(buffer))  # the mode changes nothing


@pytest.mark.parametrize("memory", ["mingru", "lstm"])
def test_t15_strong_weights_so_that_every_choice_hangs_on_those_before(memory):
    """Rounding grows with the logits, so does the tolerance; a wrong op shows."""
    policy = make_policy(config=replace(TINY, memory=memory), strength=60.0)
    with torch.no_grad():
        policy.op_embedding.weight.mul_(5.0)
    buffer = make_buffer(policy, 6, 24)
    fill_ragged(policy, buffer)
    batch = take(buffer)
    heads, _, values = differences(policy, batch)
    certain = batch.distribution[batch.masks].min()
    assert certain < -50
    assert (heads < 5e-4).all()
    assert values < 5e-4
    other = batch.actions.clone()
    other[..., 0] = (other[..., 0] + 1) % 6
    assert differences(policy, replace(batch, actions=other))[0][1:].max() > 0.01


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
            policy, world, live, buffer, generator, policy_version=agent.version
        )
        agent.update()
    assert policy.value_scale > 10
    collect(policy, world, live, buffer, generator, policy_version=agent.version)
    batch = take(buffer)
    heads, _, values = differences(policy, batch)
    assert (heads < TOLERANCE).all()
    assert values < TOLERANCE * float(policy.value_scale)


def test_t23_after_an_update_memory_has_drifted_a_little_and_only_a_little():
    """Rows start from memory of the old weights: measure what one update does to it."""
    policy = make_policy(strength=0.1)
    world, buffer = HashWorld(8, ends=0.0), make_buffer(policy, 8, 16)
    agent = PPOAgent(policy, buffer, PPOConfig(minibatches=2, learning_rate=3e-4))
    live, generator = start(world, policy), Generator().manual_seed(0)
    live, _ = collect(policy, world, live, buffer, generator, policy_version=0)
    batch, stored = take(buffer), live.state.clone()
    with torch.no_grad():
        _, same = policy.encode(batch.features, batch.episode_start, batch.state)
    assert_close(same, stored, rtol=1e-5, atol=1e-5)
    record = agent.update()
    assert record.steps_taken > 0
    with torch.no_grad():
        _, fresh = policy.encode(batch.features, batch.episode_start, batch.state)
    drift = (fresh - stored).norm() / stored.norm()
    assert 1e-4 < drift < 0.1


def draw_ops_again(batch):
    rows, distribution = batch.masks[..., 0, :], batch.distribution[..., 0, :]
    again = batch.actions.clone()
    again[..., 0] = sample(distribution, rows, Generator().manual_seed(9))
    return {"actions": again}


@pytest.mark.parametrize(
    ("change", "heads", "value"),
    [
        (lambda b: {"state": torch.zeros_like(b.state)}, any, True),
        (lambda b: {"episode_start": b.episode_start.roll(-1, dims=1)}, any, True),
        (lambda b: {"episode_start": b.episode_start.roll(1, dims=1)}, any, True),
        (lambda b: {"episode_start": torch.zeros_like(b.episode_start)}, any, True),
        (lambda b: {"masks": SPEC.allowed.expand_as(b.masks)}, all, False),
        (draw_ops_again, lambda moved: all(moved[1:]), False),
        (lambda b: {"values": 1.5 * b.values}, None, True),
    ],
    ids=[
        *("no memory", "a step late", "a step early", "no resets"),
        *("no masks", "another op", "stale statistics"),
    ],
)
def test_the_twin_with_a_usual_mistake_is_caught(change, heads, value):
    policy = make_policy(strength=2.0)
    buffer = make_buffer(policy, 8, 20)
    standing = fill_ragged(policy, buffer)
    buffer.reset()
    fill_ragged(policy, buffer, standing=standing, rng_seed=2)
    batch = take(buffer)
    require_ratio_one(policy, batch)
    by_head, _, by_value = differences(policy, replace(batch, **change(batch)))
    assert heads is None or heads((by_head > 1e-3).tolist())
    assert (by_value > 1e-3) == value
