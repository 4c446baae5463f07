"""When an update stops, what it refuses, and that refusing changes no bit."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from esper.simic.agent import ppo
from esper.simic.agent.metrics import read_record
from esper.simic.agent.ppo import Guard
from tests.rollouts import fill_ragged, make_policy
from tests.simic.agents import agent_with_rollout, changed, snapshot, unequal


@pytest.mark.parametrize("learning_rate", [0.3, 1.0])
def test_t34_a_wild_step_is_the_last_one(learning_rate):
    agent = agent_with_rollout(learning_rate=learning_rate)
    record = agent.update()
    assert record.steps_taken == 1
    assert record.stopped_at == 1
    assert record.refused == 0
    assert not record.last_kl <= agent.config.target_kl
    assert all(x.isfinite().all() for x in agent.policy.state_dict().values())
    assert {float(s["step"]) for s in agent.optimizer.state.values()} == {1.0}


def test_t34_a_partial_stop_keeps_the_steps_before_and_takes_none_after():
    """Stop in mid-epoch: the weights are those of an agent that planned no more."""
    agent = agent_with_rollout(learning_rate=0.004, target_kl=0.02, epochs=6)
    record = agent.update()
    taken = record.steps_taken
    assert 1 < taken < record.steps_planned
    assert record.stopped_at == taken
    assert record.last_kl > 0.0
    free = agent_with_rollout(learning_rate=0.004, target_kl=math.inf, epochs=6)
    batch, guard = free._take_rollout(), Guard(math.inf, free.device)
    free._adopt_statistics(batch)
    targets = free._targets(batch)
    rows = []
    while len(rows) < taken:
        for part in targets.minibatches(2, free.generator):
            if len(rows) < taken:
                rows.append(free.step(part, guard))
    assert not unequal(snapshot(free), snapshot(agent))
    # T35: what is reported is the mean of what ran, and of nothing else.
    singles = [read_record([row], torch.ones(()), 1, [*record.heads]) for row in rows]
    for name in ("policy_loss", "value_loss", "clip_fraction", "clamped", "kl"):
        mean = np.mean([getattr(one, name) for one in singles])
        assert_close(getattr(record, name), float(mean), rtol=1e-5, atol=1e-7)


def fail_at(call, count, error):
    """The call, which raises after it has done its work for the n-th time."""
    calls = []

    def failing(*arguments, **named):
        result = call(*arguments, **named)
        calls.append(1)
        if len(calls) == count:
            raise error
        return result

    return failing


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    "which", ["evaluate_actions", "optimiser", "clipping", "record"]
)
def test_an_update_that_fails_changes_nothing_and_can_be_tried_again(
    which, error, monkeypatch
):
    """The first two of four steps were taken, or all."""
    agents = [agent_with_rollout(epochs=2, target_kl=math.inf) for _ in range(2)]
    for agent in agents:
        agent.update()
        fill_ragged(agent.policy, agent.buffer, policy_version=1, rng_seed=5)
    agent, undisturbed = agents
    holder, name, count = {
        "evaluate_actions": (agent.policy, "evaluate_actions", 3),
        "optimiser": (agent.optimizer, "move", 3),
        "clipping": (agent.optimizer, "gradient_norm", 3),
        "record": (ppo, "read_record", 1),
    }[which]
    before, random = snapshot(agent), agent.generator.get_state()
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, fail_at(getattr(holder, name), count, error))
        with pytest.raises(type(error)):
            agent.update()
    assert not unequal(before, snapshot(agent))
    assert torch.equal(random, agent.generator.get_state())
    assert agent.version == agent.buffer.policy_version == 1
    assert not changed(agent.update(), undisturbed.update())
    assert not unequal(snapshot(agent), snapshot(undisturbed))


@pytest.mark.parametrize("filler", [-1.0, 3.0])
def test_what_is_stored_of_illegal_choices_does_not_change_the_stop(filler):
    """T9: with -1 there, a KL over all places was negative, and nothing stopped it."""
    records = []
    for fill in (0.0, filler):
        agent = agent_with_rollout(learning_rate=0.01)
        storage = agent.buffer._storage
        storage["distribution"][~storage["masks"]] = fill
        records.append(agent.update())
    assert records[0].stopped_at is not None
    assert not changed(*records)


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_what_logits_have_in_common_costs_no_digit_of_the_loss(offset):
    """An unchanged policy has KL 0, or the stop ends updates for no reason."""
    policy = make_policy()
    with torch.no_grad():
        policy.op_out.weight.zero_()
        policy.op_out.bias.copy_(torch.arange(6.0) / 8)
    record = agent_with_rollout(policy, epochs=1, minibatches=1).update()
    with torch.no_grad():
        policy = make_policy()
        policy.op_out.weight.zero_()
        policy.op_out.bias.copy_(offset + torch.arange(6.0) / 8)
    shifted = agent_with_rollout(policy, epochs=1, minibatches=1).update()
    assert abs(shifted.kl) < 1e-6
    assert shifted.policy_loss == pytest.approx(record.policy_loss, abs=1e-6)


@pytest.mark.parametrize(
    ("field", "rot"),
    [
        ("features.host", math.nan),
        ("features.offers", math.inf),
        ("rewards", math.inf),
        ("log_probs", math.nan),
        ("distribution", math.nan),
    ],
)
def test_an_update_on_rotten_data_changes_no_bit_and_counts_its_refusals(field, rot):
    agent = agent_with_rollout()
    agent.update()
    fill_ragged(agent.policy, agent.buffer, policy_version=1, rng_seed=5)
    agent.buffer._storage[field][:, :] = rot
    before = snapshot(agent)
    record = agent.update()
    assert record.refused == record.steps_planned
    assert record.steps_taken == 0
    assert record.stopped_at is None
    assert math.isnan(record.policy_loss)
    assert not unequal(before, snapshot(agent))
    fill_ragged(agent.policy, agent.buffer, policy_version=2, rng_seed=6)
    assert agent.update().steps_taken > 0


def test_the_very_first_update_may_be_refused_as_well():
    agent = agent_with_rollout()
    agent.buffer._storage["features.slots"][:, :] = math.nan
    before = snapshot(agent)
    record = agent.update()
    assert record.refused == record.steps_planned
    assert not unequal(before, {**before, **snapshot(agent)})
    assert all(
        (x == 0).all() for s in agent.optimizer.state.values() for x in s.values()
    )


def test_a_refused_step_leaves_the_others_their_guard():
    """One rotten environment must not blind the KL stop for the rest."""
    guard = Guard(0.1, torch.device("cpu"))
    steps, one = torch.tensor(10), torch.tensor(1.0)
    nan, small, large = torch.tensor(math.nan), torch.tensor(0.0), torch.tensor(3.0)
    taken, stopped, finite = guard.check(nan, steps, nan, nan)
    assert not taken
    assert not stopped
    assert not finite
    assert guard.check(small, steps, one, one)[0]
    taken, stopped, _ = guard.check(large, steps, one, one)
    assert not taken
    assert stopped
    guard.start_epoch()
    assert not guard.check(small, steps, one, one)[0]


def test_the_stop_weighs_minibatches_by_their_steps():
    guard = Guard(0.1, torch.device("cpu"))
    one = torch.tensor(1.0)
    assert guard.check(torch.tensor(0.0), torch.tensor(90), one, one)[0]
    assert guard.check(torch.tensor(9.0), torch.tensor(10), one, one)[0]
    assert not guard.check(torch.tensor(9.0), torch.tensor(10), one, one)[0]
