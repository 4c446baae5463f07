"""Sentences: from words to numbers and back."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import torch
from jaxtyping import Int64
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, ActionSpec, Op
from esper.contracts.errors import BadInput, IllegalAction
from esper.contracts.masks import ActionMasks


def in_words(
    actions: Int64[Tensor, "1 head"], slots: Sequence[str], spec: ActionSpec
) -> str:
    """One sentence, such as "plant widen_16 in fc1->fc2#0 (ADD, STANDARD, FULL)"."""
    op = Op(int(actions[0, HEAD["op"]]))
    if op is Op.WAIT:
        return "wait"
    slot = slots[int(actions[0, HEAD["slot"]])]
    manner = [
        [*head.choices][int(actions[0, index])]
        for index, head in enumerate(HEADS)
        if head.choices and head.name != "op" and op in head.used_by
    ]
    how = f" ({', '.join(manner)})" if manner else ""
    if op is Op.GERMINATE:
        what = spec.blueprints[int(actions[0, HEAD["blueprint"]])].name
        return f"plant {what} in {slot}{how}"
    verb = {
        Op.ADVANCE: "advance",
        Op.SET_ALPHA: "set alpha of",
        Op.PRUNE: "prune",
        Op.FOSSILIZE: "keep",
    }[op]
    return f"{verb} {slot}{how}"


def refuse_illegal(actions: Int64[Tensor, "env head"], masks: ActionMasks) -> None:
    """A controller may be anybody's: what its masks forbid is not done."""
    if actions.shape != (1, NUM_HEADS):
        raise IllegalAction(
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
        raise IllegalAction(
            f"the controller said what its masks forbid: op {op}, slot {slot}, "
            f"blueprint {kind}."
        )


def sentence(op: Op, said: Mapping[str, int | str]) -> Int64[Tensor, "1 head"]:
    """One sentence as numbers; heads that are not named are 0."""
    row = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
    row[0, HEAD["op"]] = op
    for head, choice in said.items():
        if isinstance(choice, str):
            choices = [*HEADS[HEAD[head]].choices]
            if choice not in choices:
                near = get_close_matches(choice, choices, n=1, cutoff=0.0)
                raise BadInput(
                    f"{head} has no choice {choice!r}; did you mean {near[0]!r}?"
                )
            row[0, HEAD[head]] = choices.index(choice)
        else:
            row[0, HEAD[head]] = choice
    return row
