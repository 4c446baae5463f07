"""An update: what it must not depend on, when it stops, what it refuses and reports."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from esper.contracts.actions import HEAD, HEAD_NAMES
from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.simic.agent.losses import Targets, loss_weights, ppo_terms
from esper.simic.agent.ppo import PPOAgent, PPOConfig, explained_variance
from esper.simic.rollout import collect, start
from esper.tamiyo.policy.network import TamiyoPolicy
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
from tests.simic.agents import agent_with_rollout, changed, flat, snapshot, unequal


def terms_of(agent, batch):
    policy = agent.policy
    new = evaluate_batch(policy, batch)
    config, entropy = PPOConfig(), torch.full((8,), 0.1)
    weights = loss_weights(config, entropy, torch.zeros(8))
    return ppo_terms(new, Targets.of(batch), config, weights)


def refilled(agent):
    """The next rollout, of the policy as it is now."""
    fill_ragged(agent.policy, agent.buffer, policy_version=agent.version, rng_seed=7)
    return take(agent.buffer)


def test_an_update_moves_every_weight_and_reports_what_ran():
    agent = agent_with_rollout(target_kl=math.inf, envs=16, steps=32)
    before = snapshot(agent)
    record = agent.update()
    moved = unequal(before, {**before, **snapshot(agent)})
    assert set(dict(agent.policy.named_parameters())) <= set(moved)
    assert record.steps_planned == record.steps_taken == 8
    assert record.stopped_at is None
    assert record.refused == 0
    assert tuple(record.heads) == HEAD_NAMES
    assert all(math.isfinite(x) for x in flat(record).values() if x is not None)
    assert record.kl > 0
    assert record.grad_norm > 0
    assert agent.version == 1
    assert (agent.buffer.step_counts == 0).all()


def test_a_frozen_policy_stays_while_its_value_is_learnt_and_can_be_unfrozen():
    """As in a warm-up of the critic."""
    policy = make_policy(strength=0.5)
    rest = [p for n, p in policy.named_parameters() if not n.startswith("value")]
    for parameter in rest:
        parameter.requires_grad_(False)
    agent = agent_with_rollout(policy)
    before = snapshot(agent)
    record = agent.update()
    moved = unequal(before, snapshot(agent))
    names = dict(policy.named_parameters())
    assert {n for n in moved if n in names} == {n for n in names if "value" in n}
    assert record.steps_taken == record.steps_planned
    assert abs(record.kl) < 1e-6
    assert {head.grad_norm for head in record.heads.values()} == {0.0}
    for parameter in rest:
        parameter.requires_grad_()
    refilled(agent)
    agent.update()
    assert {*names} <= {*unequal(before, snapshot(agent))}


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_an_update_without_gradients_is_refused_in_words(off):
    agent = agent_with_rollout()
    before = snapshot(agent)
    with (
        off(),
        pytest.raises(
            InvalidStateError, match="needs gradients, but they are disabled"
        ),
    ):
        agent.update()
    agent.policy.requires_grad_(False)
    with pytest.raises(InvalidStateError, match="loss does not require grad"):
        agent.update()
    assert not unequal(before, snapshot(agent))
    agent.policy.requires_grad_()
    assert agent.update().steps_taken > 0


def test_the_same_seed_gives_the_same_update_and_another_one_does_not():
    def after(rng_seed):
        policy = make_policy(strength=0.5)
        agent = PPOAgent(
            policy,
            make_buffer(policy, 6, 12),
            PPOConfig(minibatches=3),
            rng_seed=rng_seed,
        )
        fill_ragged(policy, agent.buffer)
        return agent.update(), snapshot(agent)

    record, weights = after(1)
    assert not changed(record, after(1)[0])
    assert not unequal(weights, after(1)[1])
    assert unequal(weights, after(2)[1])


def test_t10_weights_of_a_head_that_no_op_used_move_nothing_and_get_no_gradient():
    spec = replace(SPEC, narrowed={"op": ("WAIT", "ADVANCE", "FOSSILIZE")})
    policy = make_policy(spec, strength=0.5)
    agent = agent_with_rollout(policy)
    batch = take(agent.buffer)
    before = terms_of(agent, batch)
    before.loss.backward()
    unused = [
        policy.offer_score,
        policy.offer_query,
        policy.rest_out,
        policy.rest_hidden,
    ]
    for layer in unused:
        assert (layer.weight.grad == 0).all()
        assert (layer.bias.grad == 0).all()
    assert (policy.op_out.weight.grad != 0).any()
    assert (before.openness[HEAD["blueprint"] :] == 0).all()
    with torch.no_grad():
        for layer in unused:
            layer.weight.add_(torch.randn_like(layer.weight))
    after = terms_of(agent, batch)
    for name in before.__slots__:
        assert torch.equal(getattr(before, name), getattr(after, name)), name


@pytest.mark.parametrize("filler", [math.nan, 1e30, -math.inf])
def test_t24_whatever_stands_on_padding_changes_no_bit(filler):
    results = []
    for fill in (None, filler):
        agent = agent_with_rollout(acted=0.6)
        buffer = agent.buffer
        assert buffer.step_counts.min() < buffer.step_counts.max()
        if fill is not None:
            times = torch.arange(buffer.max_steps + 1)[:, None]
            for stored in buffer._storage.values():
                beyond = (times >= buffer.step_counts).expand(stored.shape[:2])
                stored[beyond] = True if stored.dtype == torch.bool else 77
                if stored.is_floating_point():
                    stored[beyond] = fill
        results.append((agent.update(), snapshot(agent)))
    (clean, weights), (dirty, same) = results
    assert not changed(clean, dirty)
    assert not unequal(weights, same)


def test_t29_the_unit_of_the_reward_does_not_matter_to_the_bit():
    results = []
    for unit in (1.0, 1024.0):
        policy = make_policy(strength=0.5)
        with torch.no_grad():
            policy.value_out.weight.zero_()
            policy.value_out.bias.zero_()
        world = HashWorld(6, reward_scale=unit)
        agent = PPOAgent(policy, make_buffer(policy, 6, 12), PPOConfig(minibatches=2))
        live, generator = start(world, policy), Generator().manual_seed(0)
        records = []
        for _ in range(2):
            version = {"policy_version": agent.version}
            live, _ = collect(policy, world, live, agent.buffer, generator, **version)
            records.append(agent.update())
        results.append((records, dict(policy.named_parameters()), policy.value_scale))
    (small, weights, scale), (large, same, large_scale) = results
    assert not any(changed(*pair) for pair in zip(small, large, strict=True))
    assert not unequal(weights, same)
    assert large_scale == 1024 * scale


def test_t31_equal_advantages_teach_the_policy_nothing_and_stay_finite():
    agent = agent_with_rollout(entropy_coef=0.0, value_coef=0.0)
    agent.buffer.rewards.zero_()
    agent.buffer.values.zero_()
    agent.buffer.dones.fill_(True)
    agent.buffer.truncated.zero_()
    before = snapshot(agent)
    record = agent.update()
    assert record.grad_norm == 0.0
    assert math.isnan(record.explained_variance)
    single = agent_with_rollout(envs=1, steps=1, minibatches=1)
    assert single.update().steps_taken > 0
    assert all(x.isfinite().all() for x in single.policy.state_dict().values())
    weights = [name for name in unequal(before, snapshot(agent)) if "value" not in name]
    assert not [
        name for name in weights if name in dict(agent.policy.named_parameters())
    ]


def test_advantages_that_are_written_by_hand_are_learnt_from():
    """Once they are computed, an update takes them as they are."""
    agent = agent_with_rollout(entropy_coef=0.0, value_coef=0.0)
    agent.buffer.compute_advantages_and_returns()
    agent.buffer.advantages.zero_()
    assert agent.update().grad_norm == 0.0


def test_an_update_normalizes_the_advantages_of_the_whole_rollout():
    agent = agent_with_rollout(epochs=1, minibatches=1)
    batch, seen = take(agent.buffer), []
    step = agent.step
    agent.step = lambda part, guard: seen.append(part.batch) or step(part, guard)
    agent.update()
    valid = batch.valid_mask
    raw = batch.advantages[valid].double()
    expected = (raw - raw.mean()) / raw.std(correction=0)
    found = seen[0].advantages[seen[0].valid_mask].double().sort().values
    assert_close(found, expected.sort().values, rtol=1e-4, atol=1e-5)


def test_t35_a_heads_entropy_is_the_mean_over_the_steps_on_which_it_was_open():
    """Minibatches in which a head is hardly ever open must not pull it to 0."""
    agent = agent_with_rollout(learning_rate=1e-9, epochs=1, minibatches=6, steps=5)
    batch = take(agent.buffer)
    terms = terms_of(agent, batch)
    record = agent.update()
    for index, name in enumerate(HEAD_NAMES):
        expected = float(terms.entropy[index])
        assert record.heads[name].entropy == pytest.approx(expected, rel=1e-4)
    opened = (batch.masks.sum(dim=-1) > 1).any(dim=1)
    assert (opened.any(dim=0) & ~opened.all(dim=0)).any()


def test_explained_variance_by_hand():
    agent = agent_with_rollout()
    batch = take(agent.buffer)
    perfect = replace(batch, values=batch.returns)
    assert_close(explained_variance(perfect), torch.tensor(1.0))
    constant = replace(batch, values=torch.full_like(batch.returns, 3.0))
    assert_close(explained_variance(constant), torch.tensor(0.0), rtol=0, atol=1e-5)
    assert explained_variance(replace(batch, returns=batch.returns * 0)).isnan()


def test_the_first_statistics_begin_at_their_mean():
    """Not as many deviations from it as it is large."""
    agent = agent_with_rollout(TamiyoPolicy(SPEC, TINY), learning_rate=1e-9)
    agent.buffer.rewards.add_(50.0)
    agent.update()
    mean, batch = agent.policy.value_mean, refilled(agent)
    assert mean > 50
    assert_close(batch.values, mean.expand_as(batch.values), rtol=1e-4, atol=0)


def test_later_statistics_move_no_prediction():
    agent = agent_with_rollout()
    agent.update()
    batch = refilled(agent)
    scale = agent.policy.value_scale.clone()
    agent._adopt_statistics(replace(batch, returns=5.0 * batch.returns + 20.0))
    assert agent.policy.value_scale > 1.5 * scale
    policy = agent.policy
    new = evaluate_batch(policy, batch)
    values = policy.value_mean + policy.value_scale * new.normalized_values
    assert_close(values, batch.values, rtol=1e-4, atol=1e-4)


def test_annealing_scales_learning_rate_and_bonuses_of_the_configuration():
    agent = agent_with_rollout(
        learning_rate=0.5, head_entropy={"slot": 0.3}, exploration_coef=2.0
    )
    assert_close(-agent._weights[-8:], torch.full((8,), 2.0))
    agent.anneal(0.5)
    agent.anneal(0.1)
    assert agent.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    expected = [0.001] * 8
    expected[HEAD["slot"]] = 0.03
    entropy, exploration = (-agent._weights[-16:]).chunk(2)
    assert_close(entropy, torch.tensor(expected))
    assert_close(exploration, torch.full((8,), 0.02))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"learning_rate": 0.0}, r"learning_rate must be in \(0, 1\], got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate must be in .*, got nan"),
        ({"learning_rate": 1e5}, "learning_rate must be in .*, got 100000.0"),
        ({"clip_range": -0.1}, "clip_range must be positive"),
        ({"target_kl": 0.0}, "target_kl must be positive"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"epochs": 1.5}, "epochs must be an integer from 1 to 1000, got 1.5"),
        ({"epochs": 0}, "epochs must be an integer from 1 to 1000, got 0"),
        ({"minibatches": 0}, "minibatches must be an integer from 1 to .*, got 0"),
        (
            {"entropy_coef": math.inf},
            "entropy_coef must be finite, not negative, got inf",
        ),
        ({"entropy_coef": -0.1}, "entropy_coef must be finite, not negative, got -0.1"),
        ({"value_coef": math.nan}, "value_coef must be finite, not negative, got nan"),
        ({"value_norm_decay": 1.5}, r"value_norm_decay must be in \[0, 1\], got 1.5"),
        ({"exploration_coef": -1.0}, "exploration_coef must be finite, from 0, got -1"),
        ({"value_clip": 0.0}, "value_clip must be positive or None, got 0.0"),
        ({"clip_mode": "both"}, "clip_mode must be one of .*joint.*, got 'both'"),
        ({"head_entropy": {"op": -1.0}}, "head_entropy must be finite, not negative"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(bad, match):
    config = PPOConfig()
    for name, value in bad.items():  # past the type checks of the tests
        object.__setattr__(config, name, value)
    with pytest.raises(InvalidInputError, match=match):
        config.__post_init__()


def test_a_buffer_of_another_policy_and_a_bad_factor_are_refused():
    policy = make_policy()
    narrower = make_policy(config=replace(TINY, width=8))
    other = make_policy(replace(SPEC, blueprints=SPEC.blueprints[:2]))
    for maker, parts, match in (
        (policy, 4, "minibatches is 4 but the buffer has 3"),
        (narrower, 1, r"state of \(1, 8\), the policy's is \(1, 16\)"),
        (other, 1, "different action spaces"),
    ):
        with pytest.raises(InvalidInputError, match=match):
            PPOAgent(policy, make_buffer(maker, 3, 2), PPOConfig(minibatches=parts))
    config = PPOConfig(minibatches=1, head_entropy={"ops": 0.1})
    with pytest.raises(
        InvalidInputError, match=r"head_entropy must name heads of .*'op'"
    ):
        PPOAgent(policy, make_buffer(policy, 3, 2), config)
    for factor in (math.nan, math.inf, -0.1):
        with pytest.raises(
            InvalidInputError, match="factor must be finite and not negative"
        ):
            agent_with_rollout().anneal(factor)


@pytest.mark.parametrize("reward", [2e19, 1e6, -1e6])
def test_one_absurd_reward_does_not_end_the_training(reward):
    """Statistics are robust: three updates later the scale is what it was."""
    agent = agent_with_rollout()
    agent.update()
    scales = [float(agent.policy.value_scale)]
    for rng_seed in range(1, 5):
        fill_ragged(
            agent.policy, agent.buffer, policy_version=agent.version, rng_seed=rng_seed
        )
        if rng_seed == 1:
            agent.buffer.rewards[0, 8] = reward
        record = agent.update()
        scales.append(float(agent.policy.value_scale))
    assert record.steps_taken > 0
    assert record.refused == 0
    assert scales[-1] < 10 * scales[0]
    assert all(x.isfinite().all() for x in agent.policy.state_dict().values())


def test_steps_of_another_policy_version_are_refused_and_nothing_changes():
    agent = agent_with_rollout()
    agent.buffer.policy_version = 3
    before = snapshot(agent)
    with pytest.raises(
        InvalidStateError, match=r"version 3, .* is version 0.*=agent\.version"
    ):
        agent.update()
    assert not unequal(before, snapshot(agent))
    agent.buffer.policy_version = 0
    assert agent.update().steps_taken > 0
