r"""Folding seeds into the host's own layers, alpha included.

    WIDEN         W1 <- [W1; A],  W2 <- [W2, alpha B], and norms between get units
    LOW_RANK      W <- W + alpha B A beside a layer, W <- (I + alpha B A) W after it
    SCALE_SHIFT   the same with B A = diag(a), and b <- b + alpha shift

`plan` says which seeds fold. A layer's own output comes before everything added to it,
so a seed folds only if no branch is left that would read or scale it otherwise.
Weights are computed in float64. Every fold works on the rows and columns that the seed
knows of, so that layers may have been widened before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor, nn

from esper.contracts.blueprints import Form
from esper.growth.blueprints.geometry import Geometry
from esper.growth.blueprints.seed import FormSeed
from esper.growth.hooks import ADD, Branch
from esper.growth.slots import InsertionPoint, is_layer
from esper.growth.tracing import NORMS

RESIZED: Final = {
    nn.Linear: ("out_features", "in_features"),
    nn.Conv1d: ("out_channels", "in_channels"),
    nn.Conv2d: ("out_channels", "in_channels"),
}
"""Where a layer writes down its sizes."""


@dataclass(frozen=True, slots=True)
class ActiveSeed:
    """A seed that changes the host's output, as an export takes it."""

    slot: int
    name: str
    """Of the slot."""
    place: InsertionPoint
    branch: Branch

    @property
    def seed(self) -> nn.Module:
        """The module."""
        return self.branch.seed


def plan(
    active: Sequence[ActiveSeed],
    names: Mapping[nn.Module, str],
    refused: Mapping[str, str],
) -> dict[int, str]:
    """Why each slot's seed stays a branch; empty if it folds.

    Args:
        active: Seeds in the order in which they are applied, place by place.
        names: The host's modules.
        refused: Places that must not be folded, and why.
    """
    # By outlet, the first branch that is left there, that reads it, that scales it.
    left: dict[str, dict[str, str]] = {}
    reasons: dict[int, str] = {}
    for site, group in groupby(active, key=lambda one: one.place.site):
        seeds, at = [*group], left.setdefault(site.outlet, {})
        own = {s.slot: refused.get(site.name) or why_not(s, names) for s in seeds}
        shared = ""
        if site.residual and at:
            shared = f"it reads what branch {at['adds']} adds"
        elif site.residual and any(own.values()):
            reader = next(seed.name for seed in seeds if own[seed.slot])
            shared = f"branch {reader} reads the same tensor"
        for seed in seeds:
            why = own[seed.slot] or shared
            if not why and "reads" in at and not site.residual:
                why = f"branch {at['reads']} reads the tensor before it"
            if not why and "scales" in at:
                why = f"branch {at['scales']} scales the tensor before it"
            reasons[seed.slot] = why
            if why:
                at.setdefault("adds", seed.name)
            if why and site.residual:
                at.setdefault("reads", seed.name)
            if why and seed.branch.style != ADD:
                at.setdefault("scales", seed.name)
    return reasons


def why_not(one: ActiveSeed, names: Mapping[nn.Module, str]) -> str:
    """Why a seed's own kind or place keeps it from folding; empty if nothing does."""
    seed, place = one.seed, one.place
    if one.branch.style != ADD:
        return "it scales its outlet"
    if not isinstance(seed, FormSeed):
        return "it is a module of its own"
    form, at = seed.blueprint.form, place.geometry
    if form is Form.WIDEN:
        return _why_no_units(place.middle, seed, names)
    if form not in (Form.LOW_RANK, Form.SCALE_SHIFT):
        return f"{seed.blueprint.name} is not linear, or looks at neighbours"
    if at.residual:
        layer = is_layer(place.outlet) and "weight" in place.outlet._parameters
        norm = form is Form.SCALE_SHIFT and _scales_channels(place.outlet, at)
        return "" if layer or norm else "no layer there can take it up"
    if at.beside and (form is Form.LOW_RANK or isinstance(place.outlet, nn.Linear)):
        return ""
    return "it goes around more than one linear layer"


def merge_into(
    host: nn.Module, names: Mapping[nn.Module, str], active: Sequence[ActiveSeed]
) -> None:
    """Fold seeds into a copy of their host, in the order in which they are applied."""
    for site, group in groupby(active, key=lambda one: one.place.site):
        outlet = host.get_submodule(site.outlet)
        # Residual seeds of one place all read what was there before them.
        before = _read(outlet)
        for one in group:
            seed = one.seed
            assert isinstance(seed, FormSeed)
            params = {key: _exact(value) for key, value in seed.weights.items()}
            if seed.blueprint.form is Form.WIDEN:
                inlet = host.get_submodule(site.inlet)
                _widen(inlet, outlet, params, seed.geometry, one.branch.alpha)
                for norm, own in _pairs(one.place.middle, seed):
                    if isinstance(norm, NORMS):
                        _more_units(host.get_submodule(names[norm]), own)
            else:
                read = before if site.residual else None
                _fold_linear(outlet, params, one.branch.alpha, read)


def _widen(
    inlet: nn.Module,
    outlet: nn.Module,
    params: dict[str, Tensor],
    at: Geometry,
    alpha: float,
) -> None:
    """Units for the first layer, columns for the second; both at the end."""
    first, last = params["first"], alpha * params["last"]
    first = first.T if at.inlet_kernel is None else first  # [unit, input, ...]
    last = last.T if at.outlet_kernel is None else last  # [output, unit, ...]
    weight, bias = _read(inlet)
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    rows = weight.new_zeros(len(first), *weight.shape[1:])
    rows[:, : first.shape[1]] = first
    _put(inlet, "weight", torch.cat([weight, rows]))
    _put(inlet, "bias", torch.cat([bias, params["first_bias"]]))
    weight, _ = _read(outlet)
    columns = weight.new_zeros(len(weight), *last.shape[1:])
    columns[: len(last)] = last
    _put(outlet, "weight", torch.cat([weight, columns], dim=1))
    for layer in (inlet, outlet):
        outputs, inputs = RESIZED[type(layer)]
        sizes = layer.get_parameter("weight").shape
        setattr(layer, outputs, sizes[0])
        setattr(layer, inputs, sizes[1])


def _more_units(norm: nn.Module, own: nn.Module) -> None:
    """Append the seed's own norm to the host's."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        mine, new = getattr(norm, name, None), getattr(own, name, None)
        if mine is not None and new is not None:
            _put(norm, name, torch.cat([_exact(mine), _exact(new)]))
    if isinstance(norm, nn.GroupNorm) and isinstance(own, nn.GroupNorm):
        norm.num_groups += own.num_groups
        norm.num_channels += own.num_channels
    elif isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
        norm.num_features += int(own.num_features)  # type: ignore[arg-type]


def _fold_linear(
    outlet: nn.Module,
    params: dict[str, Tensor],
    alpha: float,
    before: tuple[Tensor, Tensor | None] | None,
) -> None:
    """Add alpha times a linear seed, of the outlet's input or of its output before."""
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
    _put(outlet, "weight", weight)
    if shift is not None:
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        bias[:rows] += alpha * shift
        _put(outlet, "bias", bias)


def _linear_map(params: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """A linear seed as one map `[output, input, ...]` and a shift."""
    last = params["last"]
    if "first" not in params:
        return last.diag(), params["last_bias"]
    first = params["first"]
    if first.dim() == 2:  # matrices keep inputs first
        return (first @ last).T, None
    return torch.einsum("ou,ui...->oi...", last.flatten(1), first), None


def _why_no_units(
    middle: Sequence[nn.Module], seed: FormSeed, names: Mapping[nn.Module, str]
) -> str:
    for norm, own in _pairs(middle, seed):
        if not isinstance(norm, NORMS):
            continue
        if norm not in names:
            return "a norm between the layers is none of the host's modules"
        if isinstance(norm, nn.LayerNorm):
            return "LayerNorm between the layers runs over all units at once"
        if isinstance(norm, nn.GroupNorm) and isinstance(own, nn.GroupNorm):
            size = norm.num_channels // norm.num_groups
            if own.num_channels // own.num_groups != size:
                return f"GroupNorm between the layers needs whole groups of {size}"
    return ""


def _scales_channels(norm: nn.Module, at: Geometry) -> bool:
    """Whether a norm's own weight lies along the channels of the outlet."""
    weight = norm._parameters.get("weight")
    if not isinstance(norm, NORMS) or weight is None:
        return False
    last = isinstance(norm, nn.LayerNorm)
    vector = len(at.outlet_shape) == 1
    along = vector or at.outlet_layout.channels_first is not last
    return along and tuple(weight.shape) == (at.outlet_width,)


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module's tensor other values, and another size if they have one."""
    old = getattr(module, name)
    like = module.get_parameter("weight") if old is None else old
    value = value.to(device=like.device, dtype=like.dtype)
    if old is not None and old.shape == value.shape:
        with torch.no_grad():
            old.copy_(value)
    elif name in module._buffers:
        setattr(module, name, value)
    else:
        setattr(module, name, nn.Parameter(value, requires_grad=like.requires_grad))


def _pairs(
    middle: Sequence[nn.Module], seed: FormSeed
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """What lies between the layers, the host's and the seed's own."""
    return zip(middle, seed.middle.children(), strict=True)


def _read(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias."""
    bias = module._parameters.get("bias")
    weight = _exact(module.get_parameter("weight"))
    return weight, None if bias is None else _exact(bias)


def _exact(tensor: Tensor) -> Tensor:
    """A copy in float64; on the CPU, since not every device has that."""
    return tensor.detach().to(device="cpu", dtype=torch.float64, copy=True)
