"""A random baseline matched to a policy's number and times of plantings.

If a policy does no better than seeds of random kinds at random places and times, as
many as it planted and in the same part of the horizon, its choices did not matter.
"""

import torch
from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.actions import ActionMasks, ActionSpec
from esper.contracts.errors import BadInput
from esper.contracts.world import ControllerState, Observation
from esper.tamiyo.rule_based import germinates, next_actions


class MatchedRandom:
    """Plants a given number of seeds at decisions drawn uniformly from a range.

    A planting that could not be made is made up for later. Every legal offer is equally
    likely. The state is the number of plantings of the episode, and how many are due by
    each decision.

    Args:
        spec: The action space.
        counts: Seeds to plant in each environment, int64 [env].
        first: Share of the horizon at the first decision of the range, [env].
        last: Share of the horizon at its last decision, [env].
        horizon: Decisions of an episode.
    """

    def __init__(
        self,
        spec: ActionSpec,
        counts: Tensor,
        first: Tensor,
        last: Tensor,
        *,
        horizon: int,
    ) -> None:
        shapes = [[*given.shape] for given in (counts, first, last)]
        if counts.ndim != 1 or shapes[1:] != [shapes[0]] * 2:
            raise BadInput(
                "counts, first and last must have one number for each environment, "
                f"got {shapes[0]}, {shapes[1]} and {shapes[2]}."
            )
        if horizon < 1 or bool((counts < 0).any()):
            raise BadInput("horizon must be at least 1 and no count negative.")
        self._kinds, self._counts = len(spec.blueprints), counts
        decision = torch.arange(horizon, device=counts.device)
        # Shares are of whole decisions, give or take what rounding does to them.
        low, high = (torch.round(share * horizon)[:, None] for share in (first, last))
        self._inside = (decision >= low) & (decision <= high)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Follow the rules, and plant a random offer if it is due."""
        if masks.blueprint.shape[::2] != (len(self._counts), self._kinds):
            raise BadInput(
                f"expected {len(self._counts)} environments and {self._kinds} "
                f"blueprints, got {masks.blueprint.shape[0]} and "
                f"{masks.blueprint.shape[2]}."
            )
        drawn = self._draw(generator)
        planted, due = torch.zeros_like(drawn[:, 0]), drawn
        if isinstance(state, tuple):
            planted = torch.where(observation.first, 0, state[0])
            due = torch.where(observation.first[:, None], drawn, state[1])
        horizon = due.shape[1]
        now = torch.round(observation.host.progress * horizon).long()
        wanted = due.gather(1, now.clamp(0, horizon - 1)[:, None]).squeeze(1)
        lot = torch.rand(
            masks.blueprint.shape, generator=generator, device=generator.device
        ).to(masks.blueprint.device)
        scores = torch.where((planted < wanted)[:, None, None], lot, -torch.inf)
        actions = next_actions(observation, masks, scores)
        return actions, (planted + germinates(actions), due)

    def _draw(self, generator: Generator) -> Int64[Tensor, "env decision"]:
        """Draw how many seeds are due by each decision."""
        inside = self._inside
        lot = torch.rand(inside.shape, generator=generator, device=generator.device)
        lot = torch.where(inside, lot.to(inside.device), 2.0)
        rank = lot.argsort(dim=1).argsort(dim=1)
        chosen = inside & (rank < self._counts[:, None])
        by_now = chosen.long().cumsum(dim=1)
        # More than fit into the range are due from its end on.
        missing = self._counts - by_now[:, -1]
        latest = inside.shape[1] - 1 - inside.flip(1).long().argmax(dim=1)
        decision = torch.arange(inside.shape[1], device=inside.device)
        return by_now + torch.where(decision >= latest[:, None], missing[:, None], 0)
