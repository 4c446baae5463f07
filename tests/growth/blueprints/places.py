"""Every blueprint at every standard place that it fits, with weights that woke up."""

import numpy as np
import torch

from esper.contracts.blueprints import BLUEPRINTS, Form
from esper.growth.blueprint_checks import STANDARD
from esper.growth.blueprints.forms import FORMS
from esper.growth.blueprints.geometry import Geometry, Layout
from tests.references.forms import gelu

PLANTINGS = [
    (blueprint, geometry)
    for blueprint in BLUEPRINTS
    for geometry in STANDARD
    if not FORMS[blueprint.form].fits(geometry, blueprint.size)
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
    return Geometry(
        inlet_layout=layout,
        outlet_layout=layout,
        inlet_shape=shape,
        outlet_shape=shape,
        residual=True,
    )


def awake(form: Form, size: int, geometry: Geometry, *lead: int):
    """Random parameters in float64, the last layer's too; `lead` is an env axis."""
    shapes = FORMS[form].shapes(geometry, size)
    return {
        name: 0.5 * torch.randn(*lead, *shape, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def middle(geometry: Geometry):
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
