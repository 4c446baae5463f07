"""The contract check passes what is right and names what is not."""

from itertools import count

import pytest
import torch
from torch import nn

from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.growth.blueprints import registry
from esper.growth.blueprints.geometry import Layout
from esper.growth.blueprints.kit import CLAUSES, STANDARD, Trial, check_blueprint
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


@pytest.mark.parametrize("name", [b.name for b in BLUEPRINTS])
def test_every_built_in_blueprint_keeps_the_contract(name):
    check_blueprint(name)


def test_standard_places_are_of_every_kind():
    for layout in Layout:
        places = [place for place in STANDARD if place.inlet_layout is layout]
        assert any(place.residual for place in places)
        assert any(place.beside for place in places)
        assert any(place.spans for place in places)
    assert any(place.unit_inputs > 1 for place in STANDARD)


def test_a_users_small_network_keeps_the_contract_where_it_fits():
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
    check_blueprint("mine")
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(BadInput, match="fits none of 1 places: is for vectors"):
        check_blueprint("mine", IMAGE)


def stuck(m, h):
    return h * (m.weight - m.weight.detach())


def uphill(m, h):
    """Zero at birth; follows its gradient the wrong way."""
    return h * (2 * m.weight.detach() - m.weight - 1)


sizes = count(1)


@pytest.mark.parametrize(
    ("make", "geometry", "said"),
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
def test_the_first_broken_clause_is_named(make, geometry, said):
    @blueprint("mine")
    def factory(place):
        return make()

    with pytest.raises(BadInput, match=said) as caught:
        check_blueprint("mine", geometry)
    assert "\n" not in str(caught.value)


LIARS = {
    "be zero at birth": lambda m, h: h * m.weight,
    "have live gradients at birth": lambda m, h: h * m.weight * 0.0,
    "keep the outlet's shape": lambda m, h: h[:, :5] * m.weight[:5],
    "stay finite": lambda m, h: h.exp() * m.weight,
    "mind its own sample": lambda m, h: (h + h.mean(0)) * m.weight,
    "cost what it declares": lambda m, h: (h @ h.T @ h) * m.weight,
    "learn": uphill,
}


def test_every_clause_has_a_liar():
    assert list(LIARS) == list(CLAUSES)


@pytest.mark.parametrize("words", list(CLAUSES))
def test_each_clause_alone_catches_its_liar(words):
    cost = Cost(parameters=6, macs=3)
    honest = Trial(lambda _: Own(lambda m, h: h * (m.weight - 1)), VECTOR, cost, False)
    assert CLAUSES[words](honest) == ""
    liar = Trial(lambda _: Own(LIARS[words]), VECTOR, cost, False)
    assert CLAUSES[words](liar) != ""


@pytest.mark.parametrize(
    ("parameters", "macs", "said"),
    [
        (6 * 6 + 6, 36, ""),
        (6 * 6 + 6, 39, ""),
        (6 * 6, 36, "declares 36 parameters and has 42"),
        (6 * 6 + 6, 40, "declares 40 multiply-adds and does 36"),
        (6 * 6 + 6, 32, "declares 32 multiply-adds and does 36"),
        (6 * 6 + 6, 0, "declares 0 multiply-adds"),
    ],
)
def test_declared_costs_are_held_to_ten_per_cent(parameters, macs, said):
    declared = Cost(parameters=parameters, macs=macs)
    trial = Trial(lambda _: nn.Linear(6, 6), VECTOR, declared, True)
    answer = CLAUSES["cost what it declares"](trial)
    assert said in answer
    assert bool(answer) is bool(said)
