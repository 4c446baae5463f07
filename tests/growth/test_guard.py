"""The guard's own promises: when it takes a snapshot, and what it goes back to."""

import pytest
import torch
from torch import nn

from esper.contracts.errors import BadInput, CallOrder
from esper.growth.governor import GovernorConfig, Verdict
from esper.growth.guard import Guard
from esper.growth.hand import Hand
from esper.growth.snapshots import Snapshot
from tests.growth.hosts import grow, make_batch, make_host


class Guarded:
    """A growing model under guard, without a Grower."""

    def __init__(self, **config):
        self.model = grow("vector")
        self.model.host.drop.p = 0.0
        self.optimizer = torch.optim.Adam(self.model.host.parameters(), 1e-3)
        self.incidents, self.reasons = [], []
        self.guard = Guard(
            self.model,
            self.optimizer,
            GovernorConfig(**config),
            self.incidents.append,
            self.reasons.append,
        )
        self.hand = Hand(self.model, self.optimizer, None)

    def train(self, batches, factor=1.0):
        for batch in batches:
            x, y = make_batch("vector", 16, rng_seed=batch)
            self.guard.before_batch()
            loss = factor * nn.functional.cross_entropy(self.model.host(x), y)
            self.guard.after_batch(loss)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


def test_a_snapshot_is_taken_when_a_batch_has_shown_that_all_is_well():
    run = Guarded()
    run.train(range(10))
    first = {**run.guard.snapshot._tensors}
    before = run.weights()
    run.guard.follow()
    kept = [run.guard.snapshot._tensors[n] for n, _ in run.model.named_parameters()]
    assert not any(map(torch.equal, kept, before))  # still that of the beginning
    run.train(range(1), factor=torch.nan)
    assert all(first[name] is t for name, t in run.guard.snapshot._tensors.items())
    run.train(range(1))
    kept = [run.guard.snapshot._tensors[n] for n, _ in run.model.named_parameters()]
    assert all(map(torch.equal, kept, before))
    assert not any(map(torch.equal, kept, run.weights()))


def test_three_bad_batches_go_back_to_the_snapshot():
    run = Guarded()
    run.train(range(16))
    assert run.guard.take()
    kept = run.weights()
    run.train(range(2))
    run.train(range(3), factor=1e5)
    verdicts = [incident.verdict for incident in run.incidents]
    assert verdicts == [Verdict.SPIKE, Verdict.SPIKE, Verdict.DIVERGED]
    assert [i.rolled_back for i in run.incidents] == [False, False, True]
    assert all(map(torch.equal, kept, run.weights()))
    run.train(range(2))
    assert len(run.incidents) == 3


def test_failing_again_from_one_snapshot_starts_the_moments_anew():
    run = Guarded()
    run.train(range(16))
    run.guard.take()
    state = run.optimizer.state[run.model.host.first.weight]
    assert bool(state["exp_avg"].any())
    run.train(range(3), factor=1e5)
    assert run.guard.falls == 1
    assert bool(state["exp_avg"].any())
    run.train(range(3), factor=1e5)
    assert run.guard.falls == 2
    assert not bool(state["exp_avg"].any())


def test_what_was_learnt_and_lost_goes_back_at_the_decision():
    run = Guarded(window=8, loss_spike=1000.0)
    run.train([0] * 40)
    run.guard.follow()
    run.train([0])
    kept = [run.guard.snapshot._tensors[n] for n, _ in run.model.named_parameters()]
    kept = [tensor.clone() for tensor in kept]
    assert not run.guard.decision()
    with torch.no_grad():
        run.model.host.last.weight.mul_(30.0)
    run.guard.follow()
    run.train([1, 2] * 4)  # bad, but none of them a spike; no snapshot is taken
    assert run.incidents == []
    assert run.guard.decision()
    assert run.incidents[-1].verdict is Verdict.WORSE_THAN_GUESSING
    assert all(map(torch.equal, kept, run.weights()))
    assert not run.guard.decision()  # what was judged went back too


def test_moments_that_are_not_finite_are_found_at_the_decision():
    run = Guarded()
    run.train(range(10))
    run.guard.take()
    run.optimizer.state[run.model.host.first.weight]["exp_avg"][0, 0] = torch.inf
    assert not run.guard.take()
    assert run.guard.decision()
    assert "moment" in run.incidents[-1].reason


def test_training_seeds_that_are_broken_are_told_by_slot():
    run = Guarded()
    run.model.plant("second#0", "residual_mlp")
    run.model.plant("first->second#0", "widen_8")
    assert run.guard.broken_seeds() == []
    with torch.no_grad():
        next(run.model.seeds["slot_0"].parameters())[0] = torch.nan
    assert run.guard.broken_seeds() == [0]
    assert not run.guard.decision()  # the host does not feel it


def test_a_guard_lets_go_of_its_optimiser():
    run = Guarded()
    run.guard.detach()
    run.train(range(1), factor=torch.nan)
    assert run.incidents == []
    host = make_host("vector")
    with torch.no_grad():
        host.last.bias[0] = torch.inf
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    with pytest.raises(BadInput, match=r"'last\.bias' is not finite"):
        Guard(grow("vector", host), optimizer, None, print, print)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_snapshot_follows_the_topology_and_keeps_its_values():
    run = Guarded()
    run.train(range(3))
    snapshot = Snapshot()
    with pytest.raises(CallOrder, match="before follow"):
        snapshot.follow(run.model, run.optimizer)
    snapshot.take(run.model, run.optimizer)
    kept = run.weights()
    run.train(range(2))
    slot = "second#0"
    run.hand._follow(
        lambda: run.model.plant(slot, "residual_mlp"), run.model.index(slot)
    )
    newborn = [p.detach().clone() for p in run.model.seeds.parameters()]
    snapshot.follow(run.model, run.optimizer)
    run.train(range(2))
    snapshot.restore(run.model, run.optimizer)
    host = [p.detach() for p in run.model.host.parameters()]
    assert all(map(torch.equal, kept, host))
    assert all(map(torch.equal, newborn, run.model.seeds.parameters()))
    run.hand.remove(run.model.index(slot), "test")
    snapshot.follow(run.model, run.optimizer)
    snapshot.restore(run.model, run.optimizer)
