r"""Export a grown model as a plain module: seeds are folded in or stay branches.

    WIDEN         W1 <- [W1; A],  W2 <- [W2, alpha B], and norms between get units
    LOW_RANK      W <- W + alpha B A around a layer, W <- (I + alpha B A) W after it
    SCALE_SHIFT   the same with B A = diag(a), and b <- b + alpha shift

The result has the host's class; seeds that do not fold are in a submodule `Branches`. A
seed folds only if no branch is left that would then read or scale another tensor; seeds
whose units feed each other fold together. The result is compared with the model on the
example: where folding changes the answer, branches stay.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map

from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.growth.analysis.host_layers import (
    kernel_of,
    swap_layout,
    units_of,
    write_sizes,
)
from esper.growth.analysis.interlayer import NORMS, every_step, new_interlayer
from esper.growth.analysis.slots import InsertionPoint
from esper.growth.analysis.tracing import Example, eval_outputs
from esper.growth.blueprints.geometry import Geometry
from esper.growth.blueprints.registry import first_line
from esper.growth.blueprints.seed import FormSeed, build
from esper.growth.hooks import ADD, Branch, SlotHooks
from esper.growth.saving.merge_rules import why_no_merge
from esper.growth.saving.saved_topology import NAME
from esper.growth.seed_modules import grown_part

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

TOLERANCE: Final = 1e-3
"""Largest error of a merge, relative to the largest output; 1e-6 in float64."""


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


def export(model: "GrowingModel", *, merge: bool = True) -> nn.Module:
    """Copy of the grown host with the same output; seeds in TRAINING are left out.

    With `merge`, seeds are folded into the host's layers where that is possible.
    """
    active = _active_seeds(model)
    names = {module: name for name, module in model.host.named_modules()}
    example = _suited(model.example, model.host)
    expected = eval_outputs(model, example)

    def attempt(refused: Mapping[str, str]) -> tuple[nn.Module, str]:
        """Export without folds at the refused places, and what is wrong with it."""
        reasons = plan(active, refused)
        folds = [one for one in active if not reasons[one.slot]]
        rest = {one.slot: f"{one.name}: {reasons[one.slot]}" for one in active}
        rest = {slot: line for slot, line in rest.items() if reasons[slot]}
        host, hooks = _copy_host(model, rest)
        if rest:
            host.add_module(NAME, Branches(hooks, [*rest.values()], host.training))
        try:
            merge_into(host, names, folds)
            with _refused_calls(model, names):
                found = eval_outputs(host, example)
        except Exception as error:  # the host may be any code
            return host, f"it would fail, {first_line(error)}"
        return host, _difference(expected, found)

    places = [*dict.fromkeys(one.place.site.name for one in active)]
    refused = {} if merge else dict.fromkeys(places, "merging was switched off")
    module, problem = attempt(refused)
    if problem and merge:  # fold one place after the other, where that works
        refused = dict.fromkeys(places, problem)
        for name in places:
            fewer = {other: why for other, why in refused.items() if other != name}
            _, problem = attempt(fewer)
            refused = {**fewer, name: problem} if problem else fewer
        module, problem = attempt(refused)
    if problem:
        raise InvalidInputError(
            f"a copy of the host does not answer like the host ({problem}). Its "
            "modules must reach each other through attributes, not through closures."
        )
    return module


def why_units_do_not_fold(
    host: nn.Module, place: InsertionPoint, blueprint: Blueprint, example: Example
) -> str:
    """Why new units in its layers change the host's answer; empty if they do not.

    Nothing reads the units, so only code that depends on the width can change it. The
    host is restored.
    """
    names = {module: name for name, module in host.named_modules()}
    norms = [step for step in every_step(place.interlayer) if step in names]
    gates = [host.get_submodule(place.gate)] if place.gate else []
    before = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in (place.inlet, place.outlet, *gates, *norms)
    ]
    sized = replace(blueprint, size=blueprint.units(units_of(place.inlet)), share=0.0)
    interlayer = new_interlayer(place.interlayer, sized.size, units_of(place.inlet))
    seed = build(sized, place.geometry, torch.Generator().manual_seed(0), interlayer)
    one = ActiveSeed(0, place.site.name, place, Branch(seed, alpha=1.0, shadow=False))
    expected = eval_outputs(host, example)
    try:
        merge_into(host, names, [one])
        return _difference(expected, eval_outputs(host, example))
    except Exception as error:  # the host may be any code
        return f"it would fail, {first_line(error)}"
    finally:
        for module, attributes, parameters, buffers in before:
            vars(module).update(attributes)
            module._parameters, module._buffers = parameters, buffers


class Branches(nn.ModuleDict):
    """Seeds of an exported host that were not merged.

    In a layer that other seeds have widened, a seed reads and writes only the first
    channels.
    """

    def __init__(
        self, hooks: Sequence[SlotHooks], reasons: Sequence[str], training: bool
    ) -> None:
        super().__init__(
            {
                f"slot_{slot}": branch.seed
                for place in hooks
                for slot, branch in place.branches.items()
            }
        )
        self.reasons = [*reasons]
        """Why seeds were not merged, as "slot: reason"."""
        self.training = training

    def forward(self, h: Any) -> Any:  # noqa: ANN401
        """Return the input: some hosts call all their submodules in a chain."""
        return h


def _copy_host(
    model: "GrowingModel", slots: Collection[int]
) -> tuple[nn.Module, list[SlotHooks]]:
    """Copy of the host with the hooks of some slots only."""
    try:
        host = deepcopy(model.host)
    except Exception as error:
        raise InvalidInputError(
            f"the host cannot be copied: {first_line(error)}."
        ) from error
    grown = grown_part(host)
    assert grown is not None
    copies = grown.hooks
    grown.leave()
    for hooks in copies:
        hooks.branches = {s: b for s, b in hooks.branches.items() if s in slots}
        if not hooks.branches:
            hooks.detach()
        for branch in hooks.branches.values():
            if isinstance(branch.seed, FormSeed):
                for key in [*branch.seed.cross]:  # with a seed that is left out
                    if int(key.split("_")[1]) not in slots:
                        del branch.seed.cross[key]
    return host, [hooks for hooks in copies if hooks.branches]


@contextmanager
def _refused_calls(
    model: "GrowingModel", names: Mapping[nn.Module, str]
) -> Iterator[None]:
    """Raise if the growing model's own modules are called in the block."""
    own = {*model.modules()}

    def refuse(module: nn.Module, args: object) -> None:
        if module in own:
            raise RuntimeError(f"it calls the original {names.get(module)!r}")

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _active_seeds(model: "GrowingModel") -> list[ActiveSeed]:
    """Seeds that change the output, in order of application."""
    active: list[ActiveSeed] = []
    for hooks in model.hooks:
        for slot, branch in hooks.branches.items():
            name = model.slots[slot]
            if branch.shadow or branch.alpha == 0.0:
                continue
            if hooks.write not in hooks.place.outlet._forward_hooks.values():
                raise InvalidStateError(
                    f"the hooks of slot {name!r} were removed from the host. Export "
                    "before detach()."
                )
            active.append(ActiveSeed(slot, name, hooks.place, branch))
    return active


def _suited(example: Example, host: nn.Module) -> Example:
    """The example on the device and in the dtype of the host."""
    like = next(p for p in host.parameters() if p.is_floating_point())

    def moved(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor):
            return leaf
        kind = like.dtype if leaf.is_floating_point() else leaf.dtype
        return leaf.to(device=like.device, dtype=kind)

    suited: Example = tree_map(moved, example)
    return suited


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
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


# Folding.


def plan(active: Sequence[ActiveSeed], refused: Mapping[str, str]) -> dict[int, str]:
    """Why each slot's seed stays a branch; empty if it folds.

    `refused` holds places that must not be folded, and why.
    """
    whys = {
        one.slot: refused.get(one.place.site.name) or why_not(one) for one in active
    }
    while True:
        reasons = _reasons(active, whys)
        torn = [
            sorted(pair, key=lambda one: not reasons[one.slot])
            for pair in _linked(active)
            if bool(reasons[pair[0].slot]) is not bool(reasons[pair[1].slot])
        ]
        if not torn:
            return reasons
        for stays, folds in torn:
            whys[folds.slot] = f"its units and those of {stays.name} feed each other"


def _linked(active: Sequence[ActiveSeed]) -> list[tuple[ActiveSeed, ActiveSeed]]:
    """Pairs of seeds where units of the first feed units of the second."""
    widening = [s for s in active if isinstance(s.seed, FormSeed) and s.seed.widens]
    pairs = product(widening, widening)
    return [(u, d) for u, d in pairs if u.place.outlet is d.place.inlet]


def _reasons(active: Sequence[ActiveSeed], whys: Mapping[int, str]) -> dict[int, str]:
    """Why each slot's seed stays a branch: its own reason, or that of others."""
    # By outlet, the first remaining branch that adds to it, reads it or scales it.
    left: dict[str, dict[str, str]] = {}
    reasons: dict[int, str] = {}
    for site, group in groupby(active, key=lambda one: one.place.site):
        seeds, at = [*group], left.setdefault(site.outlet, {})
        own = {seed.slot: whys[seed.slot] for seed in seeds}
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


def why_not(one: ActiveSeed) -> str:
    """Why the kind or place of a seed does not allow folding; empty if it does."""
    if one.branch.style != ADD:
        return "it scales its outlet"
    if not isinstance(one.seed, FormSeed):
        return "it is a module of its own"
    return why_no_merge(one.place, one.seed.blueprint)


def merge_into(
    host: nn.Module, names: Mapping[nn.Module, str], active: Sequence[ActiveSeed]
) -> None:
    """Fold seeds into a copy of their host, in order of application."""
    at: dict[int, tuple[int, int]] = {}
    for site, group in groupby(active, key=lambda one: one.place.site):
        outlet = host.get_submodule(site.outlet)
        # Residual seeds of one place all read the tensor before any of them.
        before = _read(outlet)
        for one in group:
            seed = one.seed
            assert isinstance(seed, FormSeed)
            params = {key: _exact(value) for key, value in seed.weights.items()}
            if seed.blueprint.form is Form.WIDEN:
                firsts = {"first": host.get_submodule(site.inlet)}
                if one.place.gate:
                    firsts["gate"] = host.get_submodule(one.place.gate)
                at[one.slot] = _widen(
                    firsts, outlet, params, seed.geometry, one.branch.alpha
                )
                own_steps = every_step(seed.interlayer.children())
                steps = zip(every_step(one.place.interlayer), own_steps, strict=True)
                for norm, own in steps:
                    if isinstance(norm, NORMS):
                        _more_units(host.get_submodule(names[norm]), own)
            else:
                read = before if site.residual else None
                _fold_linear(outlet, params, one.branch.alpha, read)
    for above, below in _linked(active):
        assert isinstance(above.seed, FormSeed)
        assert isinstance(below.seed, FormSeed)
        block = _exact(below.seed.block(below.slot, above.slot, above.seed))
        block = above.branch.alpha * block
        block = block.T if above.place.geometry.outlet_kernel is None else block
        layer = host.get_submodule(below.place.site.inlet)
        weight, (row, column) = _read(layer)[0], (at[below.slot][0], at[above.slot][1])
        weight[row : row + len(block), column : column + block.shape[1]] = block
        _put(layer, "weight", weight)


def _widen(
    firsts: Mapping[str, nn.Module],
    outlet: nn.Module,
    params: dict[str, Tensor],
    at: Geometry,
    alpha: float,
) -> tuple[int, int]:
    """Append units to the first layer and its gate, and columns to the second.

    Returns the first new row and the first new column.
    """
    row = 0
    for name, inlet in firsts.items():
        first = params[name]
        first = first.T if kernel_of(inlet) is None else first  # [unit, input, ...]
        weight, bias = _read(inlet)
        row = len(weight)
        rows = weight.new_zeros(len(first), *weight.shape[1:])
        rows[:, : first.shape[1]] = first
        _put(inlet, "weight", torch.cat([weight, rows]))
        if bias is not None:
            _put(inlet, "bias", torch.cat([bias, params[f"{name}_bias"]]))
    last = alpha * params["last"]
    last = last.T if at.outlet_kernel is None else last  # [output, unit, ...]
    weight, _ = _read(outlet)
    column = weight.shape[1]
    columns = weight.new_zeros(len(weight), *last.shape[1:])
    columns[: len(last)] = last
    _put(outlet, "weight", torch.cat([weight, columns], dim=1))
    for layer in (*firsts.values(), outlet):
        write_sizes(layer)
    return row, column


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
    _put(outlet, "weight", weight)
    if shift is not None:
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        bias[:rows] += alpha * shift
        _put(outlet, "bias", bias)


def _linear_map(params: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Weight `[output, input, ...]` and shift of a linear seed."""
    last = params["last"]
    if "first" not in params:
        return last.diag(), params["last_bias"]
    first = params["first"]
    if first.dim() == 2:  # matrices keep inputs first
        return (first @ last).T, None
    return torch.einsum("ou,ui...->oi...", last.flatten(1), first), None


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a tensor of a module, which may change its size."""
    old = getattr(module, name)
    value = swap_layout(module, value) if name == "weight" else value
    like = module.get_parameter("weight") if old is None else old
    value = value.to(device=like.device, dtype=like.dtype)
    if old is not None and old.shape == value.shape:
        with torch.no_grad():
            old.copy_(value)
    elif name in module._buffers:
        setattr(module, name, value)
    else:
        setattr(module, name, nn.Parameter(value, requires_grad=like.requires_grad))


def _read(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in float64."""
    bias = module._parameters.get("bias")
    weight = swap_layout(module, _exact(module.get_parameter("weight")))
    return weight, None if bias is None else _exact(bias)


def _exact(tensor: Tensor) -> Tensor:
    """Copy in float64 on the CPU: not every device has float64."""
    return tensor.detach().to(device="cpu", dtype=torch.float64, copy=True)
