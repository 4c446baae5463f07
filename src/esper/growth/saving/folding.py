r"""Fold seeds into the layers of a host: the one place where layers get new weights.

    WIDEN         W1 <- [W1; A],  W2 <- [W2, alpha B], and steps between get units:
                  per-unit weights w <- [w; v], layers of a squeeze W <- diag(W, V)
    LOW_RANK      W <- W + alpha B A around a layer, W <- (I + alpha B A) W after it
    SCALE_SHIFT   the same with B A = diag(a), and b <- b + alpha shift

`why_no_merge` tells which seeds fold. Sums are computed in float64. The same code folds
values, gradients and the moments of an optimiser (`Reading`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import inf, nan
from typing import Final

import torch
from torch import Tensor, nn

from esper.contracts.blueprints import Blueprint, Form
from esper.growth.analysis.host_layers import (
    COUPLING,
    NORMS,
    is_layer,
    kernel_of,
    own_tensors,
    put_tensor,
    swap_layout,
    unit_size,
    units_of,
    why_no_layer,
    write_any_size,
)
from esper.growth.analysis.interlayer import UnitParameter, every_step
from esper.growth.analysis.slots import InsertionPoint
from esper.growth.blueprints.forms import FormSeed
from esper.growth.blueprints.geometry import Geometry
from esper.growth.hooks import ADD, Branch

TOLERANCE: Final = 1e-3
"""Largest error of a fold, relative to the largest output; 1e-6 in float64."""


class FoldError(Exception):
    """Seeds cannot be folded; nothing has changed."""


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

    def steps(self, host: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
        """Steps between the layers that have weights of their own for new units.

        Yields the host's module, the name of its parameter if the step is one, and the
        seed's step.
        """
        if not (isinstance(self.seed, FormSeed) and self.seed.widens):
            return
        own = every_step(self.seed.interlayer.children())
        for step, new in zip(every_step(self.place.interlayer), own, strict=True):
            if isinstance(step, UnitParameter):
                owner, _, name = step.name.rpartition(".")
                yield host.get_submodule(owner), name, new
            elif unit_size(new) or is_layer(new):
                yield step, "", new


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
    if at.spans or at.beside:  # parametrized since
        whys = why_no_layer(place.inlet), why_no_layer(place.outlet)
        if any(whys):
            return f"its layer {max(whys)}"
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
        if isinstance(norm, COUPLING):
            kind = type(norm).__name__
            return f"{kind} between the layers runs over all units at once"
        if isinstance(norm, nn.GroupNorm):
            if not norm.affine:  # loading would not know the number of groups
                return "GroupNorm between the layers has no weight"
            size = norm.num_channels // norm.num_groups
            if units % size:
                return f"GroupNorm between the layers needs whole groups of {size}"
    return ""


def _scales_channels(norm: nn.Module, at: Geometry) -> bool:
    """Whether the weight of a norm is per channel of the outlet."""
    weight = norm._parameters.get("weight")
    if not isinstance(norm, NORMS) or weight is None:
        return False
    last = isinstance(norm, COUPLING)
    vector = len(at.outlet_shape) == 1
    along = vector or at.outlet_layout.channels_first is not last
    return along and tuple(weight.shape) == (at.outlet_width,)


Bound = Callable[[ActiveSeed, ActiveSeed], str]
"""Returns why the second seed cannot fold if the first one stays a branch."""


def fold_possible(
    living: Callable[[], Sequence[ActiveSeed]],
    refused: Mapping[int, str],
    bound: Bound,
    fold: Callable[[Sequence[ActiveSeed]], str],
) -> dict[int, str]:
    """Fold all seeds at once, or one after the other where that fails.

    Args:
        living: Returns the seeds that are left, in order of application.
        refused: Slots that must not be folded, and why.
        bound: Which seeds fold together only.
        fold: Folds some seeds completely, or returns why it changed nothing.

    Returns:
        Why seeds stay branches, by slot.
    """
    whys = plan(living(), refused, bound)
    folds = [one for one in living() if one.slot not in whys]
    if problem := fold(folds) if folds else "":
        whys |= {one.slot: problem for one in folds}
        groups = dict.fromkeys(
            frozenset(one.slot for one in folds if one is first or bound(first, one))
            for first in folds
        )
        for mates in groups if len(groups) > 1 else ():
            stay = {slot: why for slot, why in whys.items() if slot not in mates}
            stay = plan(living(), stay, bound)
            alone = [one for one in living() if one.slot not in stay]
            problem = fold(alone) if alone else ""
            whys = stay | {one.slot: problem for one in alone if problem}
    return whys


def plan(
    active: Sequence[ActiveSeed], refused: Mapping[int, str], bound: Bound
) -> dict[int, str]:
    """Why seeds stay branches, by slot; the others fold, before all branches."""
    whys = {one.slot: refused.get(one.slot) or why_not(one) for one in active}
    order = {one.slot: number for number, one in enumerate(active)}
    changed = True
    while changed:
        changed = False
        for stays, folds in product(active, active):
            if whys[stays.slot] and not whys[folds.slot]:
                earlier = order[stays.slot] < order[folds.slot]
                why = bound(stays, folds) or _why_not_past(
                    stays, folds, earlier=earlier
                )
                whys[folds.slot] = why
                changed |= bool(why)
    return {slot: why for slot, why in whys.items() if why}


def _why_not_past(stays: ActiveSeed, folds: ActiveSeed, *, earlier: bool) -> str:
    """Why a branch that stays keeps another seed from folding; empty if it does not.

    `earlier` is whether the branch is applied before the other seed.
    """
    ours, theirs = stays.place.site, folds.place.site
    if ours.outlet != theirs.outlet:
        return ""
    if ours == theirs and ours.residual:
        return f"branch {stays.name} reads the same tensor"
    if earlier and theirs.residual:
        return f"it reads what branch {stays.name} adds"
    if earlier and ours.residual:
        return f"branch {stays.name} reads the tensor before it"
    if earlier and stays.branch.style != ADD:
        return f"branch {stays.name} scales the tensor before it"
    return ""


def linked_seeds(active: Sequence[ActiveSeed]) -> list[tuple[ActiveSeed, ActiveSeed]]:
    """Pairs of seeds where units of the first feed units of the second."""
    widening = [s for s in active if isinstance(s.seed, FormSeed) and s.seed.widens]
    pairs = product(widening, widening)
    return [(u, d) for u, d in pairs if u.place.outlet is d.place.inlet]


@dataclass(frozen=True, slots=True)
class Reading:
    """What is folded: values of tensors, or something of the same shapes."""

    get: Callable[[Tensor], Tensor | None]
    """Returns it for a parameter or buffer; None if there is none."""
    power: int = 1
    """Power of alpha by which outgoing weights are multiplied."""
    blank: float = nan
    """Entries that have no value; NaN is replaced at the end."""
    fills_mean: bool = False
    """Whether NaN is replaced by the mean of the other entries, or by 0."""


VALUES: Final = Reading(lambda tensor: tensor, blank=0.0)
Tensors = dict[tuple[nn.Module, str], Tensor]
"""Tensors by module and name, in float64 on the CPU, as the module stores them."""


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """How two answers differ; empty if they agree."""
    shapes = [[tuple(tensor.shape) for tensor in one] for one in (expected, found)]
    if shapes[0] != shapes[1]:
        return f"it would answer with shapes {shapes[1]} instead of {shapes[0]}"
    for one, other in zip(expected, found, strict=True):
        eps = torch.finfo(one.dtype).eps
        exact = one.dtype == torch.float64
        limit = TOLERANCE / 1000 if exact else max(TOLERANCE, 8 * eps)
        size = one.nan_to_num().abs().max() if one.numel() else 0.0
        if not torch.allclose(
            one, other, rtol=0, atol=float(size) * limit, equal_nan=True
        ):
            gap = (one - other).abs().max() / size
            return f"it would answer differently, by {float(gap):.1g} of the largest"
    return ""


def fold(
    host: nn.Module,
    active: Sequence[ActiveSeed],
    living: Sequence[ActiveSeed] = (),
) -> None:
    """Fold the values of seeds into their host; see `folded`."""
    values = folded(host, active, living=living)
    before = {module: unit_size(module) for module, _ in values}
    for (module, name), value in values.items():
        put_tensor(module, name, value)
    for module, units in before.items():
        write_any_size(module, units)


def folded(
    host: nn.Module,
    active: Sequence[ActiveSeed],
    reading: Reading = VALUES,
    living: Sequence[ActiveSeed] = (),
) -> Tensors:
    """The tensors that a fold changes, with their new values.

    Args:
        host: The host of the seeds.
        active: Seeds to fold, in order of application.
        reading: What to fold. Linear seeds change values only.
        living: Seeds that stay. Their weights take up the blocks between their units
            and those of folded seeds.
    """
    layers, at = _Layers(reading), dict[int, tuple[int, int]]()
    for site, group in groupby(active, key=lambda one: one.place.site):
        here = [*group]
        outlet = here[0].place.outlet
        # Residual seeds of one place all read the tensor before any of them.
        before = layers.read(outlet) if site.residual else None
        for one in here:
            seed = one.seed
            assert isinstance(seed, FormSeed)
            params = {key: layers.exact(value) for key, value in seed.weights.items()}
            if seed.widens:
                firsts = one.place.first_layers(host)
                scale = one.branch.alpha**reading.power
                at[one.slot] = layers.widen(firsts, outlet, params, scale)
                for step in one.steps(host):
                    layers.more_units(*step)
            elif reading is VALUES:
                layers.fold_linear(outlet, params, one.branch.alpha, before)
    for above, below in linked_seeds([*active, *living]):
        assert isinstance(above.seed, FormSeed)
        assert isinstance(below.seed, FormSeed)
        block = layers.exact(below.seed.block(below.slot, above.slot, above.seed))
        if above.slot in at:
            block = above.branch.alpha**reading.power * block
        if above.slot in at and below.slot in at:
            corner = at[below.slot][0], at[above.slot][1]
            layers.put_block(below.place.inlet, block, corner)
        elif above.slot in at:
            layers.more_inputs(below.seed.weights, block)
        elif below.slot in at:
            layers.more_outputs(above.seed.weights, block)
    return layers.known()


class _Layers:
    """The tensors of layers while seeds are folded into them."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._found: Tensors = {}

    def known(self) -> Tensors:
        """The tensors that were written, without those of which nothing is known."""
        known: Tensors = {}
        for (module, name), value in self._found.items():
            own = getattr(module, name)
            if own is None or self._reading.get(own) is not None:
                known[module, name] = value
                if self._reading is not VALUES:
                    fill = value.nanmean() if self._reading.fills_mean else 0.0
                    value.nan_to_num_(nan=float(fill), posinf=inf, neginf=-inf)
        return known

    def exact(self, tensor: Tensor) -> Tensor:
        """Copy in float64 on the CPU: not every device has float64."""
        read = self._reading.get(tensor)
        if read is None:
            return torch.full(tensor.shape, self._reading.blank, dtype=torch.float64)
        return read.detach().to(device="cpu", dtype=torch.float64, copy=True)

    def read(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Weight, as `[output, input, ...]`, and bias."""
        weight = swap_layout(module, self._stored(module, "weight"))
        has_bias = module._parameters.get("bias") is not None
        has_bias |= (module, "bias") in self._found
        return weight, self._stored(module, "bias") if has_bias else None

    def _stored(self, module: nn.Module, name: str) -> Tensor:
        held = self._found.get((module, name))
        return self.exact(getattr(module, name)) if held is None else held.clone()

    def _write(self, module: nn.Module, name: str, value: Tensor) -> None:
        stored = swap_layout(module, value) if name == "weight" else value
        self._found[module, name] = stored

    def _blank(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_full(shape, self._reading.blank)

    def widen(
        self,
        firsts: Mapping[str, nn.Module],
        outlet: nn.Module,
        params: dict[str, Tensor],
        scale: float,
    ) -> tuple[int, int]:
        """Append units to the first layer and its gate, and columns to the second.

        Returns the first new row and the first new column.
        """
        row = 0
        for name, inlet in firsts.items():
            first = _outputs_first(inlet, params[name])
            weight, bias = self.read(inlet)
            row = len(weight)
            rows = self._blank(weight, len(first), *weight.shape[1:])
            rows[:, : first.shape[1]] = first
            self._write(inlet, "weight", torch.cat([weight, rows]))
            if bias is not None:
                more = params[f"{name}_bias"]
                self._write(inlet, "bias", torch.cat([bias, more]))
        last = _outputs_first(outlet, scale * params["last"])
        weight, _ = self.read(outlet)
        columns = self._blank(weight, len(weight), *last.shape[1:])
        columns[: len(last)] = last
        self._write(outlet, "weight", torch.cat([weight, columns], dim=1))
        return row, weight.shape[1]

    def more_units(self, module: nn.Module, name: str, own: nn.Module) -> None:
        """Append the seed's own step to the host's: the direct sum of both."""
        for key, tensor in own_tensors(own).items():
            held, new = self._stored(module, name or key), self.exact(tensor)
            if is_layer(own) and key == "weight":
                held, new = swap_layout(own, held), swap_layout(own, new)
                wide = self._blank(held, len(held), *new.shape[1:])
                low = self._blank(new, len(new), *held.shape[1:])
                held, new = torch.cat([held, wide], 1), torch.cat([low, new], 1)
            self._write(module, name or key, torch.cat([held, new]))

    def put_block(
        self, layer: nn.Module, block: Tensor, corner: tuple[int, int]
    ) -> None:
        """Set the weights between new inputs and new units of one layer."""
        (weight, _), (row, column) = self.read(layer), corner
        block = _outputs_first(layer, block)
        weight[row : row + len(block), column : column + block.shape[1]] = block
        self._write(layer, "weight", weight)

    def more_inputs(self, weights: nn.ParameterDict, block: Tensor) -> None:
        """Let a seed read units that are the host's now; its gate ignores them."""
        axis = 0 if block.dim() == 2 else 1  # matrices keep inputs first
        for name in ("first", "gate"):
            if name in weights:
                own = self._stored(weights, name)
                shape = [*own.shape]
                shape[axis] = block.shape[axis]
                more = block if name == "first" else self._blank(own, *shape)
                self._write(weights, name, torch.cat([own, more], dim=axis))

    def more_outputs(self, weights: nn.ParameterDict, block: Tensor) -> None:
        """Let a seed write to units that are the host's now."""
        axis = 1 if block.dim() == 2 else 0
        own = self._stored(weights, "last")
        self._write(weights, "last", torch.cat([own, block], dim=axis))

    def fold_linear(
        self,
        outlet: nn.Module,
        params: dict[str, Tensor],
        alpha: float,
        before: tuple[Tensor, Tensor | None] | None,
    ) -> None:
        """Add a linear seed times alpha; it reads the input, or the output `before`."""
        weight, bias = self.read(outlet)
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
        self._write(outlet, "weight", weight)
        if shift is not None:
            bias = weight.new_zeros(len(weight)) if bias is None else bias
            bias[:rows] += alpha * shift
            self._write(outlet, "bias", bias)


def _outputs_first(layer: nn.Module, weight: Tensor) -> Tensor:
    """A seed's weight as `[output, input, ...]`; its matrices keep inputs first."""
    return weight.T if kernel_of(layer) is None else weight


def _linear_map(params: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Weight `[output, input, ...]` and shift of a linear seed."""
    last = params["last"]
    if "first" not in params:
        return last.diag(), params["last_bias"]
    first = params["first"]
    if first.dim() == 2:  # matrices keep inputs first
        return (first @ last).T, None
    return torch.einsum("ou,ui...->oi...", last.flatten(1), first), None
