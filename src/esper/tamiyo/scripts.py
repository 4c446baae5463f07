"""Actions written down beforehand: trees of scripts that share their beginnings.

A script says for every decision what is done: nothing, a widening of some place, or the
removal of the youngest seed. Scripts of a host form a tree: several of them do the same
up to a decision and part there. Hosts of the same luck that follow them are, up to that
decision, the same network to the bit, so what they become afterwards is due to the
choice alone.

    code 0                          wait
    code 1 + place * kinds + kind   plant blueprint `kind` at a place
    code -1                         prune the youngest seed
"""

from typing import Final

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, NUM_HEADS, ActionMasks, ActionSpec, Op
from esper.contracts.errors import InvalidInputError
from esper.contracts.world import ControllerState, Observation
from esper.tamiyo.policy.heads import relevant
from esper.tamiyo.rule_based import episode_count

PRUNE: Final = -1
WAITING: Final = 0.4
"""Share of the scripts in a node that wait where the others act."""
PRUNING: Final = 0.15
"""Chance that pruning is among the actions of a node in which something grows."""
NEXT: Final = 0.15
"""Share of the episode up to which the scripts of a node part, in the mean."""
Codes = NDArray[np.int64]


def draw_scripts(
    scripts: int,
    decisions: int,
    places: int,
    kinds: int,
    slots: int,
    chance: np.random.Generator,
) -> Codes:
    """A tree of scripts, `[script, decision]`; the first of them always waits.

    Args:
        scripts: How many.
        decisions: Of an episode.
        places: Places of the host.
        kinds: Blueprints on offer.
        slots: Seeds that a place can hold.
        chance: The random generator.
    """
    codes = np.zeros((scripts, decisions), dtype=np.int64)

    def part(members: Codes, begin: int, grown: tuple[int, ...]) -> None:
        """Let scripts that agree so far part at some decision, and go on from there."""
        wait = chance.exponential(NEXT * decisions)
        # A third part as soon as they can: growing early is what matters most.
        at = begin + (0 if chance.random() < 1 / 3 else int(wait))
        if len(members) < 2 or at >= decisions:
            return
        choices = [
            1 + place * kinds + kind
            for place in range(places)
            for kind in range(kinds)
            if grown[place] < slots
        ]
        chance.shuffle(choices)
        if sum(grown) and chance.random() < PRUNING:
            choices.insert(0, PRUNE)
        waiting = max(1, round(WAITING * len(members)))
        acting = members[waiting:]
        part(members[:waiting], at + 1, grown)
        for action, own in zip(
            choices,
            np.array_split(acting, min(len(acting), len(choices))),
            strict=False,
        ):
            codes[own, at] = action
            after = [*grown]
            if action != PRUNE:
                after[(action - 1) // kinds] += 1
            part(own, at + 1, tuple(after))

    part(np.arange(scripts), 0, (0,) * places)
    return codes


class Scripted:
    """Follows one script in every environment; what is not possible is a WAIT.

    Args:
        spec: The action space; slot s stands at place s % places.
        codes: `[env, decision]`; after its end nothing is done.
        places: Places of the host.
    """

    def __init__(self, spec: ActionSpec, codes: Codes, places: int) -> None:
        self._codes = torch.from_numpy(np.asarray(codes))
        self._places, self._kinds = places, len(spec.blueprints)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """What the scripts say; the state is the number of the decision."""
        envs, device = len(observation.episode_start), masks.op.device
        if envs != len(self._codes):
            raise InvalidInputError(
                f"there are scripts for {len(self._codes)} environments, got {envs}."
            )
        decision = episode_count(state, observation)
        at = decision.clamp(max=self._codes.shape[1] - 1)
        code = self._codes.to(device).gather(1, at[:, None])[:, 0]
        code = torch.where(decision < self._codes.shape[1], code, 0)
        kind = (code - 1).clamp(min=0) % self._kinds
        place = (code - 1).clamp(min=0) // self._kinds
        slots = torch.arange(masks.slot.shape[2], device=device)
        here = slots % self._places == place[:, None]
        rows = torch.arange(envs, device=device)
        free = masks.blueprint[rows, :, kind] & here & (code > 0)[:, None]
        # Seeds of a slot further on are younger: slots of a place fill in order.
        prunable = masks.slot[:, Op.PRUNE] & (code == PRUNE)[:, None]
        youngest = observation.slots.age.masked_fill(~prunable, 1 << 40).argmin(dim=1)
        plants, prunes = free.any(dim=1), prunable.any(dim=1)
        actions = torch.zeros(envs, NUM_HEADS, dtype=torch.int64, device=device)
        actions[:, HEAD["op"]] = Op.GERMINATE * plants + Op.PRUNE * prunes
        actions[:, HEAD["slot"]] = torch.where(
            plants, free.int().argmax(dim=1), youngest * prunes
        )
        actions[:, HEAD["blueprint"]] = kind * plants
        # The other heads have one choice each where seeds take part at once.
        only = masks.fixed.int().argmax(dim=2)
        rest = slice(HEAD["blueprint"] + 1, None)
        actions[:, rest] = only[:, rest]
        return torch.where(relevant(actions), actions, 0), decision + 1
