"""What happened to seeds between two looks at them, for all slots at once.

Worlds say how things stand, not what changed: `events_between` compares. A seed whose
alpha is 0 is pruned and gone within one decision, so that a stage may seem to be left
out. Where an episode has just ended, what is seen next belongs to another one; what the
last decision did follows from its sentence.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts import actions as words
from esper.contracts.actions import HEAD, HEADS, Op
from esper.contracts.events import StageChanged
from esper.contracts.slots import SlotStates
from esper.contracts.stages import NEXT_STAGE, Stage
from esper.kernels import fused_with

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

WORDS: Final = (
    "planted",
    "blending",
    "holding",
    "kept",
    "pruned",
    "cleared",
    "aimed",
    "jumped",
)
"""What can happen; `aimed`: another alpha to go to; `jumped`: nothing known."""

_GROWING: Final = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
_NAMED: Final = {
    (Stage.DORMANT, Stage.TRAINING): "planted",
    (Stage.TRAINING, Stage.BLENDING): "blending",
    (Stage.BLENDING, Stage.HOLDING): "holding",
    (Stage.HOLDING, Stage.FOSSILIZED): "kept",
    (Stage.COOLING, Stage.DORMANT): "cleared",
    **{(stage, Stage.COOLING): "pruned" for stage in _GROWING},
    **{(stage, Stage.DORMANT): "pruned" for stage in _GROWING},
}
WORD: Final = torch.tensor(
    [
        [WORDS.index(_NAMED.get((before, after), "jumped")) for after in Stage]
        for before in Stage
    ]
)
"""What a change of stage is called, int64 [stage, stage]."""
AIMED: Final = WORDS.index("aimed")
NOTHING: Final = np.empty((0, len(HEADS)), np.int64)
OP, SLOT, BLUEPRINT, TARGET = (
    HEAD[head] for head in ("op", "slot", "blueprint", "alpha_target")
)
WAIT, GERMINATE = int(Op.WAIT), int(Op.GERMINATE)
SET_ALPHA = int(Op.SET_ALPHA)
AIMS: Final = torch.tensor([*HEADS[HEAD["alpha_target"]].choices.values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What happened, in order of environment and slot."""

    env: Int64[Tensor, " change"]
    slot: Int64[Tensor, " change"]
    what: Int64[Tensor, " change"]
    """Index into `WORDS`."""
    before: Int64[Tensor, " change"]
    """`Stage` that was left."""
    after: Int64[Tensor, " change"]
    """`Stage` that was entered; the same if it was another change."""
    blueprint: Int64[Tensor, " change"]
    """Of the seed; -1 if there is none."""
    alpha: Float[Tensor, " change"]
    """Afterwards; as last seen where the episode ended."""

    def __len__(self) -> int:
        """How much happened."""
        return len(self.env)

    def stage_changes(self, step: int) -> tuple[StageChanged, ...]:
        """The changes of stage, one by one."""
        columns = (self.env, self.slot, self.before, self.after, self.what)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(
            StageChanged(
                env=env,
                slot=slot,
                step=step,
                before=Stage(before),
                after=Stage(after),
                reason=WORDS[what],
            )
            for env, slot, before, after, what in rows
            if before != after
        )


def events_between(
    before: SlotStates,
    after: SlotStates,
    *,
    ended: Bool[Tensor, " env"] | None = None,
    actions: Int64[Tensor, "env head"] | None = None,
    illegal: Bool[Tensor, " env"] | None = None,
) -> Changes:
    """What happened to every slot in one step.

    Args:
        before: What was seen before the decision.
        after: What is seen next.
        ended: Where `after` belongs to another episode.
        actions: What was said; only asked where an episode ended, of which nothing is
            told without it.
        illegal: Where the sentence was not carried out.
    """
    if before.stage.device.type == "cpu":
        return _found_at_once(before, after, ended, actions, illegal)
    return events_on_any_device(before, after, ended, actions, illegal)


def events_on_any_device(
    before: SlotStates,
    after: SlotStates,
    ended: Tensor | None,
    actions: Tensor | None,
    illegal: Tensor | None,
) -> Changes:
    """The same as whole-tensor operations."""
    stage, blueprint, target, alpha = (
        after.stage,
        after.blueprint,
        after.alpha_target,
        after.alpha,
    )
    if ended is not None:
        over = ended.unsqueeze(1)
        last = _last_words(before, actions, illegal)
        stage, blueprint, target = (
            torch.where(over, said, seen)
            for said, seen in zip(last, (stage, blueprint, target), strict=True)
        )
        alpha = torch.where(over, before.alpha, alpha)
    moved = stage != before.stage
    swapped = ~moved & (blueprint != before.blueprint)
    aimed = ~moved & ~swapped & (target != before.alpha_target)
    word = WORD.to(stage.device)[before.stage, stage]
    word = torch.where(aimed, WORDS.index("aimed"), word)
    env, slot = torch.nonzero(moved | swapped | aimed, as_tuple=True)
    kind = torch.where(blueprint >= 0, blueprint, before.blueprint)
    return Changes(
        env=env,
        slot=slot,
        what=word[env, slot],
        before=before.stage[env, slot],
        after=stage[env, slot],
        blueprint=kind[env, slot],
        alpha=alpha[env, slot],
    )


def _last_words(
    before: SlotStates, actions: Tensor | None, illegal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Stage, blueprint and target after a sentence that nobody saw the outcome of."""
    if actions is None:
        return before.stage, before.blueprint, before.alpha_target
    device = before.stage.device
    op, slot, kind, aim = (
        actions[:, HEAD[head]].unsqueeze(1)
        for head in ("op", "slot", "blueprint", "alpha_target")
    )
    here = torch.arange(before.stage.shape[1], device=device) == slot
    here = here & (op != Op.WAIT)
    if illegal is not None:
        here = here & ~illegal.unsqueeze(1)
    aims = AIMS.to(before.alpha_target)[aim]
    return (
        torch.where(here, NEXT_STAGE.to(device)[op, before.stage], before.stage),
        torch.where(here & (op == Op.GERMINATE), kind, before.blueprint),
        torch.where(here & (op == Op.SET_ALPHA), aims, before.alpha_target),
    )


def _found_at_once(
    before: SlotStates,
    after: SlotStates,
    ended: Tensor | None,
    actions: Tensor | None,
    illegal: Tensor | None,
) -> Changes:
    """The same in one compiled loop."""
    envs, slots = before.stage.shape
    names = ("stage", "blueprint", "alpha_target", "alpha")
    seen = [
        _array(getattr(states, name)) for name in names for states in (before, after)
    ]
    none = np.zeros(envs, np.bool_)
    flags = [none if flag is None else _array(flag) for flag in (ended, illegal)]
    said = NOTHING if actions is None else _array(actions)
    found = np.empty((6, envs * slots), np.int64)
    alpha = np.empty(envs * slots, seen[-1].dtype)
    tables = WORD.numpy(), NEXT_STAGE.numpy(), AIMS.numpy()
    count = _compare(*seen, *flags, said, *tables, found, alpha)
    env, slot, what, left, entered, kind = torch.from_numpy(found[:, :count].copy())
    return Changes(
        env=env,
        slot=slot,
        what=what,
        before=left,
        after=entered,
        blueprint=kind,
        alpha=torch.from_numpy(alpha[:count].copy()),
    )


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().contiguous().numpy()


@fused_with(words)
def _compare(
    stage, next_stage, kind, next_kind, aim, next_aim, alpha, next_alpha,
    ended, illegal, said, words, outcome, aims, found, alphas,
):  # fmt: skip
    """Write what happened; return how much did."""
    count = 0
    for env in range(stage.shape[0]):
        over = ended[env]
        heard = over and len(said) > 0 and not illegal[env] and said[env, OP] != WAIT
        for slot in range(stage.shape[1]):
            left, seed, aimed = stage[env, slot], kind[env, slot], aim[env, slot]
            entered, grown, aiming = left, seed, aimed
            if not over:
                entered, grown = next_stage[env, slot], next_kind[env, slot]
                aiming = next_aim[env, slot]
            elif heard and said[env, SLOT] == slot:
                op = said[env, OP]
                entered = outcome[op, left]
                if op == GERMINATE:
                    grown = said[env, BLUEPRINT]
                elif op == SET_ALPHA:
                    aiming = aims[said[env, TARGET]]
            moved = entered != left
            if not moved and grown == seed and aiming == aimed:
                continue
            word = words[left, entered]
            if not moved and grown == seed:
                word = AIMED
            found[0, count], found[1, count], found[2, count] = env, slot, word
            found[3, count], found[4, count] = left, entered
            found[5, count] = grown if grown >= 0 else seed
            alphas[count] = alpha[env, slot] if over else next_alpha[env, slot]
            count += 1
    return count
