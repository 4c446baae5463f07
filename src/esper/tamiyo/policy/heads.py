"""Order of sampling and legal choices of Tamiyo's heads.

A mask row holds the legal choices of a head *given the heads before it*: slots depend
on the op, blueprints on the slot. A head that the op does not use gets choice 0.
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
from esper.contracts.devices import require_tensor
from esper.simic.agent.distribution import first_choice

NO_CHOICE_HINT: Final = "WAIT must be legal and an op needs a slot: check the masks."
HEAD_GROUPS: tuple[tuple[int, ...], ...] = (
    (HEAD["op"],),
    (HEAD["slot"],),
    (HEAD["blueprint"],),
    tuple(range(HEAD["blueprint"] + 1, NUM_HEADS)),
)
"""Order of sampling: each group is sampled given the groups before it."""


def relevant(actions: Int64[Tensor, "*batch head"]) -> Bool[Tensor, "*batch head"]:
    """Return whether the chosen op uses each head; always True for the op."""
    ops = actions[..., HEAD["op"]].reshape(-1)
    return _relevant_on(actions.device).index_select(0, ops).view_as(actions)


@cache
def _relevant_on(device: torch.device) -> Tensor:
    # The cached tensor must also work outside of inference mode.
    with torch.inference_mode(False):
        return RELEVANT.to(device)


def rows_by_group(
    masks: ActionMasks, *, causal: bool = True
) -> Coroutine[Tensor, Any, None]:
    """Yield the legal choices of one group of heads after the other.

    Yields masks of op, slot and blueprint `[env, choice]` and is sent the choices
    `[env]`; then yields the masks of all other heads `[env, head, choice]`. If `causal`
    is False (an ablation), heads that the op does not use are not forced to choice 0.
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
    """Return the row of each environment's option."""
    index = option.view(-1, 1, 1).expand(-1, 1, table.shape[2])
    return table.gather(1, index).squeeze(1)


def join_groups(groups: Sequence[Tensor], width: int) -> Tensor:
    """Return masks or logits of all groups as `[row, head, choice]`, padded with 0."""
    *single, rest = groups
    blank = rest.new_zeros(rest.shape[0], width)
    padded = [part for row in single for part in (row, blank[:, row.shape[1] :])]
    flat = torch.cat((*padded, rest.flatten(1)), dim=1)
    return flat.view(rest.shape[0], -1, width)


def legal_rows(
    masks: ActionMasks, actions: Int64[Tensor, "env head"], *, causal: bool = True
) -> Bool[Tensor, "env head choice"]:
    """Return the legal choices of every head, given the actions of those before it."""
    groups = rows_by_group(masks, causal=causal)
    rows = [next(groups), *(groups.send(actions[:, head]) for head in range(3))]
    return join_groups(rows, masks.fixed.shape[2])


def require_masks(masks: ActionMasks, envs: int, spec: ActionSpec) -> None:
    """Check dtype and shape of all masks."""
    ops, slots, kinds = len(Op), spec.slots.max_slots, len(spec.blueprints)
    shapes = {
        "op": (envs, ops),
        "slot": (envs, ops, slots),
        "blueprint": (envs, slots, kinds),
        "fixed": (envs, NUM_HEADS, spec.width),
    }
    for name, shape in shapes.items():
        mask = getattr(masks, name)
        require_tensor(f"mask {name!r}", mask, shape, torch.bool, mask.device)
