"""The contract that users can run on their own blueprints."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import esper
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.growth.blueprints import registry
from esper.growth.contract import check_blueprint


@pytest.fixture(autouse=True)
def only_built_in(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    return


@pytest.mark.parametrize("name", {b.form: b.name for b in BLUEPRINTS}.values())
def test_every_built_in_blueprint_keeps_the_contract(name):
    check_blueprint(name)


def mix_channels(geometry):
    width = geometry.inlet_width, geometry.outlet_width
    if geometry.inlet_layout.channels_first:
        return nn.LazyLinear(1)
    return nn.Sequential(nn.Linear(width[0], 4), nn.GELU(), nn.Linear(4, width[1]))


def only_vectors(geometry):
    return "" if len(geometry.inlet_shape) == 1 else "it serves vectors only"


def test_a_users_own_blueprint_is_tried_in_hosts():
    esper.blueprint("mine", fits=only_vectors)(mix_channels)
    esper.check_blueprint("mine")


def test_a_users_own_blueprint_is_tried_in_a_users_own_host_and_leaves_it_alone():
    esper.blueprint("mine", fits=only_vectors)(mix_channels)
    host = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    before = [p.clone() for p in host.parameters()]
    esper.check_blueprint("mine", host, ["0->2"], torch.randn(4, 8))
    assert all(
        torch.equal(a, b) for a, b in zip(before, host.parameters(), strict=True)
    )
    assert not host[0]._forward_pre_hooks


class Remembers(nn.Module):
    """Says something else at every call in evaluation, once it has been trained."""

    def __init__(self, width):
        super().__init__()
        self.last = nn.Linear(width, width)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h):
        self.calls += 1
        return self.last(h) * self.calls


def test_a_blueprint_whose_answer_changes_with_every_call_is_found_out():
    def remembers(geometry):
        return Remembers(geometry.outlet_width)

    def fits(geometry):
        square = geometry.inlet_shape == geometry.outlet_shape
        return "" if len(geometry.inlet_shape) == 1 and square else "no"

    esper.blueprint("remembers", fits=fits)(remembers)
    with pytest.raises(BadInput, match=r"must (be|keep|mind)"):
        check_blueprint("remembers")


def test_half_a_host_is_refused():
    with pytest.raises(BadInput, match="model, slots and example together"):
        check_blueprint("conv", nn.Linear(2, 2))
