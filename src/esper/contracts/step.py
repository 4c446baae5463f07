"""What a world answers to a decision, and what it must offer to be trained in.

`terminated` and `truncated` are two facts: is there no future, or did we only stop
looking? Worlds reset ended environments in the same step: `observation` is then the
first of the next episode and `final` the last of the old one.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step of every environment."""

    observation: Observation
    """What is seen next; of a new episode where the old one ended."""
    reward: Float[Tensor, " env"]
    terminated: Bool[Tensor, " env"]
    """The episode has no future."""
    truncated: Bool[Tensor, " env"]
    """The episode was cut although it had a future."""
    final: Observation | None = None
    """The true last observation where truncated; None if nothing was truncated."""


@runtime_checkable
class VectorWorld(Protocol):
    """Many environments that step together."""

    @property
    def spec(self) -> ActionSpec:
        """What can be said in this world."""
        ...

    @property
    def num_envs(self) -> int:
        """How many environments step together."""
        ...

    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        ...

    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Act everywhere; ended environments start anew in the same step."""
        ...
