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
    STANDARD,
    SeedTrial,
    check_blueprint,
    check_seed,
)
from esper.growth.blueprints import registry
from esper.growth.blueprints.geometry import Layout
from esper.growth.blueprints.registry import blueprint
from esper.growth.blueprints.seed import Cost
from tests.growth.blueprints.places import residual

VECTOR = residual(Layout.VECTOR, 6)
IMAGE = residual(Layout.IMAGE, 4, 5, 5)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})


class Own(nn.Module):
    """One weight per channel and any forward."""

    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.own = forward

    def forward(self, h):
        return self.own(self, h)


def test_standard_places_are_of_every_kind():
    for layout in Layout:
        places = [place for place in STANDARD if place.inlet_layout is layout]
        assert any(place.residual for place in places)
        assert any(place.beside for place in places)
        assert any(place.spans for place in places)
    assert any(place.unit_inputs > 1 for place in STANDARD)


def test_a_users_small_network_passes_the_seed_checks_where_it_fits():
    def vectors_only(geometry):
        return "" if geometry.inlet_layout is Layout.VECTOR else "is for vectors"

    @blueprint("mine", fits=vectors_only)
    def factory(geometry):
        return nn.Sequential(
            nn.Linear(geometry.inlet_width, 8),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(8, geometry.outlet_width),
        )

    before = torch.get_rng_state()
    check_seed("mine")
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(BadInput, match="fits none of 1 places: is for vectors"):
        check_seed("mine", IMAGE)


def stuck(m, h):
    return h * (m.weight - m.weight.detach())


def uphill(m, h):
    """Zero at birth; follows its gradient the wrong way."""
    return h * (2 * m.weight.detach() - m.weight - 1)


sizes = count(1)


@pytest.mark.parametrize(
    ("make", "geometry", "reason"),
    [
        (lambda: Own(stuck), VECTOR, "must learn; it gives zero with any weights"),
        (
            lambda: Own(lambda m, h: m.weight * h.exp()),
            VECTOR,
            "must stay finite; inputs of size 1000",
        ),
        (
            lambda: nn.LayerNorm((4, 5, 5)),
            IMAGE,
            r"must keep the outlet's shape; it failed on \(2, 4, 8, 8\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(6, n := next(sizes)), nn.Linear(n, 6)),
            VECTOR,
            "must cost what it declares; it declares .* parameters and has",
        ),
        (
            lambda: Own(uphill),
            VECTOR,
            "must learn; its loss went from",
        ),
        (lambda: nn.Linear(6, 5), VECTOR, "must give shape"),
    ],
)
def test_the_first_failed_check_is_named(make, geometry, reason):
    @blueprint("mine")
    def factory(place):
        return make()

    with pytest.raises(BadInput, match=reason) as caught:
        check_seed("mine", geometry)
    assert "\n" not in str(caught.value)


LIARS = {
    "be zero at birth": lambda m, h: h * m.weight,
    "have live gradients at birth": lambda m, h: h * m.weight * 0.0,
    "keep the outlet's shape": lambda m, h: h[:, :5] * m.weight[:5],
    "stay finite": lambda m, h: h.exp() * m.weight,
    "treat samples independently": lambda m, h: (h + h.mean(0)) * m.weight,
    "cost what it declares": lambda m, h: (h @ h.T @ h) * m.weight,
    "learn": uphill,
}


def test_every_check_has_a_liar():
    assert list(LIARS) == list(SEED_CHECKS)


@pytest.mark.parametrize("words", list(SEED_CHECKS))
def test_each_check_alone_catches_its_liar(words):
    cost = Cost(parameters=6, macs=3)
    honest = SeedTrial(
        lambda _: Own(lambda m, h: h * (m.weight - 1)), VECTOR, cost, False
    )
    assert SEED_CHECKS[words](honest) == ""
    liar = SeedTrial(lambda _: Own(LIARS[words]), VECTOR, cost, False)
    assert SEED_CHECKS[words](liar) != ""


@pytest.mark.parametrize(
    ("parameters", "macs", "reason"),
    [
        (6 * 6 + 6, 36, ""),
        (6 * 6 + 6, 39, ""),
        (6 * 6, 36, "declares 36 parameters and has 42"),
        (6 * 6 + 6, 40, "declares 40 multiply-adds and does 36"),
        (6 * 6 + 6, 32, "declares 32 multiply-adds and does 36"),
        (6 * 6 + 6, 0, "declares 0 multiply-adds"),
    ],
)
def test_declared_costs_are_held_to_ten_per_cent(parameters, macs, reason):
    declared = Cost(parameters=parameters, macs=macs)
    trial = SeedTrial(lambda _: nn.Linear(6, 6), VECTOR, declared, True)
    answer = SEED_CHECKS["cost what it declares"](trial)
    assert reason in answer
    assert bool(answer) is bool(reason)


# In hosts.


@pytest.mark.parametrize("name", {b.form: b.name for b in BLUEPRINTS}.values())
def test_every_built_in_blueprint_passes_all_checks(name):
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
    with pytest.raises(BadInput, match=r"must (be|keep|treat)"):
        check_blueprint("remembers")


def test_half_a_host_is_refused():
    with pytest.raises(BadInput, match="model, slots and example together"):
        check_blueprint("conv", nn.Linear(2, 2))
