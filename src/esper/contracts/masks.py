"""Which choices are possible, for every environment and every head.

The first three heads depend on each other, so their masks are tables: `op`
`[env, op]`, `slot` `[env, op, slot]`, `blueprint` `[env, slot, blueprint]`. The other
heads are rows of `fixed`. `masks["slot"]` and `masks["blueprint"]` are unions over the
tables; every other `masks[name]` is a view, which may be written into.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from esper.contracts.actions import HEAD, HEAD_NAMES, HEADS


@dataclass(frozen=True, slots=True, eq=False)
class ActionMasks(Mapping[str, Tensor]):
    """What is possible now, as a mapping from each head to its legal choices."""

    op: Bool[Tensor, "env op"]
    """Legal ops; WAIT always is."""
    slot: Bool[Tensor, "env op slot"]
    """Slots legal for each op."""
    blueprint: Bool[Tensor, "env slot blueprint"]
    """Blueprints that can be planted in each slot; all False if none can."""
    fixed: Bool[Tensor, "env head choice"]
    """What the run allows each head, padded to the width of the largest head."""

    def __getitem__(self, head: str) -> Tensor:  # bool [env, choice]
        """The legal choices of one head, whatever the other heads choose."""
        if head == "op":
            return self.op
        if head == "slot":
            return self.slot.any(dim=1)
        if head == "blueprint":
            return self.blueprint.any(dim=1)
        index = HEAD[head]
        return self.fixed[:, index, : len(HEADS[index].choices)]

    def __iter__(self) -> Iterator[str]:
        """The names of the heads, in order."""
        return iter(HEAD_NAMES)

    def __len__(self) -> int:
        """How many heads there are."""
        return len(HEAD_NAMES)

    def to(self, device: torch.device | str) -> "ActionMasks":
        """The same masks on another device."""
        tables = (self.op, self.slot, self.blueprint, self.fixed)
        return ActionMasks(*(table.to(device) for table in tables))
