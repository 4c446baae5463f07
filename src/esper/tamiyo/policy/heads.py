"""Tamiyo's heads: in which order they are drawn, and what each may choose.

A row is what a head may choose *given the heads before it*: the slot row belongs to the
op, the blueprint row to the slot. A head that the op does not use is forced to choice
0.
"""

from collections.abc import Generator as Coroutine
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from esper.contracts.actions import (
    HEAD,
    NUM_HEADS,
    RELEVANT,
    ActionMasks,
    ActionSpec,
    Op,
)
from esper.contracts.errors import InvalidInputError
from esper.simic.agent.distribution import first_choice

NO_CHOICE: Final = "WAIT must always be legal and an op needs a slot: check the masks."
"""What to do when a head has none."""
HEAD_GROUPS: tuple[tuple[int, ...], ...] = (
    (HEAD["op"],),
    (HEAD["slot"],),
    (HEAD["blueprint"],),
    tuple(range(HEAD["blueprint"] + 1, NUM_HEADS)),
)
"""The order of sampling: each group is drawn given the groups before it."""


def relevant(actions: Int64[Tensor, "*batch head"]) -> Bool[Tensor, "*batch head"]:
    """Whether the chosen op uses each head; the op itself always counts."""
    ops = actions[..., HEAD["op"]]
    return (
        _relevant_on(actions.device).index_select(0, ops.reshape(-1)).view_as(actions)
    )


@cache
def _relevant_on(device: torch.device) -> Tensor:
    # One copy per device, usable with gradients even if inference asks for it first.
    with torch.inference_mode(False):
        return RELEVANT.to(device)


def rows_by_group(
    masks: ActionMasks, *, causal: bool = True
) -> Coroutine[Tensor, Any, None]:
    """What one group of heads after the other may choose, given the choices before.

    A coroutine: it yields the rows of op, slot and blueprint `[env, choice]` and is
    sent their choices `[env]`; last it yields the rows of all other heads
    `[env, head, choice]`.

    Args:
        masks: What is possible.
        causal: Force heads that the op does not use to choice 0. False is the
            ablation in which such heads are drawn, and counted, all the same.
    """
    fixed = masks.fixed
    op = yield masks.op
    uses = _relevant_on(op.device).index_select(0, op).unsqueeze(2)

    def given_op(rows: Tensor, head: int | slice) -> Tensor:
        width = rows.shape[-1]
        unused = first_choice(width, op.device) if causal else fixed[:, head, :width]
        return torch.where(uses[:, head], rows, unused)

    slot = yield given_op(_of_choice(masks.slot, op), HEAD["slot"])
    yield given_op(_of_choice(masks.blueprint, slot), HEAD["blueprint"])
    rest = slice(HEAD["blueprint"] + 1, None)
    yield given_op(fixed[:, rest], rest)


def _of_choice(
    table: Bool[Tensor, "env option choice"], option: Int64[Tensor, " env"]
) -> Bool[Tensor, "env choice"]:
    """The row of each environment's option."""
    index = option.view(-1, 1, 1).expand(-1, 1, table.shape[2])
    return table.gather(1, index).squeeze(1)


def join_groups(groups: Sequence[Tensor], width: int) -> Tensor:
    """Rows or logits of all groups as `[row, head, choice]`, padded with 0."""
    *single, rest = groups
    blank = rest.new_zeros(rest.shape[0], width)
    padded = [part for row in single for part in (row, blank[:, row.shape[1] :])]
    flat = torch.cat((*padded, rest.flatten(1)), dim=1)
    return flat.view(rest.shape[0], -1, width)


def legal_rows(
    masks: ActionMasks, actions: Int64[Tensor, "env head"], *, causal: bool = True
) -> Bool[Tensor, "env head choice"]:
    """What every head may choose, given the choices of the heads before it."""
    groups = rows_by_group(masks, causal=causal)
    rows = [next(groups), *(groups.send(actions[:, head]) for head in range(3))]
    return join_groups(rows, masks.fixed.shape[2])


def require_masks(masks: ActionMasks, envs: int, spec: ActionSpec) -> None:
    """Refuse masks of another type or shape, even if they would broadcast."""
    ops, slots, kinds = len(Op), spec.slots.max_slots, len(spec.blueprints)
    shapes = {
        "op": (envs, ops),
        "slot": (envs, ops, slots),
        "blueprint": (envs, slots, kinds),
        "fixed": (envs, NUM_HEADS, spec.width),
    }
    for name, shape in shapes.items():
        mask = getattr(masks, name)
        if mask.dtype != torch.bool:
            raise InvalidInputError(f"mask {name!r} must be bool, got {mask.dtype}.")
        if mask.shape != shape:
            raise InvalidInputError(
                f"mask {name!r} must be {list(shape)} for this action space, got "
                f"{list(mask.shape)}."
            )
