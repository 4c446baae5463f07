r"""Fold seeds into the layers of a host: the one place where layers get new weights.

    WIDEN         W1 <- [W1; A],  W2 <- [W2, alpha B], and norms between get units
    LOW_RANK      W <- W + alpha B A around a layer, W <- (I + alpha B A) W after it
    SCALE_SHIFT   the same with B A = diag(a), and b <- b + alpha shift

`why_no_merge` tells which seeds fold. Sums are computed in float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

import torch
from torch import Tensor, nn

from esper.contracts.blueprints import Blueprint, Form
from esper.growth.analysis.host_layers import (
    is_layer,
    kernel_of,
    put_tensor,
    swap_layout,
    units_of,
    write_norm_size,
    write_sizes,
)
from esper.growth.analysis.interlayer import NORMS, every_step
from esper.growth.analysis.slots import InsertionPoint
from esper.growth.blueprints.forms import FormSeed
from esper.growth.blueprints.geometry import Geometry
from esper.growth.hooks import ADD, Branch


@dataclass(frozen=True, slots=True)
class ActiveSeed:
    """A seed that changes the host's output."""

    slot: int
    name: str
    """Name of the slot."""
    place: InsertionPoint
    branch: Branch

    @property
    def seed(self) -> nn.Module:
        """The module."""
        return self.branch.seed


def why_not(one: ActiveSeed) -> str:
    """Why the kind or place of a seed does not allow folding; empty if it does."""
    if one.branch.style != ADD:
        return "it scales its outlet"
    if not isinstance(one.seed, FormSeed):
        return "it is a module of its own"
    return why_no_merge(one.place, one.seed.blueprint)


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


def linked_seeds(active: Sequence[ActiveSeed]) -> list[tuple[ActiveSeed, ActiveSeed]]:
    """Pairs of seeds where units of the first feed units of the second."""
    widening = [s for s in active if isinstance(s.seed, FormSeed) and s.seed.widens]
    pairs = product(widening, widening)
    return [(u, d) for u, d in pairs if u.place.outlet is d.place.inlet]


def fold(
    host: nn.Module, names: Mapping[nn.Module, str], active: Sequence[ActiveSeed]
) -> None:
    """Fold seeds into their host or a copy of it, in order of application.

    `names` are those of the modules of the host in which the seeds were planted.
    """
    at: dict[int, tuple[int, int]] = {}
    for site, group in groupby(active, key=lambda one: one.place.site):
        outlet = host.get_submodule(site.outlet)
        # Residual seeds of one place all read the tensor before any of them.
        before = _read(outlet) if site.residual else None
        for one in group:
            seed = one.seed
            assert isinstance(seed, FormSeed)
            params = {key: _exact(value) for key, value in seed.weights.items()}
            if seed.widens:
                firsts = one.place.first_layers(host)
                at[one.slot] = _widen(firsts, outlet, params, one.branch.alpha)
                own_steps = every_step(seed.interlayer.children())
                steps = zip(every_step(one.place.interlayer), own_steps, strict=True)
                for norm, own in steps:
                    if isinstance(norm, NORMS):
                        _more_units(host.get_submodule(names[norm]), own)
            else:
                _fold_linear(outlet, params, one.branch.alpha, before)
    for above, below in linked_seeds(active):
        assert isinstance(above.seed, FormSeed)
        assert isinstance(below.seed, FormSeed)
        layer = host.get_submodule(below.place.site.inlet)
        block = _exact(below.seed.block(below.slot, above.slot, above.seed))
        block = _outputs_first(layer, above.branch.alpha * block)
        weight, (row, column) = _read(layer)[0], (at[below.slot][0], at[above.slot][1])
        weight[row : row + len(block), column : column + block.shape[1]] = block
        _write(layer, "weight", weight)


def _widen(
    firsts: Mapping[str, nn.Module],
    outlet: nn.Module,
    params: dict[str, Tensor],
    alpha: float,
) -> tuple[int, int]:
    """Append units to the first layer and its gate, and columns to the second.

    Returns the first new row and the first new column.
    """
    row = 0
    for name, inlet in firsts.items():
        first = _outputs_first(inlet, params[name])
        weight, bias = _read(inlet)
        row = len(weight)
        rows = weight.new_zeros(len(first), *weight.shape[1:])
        rows[:, : first.shape[1]] = first
        _write(inlet, "weight", torch.cat([weight, rows]))
        if bias is not None:
            _write(inlet, "bias", torch.cat([bias, params[f"{name}_bias"]]))
    last = _outputs_first(outlet, alpha * params["last"])
    weight, _ = _read(outlet)
    columns = weight.new_zeros(len(weight), *last.shape[1:])
    columns[: len(last)] = last
    _write(outlet, "weight", torch.cat([weight, columns], dim=1))
    for layer in (*firsts.values(), outlet):
        write_sizes(layer)
    return row, weight.shape[1]


def _outputs_first(layer: nn.Module, weight: Tensor) -> Tensor:
    """A seed's weight as `[output, input, ...]`; its matrices keep inputs first."""
    return weight.T if kernel_of(layer) is None else weight


def _more_units(norm: nn.Module, own: nn.Module) -> None:
    """Append the seed's own norm to the host's."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        mine, new = getattr(norm, name, None), getattr(own, name, None)
        if mine is not None and new is not None:
            _write(norm, name, torch.cat([_exact(mine), _exact(new)]))
    write_norm_size(norm, more=own)


def _fold_linear(
    outlet: nn.Module,
    params: dict[str, Tensor],
    alpha: float,
    before: tuple[Tensor, Tensor | None] | None,
) -> None:
    """Add a linear seed times alpha; it reads the input, or the output `before`."""
    weight, bias = _read(outlet)
    matrix, shift = _linear_map(params)
    rows, columns = matrix.shape[:2]
    if before is None:
        weight[:rows, :columns] += alpha * matrix
    else:
        old_weight, old_bias = before
        matrix = matrix.flatten(1)
        weight[:rows] += alpha * torch.tensordot(matrix, old_weight[:columns], 1)
        if old_bias is not None:
            moved = matrix @ old_bias[:columns]
            shift = moved if shift is None else moved + shift
    _write(outlet, "weight", weight)
    if shift is not None:
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        bias[:rows] += alpha * shift
        _write(outlet, "bias", bias)


def _linear_map(params: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Weight `[output, input, ...]` and shift of a linear seed."""
    last = params["last"]
    if "first" not in params:
        return last.diag(), params["last_bias"]
    first = params["first"]
    if first.dim() == 2:  # matrices keep inputs first
        return (first @ last).T, None
    return torch.einsum("ou,ui...->oi...", last.flatten(1), first), None


def _write(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a tensor of a module, which may change its size."""
    put_tensor(module, name, swap_layout(module, value) if name == "weight" else value)


def _read(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in float64."""
    bias = module._parameters.get("bias")
    weight = swap_layout(module, _exact(module.get_parameter("weight")))
    return weight, None if bias is None else _exact(bias)


def _exact(tensor: Tensor) -> Tensor:
    """Copy in float64 on the CPU: not every device has float64."""
    return tensor.detach().to(device="cpu", dtype=torch.float64, copy=True)
