"""Enlarge a trained network in one call, without a Grower.

    larger = esper.enlarge(model, width=2.0, depth=2, example=x)

Widths grow by hidden units whose outgoing weights are zero, depth by zero blocks, so
the larger network gives the same answers and has room to learn.
"""

import warnings
from copy import deepcopy
from typing import TypeVar

from torch import nn

from esper.contracts.checks import require_int, require_number, require_one_of
from esper.contracts.errors import EsperWarning, InvalidInputError
from esper.growth.actions import DepthBlueprint
from esper.growth.analysis.slots import check_host
from esper.growth.analysis.tracing import Example
from esper.growth.depth import add_blocks, find_blocks, find_stacks
from esper.growth.hooks import Change
from esper.growth.model import GrowingModel
from esper.growth.seed_modules import all_or_nothing, grown_part

Model = TypeVar("Model", bound=nn.Module)


def enlarge(
    model: Model,
    width: float = 2.0,
    depth: int = 1,
    *,
    example: Example,
    how: DepthBlueprint = "zero",
    rng_seed: int = 0,
) -> Model:
    """Return a larger copy of a trained network; the network stays as it is.

    The optimizer must be built for the copy.

    Args:
        model: The network.
        width: Multiple of the units between layers that `suggest_slots` finds.
        depth: Multiple of the blocks in its lists of equal residual blocks.
        example: Input of the network: a tensor, a tuple or a dictionary.
        how: "zero" for new blocks that leave the output unchanged at first, "copy" for
            copies.
        rng_seed: Random seed of the first weights of new units.
    """
    check_host(model)
    require_number("width", width, 1.0, 64.0)
    require_int("depth", depth)
    require_one_of("how", how, ("copy", "zero"))
    if grown_part(model) is not None:
        raise InvalidInputError(
            "the host has a Grower. Enlarge the result of its export()."
        )
    larger = deepcopy(model)
    if depth > 1:
        _deepen(larger, depth, example, how)
    if width > 1:
        _widen(larger, width, example, rng_seed)
    return larger


def _deepen(host: nn.Module, depth: int, example: Example, how: DepthBlueprint) -> None:
    """Multiply lists of blocks; warns of those that cannot, raises if none can."""
    done, whys = list[str](), dict[str, str]()
    for name in find_stacks(host):
        if any(name.startswith(f"{other}.") for other in done):
            continue
        by = (depth - 1) * len(find_blocks(host, name, 0).order)
        try:
            with all_or_nothing(undo := list[Change]()):
                add_blocks(host, example, find_blocks(host, name, by), how, undo)
            done.append(name)
        except InvalidInputError as error:
            whys[name] = str(error)
    if not done:
        why = "the host has no list of equal residual blocks."
        raise InvalidInputError([*whys.values(), why][0])
    for name, why in whys.items():
        if not any(inner.startswith(f"{name}.") for inner in done):
            warnings.warn(why, EsperWarning, stacklevel=3)


def _widen(host: nn.Module, width: float, example: Example, rng_seed: int) -> None:
    name = f"widen_x{width:g}"
    growing = GrowingModel(
        host,
        "auto",
        example,
        blueprints=[name],
        seeds_per_slot=1,
        rng_seed=rng_seed,
        merge_only=True,
    )
    for slot in growing.decided.tolist():
        growing.plant(growing.slots[slot], name, tempo="AT_ONCE")
    growing.tick()
    growing.detach()
    for slot, why in growing.why_branches.items():
        raise InvalidInputError(f"{growing.slots[slot]!r} cannot be widened: {why}.")
