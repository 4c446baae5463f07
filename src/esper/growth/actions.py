"""Ops of a growing model by name: methods, actions as numbers and as words."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, ActionMasks, ActionSpec, Op
from esper.contracts.checks import require_int
from esper.contracts.errors import IllegalActionError, unknown

DepthBlueprint = Literal["copy", "zero"]
OPS: Final = tuple(op.name for op in Op if op is not Op.ADVANCE)
"""Ops of a controller; seeds advance by their tempo, or by hand."""

VERBS = {
    Op.ADVANCE: "advance",
    Op.SET_ALPHA: "set alpha of",
    Op.PRUNE: "prune",
    Op.FOSSILIZE: "keep",
}
DONE = {
    "GERMINATE": "planted",
    "ADVANCE": "began to blend in",
    "SET_ALPHA": "began to move the alpha of",
    "PRUNE": "pruned",
    "FOSSILIZE": "kept",
    "DEEPEN": "added",
}
"""Ops of receipts in words."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Effect of one op on the model's output on its example."""

    op: str
    slot: str
    blueprint: str
    jump: float
    """Largest absolute change of the output in eval mode."""

    def __str__(self) -> str:
        """One line, such as "planted widen_8 at fc1->fc2"."""
        place, change = self.slot.partition("#")[0], ""
        if self.jump:
            change = f", which changed the output by {self.jump:.3g}"
        what = self.blueprint or "a seed"
        return f"{DONE.get(self.op, self.op)} {what} at {place}{change}"


class NamedOps:
    """The ops of a growing model as methods that take names."""

    def plant(
        self,
        slot: str,
        blueprint: str,
        *,
        style: str = "ADD",
        tempo: str = "STANDARD",
        alpha_target: str = "FULL",
    ) -> Receipt:
        """Plant a seed; it leaves the output unchanged until it blends in.

        Args:
            slot: Name of the slot, such as "fc1->fc2#0".
            blueprint: Name of the blueprint, such as "widen_16".
            style: How the seed changes the output: "ADD" or "SCALE".
            tempo: How long it trains before it blends in: "AT_ONCE", "FAST",
                "STANDARD" or "SLOW".
            alpha_target: Weight of the seed after blending: "HALF", "MOST" or "FULL".
        """
        how = {"style": style, "tempo": tempo, "alpha_target": alpha_target}
        return self._op(Op.GERMINATE, slot, blueprint=blueprint, **how)

    def advance(self, slot: str) -> Receipt:
        """Let a training seed blend in now instead of at the end of its tempo."""
        return self._op(Op.ADVANCE, slot)

    def set_alpha(
        self,
        slot: str,
        target: str,
        *,
        speed: str = "FAST",
        curve: str = "LINEAR",
        style: str = "ADD",
    ) -> Receipt:
        """Move a seed's alpha to another target.

        Args:
            slot: Name of the slot.
            target: New weight of the seed: "HALF", "MOST" or "FULL".
            speed: Duration of the change: "INSTANT", "FAST" or "SLOW".
            curve: Shape of the change over time: "LINEAR", "COSINE" or
                "SIGMOID".
            style: How the seed changes the output: "ADD" or "SCALE".
        """
        how = {"alpha_target": target, "alpha_speed": speed, "alpha_curve": curve}
        return self._op(Op.SET_ALPHA, slot, style=style, **how)

    def prune(
        self, slot: str, *, speed: str = "INSTANT", curve: str = "LINEAR"
    ) -> Receipt:
        """Fade a seed out; a training seed is removed at once.

        Args:
            slot: Name of the slot.
            speed: Duration of the fade: "INSTANT", "FAST" or "SLOW".
            curve: Shape of the fade over time: "LINEAR", "COSINE" or
                "SIGMOID".
        """
        return self._op(Op.PRUNE, slot, alpha_speed=speed, alpha_curve=curve)

    def keep(self, slot: str) -> Receipt:
        """Keep a holding seed for good: fold it into the host's own layers.

        Its slot is free again. A seed that does not fold stays a branch.
        """
        return self._op(Op.FOSSILIZE, slot)

    def deepen(self, name: str, by: int = 1, how: DepthBlueprint = "copy") -> Receipt:
        """Add copies of blocks to a list of equal residual blocks.

        As many as there are: the whole stack again, after its end. Fewer: copies of
        evenly spread blocks, each after its original. New parameters join the groups of
        their originals in the optimizer, without state.

        Args:
            name: Name of the list, such as "transformer.h" or "h".
            by: Number of new blocks.
            how: "copy", or "zero" for copies whose last projections are zero, which
                leaves the output unchanged.
        """
        require_int("by", by)
        return self._deepen(name, by, how)

    def _op(self, op: Op, slot: str, **choices: str) -> Receipt:
        raise NotImplementedError

    def _deepen(self, name: str, by: int, how: DepthBlueprint) -> Receipt:
        raise NotImplementedError


def encode_action(op: Op, **choices: int | str) -> Int64[Tensor, "1 head"]:
    """Encode an action from names or indices; other heads are 0."""
    row = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
    row[0, HEAD["op"]] = op
    for head, choice in choices.items():
        names = [*HEADS[HEAD[head]].choices]
        if isinstance(choice, str) and choice not in names:
            raise unknown(f"{head} has no choice", choice, names)
        index = names.index(choice) if isinstance(choice, str) else choice
        row[0, HEAD[head]] = index
    return row


def action_text(
    actions: Int64[Tensor, "1 head"], slots: Sequence[str], spec: ActionSpec
) -> str:
    """An action in words: "plant widen_16 in fc1->fc2#0 (ADD, STANDARD, FULL)"."""
    op = Op(int(actions[0, HEAD["op"]]))
    if op is Op.WAIT:
        return "wait"
    slot = slots[int(actions[0, HEAD["slot"]])]
    options = [
        [*head.choices][int(actions[0, index])]
        for index, head in enumerate(HEADS)
        if head.choices and head.name != "op" and op in head.used_by
    ]
    how = f" ({', '.join(options)})" if options else ""
    if op is Op.GERMINATE:
        what = spec.blueprints[int(actions[0, HEAD["blueprint"]])].name
        return f"plant {what} in {slot}{how}"
    return f"{VERBS[op]} {slot}{how}"


def refuse_illegal(actions: Int64[Tensor, "env head"], masks: ActionMasks) -> None:
    """Raise if the masks forbid an action: a controller may be the user's code."""
    if actions.shape != (1, NUM_HEADS):
        raise IllegalActionError(
            f"a decision must be int64 [1, {NUM_HEADS}], got {[*actions.shape]}."
        )
    op, slot, kind = actions[0, : HEAD["blueprint"] + 1].tolist()
    legal = 0 <= op < len(Op) and bool(masks.op[0, op])
    if legal and op != Op.WAIT:
        legal = 0 <= slot < masks.slot.shape[2] and bool(masks.slot[0, op, slot])
    if legal and op == Op.GERMINATE:
        kinds = masks.blueprint.shape[2]
        legal = 0 <= kind < kinds and bool(masks.blueprint[0, slot, kind])
    if not legal:
        raise IllegalActionError(
            f"the controller chose what its masks forbid: op {op}, slot {slot}, "
            f"blueprint {kind}."
        )


def without_slots(masks: ActionMasks, slots: Collection[int]) -> ActionMasks:
    """Masks that forbid every op in some slots."""
    if not slots:
        return masks
    slot = masks.slot.clone()
    slot[:, :, [*slots]] = False
    op = masks.op & slot.any(dim=2)
    op[:, Op.WAIT] = True
    return replace(masks, op=op, slot=slot)
