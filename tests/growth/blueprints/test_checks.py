"""The checks accept correct blueprints and name the error of others."""

from itertools import count

import pytest
import torch
from torch import nn

import esper
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import InvalidInputError
from esper.growth.blueprints import registry
from esper.growth.blueprints.checks import check_blueprint
from esper.growth.blueprints.geometry import Layout
from tests.growth.blueprints.places import residual

VECTOR = residual(Layout.VECTOR, 6)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})


class Own(nn.Module):
    """One weight per channel and any forward."""

    def __init__(self, forward, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.own = forward

    def forward(self, h):
        return self.own(self, h)


def uphill(m, h):
    """Zero at birth; follows its gradient the wrong way."""
    return h * (2 * m.weight.detach() - m.weight - 1)


SMALLEST = {b.form: b.name for b in reversed(BLUEPRINTS)}


@pytest.mark.parametrize("name", [*SMALLEST.values(), "widen_x4"])
def test_every_built_in_blueprint_passes_all_checks(name):
    check_blueprint(name)


def test_a_users_own_blueprint_is_tried_in_a_users_own_host_and_leaves_it_alone():
    @esper.blueprint("mine")
    def factory(geometry):
        width = geometry.inlet_width, geometry.outlet_width
        return nn.Sequential(
            nn.Linear(width[0], 4), nn.GELU(), nn.Dropout(0.2), nn.Linear(4, width[1])
        )

    host = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    before, streams = [p.clone() for p in host.parameters()], torch.get_rng_state()
    esper.check_blueprint("mine")
    esper.check_blueprint("mine", host, ["0->2"], torch.zeros(4, 8) + torch.arange(8))
    assert all(map(torch.equal, before, host.parameters()))
    assert not host[0]._forward_pre_hooks
    assert torch.equal(streams, torch.get_rng_state())


class Remembers(nn.Module):
    """Gives another output at every call in evaluation, once it has been trained."""

    def __init__(self, width):
        super().__init__()
        self.last = nn.Linear(width, width)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h):
        self.calls += 1
        return self.last(h) * self.calls


sizes = count(1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: Own(lambda m, h: h * (m.weight - m.weight.detach())),
            r"its output is zero with any weights \(in '0->3' of Sequential\)",
        ),
        (lambda: Own(uphill), "must learn; its loss went from"),
        (lambda: Own(lambda m, h: m.weight * h.exp()), "values that are not finite"),
        (
            lambda: nn.Sequential(nn.Linear(8, n := next(sizes)), nn.Linear(n, 8)),
            "declares .* parameters and has",
        ),
        (lambda: nn.Linear(8, 5), "fits none of the slots: .* must return shape"),
        (lambda: Remembers(8), "with other samples in its batch"),
    ],
)
def test_the_first_failed_check_is_named(make, reason):
    def only_vectors(geometry):
        square = geometry.inlet_shape == geometry.outlet_shape
        return "" if len(geometry.inlet_shape) == 1 and square else "it serves vectors"

    esper.blueprint("mine", fits=only_vectors)(lambda geometry: make())
    with pytest.raises(InvalidInputError, match=reason) as caught:
        check_blueprint("mine")
    assert "\n" not in str(caught.value)


def test_half_a_host_and_no_place_are_refused():
    with pytest.raises(InvalidInputError, match="model, slots and example together"):
        check_blueprint("conv", nn.Linear(2, 2))
    esper.blueprint("mine", fits=lambda geometry: "is never right")(lambda _: None)
    with pytest.raises(InvalidInputError, match="none of the slots: it is never right"):
        check_blueprint("mine")
