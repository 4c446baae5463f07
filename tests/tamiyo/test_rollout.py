"""Collecting: what is stored belongs together, and memory is where it should be."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from esper.contracts.actions import HEAD, Op
from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.simic.rollout import collect, start
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import Features, compute_features
from esper.tamiyo.rollout import play
from esper.tamiyo.rule_based import Never, Random
from tests.rollouts import (
    TINY,
    GreedyPolicy,
    HashWorld,
    evaluate,
    make_buffer,
    make_policy,
    take,
)
from tests.worlds import ProbeWorld

ENVS, STEPS = 5, 24


def collected(memory="mingru", *, rollouts=1, steps=STEPS, world=None, **settings):
    """The policy, its world, and the last of some consecutive rollouts."""
    policy = make_policy(config=replace(TINY, memory=memory, layers=2))
    world = world or HashWorld(ENVS)
    buffer = make_buffer(policy, ENVS, steps, **settings)
    live, generator = start(world, policy), Generator().manual_seed(1)
    for _ in range(rollouts):
        buffer.reset()
        before = live
        live, finished = collect(
            policy, world, live, buffer, generator, policy_version=0
        )
    return policy, world, buffer, before, live, finished


def test_t7_what_is_stored_belongs_to_one_observation():
    """The mask is a function of the observation; both must be of the same step."""
    _, world, buffer, *_ = collected()
    batch = take(buffer)
    assert batch.episode_start[:, 1:].any()
    for time in range(STEPS):
        shown = world.shown[time]
        seen, masks = (
            compute_features(shown, world.spec),
            compute_masks(shown, world.spec),
        )
        for field in fields(Features):
            stored = getattr(batch.features, field.name)[:, time]
            assert torch.equal(stored, getattr(seen, field.name))
        assert torch.equal(batch.masks[:, time, 0, :6], masks.op)
        said = batch.actions[:, time]
        assert torch.equal(said, world.said[time])
        assert torch.equal(batch.episode_start[:, time], shown.episode_start)
        used = said[:, 0] != Op.WAIT
        slots = masks.slot[torch.arange(ENVS), said[:, 0]]
        assert torch.equal(batch.masks[used, time, 1, :3], slots[used])
        assert torch.equal(buffer.rewards[:, time], world.results[time].reward)
        ended = world.results[time].terminated | world.results[time].truncated
        assert torch.equal(buffer.dones[:, time], ended)
        assert torch.equal(buffer.truncated[:, time], world.results[time].truncated)


@pytest.mark.parametrize("memory", ["mingru", "lstm"])
def test_t20_bootstraps_read_memory_after_the_last_real_step(memory):
    """One-step returns show the value that follows; it is found again from scratch.

    The value of a truncated episode's end is that of its whole history and the true
    final observation; the rollout's cut is judged by the observation that comes next.
    """
    policy, world, buffer, before, live, _ = collected(
        memory, rollouts=2, gamma=1.0, gae_lambda=0.0
    )
    batch, offset = take(buffer), STEPS
    following = batch.returns - buffer.rewards
    checked = {"truncated": 0, "terminated": 0, "cut": 0, "inside": 0}
    for env in range(ENVS):
        for time in range(STEPS):
            result = world.results[offset + time]
            if result.terminated[env]:
                expected, kind = torch.tensor(0.0), "terminated"
            elif result.truncated[env]:
                last, kind = world.finals[offset + time], "truncated"
                expected = value_of(policy, batch, before.state, env, time, last)
            elif time == STEPS - 1:
                last, kind = live.observation, "cut"
                expected = value_of(policy, batch, before.state, env, time, last)
            else:
                expected, kind = batch.values[env, time + 1], "inside"
            assert_close(following[env, time], expected, rtol=1e-4, atol=1e-5)
            checked[kind] += 1
    assert min(checked.values()) > 0


@torch.no_grad()
def value_of(policy, batch, state, env, time, last):
    """V of `last` after the row's steps up to and including `time`."""
    extra = compute_features(last, policy.spec)
    row = Features(
        *(
            torch.cat(
                (
                    getattr(batch.features, field.name)[env, : time + 1],
                    getattr(extra, field.name)[env][None],
                )
            )[None]
            for field in fields(Features)
        )
    )
    first = torch.cat((batch.episode_start[env, : time + 1], torch.tensor([False])))[
        None
    ]
    waits = torch.zeros(1, time + 2, 8, dtype=torch.int64)
    rows = torch.ones(1, time + 2, 8, policy.spec.width, dtype=torch.bool)
    new = evaluate(policy, row, rows, waits, first, state[env][None])
    return new.normalized_values[0, -1]


def test_values_of_final_observations_count_only_where_truncated():
    buffer = collected(gae_lambda=0.0)[2]
    returns = take(buffer).returns.clone()

    class Louder(HashWorld):
        """The same world; finals of steps that were not truncated are changed."""

        def step(self, actions):
            result = super().step(actions)
            if result.final is None:
                return result
            host = result.final.host
            score = torch.where(result.truncated, host.score, 1.0 - host.score)
            final = replace(result.final, host=replace(host, score=score))
            return replace(result, final=final)

    other = collected(gae_lambda=0.0, world=Louder(ENVS))[2]
    assert torch.equal(take(other).returns, returns)


@pytest.mark.parametrize("memory", ["mingru", "lstm", "none"])
def test_t21_two_rollouts_equal_one_of_twice_the_length(memory):
    _, _, buffer, _, live, _ = collected(memory, rollouts=2, steps=10)
    late = take(buffer)
    _, _, whole, _, end, _ = collected(memory, steps=20)
    once = take(whole)
    assert torch.equal(late.actions, once.actions[:, 10:])
    assert torch.equal(late.episode_start, once.episode_start[:, 10:])
    for name in ("log_probs", "values", "distribution"):
        assert torch.equal(late[name], once[name][:, 10:])
    assert torch.equal(live.state, end.state)


def test_t21_stored_memory_is_a_copy_of_the_live_one():
    _, _, buffer, before, *_ = collected(rollouts=2)
    stored = take(buffer).state
    assert torch.equal(stored, before.state)
    assert stored.abs().max() > 0
    with torch.inference_mode():
        before.state.fill_(7.0)
    assert not torch.equal(buffer.get_batched_sequences("cpu").state, before.state)


@pytest.mark.parametrize("memory", ["mingru", "lstm"])
def test_t18_a_shout_in_an_episodes_last_observation_leaves_no_bit_in_the_next(memory):
    """Change what is seen at the last step of every episode; then compare the rest."""
    policy, _, buffer, *_ = collected(memory)
    batch = take(buffer)
    last = buffer.dones.clone()
    assert last.any()
    host = torch.where(last[..., None], 1e6, batch.features.host)
    shout = replace(batch.features, host=host)
    outcomes = []
    with torch.no_grad():
        for features in (batch.features, shout):
            new = evaluate(
                policy,
                features,
                batch.masks,
                batch.actions,
                batch.episode_start,
                batch.state,
            )
            outcomes.append((new.distribution, new.normalized_values))
    for plain, loud in zip(*outcomes, strict=True):
        assert torch.equal(plain[~last], loud[~last])
        assert not torch.equal(plain[last], loud[last])


def test_t28_returns_are_sums_of_rewards_over_rollout_boundaries():
    policy, world = make_policy(), HashWorld(ENVS, ends=0.1)
    buffer = make_buffer(policy, ENVS, 7)
    live, generator = start(world, policy), Generator().manual_seed(1)
    total, episodes = 0.0, 0.0
    for _ in range(5):
        buffer.reset()
        live, finished = collect(
            policy, world, live, buffer, generator, policy_version=0
        )
        total += float(finished.returns.sum())
        episodes += len(finished.returns)
    running, sums = [0.0] * ENVS, []
    for result in world.results:
        ended = (result.terminated | result.truncated).tolist()
        for env, reward in enumerate(result.reward.tolist()):
            running[env] += reward
            if ended[env]:
                sums.append(running[env])
                running[env] = 0.0
    assert episodes == len(sums) > 3
    assert total == pytest.approx(sum(sums), rel=1e-5)
    expected = torch.tensor(running, dtype=torch.float64)
    assert_close(live.returns, expected, rtol=1e-5, atol=1e-5)


def test_mean_return_of_no_episode_is_not_a_number():
    *_, finished = collected(world=HashWorld(ENVS, ends=0.0))
    assert finished.mean_return() != finished.mean_return()


def test_collecting_goes_on_after_an_update_refused_the_old_version():
    policy, world, buffer, *_ = collected()
    live = start(world, policy)
    with pytest.raises(InvalidStateError, match="begin"):
        collect(policy, world, live, buffer, Generator(), policy_version=1)


def test_a_world_of_another_size_than_the_buffer_is_refused():
    policy, world = make_policy(), HashWorld(3)
    buffer = make_buffer(policy, 4, 2)
    with pytest.raises(InvalidInputError, match="state"):
        collect(
            policy, world, start(world, policy), buffer, Generator(), policy_version=0
        )


def test_a_world_with_another_action_space_is_refused():
    policy = make_policy()
    world = ProbeWorld(2, pay=lambda time, bit, actions: bit)
    buffer = make_buffer(policy, 2, 2)
    live = start(world, policy)
    with pytest.raises(InvalidInputError, match=r"SlotStates.stage must be .*\(2, 3\)"):
        collect(policy, world, live, buffer, Generator(), policy_version=0)


@pytest.mark.parametrize("controller", [Never(), Random()])
def test_any_controller_can_play_and_every_sentence_is_legal(controller):
    """The world itself judges each sentence."""
    world = HashWorld(ENVS, ends=0.3)
    returns = play(world, controller, Generator().manual_seed(0))
    assert_close(returns, first_episodes(world), rtol=1e-5, atol=1e-5)


def test_t8_a_policy_judged_without_chance_plays_legally():
    world = HashWorld(ENVS, ends=0.3)
    returns = play(world, GreedyPolicy(make_policy(strength=5.0)), Generator())
    assert_close(returns, first_episodes(world), rtol=1e-5, atol=1e-5)


def first_episodes(world):
    """Sum of rewards up to the first end of each environment."""
    sums = []
    for env in range(world.num_envs):
        total = 0.0
        for result in world.results:
            total += float(result.reward[env])
            if result.terminated[env] or result.truncated[env]:
                break
        sums.append(total)
    return torch.tensor(sums)


def test_playing_ends_with_an_error_if_an_episode_does_not():
    world = HashWorld(ENVS, ends=0.0)
    with pytest.raises(InvalidInputError, match="did not end within 5 steps"):
        play(world, Never(), Generator(), max_steps=5)


def test_waiting_earns_what_waiting_earns():
    world = ProbeWorld(
        4, pay=lambda time, bit, actions: actions[:, HEAD["op"]] == Op.WAIT, length=3
    )
    assert play(world, Never(), Generator()).tolist() == [3.0] * 4
