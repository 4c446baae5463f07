"""One look, one choice among a few schedules: a linear contextual bandit.

    arm = argmax over arms of  weights[arm] @ context

It waits for a few decisions, looks at the host once, and then plays the schedule of the
largest predicted return, whatever happens. If a policy does no better, then it pays to
look once, but not to go on looking.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from jaxtyping import Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.controller import ControllerState
from esper.contracts.errors import BadInput
from esper.contracts.masks import ActionMasks
from esper.contracts.observation import Observation
from esper.tamiyo.controls import counted
from esper.tamiyo.policy.features import (
    HOST_COLUMNS,
    OFFER_COLUMNS,
    compute_features,
)
from esper.tamiyo.schedule import Schedule, Timetable, plantings

LOOK: Final = 4
"""Decisions that are waited for; promises are known by then in a default world."""
SUMMED_UP: Final = ("promise", "net_promise", "promise_known")
"""Columns of the offers that a context has the mean and the largest of."""
CONTEXT: Final = (
    *(column.name for column in HOST_COLUMNS),
    *(f"mean_{name}" for name in SUMMED_UP),
    *(f"max_{name}" for name in SUMMED_UP),
    "one",
)
"""What each number of a context is."""

Chooser = Callable[[Float[Tensor, "env context"]], Int64[Tensor, " env"]]
"""Says which arm each environment is to play; asked at every decision."""


class OneLook:
    """Plays in each environment the schedule that is chosen after a look.

    What is remembered are the decisions and plantings of the episode and the choice.

    Args:
        spec: The action space.
        arms: The schedules to choose from.
        choose: Who chooses; its answer counts at decision `look`, counted from 0.
        look: Decisions that are waited for.
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
        """Wait, choose when it is time, and play on."""
        kept = state if isinstance(state, tuple) else (None, None, None)
        time, planted, arm = (counted(each, observation) for each in kept)
        chosen = self._choose(context(observation, self._spec))
        arm = torch.where(time == self.look, chosen, arm)
        may = time >= self.look
        actions = self._table.said(observation, masks, arm, planted, may)
        return actions, (time + 1, planted + plantings(actions), arm)


class LinearBandit(OneLook):
    """Chooses the schedule of the largest predicted return.

    Args:
        spec: The action space.
        arms: The schedules to choose from.
        weights: What each number of `CONTEXT` adds to the return of each arm.
        look: Decisions that are waited for.
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

    def _best(self, seen: Float[Tensor, "env context"]) -> Int64[Tensor, " env"]:
        weights = self._weights.to(seen.device)
        return (seen.to(weights.dtype) @ weights.T).argmax(dim=1)


def context(observation: Observation, spec: ActionSpec) -> Float[Tensor, "env context"]:
    """What the bandit sees: the host, a summary of all promises, and a 1."""
    features = compute_features(observation, spec)
    names = [column.name for column in OFFER_COLUMNS]
    columns = [names.index(name) for name in SUMMED_UP]
    offers = torch.stack([features.offers[..., each] for each in columns], dim=-1)
    one = torch.ones_like(features.host[:, :1])
    parts = [features.host, offers.mean(dim=(1, 2)), offers.amax(dim=(1, 2)), one]
    return torch.cat(parts, dim=1)
