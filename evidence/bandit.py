"""A linear contextual bandit that chooses among a few schedules, once per episode.

    arm = argmax over arms of  weights[arm] @ context

It waits for a few decisions, observes the host once, and then follows the schedule of
the largest predicted return. If a policy does no better, it pays to observe once, but
not to go on observing.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from jaxtyping import Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import ActionMasks, ActionSpec
from esper.contracts.errors import BadInput
from esper.contracts.world import ControllerState, Observation
from esper.tamiyo.policy.features import (
    HOST_COLUMNS,
    OFFER_COLUMNS,
    compute_features,
)
from esper.tamiyo.rule_based import episode_count, germinates
from esper.tamiyo.schedule import Schedule, Timetable

LOOK: Final = 4
"""Decisions before the choice; promises are known by then in a default world."""
SUMMARISED: Final = ("promise", "net_promise", "promise_known")
"""Columns of the offers whose mean and maximum are in the context."""
CONTEXT: Final = (
    *(column.name for column in HOST_COLUMNS),
    *(f"mean_{name}" for name in SUMMARISED),
    *(f"max_{name}" for name in SUMMARISED),
    "one",
)
"""Names of the columns of a context."""

Chooser = Callable[[Float[Tensor, "env context"]], Int64[Tensor, " env"]]
"""From contexts to the arm of each environment; called at every decision."""


class OneChoice:
    """Follows in each environment the schedule that is chosen at decision `look`.

    The state are the decisions and plantings of the episode, and the chosen arm.

    Args:
        spec: The action space.
        arms: The schedules to choose from.
        choose: Chooses the arms; its answer counts at decision `look` only.
        look: Decisions before the choice.
    """

    def __init__(
        self,
        spec: ActionSpec,
        arms: Sequence[Schedule],
        choose: Chooser,
        look: int = LOOK,
    ) -> None:
        if look < 0:
            raise BadInput(f"look must be a whole number from 0, got {look}.")
        self.look = look
        self._spec, self._choose = spec, choose
        self._table = Timetable(spec, arms)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Wait, choose an arm, then follow it."""
        parts = state if isinstance(state, tuple) else (None, None, None)
        time, planted, arm = (episode_count(part, observation) for part in parts)
        chosen = self._choose(context(observation, self._spec))
        arm = torch.where(time == self.look, chosen, arm)
        allowed = time >= self.look
        actions = self._table.actions(observation, masks, arm, planted, allowed)
        return actions, (time + 1, planted + germinates(actions), arm)


class LinearBandit(OneChoice):
    """Chooses the schedule of the largest predicted return.

    Args:
        spec: The action space.
        arms: The schedules to choose from.
        weights: Of the columns in `CONTEXT`, for the return of each arm.
        look: Decisions before the choice.
    """

    def __init__(
        self,
        spec: ActionSpec,
        arms: Sequence[Schedule],
        weights: Float[Tensor, "arm context"],
        look: int = LOOK,
    ) -> None:
        if weights.shape != (len(arms), len(CONTEXT)):
            raise BadInput(
                f"weights must be {[len(arms), len(CONTEXT)]} for {len(arms)} arms, "
                f"got {[*weights.shape]}."
            )
        self._weights = weights
        super().__init__(spec, arms, self._best, look)

    def _best(self, contexts: Float[Tensor, "env context"]) -> Int64[Tensor, " env"]:
        weights = self._weights.to(contexts.device)
        return (contexts.to(weights.dtype) @ weights.T).argmax(dim=1)


def context(observation: Observation, spec: ActionSpec) -> Float[Tensor, "env context"]:
    """The host's features, a summary of all promises, and a constant 1."""
    features = compute_features(observation, spec)
    names = [column.name for column in OFFER_COLUMNS]
    columns = [names.index(name) for name in SUMMARISED]
    offers = torch.stack([features.offers[..., each] for each in columns], dim=-1)
    one = torch.ones_like(features.host[:, :1])
    parts = [features.host, offers.mean(dim=(1, 2)), offers.amax(dim=(1, 2)), one]
    return torch.cat(parts, dim=1)
