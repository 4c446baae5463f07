"""Gymnasium environments as a `World` for rollouts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from esper.contracts.world import StepResult
from esper.rl.observations import ObservationReader
from esper.rl.vector import Vector, View


@dataclass(frozen=True, slots=True)
class GymSeen:
    """Input of the policy for all environments."""

    features: dict[str, Tensor]
    masks: Bool[Tensor, "env *op head choice"] | None
    episode_start: Bool[Tensor, " env"]
    acts: Bool[Tensor, " env"] | None
    """Environments whose next action counts; None: all of them."""


class GymWorld:
    """Environments and the reader of their observations.

    `seed` is that of the next reset. With `learn`, the reader updates its statistics.
    """

    group_size = 1

    def __init__(
        self,
        vector: Vector,
        reader: ObservationReader,
        seed: int | None = None,
        *,
        learn: bool = False,
    ) -> None:
        self.vector, self.num_envs, self.seed = vector, vector.num_envs, seed
        self._reader, self._learn = reader, learn

    def reset(self) -> GymSeen:
        """Start a new episode in every environment."""
        return self._seen(self.vector.reset(self.seed))

    def step(self, actions: Shaped[Tensor, "env head"]) -> StepResult[GymSeen]:
        """Step every environment."""
        acts, step = self._acts, self.vector.step(self.vector.spec.to_env(actions))
        final = None
        if (step.truncated & ~step.terminated & acts).any():
            final = self._seen(step.view, step.final, acts)
        return StepResult(
            observation=self._seen(step.view),
            reward=torch.from_numpy(step.rewards),
            terminated=torch.from_numpy(step.terminated),
            truncated=torch.from_numpy(step.truncated),
            final=final,
        )

    def _seen(
        self,
        view: View,
        final: Any = None,  # noqa: ANN401
        acted: Any = None,  # noqa: ANN401
    ) -> GymSeen:
        """Features of a view, or of the final observations where `acted`."""
        if acted is None:
            shown, acts, learn = view.observation, view.acts, self._learn
            self._acts = acts
        else:
            shown, acts, learn = final, acted, False
        features = self._reader.read(shown, acts, view.where, learn=learn)
        start = torch.from_numpy(np.asarray(view.episode_start))
        all_act = None if acts.all() else torch.from_numpy(acts)
        return GymSeen(features, view.masks, start, all_act)
