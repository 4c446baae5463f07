"""What is left of the rollout before, when calls may come, and where they run."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.rl.ppo import PPOSettings
from esper.simic.agent.distribution import Decision
from esper.simic.agent.rollout_buffer import VIEWS, TamiyoRolloutBuffer
from tests.device_reads import count_device_reads
from tests.rollouts import make_policy
from tests.simic.steps import (
    STATE,
    Steps,
    a_step,
    assert_same,
    fields,
    fill,
    flags,
    make_buffer,
    take,
)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), 1e30, None])
def test_t24_leftovers_in_storage_change_nothing(ragged, poison):
    """Whatever was stored before, or a whole rollout that was reset."""
    buffer, steps = make_buffer(steps=3), Steps(rng_seed=9)
    if poison is None:
        for _ in range(3):
            buffer.add(**steps(rewards=torch.full((2,), 1e30)))
        buffer.finish(torch.full((2,), 1e30))
        buffer.compute_advantages_and_returns()
        buffer.reset()
        assert buffer.step_counts.tolist() == [0, 0]
    else:
        for stored in buffer._storage.values():
            stored.fill_(poison if stored.is_floating_point() else 77)
    assert_same(fill(buffer, ragged=ragged), fill(make_buffer(steps=3), ragged=ragged))


@pytest.mark.parametrize(("envs", "steps"), [(1, 3), (3, 1), (1, 1)])
def test_a_batch_is_a_copy_whatever_its_shape(envs, steps):
    """With one row or one step a transposed tensor is contiguous: no copy by luck."""
    buffer, source = make_buffer(envs, steps), Steps(envs)
    for _ in range(steps):
        buffer.add(**source())
    buffer.finish(torch.zeros(envs))
    batch = take(buffer)
    before = {name: field.clone() for name, field in fields(batch).items()}
    buffer.reset()
    other = Steps(envs, rng_seed=1)
    for _ in range(steps):
        buffer.add(**other())
    for name, field in fields(batch).items():
        assert torch.equal(field, before[name])


def filled(*calls) -> TamiyoRolloutBuffer:
    buffer, steps = make_buffer(steps=2), Steps()
    buffer.add(**steps())
    buffer.add(**steps())
    for call in calls:
        call(buffer)
    return buffer


def cut(buffer):
    buffer.finish(torch.zeros(2))


def compute(buffer):
    buffer.compute_advantages_and_returns()


def add(buffer):
    buffer.add(**a_step(episode_start=flags(2)))


@pytest.mark.parametrize(
    ("make", "call", "match"),
    [
        (make_buffer, compute, "buffer is empty"),
        (make_buffer, cut, "empty buffer"),
        (make_buffer, lambda b: b.get_batched_sequences(), "advantages are missing"),
        (filled, add, "every row has 2 steps"),
        (filled, lambda b: b.begin(), r"begin\(\) after 2 steps"),
        (filled, compute, "environment 0 has not ended"),
        (filled, lambda b: b.get_batched_sequences(), "advantages are missing"),
        (lambda: filled(cut), add, r"add\(\) on a finished rollout"),
        (lambda: filled(cut), cut, r"finish\(\) on a finished rollout"),
        (lambda: filled(cut), lambda b: b.begin(), r"begin\(\) after 2 steps"),
        (lambda: filled(cut, compute), add, r"add\(\) on a finished rollout"),
        (lambda: filled(cut, compute), cut, r"finish\(\) on a finished rollout"),
        (filled, pickle.dumps, "cannot be pickled"),
        (filled, copy.deepcopy, "cannot be pickled"),
    ],
)
def test_a_call_at_the_wrong_moment_is_refused(make, call, match):
    with pytest.raises(InvalidStateError, match=match):
        call(make())


def test_a_full_row_is_named_and_the_others_may_go_on():
    buffer, steps = make_buffer(envs=3, steps=1), Steps(3)
    buffer.add(**steps(acted=flags(3, 1, 2)))
    with pytest.raises(InvalidStateError, match="row of environment 1 is full"):
        buffer.add(**steps(acted=flags(3, 0, 1)))
    assert not buffer.is_full
    buffer.add(**Steps(3)(acted=flags(3, 0)))
    assert buffer.is_full
    with pytest.raises(InvalidStateError, match="row of environment 0 is full"):
        buffer.add(**steps())
    assert buffer.step_counts.tolist() == [1, 1, 1]


def test_a_row_that_goes_on_is_named_before_advantages_are_computed():
    buffer, steps = make_buffer(envs=3, steps=2), Steps(3)
    buffer.add(**steps(terminated=flags(3, 0, 1), acted=flags(3, 0, 1)))
    buffer.add(**steps(terminated=flags(3, 0), acted=flags(3, 0, 1)))
    with pytest.raises(InvalidStateError, match="environment 1 has not ended"):
        buffer.compute_advantages_and_returns()
    buffer.finish(torch.zeros(3))
    assert take(buffer).valid_mask.tolist() == [[True, True]] * 2 + [[False, False]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("envs", "steps", "settings", "match"),
    [
        (0, 1, {}, "num_envs must be a whole number .* got 0"),
        (2.5, 1, {}, "num_envs must be a whole number .* got 2.5"),
        (1, -1, {}, "max_steps must be a whole number .* got -1"),
        (1, 1, {"gamma": 1.5}, r"gamma must lie in \[0, 1\], got 1.5"),
        (1, 1, {"gamma": float("nan")}, "gamma must lie in"),
        (1, 1, {"gamma": torch.tensor(0.9)}, r"gamma must lie in .* got tensor\(0.9"),
        (
            1,
            1,
            {"state_shape": (-1, 3)},
            "state_shape must be a whole .* got -1",
        ),
        (1, 1, {"state_shape": 3}, "state_shape must be layers and width, got 3"),
        (1, 1, {"state_shape": (1, 2, 3)}, r"state_shape must be layers .* 3\)"),
        (1, 1, {"gae_lambda": -0.1}, "gae_lambda must lie in"),
        (10**6, 10**3, {}, r"need \d+,\d+,\d+,\d+ bytes, more than max_bytes"),
        (2, 2, {"max_bytes": 1000}, "more than max_bytes = 1,000"),
        (10**6, 1, {"state_shape": (100, 1000)}, "more than max_bytes"),
        (1, 1, {"device": "xpu"}, "device 'xpu' cannot be used here. Use one of: cpu"),
    ],
)
def test_a_buffer_that_cannot_be_meant_is_refused(envs, steps, settings, match):
    with pytest.raises(InvalidInputError, match=match) as caught:
        make_buffer(envs, steps, **settings)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        InvalidInputError, match="spec must be an ActionSpec, got NoneType"
    ):
        TamiyoRolloutBuffer(2, 4, None, state_shape=(1, 1))


def write(view):
    view[0] += 1


@pytest.mark.parametrize(
    "call",
    [
        write,
        lambda counts: counts.zero_(),
        lambda counts: counts[1:].fill_(3),
        lambda counts: counts.unbind()[0].copy_(torch.tensor(2)),
        lambda counts: torch.add(counts, 1, out=counts),
        lambda counts: counts.numpy().fill(3),
    ],
)
def test_counts_cannot_be_written_into_so_no_write_is_lost(call):
    buffer = make_buffer(3, 4)
    buffer.add(**a_step(3))
    with pytest.raises(ValueError, match=r"add\(\) counts steps|read-only"):
        call(buffer.step_counts)
    assert buffer.step_counts.tolist() == [1, 1, 1]
    assert type(buffer.step_counts + 1) is type(copy.deepcopy(buffer.step_counts))


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_written_into_a_view_or_assigned_to_it_is_stored(name):
    buffer = make_buffer(3, 4)
    view, stored = getattr(buffer, name), buffer._storage[name][:4].T
    ones = torch.ones_like(view)
    view[0, 2] = True
    assert stored.tolist() == [[0, 0, 1, 0], [0] * 4, [0] * 4]
    for values in (ones, view):  # the latter is how `buffer.rewards *= 2` ends
        setattr(buffer, name, values)
        assert torch.equal(stored, ones)
        assert getattr(buffer, name) is view
    with pytest.raises(
        InvalidInputError, match=rf"{name} must be .* \(3, 4\) .*, got .* \(2,\)"
    ):
        setattr(buffer, name, ones[0, :2])


def test_bytes_are_those_of_the_storage():
    buffer = make_buffer(3, 4)
    stored = sum(field.nbytes for field in buffer._storage.values())
    stored += buffer._state.nbytes
    assert make_buffer(3, 4, max_bytes=stored).nbytes == stored
    with pytest.raises(InvalidInputError, match=f"{stored:,} bytes"):
        make_buffer(3, 4, max_bytes=stored - 1)


class ForbidOperations(TorchDispatchMode):
    """Nothing at all is asked of torch."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(function)


@pytest.mark.parametrize("ragged", [False, True])
def test_advantages_on_the_cpu_are_one_compiled_loop_and_no_operation_of_torch(ragged):
    """Some fifty operations around it took 95 % of the time of a small rollout."""
    buffer = make_buffer()
    batch = fill(buffer, ragged=ragged)
    buffer.advantages.fill_(torch.nan)
    with ForbidOperations():
        buffer.compute_advantages_and_returns()
    assert_same(buffer.get_batched_sequences(), batch)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_cut_rollout_never_makes_the_device_wait(ragged):
    assert count_device_reads(lambda: fill(make_buffer(), ragged=ragged)) == 0


@pytest.mark.parametrize("ragged", [False, True])
def test_other_devices_compute_the_same_without_looking_at_values(ragged):
    buffer = make_buffer(steps=4)
    buffer._checks_values = False
    actual, expected = fill(buffer, ragged=ragged), fill(make_buffer(), ragged=ragged)
    length = expected.valid_mask.shape[1]
    for name, field in fields(actual).items():
        here = field if name == "state" else field[:, :length]
        assert_close(here, fields(expected)[name], rtol=0, atol=1e-6)


def test_steps_taken_in_inference_mode_can_be_learned_from():
    with torch.inference_mode():
        buffer = make_buffer()
        buffer.begin(torch.ones(2, *STATE))
        buffer.add(**a_step(acted=flags(2, 0)))
        buffer.finish(torch.zeros(2))
    for field in fields(take(buffer)).values():
        assert not field.is_inference()
    buffer.reset()


@pytest.mark.parametrize("ragged", [False, True])
def test_a_decision_is_stored_like_its_parts(ragged):
    names = ("masks", "actions", "log_probs", "distribution", "values")
    by_name, by_decision, steps = make_buffer(), make_buffer(), Steps()
    for _ in range(3):
        step = steps(acted=flags(2, 0) if ragged else None)
        by_name.add(**step)
        parts = {name: step.pop(name) for name in names}
        decision = Decision(**parts, state=torch.zeros(2, *STATE))
        with pytest.raises(InvalidInputError, match="a decision and parts of one"):
            by_decision.add(decision, **step, values=parts["values"])
        by_decision.add(decision, **step)
    for buffer in (by_name, by_decision):
        buffer.finish(torch.ones(2))
    assert_same(take(by_decision), take(by_name))


def test_a_buffer_for_a_policy_has_its_spec_and_memory():
    policy = make_policy()
    buffer = TamiyoRolloutBuffer.for_policy(policy, 3, 5, gae_lambda=0.5)
    assert (buffer.num_envs, buffer.max_steps) == (3, 5)
    assert (buffer.spec, buffer.state_shape) == (policy.spec, policy.state_shape)
    assert (buffer.gamma, buffer.gae_lambda) == (PPOSettings().gamma, 0.5)


def test_a_rollout_says_how_many_environments_share_their_random_streams():
    buffer = make_buffer(envs=2)
    buffer.begin(group_size=2)
    buffer.add(**a_step(terminated=flags(2, 0, 1)))
    batch = take(buffer)
    assert batch.group_size == 2
    assert next(batch.minibatches(2, torch.Generator())).group_size == 1
    buffer.reset()
    with pytest.raises(InvalidInputError, match="group_size is 3 but the buffer has 2"):
        buffer.begin(group_size=3)
