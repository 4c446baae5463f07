"""Seeds as modules: output, cost and where they fit."""

import pytest
import torch
from torch import nn

from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.growth.analysis.tracing import count_macs
from esper.growth.blueprints.forms import FORMS
from esper.growth.blueprints.geometry import Layout
from esper.growth.blueprints.registry import blueprint, build, cost, forget, misfit
from tests.growth.blueprints.places import NAMES, PLANTINGS, SpanMiddle, residual

VECTOR = residual(Layout.VECTOR, 6)
MLP = Blueprint("small", Form.RESIDUAL_MLP, 4, merges=False)


def generator(rng_seed=0):
    return torch.Generator().manual_seed(rng_seed)


@pytest.mark.parametrize(("planted", "geometry"), PLANTINGS, ids=NAMES)
def test_a_seed_is_its_form_with_its_own_weights(planted, geometry):
    seed = build(planted, geometry, generator(), SpanMiddle(geometry)).double()
    for parameter in seed.parameters():
        nn.init.normal_(parameter)
    h = torch.randn(2, *geometry.inlet_shape, dtype=torch.float64)
    weights = dict(seed.weights.items())
    expected = FORMS[planted.form].apply(
        weights, h, geometry, planted.size, SpanMiddle(geometry)
    )
    assert torch.equal(seed(h), expected)
    assert seed(h).dtype == torch.float64
    assert seed(h).count_nonzero()
    declared = cost(planted, geometry)
    assert sum(p.numel() for p in seed.parameters()) == declared.parameters
    counted = count_macs(lambda: seed.eval()(h[:1]))
    assert declared.macs >= max(1, 0.9 * counted)
    if planted.form not in (Form.SCALE_SHIFT, Form.SQUEEZE_EXCITE):  # elementwise
        assert declared.macs <= 1.1 * counted


def test_a_size_of_zero_fits_nowhere():
    none = Blueprint("none", Form.LOW_RANK, 0, merges=True)
    assert "size of at least 1" in misfit(none, VECTOR)


def test_a_rank_above_that_of_any_matrix_there_is_refused():
    """It would cost more than the layer that it stands beside."""
    for rank, fits in ((6, True), (7, False)):
        low = Blueprint("low", Form.LOW_RANK, rank, merges=True)
        assert (misfit(low, VECTOR) == "") is fits
    assert "a rank of at most 6" in misfit(low, VECTOR)


def test_costs_are_those_of_the_definition():
    """By hand: 6 x 4 + 4 + 4 x 6 + 6 weights; 6 x 4 + 4 x 6 products."""
    assert (cost(MLP, VECTOR).parameters, cost(MLP, VECTOR).macs) == (58, 48)
    image = residual(Layout.IMAGE, 8, 5, 5)
    by_name = {b.name: cost(b, image).macs for b in BLUEPRINTS if not misfit(b, image)}
    assert by_name["scale_shift"] == 8 * 25
    assert by_name["squeeze_excite"] == 8 * 2 + 2 * 8 + 8 * 25
    assert by_name["depthwise"] == 8 * 9 * 25
    assert by_name["conv"] == 8 * 8 * 9 * 25
    assert by_name["attention"] == 25 * 8 * 24 + 2 * 25 * 25 * 8 + 25 * 8 * 8


def test_a_users_module_is_weighed_by_building_it():
    @blueprint("weighed")
    def factory(geometry):
        return nn.Linear(geometry.inlet_width, geometry.outlet_width)

    try:
        own = Blueprint("weighed", Form.CUSTOM, 0, merges=False)
        assert cost(own, VECTOR).parameters == 6 * 6 + 6 + 6  # and the gate
        assert cost(own, VECTOR).macs == 48  # more than its 36 products
        assert cost(own, residual(Layout.SEQUENCE, 9, 6)).macs == 9 * 36
    finally:
        forget("weighed")
