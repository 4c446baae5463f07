"""The protocol of controllers: learned policies and hand-written rules."""

from typing import Protocol, runtime_checkable

from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.masks import ActionMasks
from esper.contracts.observation import Observation

ControllerState = Tensor | tuple[Tensor, ...] | None
"""What a controller remembers between decisions; None if nothing."""


@runtime_checkable
class Controller(Protocol):
    """Decides for all environments at once."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Choose one legal action per environment.

        Args:
            observation: What is seen; where `observation.first` is set, whatever was
                remembered is of another episode and must not be used.
            masks: What is possible. Heads that the chosen op does not use are 0.
            state: What this controller returned at the last decision; None at first.
            generator: The only source of randomness.
        """
        ...
