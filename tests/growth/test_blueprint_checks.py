"""The checks pass what is right and name what is not, alone and in hosts."""

from itertools import count

import pytest
import torch
from torch import nn

import esper
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.growth.blueprint_checks import (
    SEED_CHECKS,
    SeedTrial,
    check_blueprint,
)
from esper.growth.blueprints import registry
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


LIARS = {
    "be zero at birth": lambda m, h: h * m.weight,
    "have live gradients at birth": lambda m, h: h * m.weight * 0.0,
    "keep the outlet's shape": lambda m, h: h[:, :5] * m.weight[:5],
    "stay finite": lambda m, h: h.exp() * m.weight,
    "treat samples independently": lambda m, h: (h + h.mean(0)) * m.weight,
    "cost what it declares": lambda m, h: (h @ h.T @ h) * m.weight,
    "learn": uphill,
}


@pytest.mark.parametrize("words", list(SEED_CHECKS))
def test_each_check_alone_catches_its_liar(words):
    assert list(LIARS) == list(SEED_CHECKS)
    cost = (6, 3)
    honest = SeedTrial(
        lambda _: Own(lambda m, h: h * (m.weight - 1), 6), VECTOR, cost, False
    )
    assert SEED_CHECKS[words](honest) == ""
    liar = SeedTrial(lambda _: Own(LIARS[words], 6), VECTOR, cost, False)
    assert SEED_CHECKS[words](liar) != ""


@pytest.mark.parametrize(
    ("parameters", "macs", "reason"),
    [
        (6 * 6 + 6, 36, ""),
        (6 * 6 + 6, 39, ""),
        (6 * 6, 36, "declares 36 parameters and has 42"),
        (6 * 6 + 6, 40, "declares 40 multiply-adds and does 36"),
        (6 * 6 + 6, 32, "declares 32 multiply-adds and does 36"),
        (6 * 6 + 6, 0, "declares 0 multiply-adds and does 36"),
    ],
)
def test_declared_costs_are_held_to_ten_per_cent(parameters, macs, reason):
    trial = SeedTrial(lambda _: nn.Linear(6, 6), VECTOR, (parameters, macs), True)
    answer = SEED_CHECKS["cost what it declares"](trial)
    assert reason in answer
    assert bool(answer) is bool(reason)


# In hosts.


@pytest.mark.parametrize("name", {b.form: b.name for b in BLUEPRINTS}.values())
def test_every_built_in_blueprint_passes_all_checks(name):
    check_blueprint(name)


def only_vectors(geometry):
    square = geometry.inlet_shape == geometry.outlet_shape
    return "" if len(geometry.inlet_shape) == 1 and square else "it serves vectors"


sizes = count(1)


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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: Own(lambda m, h: h * (m.weight - m.weight.detach())),
            r"must learn; it gives zero with any weights \(in '0->3' of Sequential\)",
        ),
        (lambda: Own(uphill), "must learn; its loss went from"),
        (lambda: Own(lambda m, h: m.weight * h.exp()), "must stay finite; inputs of"),
        (
            lambda: nn.Sequential(nn.Linear(8, n := next(sizes)), nn.Linear(n, 8)),
            "must cost what it declares; it declares .* parameters and has",
        ),
        (lambda: nn.Linear(8, 5), "fits none of the places: .* must give shape"),
        (lambda: Remembers(8), "must treat samples independently"),
    ],
)
def test_the_first_failed_check_is_named(make, reason):
    esper.blueprint("mine", fits=only_vectors)(lambda geometry: make())
    with pytest.raises(BadInput, match=reason) as caught:
        check_blueprint("mine")
    assert "\n" not in str(caught.value)


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


def test_half_a_host_and_no_place_are_refused():
    with pytest.raises(BadInput, match="model, slots and example together"):
        check_blueprint("conv", nn.Linear(2, 2))
    esper.blueprint("mine", fits=lambda geometry: "is never right")(
        lambda geometry: None
    )
    with pytest.raises(BadInput, match="none of the places: it is never right"):
        check_blueprint("mine")
