"""Gymnasium environments as a world that rollouts step."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from esper.contracts.world import EpisodeReport
from esper.rl.observations import ObservationReader
from esper.rl.vector import Vector, View


@dataclass(frozen=True, slots=True)
class GymSeen:
    """What a policy reads of all environments before they act."""

    features: dict[str, Tensor]
    masks: Bool[Tensor, "env *op head choice"] | None
    episode_start: Bool[Tensor, " env"]
    acts: Bool[Tensor, " env"] | None
    """Environments whose next action counts; None: all of them."""


@dataclass(frozen=True, slots=True)
class GymStep:
    """What one action of all environments leads to."""

    observation: GymSeen
    reward: Float[Tensor, " env"]
    terminated: Bool[Tensor, " env"]
    truncated: Bool[Tensor, " env"]
    final: GymSeen | None
    report: ClassVar[EpisodeReport | None] = None


class GymWorld:
    """All environments, and how their observations are read.

    Args:
        vector: The environments.
        reader: Reads observations.
        seed: Of the next reset.
        learn: Whether the reader's statistics count what is seen.
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
        """Start a new episode everywhere."""
        return self._seen(self.vector.reset(self.seed))

    def step(self, actions: Shaped[Tensor, "env head"]) -> GymStep:
        """Act everywhere."""
        acts, step = self._acts, self.vector.step(self.vector.spec.to_env(actions))
        final = None
        if (step.truncated & ~step.terminated & acts).any():
            final = self._seen(step.view, step.final, acts)
        return GymStep(
            self._seen(step.view),
            torch.from_numpy(step.rewards),
            torch.from_numpy(step.terminated),
            torch.from_numpy(step.truncated),
            final,
        )

    def _seen(
        self,
        view: View,
        final: Any = None,  # noqa: ANN401
        acted: Any = None,  # noqa: ANN401
    ) -> GymSeen:
        """What is shown, or the final observations of those that acted."""
        acts = view.acts if acted is None else acted
        shown = view.observation if acted is None else final
        learn = self._learn and acted is None
        features = self._reader.read(shown, acts, view.where, learn=learn)
        if acted is None:
            self._acts = acts
        start = torch.from_numpy(np.asarray(view.episode_start))
        all_act = None if acts.all() else torch.from_numpy(acts)
        return GymSeen(features, view.masks, start, all_act)
