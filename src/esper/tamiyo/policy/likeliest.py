"""A trained policy without chance: always the likeliest choice of every head."""

from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.controller import ControllerState
from esper.contracts.masks import ActionMasks
from esper.contracts.observation import Observation
from esper.tamiyo.policy.network import TamiyoPolicy


class Likeliest:
    """How a policy is read out where the best choice is always the same one."""

    def __init__(self, policy: TamiyoPolicy) -> None:
        self.policy = policy

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """The likeliest legal sentence per environment."""
        return self.policy.decide(observation, masks, state, None)
