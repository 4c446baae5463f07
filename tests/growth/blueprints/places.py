"""Every blueprint at every standard geometry that it fits, with random weights."""

import numpy as np
import torch
from torch import nn

from esper.contracts.blueprints import BLUEPRINTS, Form
from esper.growth.blueprints.forms import FORMS
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from tests.references.forms import gelu


def place(layout, inlet, outlet=None, *, hidden=(), kernels=(None, None), **more):
    """Residual without an outlet, a span with a hidden shape, else a parallel slot."""
    return Geometry(
        **{
            "inlet_layout": layout,
            "outlet_layout": layout,
            "inlet_shape": inlet,
            "outlet_shape": outlet or inlet,
            "residual": outlet is None,
            "inlet_kernel": kernels[0],
            "outlet_kernel": kernels[1],
            "beside": outlet is not None and not hidden,
            "spans": bool(hidden),
            "hidden_shape": hidden,
            **more,
        }
    )


VECTOR, SEQUENCE, SIGNAL, IMAGE, GRID = Layout
LINE, SQUARE = Kernel.same(3, 1), Kernel.same(3, 2)
LINE_BY_TWO = Kernel((3,), (2,), (1,), (1,))
SQUARE_BY_TWO = Kernel((3, 3), (2, 2), (1, 1), (1, 1))
FLATTENED = {"outlet_layout": VECTOR, "unit_inputs": 9}
STANDARD = (
    place(VECTOR, (12,)),
    place(VECTOR, (12,), (7,)),
    place(VECTOR, (12,), (7,), hidden=(20,)),
    place(SEQUENCE, (6, 12)),
    place(SEQUENCE, (6, 12), (6, 7)),
    place(SEQUENCE, (6, 12), (6, 12), hidden=(6, 20)),
    place(SIGNAL, (8, 10)),
    place(SIGNAL, (4, 10), (6, 5), kernels=(LINE_BY_TWO, LINE_BY_TWO)),
    place(SIGNAL, (4, 10), (6, 5), kernels=(LINE, LINE), hidden=(5, 5)),
    place(IMAGE, (8, 6, 6)),
    place(IMAGE, (4, 6, 6), (6, 3, 3), kernels=(SQUARE_BY_TWO, SQUARE_BY_TWO)),
    place(IMAGE, (4, 6, 6), (4, 6, 6), kernels=(SQUARE, SQUARE), hidden=(5, 6, 6)),
    place(IMAGE, (4, 6, 6), (7,), kernels=(SQUARE, None), hidden=(45,), **FLATTENED),
    place(GRID, (2, 3, 12)),
    place(GRID, (2, 3, 12), (2, 3, 7)),
    place(GRID, (2, 3, 12), (2, 3, 7), hidden=(2, 3, 20)),
)
"""One place of every kind: residual, beside a layer and spanning two, by layout."""
PLANTINGS = [
    (blueprint, geometry)
    for blueprint in BLUEPRINTS
    for geometry in STANDARD
    if blueprint.size and not FORMS[blueprint.form].fits(geometry, blueprint.size)
]
NAMES = [
    f"{blueprint.name}-{STANDARD.index(geometry)}-{geometry.outlet_layout.name.lower()}"
    for blueprint, geometry in PLANTINGS
]
FORM_PLANTINGS = {
    (blueprint.form, geometry): (blueprint, geometry)
    for blueprint, geometry in reversed(PLANTINGS)
}
"""The smallest blueprint of every form, where a form at one size is enough."""


def residual(layout: Layout, *shape: int) -> Geometry:
    return place(layout, shape)


def awake(form: Form, size: int, geometry: Geometry):
    """Random parameters in float64, the last layer's too."""
    shapes = FORMS[form].shapes(geometry, size)
    return {
        name: 0.5 * torch.randn(shape, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def interlayer(geometry: Geometry):
    """gelu, then means of as many neighbours as the span's shapes ask for."""

    def pooled(h: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(h)
        if geometry.inlet_kernel is None:
            return h
        lead = h.shape[: h.dim() - len(geometry.inlet_shape) + 1]
        line = h.reshape(*lead, -1)
        if geometry.outlet_kernel is None:
            return line.unflatten(-1, (geometry.unit_inputs, -1)).mean(-1).flatten(-2)
        spots = geometry.hidden_shape[1:]
        count = torch.Size(spots).numel()
        return line.unflatten(-1, (count, -1)).mean(-1).reshape(*lead, *spots)

    return pooled


class SpanMiddle(nn.Module):
    """The same as a module."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.forward = interlayer(geometry)


def middle_of_one_sample(geometry: Geometry):
    """The same for one sample, with numpy."""

    def pooled(h: np.ndarray) -> np.ndarray:
        h = gelu(h)
        if geometry.inlet_kernel is None:
            return h
        if geometry.outlet_kernel is None:
            parts = [np.split(unit.ravel(), geometry.unit_inputs) for unit in h]
            return np.array([part.mean() for unit in parts for part in unit])
        spots = geometry.hidden_shape[1:]
        parts = [np.split(unit.ravel(), np.prod(spots)) for unit in h]
        means = [[part.mean() for part in unit] for unit in parts]
        return np.array(means).reshape(len(h), *spots)

    return pooled
