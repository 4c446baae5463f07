import numpy as np
import pytest
import torch

from esper.contracts.blueprints import Blueprint, Form
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from esper.growth.blueprints.layers import convolve
from esper.growth.hooks import Sample
from esper.growth.promise import (
    RIDGE,
    directions,
    gains,
    promises,
    statistics,
    top_singular,
    view,
)
from tests.references.promise import promise as slow_promise

LINE = Kernel((3,), (2,), (1,), (1,))
WIDE = Kernel((3,), (1,), (2,), (2,))
TALL = Kernel((3, 2), (2, 1), (1, 0), (1, 1))
SQUARE = Kernel.same(3, 2)


def promise(samples, geometry, blueprint, loss):
    return promises(samples, geometry, (blueprint,), loss)[0]


def low_rank(size):
    return Blueprint(f"low_rank_{size}", Form.LOW_RANK, size, merges=True)


def widen(size):
    return Blueprint(f"widen_{size}", Form.WIDEN, size, merges=True)


def mlp(size):
    return Blueprint(f"mlp_{size}", Form.RESIDUAL_MLP, size, merges=False)


def place(layout, inlet, outlet=None, kernels=(None, None), hidden=(), **more):
    return Geometry(
        inlet_layout=layout,
        outlet_layout=more.pop("outlet_layout", layout),
        inlet_shape=inlet,
        outlet_shape=outlet or inlet,
        residual=outlet is None,
        inlet_kernel=kernels[0],
        outlet_kernel=kernels[1],
        beside=outlet is not None and not hidden,
        spans=bool(hidden),
        hidden_shape=hidden,
        **more,
    )


def vector(inputs=12, outputs=8):
    return place(Layout.VECTOR, (inputs,), (outputs,))


def passed(geometry, examples=96, seed=0, batch=None):
    """Noise at a place, with gradients that partly follow what was given."""
    chance = torch.Generator().manual_seed(seed)
    given, answer, gradient = (
        torch.randn(examples, *shape, generator=chance)
        for shape in (geometry.inlet_shape, *(geometry.outlet_shape,) * 2)
    )
    if geometry.inlet_positions == geometry.outlet_positions:
        least = min(geometry.inlet_width, geometry.outlet_width)
        axis = 1 if geometry.outlet_layout.channels_first else -1
        gradient.narrow(axis, 0, least).sub_(given.narrow(axis, 0, least))
    elif geometry.spans and geometry.outlet_kernel is not None:
        reason, widths = given, (geometry.inlet_width, 2, geometry.outlet_width)
        for at, kernel in enumerate((geometry.inlet_kernel, geometry.outlet_kernel)):
            shape = (widths[at + 1], widths[at], *kernel.size)
            weight = torch.randn(shape, generator=chance)
            reason = convolve(reason, weight, None, kernel)
        if reason.shape == gradient.shape:
            gradient -= reason
    rows = batch or examples
    return Sample(given, 3.0 * answer, rows, gradient / rows)


def planted(rank, noise, examples=400, inputs=12, outputs=8, seed=0):
    """A vector place whose desired change is a map of a rank, in noise."""
    chance = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=chance)

    given = normal(examples, inputs)
    left, _ = torch.linalg.qr(normal(inputs, rank))
    right, _ = torch.linalg.qr(normal(outputs, rank))
    wish = given @ left @ right.T + noise * normal(examples, outputs)
    answer = normal(examples, outputs)
    return Sample(given, answer, examples, -wish / examples)


KINDS = {
    "vector": (vector(), low_rank(3), (None, None), False),
    "vector with bias": (vector(), mlp(3), (None, None), True),
    "sequence": (place(Layout.SEQUENCE, (5, 6), (5, 4)), mlp(2), (None, None), True),
    "signal": (place(Layout.SIGNAL, (6, 5)), mlp(2), (None, None), True),
    "image": (place(Layout.IMAGE, (4, 3, 2)), low_rank(2), (None, None), False),
    "linear span": (
        place(Layout.VECTOR, (6,), (5,), hidden=(9,)),
        widen(3),
        (None, None),
        True,
    ),
    "beside conv1d": (
        place(Layout.SIGNAL, (3, 9), (4, 5), (LINE, LINE)),
        low_rank(3),
        (LINE, None),
        False,
    ),
    "beside conv2d": (
        place(Layout.IMAGE, (2, 5, 4), (3, 3, 3), (TALL, TALL)),
        low_rank(2),
        (TALL, None),
        False,
    ),
    "conv1d span": (
        place(Layout.SIGNAL, (3, 8), (4, 4), (WIDE, LINE), hidden=(5, 8)),
        widen(3),
        (WIDE, LINE),
        True,
    ),
    "conv2d span": (
        place(Layout.IMAGE, (2, 5, 4), (3, 3, 3), (SQUARE, TALL), hidden=(5, 5, 4)),
        widen(3),
        (SQUARE, TALL),
        True,
    ),
}


def as_numpy(tensor, layout):
    array = tensor.double().numpy()
    return array if layout.channels_first else np.moveaxis(array, -1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_promise_is_what_the_slow_twin_says(kind):
    geometry, blueprint, kernels, bias = KINDS[kind]
    sample = passed(geometry, examples=70, batch=100)
    spelled = [
        None if k is None else (k.size, k.stride, k.padding, k.dilation)
        for k in kernels
    ]
    expected = slow_promise(
        *(
            as_numpy(t, geometry.outlet_layout)
            for t in (sample.inputs, sample.outputs, sample.gradient)
        ),
        rows=100,
        loss=1000.0,
        size=blueprint.size,
        kernels=spelled,
        bias=bias,
        ridge=RIDGE,
    )
    found = promise([sample], geometry, blueprint, loss=1000.0)
    assert 0.0 < expected < 1.0
    assert found == pytest.approx(expected, rel=1e-9)


def test_scales_of_features_outlet_and_loss_do_not_matter():
    sample, geometry = planted(3, noise=1.0), vector()
    kinds = [low_rank(2), mlp(4)]
    plain = promises([sample], geometry, kinds, loss=50.0)
    assert all(0.0 < part < 1.0 for part in plain)
    louder = Sample(10 * sample.inputs, sample.outputs, 400, 7 * sample.gradient)
    assert promises([louder], geometry, kinds, loss=350.0) == pytest.approx(plain)
    wider = Sample(sample.inputs, 10 * sample.outputs, 400, sample.gradient / 10)
    assert promises([wider], geometry, kinds, loss=50.0) == pytest.approx(plain)


def test_noise_promises_next_to_nothing():
    kinds = [low_rank(1), low_rank(4), low_rank(16)]
    geometry = vector(64, 32)
    for seed in range(4):
        noise = planted(3, 1.0, 512, 64, 32, seed)
        chance = torch.Generator().manual_seed(seed)
        noise.gradient = noise.gradient[torch.randperm(512, generator=chance)]
        signal = planted(3, 1.0, 512, 64, 32, seed)
        nothing = promises([noise], geometry, kinds, loss=20.0)
        something = promises([signal], geometry, kinds, loss=20.0)
        assert max(nothing) < 0.05
        assert min(something) > 5 * max(nothing)


def test_promises_grow_up_to_the_rank_that_is_planted():
    kinds = [low_rank(size) for size in (1, 2, 3, 4, 8)]
    one, two, three, four, eight = promises(
        [planted(3, noise=0.3)], vector(), kinds, loss=50.0
    )
    assert one < 0.9 * two < 0.9 * three
    assert three == pytest.approx(four, rel=0.02)
    assert three == pytest.approx(eight, rel=0.02)
    assert four >= three
    assert eight >= four


def test_more_features_than_rows_change_nothing_but_the_way():
    sample, geometry = planted(2, 0.3, 80, 60, 20), vector(60, 20)
    seen = view(geometry, Form.LOW_RANK)
    few = statistics([sample], geometry, seen).half(0)
    assert few.features.shape[0] < few.features.shape[1]
    best = directions(few, 3)
    h, g = few.features, few.wishes
    ridge = RIDGE * h.square().mean() * torch.eye(60, dtype=torch.float64)
    full = torch.linalg.solve(h.T @ h / len(h) + ridge, h.T @ g / len(h))
    all_of_it = directions(few, 20)
    rebuilt = all_of_it.incoming * all_of_it.sizes @ all_of_it.outgoing.T
    torch.testing.assert_close(rebuilt, full, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(best.sizes, all_of_it.sizes[:3], rtol=1e-9, atol=0.0)


def test_the_search_in_large_matrices_finds_what_the_full_decomposition_does():
    chance = torch.Generator().manual_seed(1)
    matrix = torch.randn(300, 5, generator=chance, dtype=torch.float64)
    matrix = matrix @ torch.randn(5, 280, generator=chance, dtype=torch.float64)
    matrix += 0.1 * torch.randn(300, 280, generator=chance, dtype=torch.float64)
    left, sizes, right = top_singular(matrix, 4)
    _, expected, _ = torch.linalg.svd(matrix)
    torch.testing.assert_close(sizes, expected[:4], rtol=1e-9, atol=0.0)
    torch.testing.assert_close(matrix @ right, left * sizes, rtol=1e-7, atol=1e-6)
    eye = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(left.T @ left, eye, rtol=0.0, atol=1e-9)


def test_pooling_or_flattening_between_makes_a_promise_unknown():
    pooled = place(
        Layout.SIGNAL, (3, 8), (4, 2), (Kernel.same(3, 1), LINE), hidden=(5, 4)
    )
    assert promise([passed(pooled)], pooled, widen(4), loss=1.0) is None
    flattened = place(
        Layout.SIGNAL,
        (3, 8),
        (4,),
        (Kernel.same(3, 1), None),
        hidden=(40,),
        outlet_layout=Layout.VECTOR,
        unit_inputs=8,
    )
    assert promise([passed(flattened)], flattened, widen(4), loss=1.0) is None


def test_a_promise_needs_thirty_two_rows_to_be_judged_by():
    geometry, sample = vector(), planted(3, noise=0.1)
    for rows, known in ((63, False), (64, True)):
        few = Sample(
            sample.inputs[:rows], sample.outputs[:rows], 400, sample.gradient[:rows]
        )
        assert (promise([few], geometry, mlp(4), 50.0) is not None) is known


def test_gains_of_sizes_beyond_the_rank_are_those_of_the_rank():
    seen = view(vector(), Form.LOW_RANK)
    known = statistics([planted(3, 0.3)], vector(), seen)
    at_rank, beyond = gains(known, [8, 100]).tolist()
    assert at_rank == beyond > 0.0


@pytest.mark.parametrize(
    ("spoilt", "value", "blueprint", "loss", "wanted"),
    [
        ("gradient", 0.0, mlp(4), 1.0, 0.0),
        ("outputs", 0.0, mlp(4), 1.0, None),  # no relative change
        ("inputs", 0.0, low_rank(4), 1.0, 0.0),
        ("inputs", torch.nan, mlp(4), 1.0, None),
        ("outputs", torch.inf, mlp(4), 1.0, None),
        ("gradient", torch.nan, mlp(4), 1.0, None),
        ("", 0.0, mlp(4), 0.0, None),
        ("", 0.0, mlp(4), float("nan"), None),
        ("", 0.0, mlp(4), 1e-6, 1.0),  # a promise is at most all of the loss
        ("", 0.0, widen(4), 1.0, None),  # does not fit
        ("", 0.0, Blueprint("scale", Form.SCALE_SHIFT, 1, merges=True), 1.0, None),
    ],
)
def test_degenerate_samples_losses_and_forms(spoilt, value, blueprint, loss, wanted):
    sample = planted(3, 1.0)
    if spoilt:
        getattr(sample, spoilt).fill_(value)
    assert promise([sample], vector(), blueprint, loss) == wanted


def test_samples_without_gradient_or_of_other_lengths_are_left_out():
    sample = planted(3, noise=1.0)
    ahead = Sample(100 * sample.inputs, 100 * sample.outputs, 400)
    assert promise([ahead], vector(), mlp(4), 50.0) is None
    alone = promise([sample], vector(), mlp(4), 50.0)
    assert promise([sample, ahead], vector(), mlp(4), 50.0) == alone
    geometry = place(Layout.SEQUENCE, (5, 6))
    latest, longer = passed(geometry), passed(place(Layout.SEQUENCE, (7, 6)))
    alone = promise([latest], geometry, mlp(2), 50.0)
    assert promise([longer, latest], geometry, mlp(2), 50.0) == alone
