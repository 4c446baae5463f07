"""Rules for which seeds an export can fold into the host's own layers."""

from torch import nn

from esper.contracts.blueprints import Blueprint, Form
from esper.growth.analysis.host_layers import is_layer, kernel_of, units_of
from esper.growth.analysis.interlayer import NORMS, every_step
from esper.growth.analysis.slots import InsertionPoint
from esper.growth.blueprints.geometry import Geometry


def why_no_merge(place: InsertionPoint, blueprint: Blueprint) -> str:
    """Why a seed of this blueprint stays a branch at a place; empty if it folds."""
    form, at = blueprint.form, place.geometry
    if form is Form.CUSTOM:
        return "it is a module of its own"
    if form is Form.WIDEN:
        return _why_no_units(place, blueprint.units(units_of(place.inlet)))
    if form not in (Form.LOW_RANK, Form.SCALE_SHIFT):
        return f"{blueprint.name} is not linear, or mixes positions"
    if at.residual:
        layer = is_layer(place.outlet) and "weight" in place.outlet._parameters
        norm = form is Form.SCALE_SHIFT and _scales_channels(place.outlet, at)
        return "" if layer or norm else "no layer there can take it up"
    if at.beside and (form is Form.LOW_RANK or kernel_of(place.outlet) is None):
        return ""
    return "it goes around more than one linear layer"


def _why_no_units(place: InsertionPoint, units: int) -> str:
    for norm in every_step(place.interlayer):
        if isinstance(norm, nn.LayerNorm):
            return "LayerNorm between the layers runs over all units at once"
        if isinstance(norm, nn.GroupNorm):
            size = norm.num_channels // norm.num_groups
            if units % size:
                return f"GroupNorm between the layers needs whole groups of {size}"
    return ""


def _scales_channels(norm: nn.Module, at: Geometry) -> bool:
    """Whether the weight of a norm is per channel of the outlet."""
    weight = norm._parameters.get("weight")
    if not isinstance(norm, NORMS) or weight is None:
        return False
    last = isinstance(norm, nn.LayerNorm)
    vector = len(at.outlet_shape) == 1
    along = vector or at.outlet_layout.channels_first is not last
    return along and tuple(weight.shape) == (at.outlet_width,)
