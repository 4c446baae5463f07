"""Sampling from a trained policy at a lower temperature.

    p_i ~ exp(logit_i / temperature)

A policy trained by sampling may plant with probability 1/3 at every step; its likeliest
choice is then to wait forever. So policies are evaluated by sampling, at a lower
temperature.
"""

from copy import deepcopy
from typing import Final

import torch

from esper.tamiyo.policy.network import TamiyoPolicy

TEMPERATURE: Final = 0.25
"""Temperature of evaluation and use."""


def with_temperature(
    policy: TamiyoPolicy, temperature: float = TEMPERATURE
) -> TamiyoPolicy:
    """Return a copy of the policy that samples at this temperature."""
    copy = deepcopy(policy)
    # Logits are linear in the last layers, so scaling their weights is enough.
    with torch.no_grad():
        for head in copy.logit_layers():
            for parameter in head.parameters():
                parameter.div_(temperature)
    return copy
