"""Export a grown model as a plain module: seeds are folded in or stay branches.

The result has the host's class; seeds that do not fold are in a submodule `Branches`.
Seeds whose units feed each other fold together. The result is compared with the model
on the example: where folding changes the answer, branches stay.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from esper.contracts.blueprints import Blueprint
from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import described
from esper.growth.analysis.config_fields import follow_sizes, shapes_of
from esper.growth.analysis.host_layers import restore_sizes, units_of
from esper.growth.analysis.interlayer import new_interlayer
from esper.growth.analysis.slots import InsertionPoint
from esper.growth.analysis.tracing import Example, eval_outputs, example_like
from esper.growth.blueprints.registry import build
from esper.growth.hooks import Branch, SlotHooks
from esper.growth.saving.folding import (
    ActiveSeed,
    difference,
    fold,
    fold_possible,
    linked_seeds,
)
from esper.growth.saving.saved_topology import NAME
from esper.growth.seed_modules import SeedModules, grown_part

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel


def export(model: "GrowingModel", *, merge: bool = True) -> nn.Module:
    """Copy of the grown host with the same output; seeds in TRAINING are left out.

    With `merge`, seeds are folded into the host's layers where that is possible.
    """
    like = next(p for p in model.host.parameters() if p.is_floating_point())
    example = example_like(model.example, like)
    expected = eval_outputs(model, example)
    try:
        host = deepcopy(model.host)
    except Exception as error:
        raise InvalidInputError(
            f"the host cannot be copied: {described(error)}."
        ) from error
    grown = grown_part(host)
    with _refused_calls(model):
        if grown is not None:  # not detached
            reasons = _fold_copy(grown, example, expected, merge=merge)
            grown.leave()
            for hooks in grown.hooks:
                if not hooks.branches:
                    hooks.detach()
            used = [hooks for hooks in grown.hooks if hooks.branches]
            if used:
                host.add_module(NAME, Branches(used, reasons, host.training))
        problem = _tried(host, lambda: None, example, expected)
    if problem:
        raise InvalidInputError(
            f"a copy of the host does not answer like the host ({problem}). Its "
            "modules must reach each other through attributes, not through closures."
        )
    follow_sizes(host, shapes_of(dict(host.named_parameters())))
    return host


def _fold_copy(
    grown: SeedModules, example: Example, expected: Sequence[Tensor], *, merge: bool
) -> list[str]:
    """Fold active seeds of a copied host and drop the others.

    Returns why seeds stay branches, as "slot: reason".
    """
    for one in grown.living_seeds():
        if one.branch.shadow or not one.branch.alpha:
            grown.remove_seed(one.slot)
    active = grown.living_seeds()
    linked = {frozenset((u.slot, d.slot)) for u, d in linked_seeds(active)}

    def bound(stays: ActiveSeed, folds: ActiveSeed) -> str:
        feed = {stays.slot, folds.slot} in linked
        return f"its units and those of {stays.name} feed each other" if feed else ""

    def attempt(folds: Sequence[ActiveSeed]) -> str:
        put_back = grown.restore_point()
        slots = [one.slot for one in folds]
        problem = _tried(grown.host, lambda: grown.fold(slots), example, expected)
        if problem:
            put_back()
        return problem

    off = "merging was switched off"
    refused = {} if merge else {one.slot: off for one in active}
    whys = fold_possible(grown.living_seeds, refused, bound, attempt)
    return [f"{grown.slots[slot]}: {why}" for slot, why in whys.items()]


def why_units_do_not_fold(
    host: nn.Module, place: InsertionPoint, blueprint: Blueprint, example: Example
) -> str:
    """Why new units in its layers change the host's answer; empty if they do not.

    Nothing reads the units, so only code that depends on the width can change it. The
    host is restored.
    """
    put_back = restore_sizes(host.modules())
    sized = replace(blueprint, size=blueprint.units(units_of(place.inlet)), share=0.0)
    interlayer = new_interlayer(place.interlayer, sized.size, units_of(place.inlet))
    seed = build(sized, place.geometry, torch.Generator().manual_seed(0), interlayer)
    one = ActiveSeed(0, place.site.name, place, Branch(seed, alpha=1.0, shadow=False))
    expected = eval_outputs(host, example)
    try:
        return _tried(host, lambda: fold(host, [one]), example, expected)
    finally:
        put_back()


def _tried(
    host: nn.Module,
    change: Callable[[], None],
    example: Example,
    expected: Sequence[Tensor],
) -> str:
    """Resize a host; returns what is wrong with its answer then, and undoes it."""
    put_back = restore_sizes(host.modules())
    try:
        change()
        problem = difference(expected, eval_outputs(host, example))
    except Exception as error:  # the host may be any code
        problem = f"it would fail, {described(error)}"
    if problem:
        put_back()
    return problem


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


@contextmanager
def _refused_calls(model: "GrowingModel") -> Iterator[None]:
    """Raise if the growing model's own modules are called in the block."""
    own = {module: name for name, module in model.host.named_modules()}

    def refuse(module: nn.Module, args: object) -> None:
        if module in own:
            raise RuntimeError(f"it calls the original {own[module]!r}")

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
