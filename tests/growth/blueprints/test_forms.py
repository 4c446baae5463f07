"""The forms against a loop reference, and where they fit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from esper.contracts.blueprints import Form
from esper.growth.blueprints.forms import FORMS, Layer
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from tests.growth.blueprints.places import (
    FORM_PLANTINGS,
    PLANTINGS,
    STANDARD,
    awake,
    interlayer,
    middle_of_one_sample,
    residual,
)
from tests.references.forms import form_of_one_sample

SMALL = list(FORM_PLANTINGS.values())
SMALL_NAMES = [f"{b.name}-{STANDARD.index(g)}" for b, g in SMALL]
each_form = pytest.mark.parametrize(("blueprint", "geometry"), SMALL, ids=SMALL_NAMES)
SEQUENCES = [(b, g) for b, g in SMALL if g.inlet_layout is Layout.SEQUENCE]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_every_layout_is_served_by_what_its_forms_need():
    served = {
        layout: {b.form for b, g in PLANTINGS if g.inlet_layout is layout}
        for layout in Layout
    }
    without_positions = {Form.DEPTHWISE, Form.CONV, Form.ATTENTION}
    everything = set(Form) - {Form.CUSTOM}
    assert served[Layout.VECTOR] == everything - without_positions
    for layout in (Layout.SEQUENCE, Layout.SIGNAL, Layout.IMAGE):
        assert served[layout] == everything
    # Positions along several axes before the channels are not mixed.
    mixing = {*without_positions, Form.SQUEEZE_EXCITE, Form.BOTTLENECK}
    assert served[Layout.GRID] == everything - mixing


@each_form
def test_a_form_is_what_its_definition_says(blueprint, geometry):
    params = awake(blueprint.form, blueprint.size, geometry)
    h = double(2, *geometry.inlet_shape)
    apply = FORMS[blueprint.form].apply
    ours = apply(params, h, geometry, blueprint.size, interlayer(geometry))
    plain = {name: value.numpy() for name, value in params.items()}
    one = middle_of_one_sample(geometry)
    theirs = [
        form_of_one_sample(blueprint.form, plain, sample, geometry, one)
        for sample in h.numpy()
    ]
    assert ours.shape == (2, *geometry.outlet_shape)
    torch.testing.assert_close(
        ours, torch.from_numpy(np.array(theirs)), rtol=1e-10, atol=1e-10
    )


@each_form
def test_first_weights_come_from_the_generator_alone(blueprint, geometry):
    def born(rng_seed):
        generator = torch.Generator().manual_seed(rng_seed)
        return FORMS[blueprint.form].init(geometry, blueprint.size, generator)

    before = torch.get_rng_state()
    one, again, other = born(1), born(1), born(2)
    assert torch.equal(before, torch.get_rng_state())
    for name, value in one.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) is name.startswith("last")


@pytest.mark.parametrize(
    ("host", "kernel", "inputs"),
    [
        (nn.Linear(7, 4000), None, 7),
        (nn.Conv1d(3, 4000, 5), Kernel.same(5, 1), 3),
        (nn.Conv2d(3, 4000, 3), Kernel.same(3, 2), 3),
    ],
)
def test_new_units_are_born_as_torch_begins_the_hosts_own_layer(host, kernel, inputs):
    layer = Layer(inputs=inputs, outputs=4000, kernel=kernel)
    born = layer.init("first", torch.Generator().manual_seed(0))
    for ours, theirs in zip(born.values(), (host.weight, host.bias), strict=True):
        # The standard deviation of 4,000 uniform numbers is known to about 1 %.
        torch.testing.assert_close(ours.std(), theirs.std(), rtol=0.05, atol=0.0)
        most = theirs.abs().max()
        torch.testing.assert_close(ours.abs().max(), most, rtol=0.01, atol=0.0)


@pytest.mark.parametrize(
    ("blueprint", "geometry"), SEQUENCES, ids=[b.name for b, _ in SEQUENCES]
)
def test_on_a_sequence_nothing_looks_ahead(blueprint, geometry):
    params = awake(blueprint.form, blueprint.size, geometry)
    apply, between = FORMS[blueprint.form].apply, interlayer(geometry)
    h = double(2, *geometry.inlet_shape)
    for cut in range(1, geometry.inlet_shape[0]):
        changed = torch.cat([h[:, :cut], double(2, *geometry.inlet_shape)[:, cut:]], 1)
        was = apply(params, h, geometry, blueprint.size, between)
        now = apply(params, changed, geometry, blueprint.size, between)
        assert torch.equal(was[:, :cut], now[:, :cut])
        assert not torch.equal(was[:, cut:], now[:, cut:])


SPAN = STANDARD[2]
VECTOR = replace(residual(Layout.VECTOR, 4), residual=False)
SIGNAL = replace(residual(Layout.SIGNAL, 4, 6), residual=False)
STRIDED = {"beside": True, "outlet_kernel": Kernel((3,), (2,), (1,), (1,))}


@pytest.mark.parametrize(
    ("form", "size", "geometry", "reason"),
    [
        (Form.SCALE_SHIFT, 1, SPAN, "outlet shaped like the inlet"),
        (Form.SQUEEZE_EXCITE, 4, SPAN, "outlet shaped like the inlet"),
        (Form.DEPTHWISE, 3, residual(Layout.VECTOR, 8), "the outlet is a vector"),
        (Form.CONV, 3, residual(Layout.VECTOR, 8), "the outlet is a vector"),
        (Form.CONV, 3, STANDARD[7], "outlet shaped like the inlet"),
        (Form.CONV, 4, residual(Layout.SIGNAL, 8, 9), "odd kernel"),
        (Form.ATTENTION, 2, residual(Layout.VECTOR, 8), "the outlet is a vector"),
        (Form.ATTENTION, 2, residual(Layout.IMAGE, 7, 4, 4), "width that 2 heads"),
        (Form.ATTENTION, 2, residual(Layout.IMAGE, 8, 33, 32), "at most 1024"),
        (Form.WIDEN, 8, residual(Layout.VECTOR, 8), "two layers"),
        (Form.RESIDUAL_MLP, 8, STANDARD[7], "differ only in channels"),
        (Form.BOTTLENECK, 8, STANDARD[12], "differ only in channels"),
        (Form.LOW_RANK, 4, STANDARD[12], "differ only in channels"),
        (Form.WIDEN, 8, replace(VECTOR, why_no_span="a softmax"), "a softmax"),
        (Form.WIDEN, 8, replace(SIGNAL, spans=True), "over channels at its inlet"),
        (Form.LOW_RANK, 4, replace(SIGNAL, **STRIDED), "positions (3,)"),
    ],
)
def test_a_form_says_why_it_does_not_fit(form, size, geometry, reason):
    assert reason in FORMS[form].fits(geometry, size)


@st.composite
def convolutions(draw):
    """Outputs and numbers of a convolution, and a shape it can walk over."""
    axes = draw(st.integers(1, 2))
    numbers = [
        tuple(draw(st.integers(low, high)) for _ in range(axes))
        for low, high in ((1, 4), (1, 3), (0, 2), (1, 2))
    ]
    spots = tuple(draw(st.integers(7, 9)) for _ in range(axes))
    inputs, outputs = draw(st.integers(2, 3)), draw(st.integers(2, 3))
    return outputs, numbers, (inputs, *spots)


@given(convolutions())
def test_an_adapter_of_a_convolution_is_a_convolution_of_low_rank(case):
    outputs, numbers, shape = case
    kernel = Kernel(*numbers)
    kind = nn.Conv1d if len(shape) == 2 else nn.Conv2d
    layer = kind(shape[0], outputs, *numbers).double()
    h = double(2, *shape)
    out = layer(h)
    layout = Layout.SIGNAL if len(shape) == 2 else Layout.IMAGE
    geometry = Geometry(
        inlet_layout=layout,
        outlet_layout=layout,
        inlet_shape=shape,
        outlet_shape=tuple(out.shape[1:]),
        residual=False,
        beside=True,
        inlet_kernel=kernel,
        outlet_kernel=kernel,
    )
    spec = FORMS[Form.LOW_RANK]
    assert spec.fits(geometry, 2) == ""
    params = awake(Form.LOW_RANK, 2, geometry)
    grown = out + spec.apply(params, h, geometry, 2, nn.Identity())
    product = torch.einsum(
        "or,ri...->oi...", params["last"].flatten(1), params["first"]
    )
    with torch.no_grad():
        layer.weight += product
    torch.testing.assert_close(grown, layer(h), rtol=1e-9, atol=1e-9)
