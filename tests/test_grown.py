"""A grown network is an ordinary PyTorch network: saved, copied, averaged, moved."""

import copy
import io
import pickle
import re
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper.contracts.errors import EsperWarning, InvalidInputError
from esper.contracts.stages import Stage
from esper.grower import Grower
from esper.growth.seed_modules import host_parameters
from tests.growth.hosts import HOSTS, bits, everything, make_batch, make_host

PLANTED = {
    "vector": [("first->second#0", "widen_8"), ("second->last#0", "widen_x2")],
    "sequence": [("up->down#0", "widen_8"), ("norm#0", "residual_mlp")],
    "signal": [("first->second#0", "widen_8"), ("second->second#0", "low_rank_4")],
    "image": [("first->second#0", "widen_8"), ("second->last#0", "widen_8")],
}


def begin(kind="vector", host=None, **options):
    host = make_host(kind) if host is None else host
    optimizer = torch.optim.AdamW(host.parameters(), 3e-3)
    options = {"controller": "never", "seeds_per_slot": 2, **options}
    return Grower(
        host, optimizer, HOSTS[kind].slots, example=make_batch(kind, 4)[0], **options
    )


def train(grower, batches, kind="vector", clip=None):
    host = grower.model.host
    for batch in batches:
        x, y = make_batch(kind, 16, rng_seed=batch)
        loss = grower.loss(lambda x=x, y=y: nn.functional.cross_entropy(host(x), y))
        grower.optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(host.parameters(), clip)
        grower.optimizer.step()


def grown(kind="vector", **options):
    """A Grower with active seeds of changed weights, and one that trains."""
    grower = begin(kind, **options)
    for slot, blueprint in PLANTED[kind]:
        grower.plant(slot, blueprint, tempo="AT_ONCE")
    slot, blueprint = PLANTED[kind][0]
    grower.plant(slot.replace("#0", "#1"), blueprint, tempo="SLOW")
    train(grower, range(6), kind)
    return grower


def answer(module, kind="vector"):
    module.eval()
    with torch.no_grad():
        return module(make_batch(kind, 16, rng_seed=5)[0])


@pytest.mark.parametrize("kind", HOSTS)
def test_a_state_dict_brings_a_grown_network_back_in_one_line(kind, tmp_path):
    grower = grown(kind)
    host = grower.model.host
    wanted = answer(host, kind)
    assert not torch.equal(wanted, answer(grower_free(host, kind), kind))
    state = io.BytesIO()
    torch.save(host.state_dict(), state)
    state.seek(0)
    saved = torch.load(state, weights_only=True)
    rebuilt = esper.rebuild(make_host(kind, rng_seed=3), saved)
    assert torch.equal(wanted, answer(rebuilt, kind))
    esper.save(host, tmp_path / "net.safetensors")
    loaded = esper.load(tmp_path / "net.safetensors", make_host(kind, rng_seed=4))
    assert torch.equal(wanted, answer(loaded, kind))
    assert everything(host) == everything(loaded)
    assert bits(host.state_dict()) == bits(loaded.state_dict())
    other = begin(kind, make_host(kind, rng_seed=5))
    other.model.host.load_state_dict(saved)
    assert torch.equal(wanted, answer(other.model.host, kind))
    stages = [grower.model.stage(slot) for slot in grower.model.slots]
    assert [other.model.stage(slot) for slot in other.model.slots] == stages


def grower_free(host, kind):
    """The host's own weights, without seeds."""
    plain = make_host(kind)
    own = {n: t for n, t in host.state_dict().items() if "esper_seeds" not in n}
    plain.load_state_dict(own)
    return plain


def test_a_plain_host_refuses_a_grown_state_and_says_what_to_do(tmp_path):
    state = grown().model.host.state_dict()
    with pytest.raises(
        RuntimeError, match=re.escape("esper.rebuild(host, state_dict)")
    ):
        make_host("vector").load_state_dict(state)
    with pytest.raises(InvalidInputError, match="does not fit the saved network"):
        esper.rebuild(make_host("signal"), state | {})
    empty = begin().model.host
    make_host("vector").load_state_dict(empty.state_dict())  # nothing grew
    empty.load_state_dict(make_host("vector", rng_seed=4).state_dict())
    part = {n: t for n, t in make_host("vector").state_dict().items() if "last" in n}
    with pytest.raises(InvalidInputError, match="was absent and is here"):
        grown().model.host.load_state_dict(part, strict=False)
    (tmp_path / "no").write_text("no network")
    with pytest.raises(InvalidInputError, match="no is damaged, or not a file"):
        esper.load(tmp_path / "no", make_host("vector"))


def test_the_best_is_restored_from_before_anything_grew():
    grower = begin()
    train(grower, range(3))
    host = grower.model.host
    best, whole = copy.deepcopy(host.state_dict()), copy.deepcopy(grower.state_dict())
    wanted = answer(host)
    for restore in (
        lambda: host.load_state_dict(best),
        lambda: grower.load_state_dict(whole),
    ):
        host.train()
        grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
        train(grower, range(3, 6))
        assert not torch.equal(wanted, answer(host))
        restore()
        assert torch.equal(wanted, answer(host))
        host.train()
        train(grower, range(6, 8))
        trained = grower.optimizer.param_groups[0]["params"]
        assert len(trained) == len([*make_host("vector").parameters()])


class Tied(nn.Module):
    """Two names for one weight, of which safetensors keep one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.again = nn.Linear(6, 8, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.again(self.second(torch.relu(self.first(x))))


def test_a_state_with_one_of_the_names_of_a_tied_weight_is_whole():
    host = Tied()
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    slots, example = ["second->second"], torch.ones(4, 6)
    grower = Grower(host, optimizer, slots, example=example, controller="never")
    grower.plant("second->second#0", "low_rank_4", tempo="AT_ONCE")
    state = {n: t for n, t in host.state_dict().items() if n != "again.weight"}
    host.load_state_dict(copy.deepcopy(state), strict=False)
    assert len(grower.model.seeds) == 1


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "average"])
def test_copies_are_grown_networks_of_their_own(how):
    grower = grown()
    host = grower.model.host
    wanted = answer(host)
    if how == "deepcopy":
        other = copy.deepcopy(host)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(host))
    elif how == "average":
        other = AveragedModel(host).module
    else:
        file = io.BytesIO()
        torch.save(host, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(wanted, answer(other))
    host.train()
    train(grower, range(3))
    grower.step(metric=0.5)
    grower.prune("first->second#0")
    assert torch.equal(wanted, answer(other))  # the copy stays as it was
    with torch.no_grad():
        for parameter in other.esper_seeds.parameters():
            parameter.zero_()
    assert not torch.equal(wanted, answer(other))
    assert not torch.equal(answer(other), answer(host))


def test_what_grows_is_seen_in_every_ordinary_way():
    grower = begin()
    host = grower.model.host
    before = sum(p.numel() for p in host.parameters())
    grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
    count = sum(p.numel() for p in host.parameters())
    assert count == grower.model.count().parameters > before
    assert "slot_0" in str(host)
    assert "first->second#0: HOLDING" in str(host)
    named = dict(host.named_parameters())
    groups = grower.optimizer.param_groups
    trained = [id(p) for group in groups for p in group["params"]]
    assert sorted(trained) == sorted(id(p) for p in named.values())  # each once
    train(grower, range(1))
    assert all(p.grad is not None for p in named.values())
    host.zero_grad()
    assert all(p.grad is None for p in named.values())
    host.double()
    assert {p.dtype for p in host.parameters()} == {torch.float64}


def names(module):
    return [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("how", ["updated", "followed", "left alone", "copied again"])
def test_a_copy_that_is_updated_and_does_not_follow_is_warned_of_once(how):
    grower = begin()
    host = grower.model.host
    average = copy.deepcopy(host)
    if how == "followed":
        grower.follow(average)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            if step == 1:
                grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
            if how == "copied again":
                average = copy.deepcopy(host)
            for own, other in zip(
                average.parameters(), host.parameters(), strict=False
            ):
                if how != "left alone" and own.shape == other.shape:
                    own.data.mul_(0.9).add_(other.data, alpha=0.1)
            with torch.no_grad():
                host.first.weight.add_(0.1)
            grower.step(metric=0.5)
    lines = [str(w.message) for w in caught if w.category is EsperWarning]
    assert len(lines) == (how == "updated")
    assert not lines or "Call grower.follow(copy)" in lines[0]


def test_an_average_follows_what_grows():
    grower = begin()
    host = grower.model.host
    average = AveragedModel(host, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    grower.follow(average)
    train(grower, range(2))
    average.update_parameters(host)
    grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
    grower.plant("second->last#0", "widen_8", tempo="AT_ONCE")
    for batch in range(3):
        train(grower, [batch])
        average.update_parameters(host)
    assert names(average.module) == names(host)
    wanted = {n: p.detach().clone() for n, p in host.named_parameters()}
    train(grower, range(3, 4))
    seed = "esper_seeds.slot_0.weights.first"
    held = dict(average.module.named_parameters())
    held = {n: p.detach().clone() for n, p in held.items()}
    average.update_parameters(host)
    for name, parameter in average.module.named_parameters():
        new = dict(host.named_parameters())[name]
        torch.testing.assert_close(parameter, 0.5 * held[name] + 0.5 * new)
    assert not torch.equal(held[seed], wanted[seed])
    grower.step(metric=0.5)
    grower.prune("first->second#0")
    average.update_parameters(host)
    assert names(average.module) == names(host)
    fresh = esper.rebuild(make_host("vector"), average.module.state_dict())
    assert torch.equal(answer(fresh), answer(average.module))


@pytest.mark.parametrize("optimizer", ["old", "new"])
def test_a_rebuilt_network_goes_on_growing(optimizer):
    state = grown().model.host.state_dict()
    host = esper.rebuild(make_host("vector"), state)
    wanted = answer(host)
    host.train()
    groups = host_parameters(host).values() if optimizer == "old" else host.parameters()
    grower = Grower(
        host,
        torch.optim.SGD(groups, 0.1),
        HOSTS["vector"].slots,
        example=make_batch("vector", 4)[0],
        controller="never",
        seeds_per_slot=4,  # other numbers of slots
    )
    assert torch.equal(wanted, answer(host))
    assert grower.model.stage("second->last#0") is Stage.HOLDING
    trained = [id(p) for g in grower.optimizer.param_groups for p in g["params"]]
    assert sorted(trained) == sorted(id(p) for p in host.parameters())
    host.train()
    train(grower, range(2))
    grower.plant("second#3", "residual_mlp", tempo="AT_ONCE")
    train(grower, range(2))
    again = esper.rebuild(make_host("vector"), host.state_dict())
    assert torch.equal(answer(again), answer(host))


def test_fifty_steps_with_a_training_seed_and_its_pruning_change_no_bit():
    ends = []
    for plant in (False, True):
        torch.manual_seed(3)
        grower = begin(tick=1000)
        train(grower, range(5))
        if plant:
            assert grower.plant("first->second#0", "widen_8").jump == 0.0
        train(grower, range(5, 55))
        grower.step(metric=0.5)
        if plant:
            grower.prune("first->second#0")
        train(grower, range(55, 60))
        ends.append(
            [everything(grower.model.host, grower.optimizer), torch.get_rng_state()]
        )
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_clipping_the_whole_model_covers_its_seeds():
    grower = grown()
    host = grower.model.host
    x, y = make_batch("vector", 16)
    loss = grower.loss(lambda: nn.functional.cross_entropy(host(x), y))
    (1000 * loss).backward()
    norm = nn.utils.clip_grad_norm_(host.parameters(), 0.1)
    assert norm > 0.1
    clipped = torch.stack([p.grad.norm() for p in host.parameters()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-3, atol=0)


def test_a_second_thread_may_evaluate():
    """It does so in the middle of a pass of the first one, in every batch."""
    grower = grown()
    host = grower.model.host.eval()
    x = make_batch("vector", 3, rng_seed=9)[0]
    with torch.no_grad():
        wanted = host(x)
    seen = []

    def evaluate():
        with torch.no_grad():
            seen.append(host(x))

    def meanwhile(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    host.norm.register_forward_hook(meanwhile)
    batch, labels = make_batch("vector", 64)
    for _ in range(3):
        grower.loss(lambda: nn.functional.cross_entropy(host(batch), labels)).backward()
    assert len(seen) == 6  # in shadow passes too
    assert all(torch.equal(wanted, one) for one in seen)
    assert len(grower.model.seeds) == 3
    assert not grower.safety.incidents
