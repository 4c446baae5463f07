"""Which choices are possible, for every environment and every head.

The three first heads depend on each other, so their masks are tables: `op`
`[env, op]`, `slot` `[env, op, slot]`, `blueprint` `[env, slot, blueprint]`; the other
heads have fixed rows. `masks["slot"]` and `masks["blueprint"]` are the unions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from esper.contracts.actions import HEAD, HEAD_NAMES, HEADS


@dataclass(frozen=True, slots=True)
class ActionMasks:
    """What is possible now; merit plays no part."""

    op: Bool[Tensor, "env op"]
    """Legal ops; WAIT always is."""
    slot: Bool[Tensor, "env op slot"]
    """Slots legal for each op."""
    blueprint: Bool[Tensor, "env slot blueprint"]
    """Blueprints that can be planted in each slot; all False if none can."""
    fixed: Bool[Tensor, "head choice"]
    """What the run ever allows, padded to the width of the largest head."""

    def __getitem__(self, head: str) -> Bool[Tensor, "env choices"]:
        """The legal choices of one head, whatever the other heads choose."""
        if head == "op":
            return self.op
        if head == "slot":
            return self.slot.any(dim=1)
        if head == "blueprint":
            return self.blueprint.any(dim=1)
        index = HEAD[head]
        row = self.fixed[index, : len(HEADS[index].choices)]
        return row.expand(self.op.shape[0], -1)

    def __iter__(self) -> Iterator[str]:
        """The names of the heads, in order."""
        return iter(HEAD_NAMES)

    def __len__(self) -> int:
        """How many heads there are."""
        return len(HEAD_NAMES)

    def keys(self) -> tuple[str, ...]:
        """The names of the heads, in order."""
        return HEAD_NAMES

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Each head with its legal choices."""
        return ((head, self[head]) for head in self)

    def to(self, device: str) -> "ActionMasks":
        """The same masks on another device."""
        return ActionMasks(
            self.op.to(device),
            self.slot.to(device),
            self.blueprint.to(device),
            self.fixed.to(device),
        )
