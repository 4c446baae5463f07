"""Events of seeds between two observations, for all slots at once.

Worlds report states, not changes: `events_between` compares two of them. A seed may
pass several stages within one decision. After the end of an episode the observation is
of the next one, so the effect of the last decision is computed from its action.
"""

from typing import Any, Final

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, Op
from esper.contracts.slots import SlotStates
from esper.contracts.stages import NEXT_STAGE, Stage

EVENTS: Final = (
    *("planted", "blending", "holding", "kept", "pruned", "cleared", "aimed", "jumped"),
)
"""Kinds of events; `aimed`: another alpha target; `jumped`: any other change."""

_GROWING: Final = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
_NAMED: Final = {
    **{(Stage.DORMANT, stage): "planted" for stage in _GROWING},
    (Stage.TRAINING, Stage.BLENDING): "blending",
    (Stage.TRAINING, Stage.HOLDING): "holding",
    (Stage.BLENDING, Stage.HOLDING): "holding",
    (Stage.HOLDING, Stage.FOSSILIZED): "kept",
    (Stage.COOLING, Stage.DORMANT): "cleared",
    **{(stage, Stage.COOLING): "pruned" for stage in _GROWING},
    **{(stage, Stage.DORMANT): "pruned" for stage in _GROWING},
}
EVENT_OF: Final = torch.tensor(
    [
        [EVENTS.index(_NAMED.get((before, after), "jumped")) for after in Stage]
        for before in Stage
    ]
)
"""Event of a change of stage, int64 [stage, stage]."""
ALPHA_TARGETS: Final = torch.tensor([*HEADS[HEAD["alpha_target"]].choices.values()])


def events_between(
    before: SlotStates,
    after: SlotStates,
    *,
    ended: Bool[Tensor, " env"] | None = None,
    actions: Int64[Tensor, "env head"] | None = None,
    illegal: Bool[Tensor, " env"] | None = None,
) -> dict[str, list[Any]]:
    """Events of every slot in one step, in order of environment and slot.

    Args:
        before: State before the decision.
        after: State after it.
        ended: Where `after` is of another episode.
        actions: The actions, used only where an episode ended.
        illegal: Where the action was not carried out.

    Returns:
        Columns of the store's table `events`. `blueprint` is an index, -1 for none;
        `alpha` is the value after the step, or the last one of an ended episode.
    """
    stage, blueprint = after.stage, after.blueprint
    target, alpha = after.alpha_target, after.alpha
    if ended is not None:
        over = ended.unsqueeze(1)
        last = _last_action(before, actions, illegal)
        stage, blueprint, target = (
            torch.where(over, final, seen)
            for final, seen in zip(last, (stage, blueprint, target), strict=True)
        )
        alpha = torch.where(over, before.alpha, alpha)
    moved = stage != before.stage
    swapped = ~moved & (blueprint != before.blueprint)
    aimed = ~moved & ~swapped & (target != before.alpha_target)
    word = EVENT_OF.to(stage.device)[before.stage, stage]
    word = torch.where(aimed, EVENTS.index("aimed"), word)
    env, slot = torch.nonzero(moved | swapped | aimed, as_tuple=True)
    kind = torch.where(blueprint >= 0, blueprint, before.blueprint)
    found = {
        "env": env,
        "slot": slot,
        "what": word[env, slot],
        "stage_from": before.stage[env, slot],
        "stage_to": stage[env, slot],
        "blueprint": kind[env, slot],
        "alpha": alpha[env, slot],
    }
    columns: dict[str, list[Any]] = {
        name: part.tolist() for name, part in found.items()
    }
    columns["what"] = [EVENTS[index] for index in columns["what"]]
    for name in ("stage_from", "stage_to"):
        columns[name] = [Stage(number).name for number in columns[name]]
    return columns


def _last_action(
    before: SlotStates, actions: Tensor | None, illegal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Stage, blueprint and alpha target after an action of an ended episode."""
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
    aims = ALPHA_TARGETS.to(before.alpha_target)[aim]
    return (
        torch.where(here, NEXT_STAGE.to(device)[op, before.stage], before.stage),
        torch.where(here & (op == Op.GERMINATE), kind, before.blueprint),
        torch.where(here & (op == Op.SET_ALPHA), aims, before.alpha_target),
    )
