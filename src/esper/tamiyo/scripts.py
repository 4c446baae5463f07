"""Predefined sequences of actions: trees of scripts with common beginnings.

A script has one action per decision: wait, widen some place, or prune the youngest
seed. The scripts of a host form a tree: they agree up to a decision and branch there.
With common random numbers their hosts are equal to the bit up to that decision, so
later differences are due to the action.

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

PRUNE: Final = -1
WAIT_FRACTION: Final = 0.4
"""Fraction of the scripts of a node that wait."""
PRUNE_PROBABILITY: Final = 0.15
"""Probability that pruning is among the actions of a node with seeds."""
MEAN_BRANCH_TIME: Final = 0.15
"""Mean time to the next branch, as a fraction of the episode."""
Codes = NDArray[np.int64]


def draw_scripts(
    scripts: int,
    decisions: int,
    places: int,
    kinds: int,
    slots: int,
    chance: np.random.Generator,
) -> Codes:
    """Draw a tree of scripts, `[script, decision]`; the first one always waits.

    Args:
        scripts: Number of scripts.
        decisions: Decisions per episode.
        places: Places of the host.
        kinds: Number of blueprints.
        slots: Slots per place.
        chance: The random generator.
    """
    codes = np.zeros((scripts, decisions), dtype=np.int64)

    def part(members: Codes, begin: int, grown: tuple[int, ...]) -> None:
        """Branch scripts that agree so far at some decision, recursively."""
        wait = chance.exponential(MEAN_BRANCH_TIME * decisions)
        # A third of the nodes branch at once, because early growth matters most.
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
        if sum(grown) and chance.random() < PRUNE_PROBABILITY:
            choices.insert(0, PRUNE)
        waiting = max(1, round(WAIT_FRACTION * len(members)))
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
    """Follows one script per environment; waits where an action is illegal.

    Args:
        spec: The action space; slot s is at place s % places.
        codes: Scripts `[env, decision]`; after their end it waits.
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
        """Return the actions of the scripts; the state counts decisions."""
        envs, device = len(observation.episode_start), masks.op.device
        if envs != len(self._codes):
            raise InvalidInputError(
                f"there are scripts for {len(self._codes)} environments, got {envs}."
            )
        decision = torch.zeros_like(observation.episode_start, dtype=torch.int64)
        if isinstance(state, Tensor):
            decision = torch.where(observation.episode_start, 0, state)
        at = decision.clamp(max=self._codes.shape[1] - 1)
        code = self._codes.to(device).gather(1, at[:, None])[:, 0]
        code = torch.where(decision < self._codes.shape[1], code, 0)
        kind = (code - 1).clamp(min=0) % self._kinds
        place = (code - 1).clamp(min=0) // self._kinds
        slots = torch.arange(masks.slot.shape[2], device=device)
        here = slots % self._places == place[:, None]
        rows = torch.arange(envs, device=device)
        free = masks.blueprint[rows, :, kind] & here & (code > 0)[:, None]
        prunable = masks.slot[:, Op.PRUNE] & (code == PRUNE)[:, None]
        youngest = observation.slots.age.masked_fill(~prunable, 1 << 40).argmin(dim=1)
        plants, prunes = free.any(dim=1), prunable.any(dim=1)
        actions = torch.zeros(envs, NUM_HEADS, dtype=torch.int64, device=device)
        actions[:, HEAD["op"]] = Op.GERMINATE * plants + Op.PRUNE * prunes
        actions[:, HEAD["slot"]] = torch.where(
            plants, free.int().argmax(dim=1), youngest * prunes
        )
        actions[:, HEAD["blueprint"]] = kind * plants
        # The other heads have one legal choice each if seeds are blended at once.
        only = masks.fixed.int().argmax(dim=2)
        rest = slice(HEAD["blueprint"] + 1, None)
        actions[:, rest] = only[:, rest]
        return torch.where(relevant(actions), actions, 0), decision + 1
