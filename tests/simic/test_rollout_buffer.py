"""Rows, counts, padding, memory and advantages against one list per environment."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from esper.contracts.actions import HEAD_NAMES
from esper.contracts.errors import InvalidStateError
from esper.simic.agent.rollout_buffer import RESULTS
from tests.references.recurrence import gae_reference
from tests.references.rollout_buffer import NaiveRolloutBuffer
from tests.simic.steps import (
    COPIED,
    SEEN,
    SPEC,
    STATE,
    Steps,
    a_step,
    assert_same,
    fields,
    flags,
    make_buffer,
    take,
)

patterns = st.integers(1, 4).flatmap(
    lambda envs: st.tuples(
        st.integers(1, 5),
        st.lists(
            st.lists(
                # (acts, how the step ends): a third goes on
                st.tuples(st.booleans(), st.sampled_from(["on", "terminal", "cut"])),
                min_size=envs,
                max_size=envs,
            ),
            min_size=1,
            max_size=7,
        ),
        st.booleans(),
    )
)


@given(patterns)
def test_any_pattern_of_actors_equals_plain_lists(pattern):
    """Rows, counts, padding and advantages against one list per environment."""
    max_steps, moments, everyone = pattern
    envs = len(moments[0])
    buffer = make_buffer(envs, max_steps, gamma=0.9, gae_lambda=0.8)
    steps, rows = Steps(envs), [[] for _ in range(envs)]
    for moment in moments:
        acts = [
            (act or everyone) and len(row) < max_steps
            for (act, _), row in zip(moment, rows, strict=True)
        ]
        if everyone and not all(acts):
            break
        final = steps.normal()
        step = steps(
            terminated=torch.tensor([end == "terminal" for _, end in moment]),
            truncated=torch.tensor([end == "cut" for _, end in moment]),
            final_values=final,
            acted=None if everyone else torch.tensor(acts),
        )
        buffer.add(**step)
        for env in range(envs):
            if acts[env]:
                rows[env].append({k: v[env] for k, v in flat(step).items()})
    last = steps.normal()
    buffer.finish(last)
    counts = [len(row) for row in rows]
    assert buffer.step_counts.tolist() == counts
    assert buffer.is_full == (min(counts) == max_steps)
    if not any(counts):
        with pytest.raises(InvalidStateError, match="buffer is empty"):
            buffer.compute_advantages_and_returns()
        return

    batch = take(buffer)

    assert batch.valid_mask.shape == (envs, max(counts))
    stored = fields(batch)
    for env, row in enumerate(rows):
        expected = expected_gae(row, last[env], gamma=0.9, lam=0.8)
        for t in range(max(counts)):
            assert bool(batch.valid_mask[env, t]) == (t < len(row))
            here = {name: stored[name][env, t] for name in (*SEEN, *COPIED)}
            if t < len(row):
                for name, value in here.items():
                    assert torch.equal(value, row[t][name])
                results = [stored[name][env, t].item() for name in RESULTS]
                wanted = [result[t] for result in expected]
                assert results == pytest.approx(wanted, rel=1e-5, abs=1e-5)
            else:
                assert all(stored[name][env, t] == 0 for name in RESULTS)
                assert_is_padding(here)


def flat(step):
    seen = {name: getattr(step["features"], name) for name in SEEN}
    names = (*COPIED, "rewards", "terminated", "truncated", "final_values")
    return seen | {name: step[name] for name in names}


def assert_is_padding(here):
    legal = here.pop("masks")
    assert legal[:, 0].all()
    assert not legal[:, 1:].any()
    assert not any(value.any() for value in here.values())


def expected_gae(row, last_value, *, gamma, lam):
    """Advantages and returns of one row, in float64."""
    rewards, values, terminated, truncated, final_values = (
        [[float(step[name]) for step in row]]
        for name in ("rewards", "values", "terminated", "truncated", "final_values")
    )
    dones = [[end or cut for end, cut in zip(terminated[0], truncated[0], strict=True)]]
    results = gae_reference(
        rewards,
        values,
        dones,
        truncated,
        [len(row)],
        final_values,
        [float(last_value)],
        gamma=gamma,
        lam=lam,
    )
    return [result[0] for result in results]


def test_what_the_caller_does_to_its_tensors_afterwards_changes_nothing():
    buffer, step = make_buffer(), a_step(terminated=flags(2, 0, 1))
    state = torch.randn(2, *STATE)
    buffer.begin(state)
    buffer.add(**step)
    before = take(buffer)
    for tensor in (state, *flat({**step, "final_values": torch.zeros(2)}).values()):
        tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 7)
    take(buffer).state.mul_(2)
    assert_same(take(buffer), before)


def test_views_that_are_not_contiguous_are_stored_and_no_reward_is_edited():
    """A bootstrap that edits rewards would show in logs and normalisers."""
    rewards = torch.tensor([[1.0, 5.0], [2.0, 6.0]])[:, 0]
    buffer = make_buffer(steps=1, gamma=0.9)
    final = torch.full((2,), 9.0)
    buffer.add(**a_step(rewards=rewards, truncated=flags(2, 0), final_values=final))
    buffer.finish(final)
    buffer.compute_advantages_and_returns()
    assert buffer.rewards[:, 0].tolist() == [1.0, 2.0]


def test_the_naive_twin_of_the_benchmark_stores_the_same():
    ours, steps = make_buffer(envs=3, steps=4), Steps(3)
    naive = NaiveRolloutBuffer(3, 4, SPEC, observation_width=1, hidden_width=1)
    sizes = dict(zip(HEAD_NAMES, SPEC.sizes, strict=True))
    for moment in range(4):
        acting = range(moment % 3 + 1)
        step = steps(terminated=flags(3, 1), acted=flags(3, *acting))
        ours.add(**step)
        for env in acting:
            naive.add(
                env,
                observation=step["features"].host[env, :1],
                episode_start=bool(step["episode_start"][env]),
                actions=dict(zip(sizes, step["actions"][env].tolist(), strict=True)),
                log_probs=dict(
                    zip(sizes, step["log_probs"][env].tolist(), strict=True)
                ),
                masks={
                    head: step["masks"][env, index, : sizes[head]]
                    for index, head in enumerate(sizes)
                },
                value=float(step["values"][env]),
                reward=float(step["rewards"][env]),
                terminated=bool(step["terminated"][env]),
                truncated=False,
                bootstrap_value=0.0,
                hidden_h=torch.zeros(1),
                hidden_c=torch.zeros(1),
            )
    ours.finish(torch.zeros(3))
    batch, twin = take(ours), naive.get_batched_sequences()
    valid = batch.valid_mask
    assert torch.equal(twin["valid_mask"], valid)
    assert torch.equal(twin["observations"][valid], batch.features.host[..., :1][valid])
    for name in ("episode_start", "values"):
        assert torch.equal(twin[name][valid], batch[name][valid])
    for name in ("rewards", "dones", "truncated"):
        assert torch.equal(twin[name][valid], getattr(ours, name)[valid])
    for index, (head, size) in enumerate(sizes.items()):
        for name in ("actions", "log_probs"):
            assert torch.equal(twin[name][head][valid], batch[name][..., index][valid])
        assert torch.equal(
            twin["masks"][head][valid], batch.masks[..., index, :size][valid]
        )


def test_terminated_truncated_and_cut_have_three_different_futures():
    """Both flags mean terminated."""
    buffer = make_buffer(envs=4, steps=1, gamma=0.5)
    buffer.add(
        **a_step(
            4,
            rewards=torch.full((4,), 1.0),
            values=torch.full((4,), 2.0),
            terminated=flags(4, 0, 3),
            truncated=flags(4, 1, 3),
            final_values=torch.tensor([torch.nan, 8.0, torch.nan, 8.0]),
        )
    )
    buffer.finish(torch.tensor([torch.nan, torch.inf, 6.0, 6.0]))
    buffer.compute_advantages_and_returns()
    assert buffer.dones[:, 0].tolist() == [True, True, False, True]
    assert buffer.truncated[:, 0].tolist() == [False, True, False, False]
    assert buffer.advantages[:, 0].tolist() == [
        1 - 2,  # no future
        1 + 0.5 * 8 - 2,  # the future its final observation promises
        1 + 0.5 * 6 - 2,  # the future of the observation that comes next
        1 - 2,
    ]
    assert buffer.returns[:, 0].tolist() == [1.0, 5.0, 4.0, 1.0]


def test_a_cut_of_an_earlier_rollout_is_forgotten():
    buffer = make_buffer(envs=1, steps=1)
    buffer.add(**a_step(1))
    buffer.finish(torch.tensor([1e6]))
    buffer.compute_advantages_and_returns()
    buffer.reset()
    buffer.add(**a_step(1, terminated=flags(1, 0), rewards=torch.ones(1)))
    buffer.compute_advantages_and_returns()
    assert_close(buffer.returns, torch.ones(1, 1), rtol=0, atol=1e-6)


def test_memory_is_that_of_begin_and_zero_without_it():
    buffer, state = make_buffer(), torch.randn(2, *STATE)
    for begins, version, expected in (
        ([(state, 5)], 5, state),
        ([], 0, torch.zeros_like(state)),
        ([(state, 0), (None, 6)], 6, torch.zeros_like(state)),
    ):
        buffer.reset()
        for arguments in begins:
            buffer.begin(*arguments)
        buffer.add(**a_step(terminated=flags(2, 0, 1)))
        assert torch.equal(take(buffer).state, expected)
        assert buffer.policy_version == version
