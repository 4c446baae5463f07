import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

from esper.contracts.errors import InvalidInputError
from esper.growth.optimiser import OptimizerSurgery as Surgery
from tests.growth.hosts import bits

OPTIMISERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": partial(optim.Adam, lr=0.01),
    "adamw loop": partial(optim.AdamW, lr=0.01, foreach=False),
    "adamw foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(optim.AdamW, lr=0.01, fused=True),
    "adamw amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "adamw tensor lr": lambda groups: optim.AdamW(groups, lr=torch.tensor(0.01)),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "adagrad fused": partial(optim.Adagrad, lr=0.05, fused=True),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "adamax": partial(optim.Adamax, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.05),
    "rprop": partial(optim.Rprop, lr=0.01),
    "adafactor": partial(optim.Adafactor, lr=0.05),
}


def sequential(optimizer):
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = schedules.CosineAnnealingLR(optimizer, 20)
    return schedules.SequentialLR(optimizer, [warm, cosine], milestones=[5])


SCHEDULES = {
    "cosine": partial(schedules.CosineAnnealingLR, T_max=25),
    "one cycle": partial(
        schedules.OneCycleLR, max_lr=[0.1, 0.3], total_steps=40, cycle_momentum=False
    ),
    "plateau": partial(schedules.ReduceLROnPlateau, patience=1),
    "sequential": sequential,
}


class Host(nn.Module):
    """Two layers in two groups, a tied decoder and a frozen scale."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.tied = nn.Linear(6, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x):
        hidden = torch.tanh(self.first(x * self.frozen) + self.tied(x))
        return self.second(hidden)


def host_and_optimiser(build):
    torch.manual_seed(3)
    host = Host()
    groups = [
        {
            "params": [*host.first.parameters(), host.frozen],
            "weight_decay": 0.01,
        },
        {"params": host.second.parameters(), "lr": 0.02},
    ]
    return host, build(groups)


def named(host):
    return dict(host.named_parameters())


def a_seed():
    generator = torch.Generator().manual_seed(11)
    return {
        "seed.w": nn.Parameter(torch.randn(4, 5, generator=generator)),
        "seed.b": nn.Parameter(torch.randn(4, generator=generator)),
    }


def train(host, optimizer, steps, *, start=0, seed=None, schedule=None):
    """Real gradients for the host, noise of any size for the seed."""
    rates = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 6, generator=generator)
        y = torch.randn(16, 3, generator=generator)
        optimizer.zero_grad()
        loss = (host(x) - y).square().mean()
        loss.backward()
        for parameter in (seed or {}).values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (noise * 10.0 ** (step % 5)).to(parameter.dtype)
        optimizer.step()
        if isinstance(schedule, schedules.ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_newborn_leaves_the_host_unchanged_and_no_trace(name):
    host, optimizer = host_and_optimiser(OPTIMISERS[name])
    twin, twins = host_and_optimiser(OPTIMISERS[name])
    surgery = Surgery(optimizer, named(host))
    train(host, optimizer, 5)
    train(twin, twins, 5)

    seed = a_seed()
    before = copy.deepcopy(optimizer.state_dict())
    surgery.join(seed, near=[host.second.weight])
    surgery.leave(seed.values())
    assert bits(optimizer.state_dict()) == bits(before)

    surgery.join(seed, near=[host.first.bias])
    old = bits(seed)
    train(host, optimizer, 2, start=5)  # it may learn later
    assert bits(seed) == old
    train(host, optimizer, 18, start=7, seed=seed)
    train(twin, twins, 20, start=5)
    assert bits(host.state_dict()) == bits(twin.state_dict())
    for parameter, other in zip(host.parameters(), twin.parameters(), strict=True):
        assert bits(optimizer.state.get(parameter)) == bits(twins.state.get(other))
    assert all(bits(seed[key]) != old[key] for key in seed)
    surgery.leave(seed.values())
    assert bits(optimizer.state_dict()) == bits(twins.state_dict())


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_scheduler_goes_on_unchanged_and_a_newborn_follows_its_groups_rate(name):
    build = partial(optim.SGD, lr=0.1)
    host, optimizer = host_and_optimiser(build)
    twin, twins = host_and_optimiser(build)
    surgery = Surgery(optimizer, named(host))
    schedule, other = (SCHEDULES[name](one) for one in (optimizer, twins))
    newborn, rates = nn.Parameter(torch.zeros(3, dtype=torch.float64)), []
    for step in range(23):
        if step == 3:
            surgery.join({"seed": newborn}, near=[host.second.weight])
        seed = {"": newborn} if step >= 3 else {}
        rate, old = float(optimizer.param_groups[1]["lr"]), newborn.detach().clone()
        now = train(host, optimizer, 1, start=step, seed=seed, schedule=schedule)
        assert now == train(twin, twins, 1, start=step, schedule=other)
        rates += now
        if seed:
            wanted = old - rate * newborn.grad
            torch.testing.assert_close(newborn.detach(), wanted, rtol=1e-12, atol=1e-12)
    assert len({rate for step in rates for rate in step}) > 2
    assert bits(host.state_dict()) == bits(twin.state_dict())


@pytest.mark.parametrize("name", ["sgd momentum", "adamw fused", "adagrad", "nadam"])
def test_a_saved_run_goes_on_bit_for_bit_in_a_rebuilt_network(name):
    host, optimizer = host_and_optimiser(OPTIMISERS[name])
    surgery = Surgery(optimizer, named(host))
    gone, seed = {"gone": nn.Parameter(torch.ones(2))}, a_seed()
    surgery.join(gone, near=[host.first.weight])
    train(host, optimizer, 2, seed=gone)
    surgery.join(seed, near=[host.first.weight])
    surgery.leave(gone.values())
    train(host, optimizer, 2, start=2, seed=seed)
    saved = copy.deepcopy(
        (
            surgery.names(),
            optimizer.state_dict(),
            host.state_dict(),
            {key: value.detach() for key, value in seed.items()},
        )
    )
    train(host, optimizer, 4, start=4, seed=seed)

    twin, twins = host_and_optimiser(OPTIMISERS[name])
    again, other = Surgery(twins, named(twin)), a_seed()
    stale = {"stale": nn.Parameter(torch.ones(1))}
    again.join(stale)
    names, moments, weights, seeds = saved
    again.restore(names, dict(twin.named_parameters()) | other)
    twins.load_state_dict(moments)
    twin.load_state_dict(weights)
    for key, value in seeds.items():
        other[key].data.copy_(value)
    assert again.names() == names
    train(twin, twins, 4, start=4, seed=other)
    assert bits(twin.state_dict()) == bits(host.state_dict())
    assert bits(other) == bits(seed)
    assert bits(twins.state_dict()) == bits(optimizer.state_dict())
    again.leave(other.values())


def test_names_given_to_the_optimiser_are_kept_in_step():
    host = Host()
    optimizer = optim.Adam(list(host.named_parameters()), lr=0.1)
    surgery = Surgery(optimizer, named(host))
    before = list(optimizer.param_groups[0]["param_names"])
    seed = a_seed()
    surgery.join(seed)
    assert optimizer.param_groups[0]["param_names"] == [*before, *seed]
    saved = surgery.names()
    surgery.leave([seed["seed.w"]])
    assert optimizer.param_groups[0]["param_names"] == [*before, "seed.b"]
    surgery.restore(saved, dict(host.named_parameters()) | seed)
    assert optimizer.param_groups[0]["param_names"] == [*before, *seed]


def refusal(call):
    with pytest.raises(InvalidInputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) <= 200
    return message


def test_what_cannot_be_operated_on_is_refused():
    host = Host()
    every = list(host.parameters())
    own = named(host)
    assert "got Parameter" in refusal(lambda: Surgery(every, own))
    assert "an empty list" in refusal(lambda: Surgery([], own))
    two = [optim.SGD(every[:3]), optim.Adam(every[2:])]
    assert "is in two optimisers" in refusal(lambda: Surgery(two, own))
    assert "not in the optimiser" in refusal(lambda: Surgery(two[:1], own))
    assert "got str" in refusal(lambda: Surgery([two[0], "adam"], own))
    two[0].base_optimizer = two[1]
    assert "pass its base optimizer" in refusal(lambda: Surgery(two[0], own))
    assert "LBFGS" in refusal(lambda: Surgery(optim.LBFGS(every), own))
    assert "SparseAdam" in refusal(lambda: Surgery(optim.SparseAdam(every), own))
    assert "'second.bias'" in refusal(lambda: Surgery(optim.SGD(every[:-1]), own))
    with pytest.warns(UserWarning, match="duplicate"):
        twice = optim.SGD([*every, every[1]])
    assert "twice" in refusal(lambda: Surgery(twice, named(host)))
    surgery = Surgery(optimizer := optim.Adam(every), named(host))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(9))]})
    assert "(9,)" in refusal(surgery.names)
    matrix = nn.Linear(3, 2, bias=False)
    surgery = Surgery(optim.Muon(matrix.parameters()), named(matrix))
    assert "Muon" in refusal(lambda: surgery.join({"b": nn.Parameter(torch.ones(2))}))


def test_parameters_of_other_modules_are_trained_along_and_left_alone():
    host, stranger = Host(), nn.Parameter(torch.zeros(7))
    optimizer = optim.Adam([stranger, *host.parameters()])
    surgery = Surgery(optimizer, named(host))
    seed = a_seed()
    surgery.join(seed)
    assert surgery.names()[0][0] == "outside.0"
    names = surgery.names()
    surgery.leave(seed.values())
    surgery.restore(names, dict(host.named_parameters()) | seed)
    assert surgery.names() == names
    assert optimizer.param_groups[0]["params"][0] is stranger


def test_a_refused_restore_changes_nothing():
    host, optimizer = host_and_optimiser(OPTIMISERS["adam"])
    surgery = Surgery(optimizer, named(host))
    seed = a_seed()
    surgery.join(seed)
    train(host, optimizer, 2, seed=seed)
    before = bits([optimizer.state_dict(), surgery.names()])
    (first, second), everything = surgery.names(), dict(host.named_parameters()) | seed
    restore = surgery.restore
    assert "'ghost'" in refusal(
        lambda: restore([first, [*second, "ghost"]], everything)
    )
    assert "2" in refusal(lambda: restore([first], everything))
    assert "'second.bias'" in refusal(lambda: restore([first, second[:-1]], everything))
    after = bits([optimizer.state_dict(), surgery.names()])
    assert after == before
