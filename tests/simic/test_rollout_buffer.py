import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from esper.contracts.actions import HEAD_NAMES
from esper.contracts.errors import CallOrder
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

# --- What is stored ----------------------------------------------------------------


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
    buffer.cut(last)
    counts = [len(row) for row in rows]
    assert buffer.step_counts.tolist() == counts
    assert buffer.is_full == (min(counts) == max_steps)
    if not any(counts):
        with pytest.raises(CallOrder, match="nothing to compute"):
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
                assert stored["advantages"][env, t].item() == pytest.approx(
                    expected[0][t], rel=1e-5, abs=1e-5
                )
                assert stored["returns"][env, t].item() == pytest.approx(
                    expected[1][t], rel=1e-5, abs=1e-5
                )
            else:
                assert stored["advantages"][env, t] == stored["returns"][env, t] == 0
                assert_is_padding(here)


def flat(step):
    seen = {name: getattr(step["features"], name) for name in SEEN}
    names = (*COPIED, "rewards", "terminated", "truncated", "final_values")
    return seen | {name: step[name] for name in names}


def assert_is_padding(here):
    legal = here.pop("rows")
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

    assert_same(take(buffer), before)


def test_rows_may_be_views_that_are_not_contiguous():
    rewards = torch.tensor([[1.0, 5.0], [2.0, 6.0]])[:, 0]
    buffer = make_buffer()
    buffer.add(**a_step(rewards=rewards))
    assert buffer.rewards[:, 0].tolist() == [1.0, 2.0]


def test_both_flags_mean_terminated():
    buffer = make_buffer(gamma=0.5)
    one = torch.ones(2)
    buffer.add(
        **a_step(
            rewards=one,
            values=one,
            terminated=flags(2, 0),
            truncated=flags(2, 0, 1),
            final_values=torch.tensor([torch.nan, 4.0]),
        )
    )
    buffer.compute_advantages_and_returns()
    assert buffer.dones[:, 0].tolist() == [True, True]
    assert buffer.truncated[:, 0].tolist() == [False, True]
    assert buffer.advantages[:, 0].tolist() == [0.0, 2.0]


def test_t28_stored_rewards_are_the_environments_own():
    """A bootstrap that edits rewards would show in logs and normalisers."""
    buffer, steps = make_buffer(envs=2, steps=3, gamma=0.9), Steps()
    earned = []
    for _ in range(3):
        step = steps(truncated=flags(2, 0), final_values=torch.full((2,), 9.0))
        buffer.add(**step)
        earned.append(step["rewards"].clone())
    buffer.cut(torch.full((2,), 9.0))
    buffer.compute_advantages_and_returns()
    assert_close(buffer.rewards, torch.stack(earned, dim=1), rtol=0, atol=0)


def test_t7_each_step_keeps_its_own_rows_and_features():
    """Rows are a function of what was seen; every stored pair must still obey it."""
    buffer, steps = make_buffer(envs=3, steps=5), Steps(3)
    for moment in range(5):
        step = steps(acted=flags(3, *range(moment % 3 + 1)))
        seen = step["features"].host[:, :1, None] > 0
        step["rows"] = torch.where(seen, SPEC.allowed, first_choice())
        step["actions"] = torch.zeros_like(step["actions"])
        step["log_probs"] = step["distribution"][..., 0]
        buffer.add(**step)
    buffer.cut(torch.zeros(3))
    batch = take(buffer)
    seen = batch.features.host[..., :1, None] > 0
    expected = torch.where(seen, SPEC.allowed, first_choice())
    assert batch.valid_mask.sum() == 9
    assert torch.equal(batch.rows[batch.valid_mask], expected[batch.valid_mask])


def first_choice():
    return torch.arange(SPEC.width) == 0


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
                first=bool(step["first"][env]),
                actions=dict(zip(sizes, step["actions"][env].tolist(), strict=True)),
                log_probs=dict(
                    zip(sizes, step["log_probs"][env].tolist(), strict=True)
                ),
                masks={
                    head: step["rows"][env, index, : sizes[head]]
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
    ours.cut(torch.zeros(3))
    batch, twin = take(ours), naive.get_batched_sequences()
    valid = batch.valid_mask
    assert torch.equal(twin["valid_mask"], valid)
    assert torch.equal(twin["observations"][valid], batch.features.host[..., :1][valid])
    for name in ("first", "values"):
        assert torch.equal(twin[name][valid], batch[name][valid])
    for name in ("rewards", "dones", "truncated"):
        assert torch.equal(twin[name][valid], getattr(ours, name)[valid])
    for index, (head, size) in enumerate(sizes.items()):
        for name in ("actions", "log_probs"):
            assert torch.equal(twin[name][head][valid], batch[name][..., index][valid])
        assert torch.equal(
            twin["masks"][head][valid], batch.rows[..., index, :size][valid]
        )


# --- Advantages --------------------------------------------------------------------


def test_terminated_truncated_and_cut_have_three_different_futures():
    buffer = make_buffer(envs=3, steps=1, gamma=0.5)
    buffer.add(
        **a_step(
            3,
            rewards=torch.full((3,), 1.0),
            values=torch.full((3,), 2.0),
            terminated=flags(3, 0),
            truncated=flags(3, 1),
            final_values=torch.tensor([torch.nan, 8.0, torch.nan]),
        )
    )
    buffer.cut(torch.tensor([torch.nan, torch.inf, 6.0]))
    buffer.compute_advantages_and_returns()
    assert buffer.advantages[:, 0].tolist() == [
        1 - 2,  # no future
        1 + 0.5 * 8 - 2,  # the future its final observation promises
        1 + 0.5 * 6 - 2,  # the future of the observation that comes next
    ]
    assert buffer.returns[:, 0].tolist() == [1.0, 5.0, 4.0]


def test_a_cut_of_an_earlier_rollout_is_forgotten():
    buffer = make_buffer(envs=1, steps=1)
    buffer.add(**a_step(1))
    buffer.cut(torch.tensor([1e6]))
    buffer.compute_advantages_and_returns()
    buffer.reset()
    buffer.add(**a_step(1, terminated=flags(1, 0), rewards=torch.ones(1)))
    buffer.compute_advantages_and_returns()
    assert_close(buffer.returns, torch.ones(1, 1), rtol=0, atol=1e-6)


# --- Memory where rows start -------------------------------------------------------


def test_memory_is_that_of_begin_and_zero_without_it():
    buffer, state = make_buffer(), torch.randn(2, *STATE)
    buffer.begin(state, policy_version=5)
    buffer.add(**a_step(terminated=flags(2, 0, 1)))
    assert_close(take(buffer).state, state, rtol=0, atol=0)
    assert buffer.policy_version == 5

    buffer.reset()
    buffer.add(**a_step(terminated=flags(2, 0, 1)))
    assert not take(buffer).state.any()
    assert buffer.policy_version == 0

    buffer.reset()
    buffer.begin(state)
    buffer.begin(policy_version=6)
    buffer.add(**a_step(terminated=flags(2, 0, 1)))
    assert not take(buffer).state.any()
    assert buffer.policy_version == 6


def test_t21_the_live_memory_and_the_stored_one_are_two():
    buffer, live = make_buffer(), torch.randn(2, *STATE)
    buffer.begin(live)
    expected = live.clone()
    live.zero_()
    buffer.add(**a_step(terminated=flags(2, 0, 1)))
    batch = take(buffer)
    batch.state.mul_(2)
    assert_close(take(buffer).state, expected, rtol=0, atol=0)
