"""Controllers that do not learn: what every claim is measured against."""

import torch
from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.actions import NUM_HEADS
from esper.contracts.controller import ControllerState
from esper.contracts.masks import ActionMasks
from esper.contracts.observation import Observation
from esper.tamiyo.policy.distribution import (
    HEAD_GROUPS,
    masked_log_softmax,
    rows_of_group,
    sample,
)


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
