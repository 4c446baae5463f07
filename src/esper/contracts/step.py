"""What a world returns for a decision, and the protocol of worlds.

`terminated` and `truncated` are two facts: the episode has no future, or it was only
cut. Worlds reset ended environments in the same step: `observation` is then the first
of the next episode and `final` the last of the old one.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    """Results of the episodes that ended in a step."""

    env: Int64[Tensor, " ended"]
    score: Float[Tensor, " ended"]
    """On the decision rows."""
    test: Float[Tensor, " ended"]
    """On the test rows, which no decision and no reward ever sees."""
    added: Float[Tensor, " ended"]
    """Parameters added, as a multiple of the host's."""
    macs: Float[Tensor, " ended"]
    """Multiply-adds per row, as a multiple of the host's."""
    panicked: Bool[Tensor, " ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step of every environment."""

    observation: Observation
    """The next observation; of a new episode where the old one ended."""
    reward: Float[Tensor, " env"]
    terminated: Bool[Tensor, " env"]
    """The episode has no future."""
    truncated: Bool[Tensor, " env"]
    """The episode was cut although it had a future."""
    final: Observation | None = None
    """The true last observation where truncated; None if nothing was truncated."""
    illegal: Bool[Tensor, " env"] | None = None
    """Where the action was not possible; None if the world does not report it."""
    report: EpisodeReport | None = None
    """Results of the episodes that ended, if any did and the world has results."""


@runtime_checkable
class VectorWorld(Protocol):
    """Many environments that step together."""

    @property
    def spec(self) -> ActionSpec:
        """The action space."""
        ...

    @property
    def num_envs(self) -> int:
        """How many environments step together."""
        ...

    @property
    def group_size(self) -> int:
        """How many environments in a row have the same random streams."""
        return 1

    def begin_round(self) -> Observation | None:
        """Called before every rollout; the first observation if all episodes are new.

        A world whose environments are drawn anew for every rollout draws them here.
        """
        return None

    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        ...

    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Act everywhere; ended environments start anew in the same step."""
        ...
