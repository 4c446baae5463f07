r"""A trained policy read out with less chance, or none.

    p_i ~ exp(logit_i / temperature)

When to act is a matter of chance to a policy that was trained by sampling: to plant
with a probability of one in three at every step means to plant soon, while the
likeliest choice is to wait, for ever. So a policy is judged, and used, as it was
trained, only with a lower temperature.
"""

from copy import deepcopy
from typing import Final

import torch
from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.actions import ActionMasks
from esper.contracts.world import ControllerState, Observation
from esper.tamiyo.policy.network import TamiyoPolicy

TEMPERATURE: Final = 0.25
"""At which policies are judged and used."""


def with_temperature(
    policy: TamiyoPolicy, temperature: float = TEMPERATURE
) -> TamiyoPolicy:
    """A copy of the policy that samples at this temperature."""
    copy = deepcopy(policy)
    # Heads end in linear maps, so other weights there are all it takes.
    with torch.no_grad():
        for head in copy.logit_layers():
            for parameter in head.parameters():
                parameter.div_(temperature)
    return copy


class GreedyPolicy:
    """A controller that always takes the likeliest choice of every head."""

    def __init__(self, policy: TamiyoPolicy) -> None:
        self.policy = policy

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """The likeliest legal choices of every environment."""
        return self.policy.decide(observation, masks, state, None)
