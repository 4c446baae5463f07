"""Export a grown model as a plain module: seeds are folded in or stay branches.

The result has the host's class; seeds that do not fold are in a submodule `Branches`. A
seed folds only if no branch is left that would then read or scale another tensor; seeds
whose units feed each other fold together. The result is compared with the model on the
example: where folding changes the answer, branches stay.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from esper.contracts.blueprints import Blueprint
from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import described
from esper.growth.analysis.host_layers import restore_sizes, units_of
from esper.growth.analysis.interlayer import every_step, new_interlayer
from esper.growth.analysis.slots import InsertionPoint
from esper.growth.analysis.tracing import Example, eval_outputs, example_like
from esper.growth.blueprints.registry import build
from esper.growth.hooks import ADD, Branch, SlotHooks
from esper.growth.saving.folding import ActiveSeed, fold, linked_seeds, why_not
from esper.growth.saving.saved_topology import NAME
from esper.growth.seed_modules import grown_part

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

TOLERANCE: Final = 1e-3
"""Largest error of a merge, relative to the largest output; 1e-6 in float64."""


def export(model: "GrowingModel", *, merge: bool = True) -> nn.Module:
    """Copy of the grown host with the same output; seeds in TRAINING are left out.

    With `merge`, seeds are folded into the host's layers where that is possible.
    """
    active = _active_seeds(model)
    names = {module: name for name, module in model.host.named_modules()}
    like = next(p for p in model.host.parameters() if p.is_floating_point())
    example = example_like(model.example, like)
    expected = eval_outputs(model, example)

    def attempt(refused: Mapping[str, str]) -> tuple[nn.Module, str]:
        """Export without folds at the refused places, and what is wrong with it."""
        reasons = plan(
            active,
            {
                one.slot: refused[one.place.site.name]
                for one in active
                if one.place.site.name in refused
            },
        )
        folds = [one for one in active if one.slot not in reasons]
        lines = [f"{model.slots[slot]}: {why}" for slot, why in reasons.items()]
        host = _copy_host(model, reasons, lines)
        with _refused_calls(model, names):
            return host, _fold_and_compare(host, names, folds, example, expected)

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
    layers = place.first_layers(host).values()
    put_back = restore_sizes((place.outlet, *layers, *norms))
    sized = replace(blueprint, size=blueprint.units(units_of(place.inlet)), share=0.0)
    interlayer = new_interlayer(place.interlayer, sized.size, units_of(place.inlet))
    seed = build(sized, place.geometry, torch.Generator().manual_seed(0), interlayer)
    one = ActiveSeed(0, place.site.name, place, Branch(seed, alpha=1.0, shadow=False))
    try:
        expected = eval_outputs(host, example)
        return _fold_and_compare(host, names, [one], example, expected)
    finally:
        put_back()


def _fold_and_compare(
    host: nn.Module,
    names: Mapping[nn.Module, str],
    seeds: Sequence[ActiveSeed],
    example: Example,
    expected: Sequence[Tensor],
) -> str:
    """Fold seeds into a host; returns how its answer differs, empty if it does not."""
    try:
        fold(host, names, seeds)
        return difference(expected, eval_outputs(host, example))
    except Exception as error:  # the host may be any code
        return f"it would fail, {described(error)}"


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
    model: "GrowingModel", slots: Collection[int], reasons: Sequence[str]
) -> nn.Module:
    """Copy of the host with the seeds of some slots only, as branches."""
    try:
        host = deepcopy(model.host)
    except Exception as error:
        raise InvalidInputError(
            f"the host cannot be copied: {described(error)}."
        ) from error
    grown = grown_part(host)
    if grown is None:  # detached
        return host
    for slot in range(len(grown.slots)):
        if slot not in slots:
            grown.remove_seed(slot)
    grown.leave()
    for hooks in grown.hooks:
        if not hooks.branches:
            hooks.detach()
    used = [hooks for hooks in grown.hooks if hooks.branches]
    if used:
        host.add_module(NAME, Branches(used, reasons, host.training))
    return host


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
    living = model.seeds.living_seeds()
    return [one for one in living if one.branch.alpha and not one.branch.shadow]


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


def plan(
    active: Sequence[ActiveSeed], refused: Mapping[int, str], *, together: bool = True
) -> dict[int, str]:
    """Why seeds stay branches, by slot; the other seeds fold.

    Args:
        active: Seeds in order of application: a folded seed is applied before all
            branches.
        refused: Slots that must not be folded, and why.
        together: Whether seeds whose units feed each other fold together only.
    """
    whys = {one.slot: refused.get(one.slot) or why_not(one) for one in active}
    links = linked_seeds(active) if together else []
    linked = {frozenset((u.slot, d.slot)) for u, d in links}
    order = {one.slot: number for number, one in enumerate(active)}
    changed = True
    while changed:
        changed = False
        for stays, folds in product(active, active):
            if not whys[stays.slot] or whys[folds.slot]:
                continue
            if {stays.slot, folds.slot} in linked:
                why = f"its units and those of {stays.name} feed each other"
            else:
                earlier = order[stays.slot] < order[folds.slot]
                why = _why_not_past(stays, folds, earlier=earlier)
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
