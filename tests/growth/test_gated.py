"""Gated pairs, channels last and transposed weights can be widened."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper.contracts.errors import InvalidInputError
from esper.growth.analysis.host_layers import LAYER_KINDS, LayerKind
from esper.growth.analysis.slots import suggest_slots
from esper.growth.model import GrowingModel
from esper.growth.saving.export import export
from tests.growth.hosts import Net, shake


class Gated(nn.Module):
    """Swish of one layer times another, as in many language models."""

    def __init__(self, bias=False, norm=False):
        super().__init__()
        self.gate = nn.Linear(8, 12, bias=bias)
        self.up = nn.Linear(8, 12, bias=bias)
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(12, 5)

    def forward(self, x):
        hidden = F.silu(self.gate(x)) * self.norm(self.up(x))
        return self.down(self.drop(hidden))


class Ratio(Gated):
    """The second branch comes first, and the order matters."""

    def forward(self, x):
        return self.down(torch.sub(self.up(x), torch.tanh(self.gate(x)), alpha=2))


class Convolved(nn.Module):
    """Kernels of two sizes that meet."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Conv2d(2, 6, 3, padding=1)
        self.up = nn.Conv2d(2, 6, 1, bias=False)
        self.down = nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x).sigmoid())


class ChannelsLast(nn.Module):
    """A convolution, then an MLP at every pixel, as in ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1, groups=2)
        self.gate, self.act, self.down = nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)

    def forward(self, x):
        hidden = self.conv(x).permute(0, 2, 3, 1)
        hidden = self.down(self.act(self.gate(hidden)))
        return x.mean() + hidden.permute(0, 3, 1, 2)


class Transposed(nn.Module):
    """A linear layer that stores its weight the other way round."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Gelu(nn.Module):
    """Of several torch functions, in one module."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


def transposed():
    return Net(gate=Transposed(12, 8), act=Gelu(), down=Transposed(5, 12))


@pytest.fixture(autouse=True)
def known(monkeypatch):
    kind = LayerKind("nf", "nx", transposed=True)
    name = f"{Transposed.__module__}.Transposed"
    kinds = {**LAYER_KINDS, name: kind}
    monkeypatch.setattr("esper.growth.analysis.host_layers.LAYER_KINDS", kinds)


IMAGES = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
HOSTS = {
    "gated": (Gated, ROWS),
    "biases and a norm": (lambda: Gated(bias=True, norm=True), ROWS),
    "swapped": (lambda: Ratio(bias=True), ROWS),
    "convolutions": (Convolved, IMAGES),
    "channels last": (ChannelsLast, IMAGES),
    "transposed": (transposed, ROWS),
}


@pytest.mark.parametrize("kind", HOSTS)
def test_they_widen_without_a_trace_and_merge_exactly(kind):
    torch.manual_seed(0)
    make, x = HOSTS[kind]
    host = make().double()
    (slot,) = suggest_slots(host, x.double())
    model = GrowingModel(host, [slot], x.double(), seeds_per_slot=2)
    before = model.example_outputs()
    for index in range(2):
        model.plant(f"{slot}#{index}", "widen_x1.5", tempo="AT_ONCE")
    assert all(map(torch.equal, before, model.example_outputs()))
    assert [s.blueprint.size for s in model.seeds.values()] == [
        host.down.weight.shape[0 if kind == "transposed" else 1] // 2,
        (host.down.weight.shape[0 if kind == "transposed" else 1] * 3) // 4,
    ]
    shake(model)
    host.train()
    host(x.double())  # norms follow the data
    after = model.example_outputs()
    assert not torch.allclose(before[0], after[0])
    plain = export(model)
    assert type(plain) is type(host)
    assert not [name for name in plain.state_dict() if "esper" in name]
    assert torch.allclose(plain.eval()(x.double()), after[0], rtol=0, atol=1e-12)
    counted = sum(p.numel() for p in plain.parameters())
    assert (
        counted
        == model.count().parameters
        == sum(p.numel() for p in model.parameters())
    )
    rebuilt = esper.rebuild(make().double(), host.state_dict())
    assert torch.equal(rebuilt.eval()(x.double()), after[0])


def test_every_weight_of_a_gated_seed_learns():
    torch.manual_seed(0)
    host = Gated(bias=True)
    model = GrowingModel(host, ["gate->down"], ROWS)
    model.plant("gate->down#0", "widen_8", tempo="AT_ONCE")
    optimizer = torch.optim.SGD(model.seeds.parameters(), 0.1)
    start = {name: p.clone() for name, p in model.seeds.named_parameters()}
    assert {name.split(".")[-1] for name in start} == {
        *("first", "first_bias", "gate", "gate_bias", "last")
    }
    for _ in range(3):
        optimizer.zero_grad()
        host(ROWS).square().sum().backward()
        optimizer.step()
    for name, parameter in model.seeds.named_parameters():
        assert not torch.equal(parameter, start[name]), name


def test_units_of_a_gated_pair_feed_those_behind_it():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Gated(), nn.Linear(5, 3)

        def forward(self, x):
            return self.last(torch.relu(self.first(x)))

    torch.manual_seed(0)
    host = Two().double()
    slots = suggest_slots(host, ROWS.double())
    assert slots == ("first.gate->first.down", "first.down->last")
    model = GrowingModel(host, slots, ROWS.double(), seeds_per_slot=1)
    for slot in model.slots:
        model.plant(slot, "widen_8", tempo="AT_ONCE")
    shake(model)
    assert [*model.seeds["slot_1"].cross] == ["from_0"]
    plain = export(model).eval()
    assert type(plain) is Two
    expected = model.example_outputs()[0]
    assert torch.allclose(plain(ROWS.double()), expected, rtol=0, atol=1e-12)


def test_one_gated_pair_has_one_slot():
    host = Gated()
    assert suggest_slots(host, ROWS).skipped["up"] == (
        "it is widened together with gate->down"
    )
    GrowingModel(host, ["up->down"], ROWS).detach()
    with pytest.raises(InvalidInputError, match="both widen 'up'; use one of them"):
        GrowingModel(host, ["gate->down", "up->down"], ROWS)


def test_branches_that_read_other_tensors_are_no_gate():
    class Other(Gated):
        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x + 1.0))

    reason = "mul joins 'gate' and 'up', which read different tensors"
    model = GrowingModel(Other(), ["gate->down"], ROWS)
    assert model.seeds.place(0).geometry.why_no_span == reason
