import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from esper.contracts.errors import BadInput, CallOrder
from esper.growth.snapshots import Snapshot

BUILDERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
}


class Model(nn.Module):
    """Batch norm, dropout, a tied weight and buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5)
        )
        self.tied = nn.Linear(5, 8)
        self.tied.weight = self.layers[0].weight
        self.coarse = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("wide", torch.zeros(1).expand(4), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0, 3))

    def forward(self, x):
        self.seen += 1.0
        return self.layers(x + self.layers[3](self.tied(x))) * self.coarse.sum()


def build(name="adamw"):
    torch.manual_seed(5)
    model = Model()
    return model, BUILDERS[name](model.parameters())


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 5)).square().mean().backward()
        optimizer.step()


def bits(value):
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [bits(inner) for inner in value]
    return value


def everything(model, optimizer):
    return bits(
        {
            "parameters": dict(model.named_parameters()),
            "buffers": dict(model.named_buffers()),
            "optimiser": optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
    )


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("name", BUILDERS)
def test_everything_comes_back_to_the_bit_and_the_run_repeats_itself(name, before):
    model, optimizer = build(name)
    train(model, optimizer, before)
    snapshot = Snapshot()
    snapshot.take(model, optimizer, {"ages": {"a": [1, 2]}})
    kept = everything(model, optimizer)
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]

    train(model, optimizer, 4)
    later = everything(model, optimizer)
    assert later != kept
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(torch.nan)
        model.wide[:1].fill_(7.0)
    for group in optimizer.param_groups:
        group["weight_decay"], group["invented"] = 0.5, 1
    extra = snapshot.restore(model, optimizer)
    assert extra == {"ages": {"a": [1, 2]}}
    assert everything(model, optimizer) == kept
    assert identities == [id(t) for t in (*model.parameters(), *model.buffers())]

    train(model, optimizer, 4)
    assert everything(model, optimizer) == later
    snapshot.restore(model, optimizer)
    assert everything(model, optimizer) == kept


def test_what_the_caller_holds_and_what_was_kept_share_nothing():
    model, optimizer = build()
    train(model, optimizer, 1)
    extra = {"log": [1], "tensor": torch.zeros(2)}
    snapshot = Snapshot()
    snapshot.take(model, optimizer, extra)
    kept = everything(model, optimizer)
    extra["log"].append(2)
    extra["tensor"].fill_(9.0)
    first = snapshot.restore(model, optimizer)
    assert bits(first) == bits({"log": [1], "tensor": torch.zeros(2)})
    first["log"].append(3)
    train(model, optimizer, 2)
    assert snapshot.restore(model, optimizer)["log"] == [1]
    assert everything(model, optimizer) == kept


@pytest.mark.parametrize("name", BUILDERS)
def test_taking_again_uses_the_same_memory(name):
    model, optimizer = build(name)
    train(model, optimizer, 2)
    snapshot = Snapshot()
    snapshot.take(model, optimizer)
    tensors = [*snapshot._tensors.values()]
    tensors += [
        value
        for state in snapshot._state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    places = [tensor.data_ptr() for tensor in tensors]
    size = snapshot.size_bytes
    train(model, optimizer, 2)
    snapshot.take(model, optimizer)
    again = [*snapshot._tensors.values()]
    again += [
        value
        for state in snapshot._state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    assert places == [tensor.data_ptr() for tensor in again]
    assert snapshot.size_bytes == size
    kept = everything(model, optimizer)
    train(model, optimizer, 1)
    snapshot.restore(model, optimizer)
    assert everything(model, optimizer) == kept


def test_the_size_is_that_of_weights_moments_buffers_and_streams():
    model = nn.Linear(10, 10, bias=False)
    optimizer = optim.SGD(model.parameters(), momentum=0.9)
    snapshot = Snapshot()
    assert snapshot.size_bytes == 0
    stream = torch.get_rng_state().numel()
    snapshot.take(model, optimizer)
    assert snapshot.size_bytes == 400 + stream
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    snapshot.take(model, optimizer, {"more": torch.zeros(5)})
    assert snapshot.size_bytes == 800 + 20 + stream


def test_a_schedule_comes_back_with_the_rest():
    model, optimizer = build()
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, 1)
    schedule.step()
    snapshot = Snapshot()
    snapshot.take(model, optimizer, {"schedule": schedule.state_dict()})
    rates = []
    for _ in range(2):
        for _ in range(3):
            optimizer.step()
            schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.load_state_dict(snapshot.restore(model, optimizer)["schedule"])
    assert rates[0] == rates[1]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    model, optimizer = build("tensor lr")
    rate = optimizer.param_groups[0]["lr"]
    snapshot = Snapshot()
    snapshot.take(model, optimizer)
    rate.fill_(5.0)
    snapshot.restore(model, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.01)


def test_a_topology_made_equal_again_is_restored_and_a_different_one_refused():
    host = nn.ModuleDict({"host": nn.Linear(3, 3)})
    optimizer = optim.Adam(host.parameters())
    snapshot = Snapshot()
    snapshot.take(host, optimizer)
    kept = everything(host, optimizer)
    seed = nn.Linear(3, 3)
    host["seed"] = seed
    optimizer.param_groups[0]["params"].extend(seed.parameters())
    seed(host["host"](torch.randn(2, 3))).sum().backward()
    optimizer.step()
    grown = everything(host, optimizer)
    with pytest.raises(BadInput, match=r"'seed.bias' was absent .* is float32\[3\]"):
        snapshot.restore(host, optimizer)
    assert everything(host, optimizer) == grown

    del host["seed"]
    stray = copy.copy(optimizer.param_groups[0]["params"])
    with pytest.raises(BadInput, match="in none of the modules"):
        snapshot.restore(host, optimizer)
    optimizer.param_groups[0]["params"] = stray[:2]
    with pytest.raises(BadInput, match="in none of its"):
        snapshot.restore(host, optimizer)
    for parameter in seed.parameters():
        del optimizer.state[parameter]
    snapshot.restore(host, optimizer)
    assert everything(host, optimizer) == kept


def test_other_shapes_types_and_groups_are_refused_and_nothing_is_written():
    model, optimizer = build()
    train(model, optimizer, 2)
    snapshot = Snapshot()
    snapshot.take(model, optimizer)
    train(model, optimizer, 1)
    now = everything(model, optimizer)

    seen = model.seen
    model.seen = torch.zeros(3)
    with pytest.raises(BadInput, match=r"'seen' was float32\[2\]"):
        snapshot.restore(model, optimizer)
    model.seen = seen.double()
    with pytest.raises(BadInput, match=r"is float64\[2\]"):
        snapshot.restore(model, optimizer)
    model.seen = seen
    parameters = optimizer.param_groups[0]["params"]
    parameters.reverse()
    with pytest.raises(BadInput, match="another order"):
        snapshot.restore(model, optimizer)
    parameters.reverse()
    removed = parameters.pop()
    state = optimizer.state.pop(removed)
    with pytest.raises(BadInput, match="differ in"):
        snapshot.restore(model, optimizer)
    parameters.append(removed)
    optimizer.state[removed] = state
    assert everything(model, optimizer) == now


def test_a_snapshot_that_cannot_be_taken_leaves_the_last_one():
    model, optimizer = build()
    snapshot = Snapshot()
    with pytest.raises(CallOrder):
        snapshot.restore(model, optimizer)
    snapshot.take(model, optimizer, {"count": 1})
    kept = everything(model, optimizer)
    train(model, optimizer, 1)
    with pytest.raises(TypeError):
        snapshot.take(model, optimizer, {"lock": (line for line in "x")})
    other = nn.Linear(2, 2)
    with pytest.raises(BadInput):
        snapshot.take(other, optimizer)
    assert snapshot.restore(model, optimizer) == {"count": 1}
    assert everything(model, optimizer) == kept


def test_a_model_without_shapes_yet_is_refused():
    with pytest.raises(BadInput, match="one batch"):
        Snapshot().take(nn.LazyLinear(3), optim.SGD([nn.Parameter(torch.ones(1))]))


SITES = st.sampled_from(["weight", "buffer", "moment", "rate", "stream", "drop"])
VALUES = st.sampled_from([float("nan"), float("inf"), -3e38, 1e-45, -0.0])


@given(st.lists(st.tuples(SITES, st.integers(0, 99), VALUES), max_size=6))
def test_any_damage_is_undone_to_the_bit(damage):
    model, optimizer = build()
    train(model, optimizer, 1)
    snapshot = Snapshot()
    snapshot.take(model, optimizer)
    kept = everything(model, optimizer)
    for site, which, value in damage:
        _hurt(model, optimizer, site, which, value)
    snapshot.restore(model, optimizer)
    assert everything(model, optimizer) == kept


@torch.no_grad()
def _hurt(model, optimizer, site, which, value):
    if site == "weight":
        parameters = list(model.parameters())
        parameters[which % len(parameters)].fill_(value)
    elif site == "buffer":
        model.layers[1].running_var.fill_(value)
    elif site == "moment":
        states = list(optimizer.state.values())
        if states:
            states[which % len(states)]["exp_avg"].fill_(value)
    elif site == "rate":
        optimizer.param_groups[0]["lr"] = value
    elif site == "stream":
        torch.manual_seed(which)
    else:
        optimizer.state.clear()
