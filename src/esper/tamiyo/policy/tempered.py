r"""A trained policy with less chance.

    p_i ~ exp(logit_i / temperature)

When to act is a matter of chance to a policy that was trained by sampling: to plant
with a probability of one in three at every step means to plant soon, while the
likeliest choice is to wait, for ever. So a policy is judged, and used, as it was
trained, only surer. Heads end in linear maps, so other weights there are all it takes.
"""

from copy import deepcopy
from typing import Final

import torch

from esper.tamiyo.policy.network import TamiyoPolicy

TEMPERATURE: Final = 0.5
"""At which policies are judged and used."""


def tempered(policy: TamiyoPolicy, temperature: float = TEMPERATURE) -> TamiyoPolicy:
    """A copy of the policy that draws at this temperature."""
    sure = deepcopy(policy)
    heads = (sure.op_out, sure.slot_score, sure.offer_score, sure.rest_out)
    with torch.no_grad():
        for head in heads:
            for parameter in head.parameters():
                parameter.div_(temperature)
    return sure
