"""Controllers that look at nothing but the clock: what every claim is measured against.

Waiting, chance, two schedules and a recording. None of them cares whether growth
would help; a policy that does must be better than all of them.
"""

import torch
from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, NUM_HEADS, ActionSpec, Op
from esper.contracts.controller import ControllerState
from esper.contracts.errors import BadInput
from esper.contracts.masks import ActionMasks
from esper.contracts.observation import Observation
from esper.simic.agent.distribution import (
    HEAD_GROUPS,
    masked_log_softmax,
    relevant,
    rows_of_group,
    sample,
)
from esper.tamiyo.gardening import PATIENCE, Preference, tend


class Never:
    """Waits, whatever happens."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """WAIT everywhere."""
        envs = masks.op.shape[0]
        waits = torch.zeros(envs, NUM_HEADS, dtype=torch.int64, device=masks.op.device)
        return waits, None


class Random:
    """Draws each head evenly from what is legal given the heads before it."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """One uniformly legal sentence per environment."""
        actions, _ = Never().decide(observation, masks, state, generator)
        for group, heads in enumerate(HEAD_GROUPS):
            rows = rows_of_group(masks, group, actions)
            even = masked_log_softmax(torch.zeros(rows.shape, device=rows.device), rows)
            actions[:, heads[0] : heads[-1] + 1] = sample(even, rows, generator)
        return actions, None


class Early:
    """Plants whenever it can in the first part of the horizon, then never again.

    Args:
        spec: The action space.
        until: Share of the horizon in which seeds are planted.
        blueprint: The only one to plant; the largest widening that fits if None.
        patience: Steps a seed trains before it is blended in.
    """

    def __init__(
        self,
        spec: ActionSpec,
        until: float = 0.3,
        *,
        blueprint: str | None = None,
        patience: int = PATIENCE,
    ) -> None:
        if not 0.0 <= until <= 1.0:
            raise BadInput(f"until must be a share in [0, 1], got {until}.")
        self.until, self.patience = until, patience
        self._preference = Preference(spec, blueprint)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Tend, and plant while it is early."""
        due = observation.host.progress < self.until
        wish = self._preference.wish(observation.offers, due)
        return tend(observation, masks, wish, patience=self.patience), None


class Periodic:
    """Plants for the n-th time when n periods of the horizon have passed.

    A planting that could not be made is made up for later. What is remembered is the
    number of plantings of the episode.

    Args:
        spec: The action space.
        every: Length of a period as a share of the horizon.
        blueprint: The only one to plant; the largest widening that fits if None.
        patience: Steps a seed trains before it is blended in.
    """

    def __init__(
        self,
        spec: ActionSpec,
        every: float = 0.1,
        *,
        blueprint: str | None = None,
        patience: int = PATIENCE,
    ) -> None:
        if not 0.0 < every <= 1.0:
            raise BadInput(f"every must be a share in (0, 1], got {every}.")
        self.every, self.patience = every, patience
        self._preference = Preference(spec, blueprint)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Tend, and plant if fewer seeds were planted than periods have passed."""
        planted = counted(state, observation)
        # 0.7 / 0.1 falls short of 7 by rounding.
        due = observation.host.progress / self.every + 1e-4 >= planted + 1
        wish = self._preference.wish(observation.offers, due)
        actions = tend(observation, masks, wish, patience=self.patience)
        return actions, planted + (actions[:, HEAD["op"]] == Op.GERMINATE.value)


class Replay:
    """Plays a recorded sequence of actions, whatever happens: the open-loop control.

    If a policy does no better than her own actions, recorded in one episode and
    replayed in another, then what she saw did not matter to what she did. A sentence
    that is not legal now becomes WAIT, and after its end the recording waits. What is
    remembered is the time since the start of the episode.

    Args:
        actions: The recording, int64 [time, head], or [time, env, head] with one
            sequence for each environment.
    """

    def __init__(self, actions: Tensor) -> None:
        if (
            actions.dtype is not torch.int64
            or actions.ndim not in (2, 3)
            or actions.shape[-1] != NUM_HEADS
        ):
            raise BadInput(
                f"actions must be int64 [time, {NUM_HEADS}] or [time, env, "
                f"{NUM_HEADS}], got {actions.dtype} {[*actions.shape]}."
            )
        if actions.ndim == 2:
            actions = actions.unsqueeze(1)
        end = actions.new_zeros(1, *actions.shape[1:])
        self._actions = torch.cat([actions, end])  # the end is WAIT, for ever

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """The sentence recorded for this time, or WAIT if it is not legal."""
        envs, device = masks.op.shape[0], masks.op.device
        if self._actions.shape[1] not in (1, envs):
            raise BadInput(
                f"the recording is of {self._actions.shape[1]} environments, got "
                f"{envs}; replay as many, or one sequence [time, {NUM_HEADS}] for all."
            )
        self._actions = self._actions.to(device)
        time = counted(state, observation)
        row = time.clamp(max=len(self._actions) - 1)
        every = self._actions.expand(-1, envs, -1)
        actions = every[row, torch.arange(envs, device=device)]
        return _legal_or_wait(actions, masks), time + 1


def _legal_or_wait(
    actions: Int64[Tensor, "env head"], masks: ActionMasks
) -> Int64[Tensor, "env head"]:
    """The sentences, without what their ops do not use; WAIT where illegal."""
    sizes = [masks.fixed.shape[2]] * NUM_HEADS
    sizes[HEAD["op"]] = masks.op.shape[1]
    sizes[HEAD["slot"]], sizes[HEAD["blueprint"]] = masks.blueprint.shape[1:]
    last = torch.tensor(sizes, device=actions.device) - 1
    inside = actions.clamp(torch.zeros_like(last), last)
    used = relevant(inside)
    inside = torch.where(used, inside, 0)
    rows = [rows_of_group(masks, group, inside) for group in range(len(HEAD_GROUPS))]
    legal = torch.cat(rows, dim=1).gather(2, inside.unsqueeze(2)).squeeze(2)
    legal &= (inside == actions) | ~used
    return torch.where(legal.all(dim=1, keepdim=True), inside, 0)


def counted(state: ControllerState, observation: Observation) -> Int64[Tensor, " env"]:
    """What was counted so far in this episode."""
    if not isinstance(state, Tensor):
        return torch.zeros_like(observation.first, dtype=torch.int64)
    return torch.where(observation.first, 0, state)
