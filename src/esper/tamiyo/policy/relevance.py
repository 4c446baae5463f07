"""Which choices of a sentence were heard: `RELEVANT[op, head]`, looked up by op.

A head that its op does not use changed nothing, so it earns and teaches nothing: its
log-probability, entropy, divergence and gradient are selected away by this mask.
"""

from functools import cache

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, RELEVANT


def relevant(
    actions: Int64[Tensor, "*batch head"],
) -> Bool[Tensor, "*batch head"]:
    """Whether each head was used by the op of its sentence; the op always was."""
    return _relevant_on(actions.device)[actions[..., HEAD["op"]]]


@cache
def _relevant_on(device: torch.device) -> Tensor:
    # One copy per device, usable with gradients even if inference asks for it first.
    with torch.inference_mode(False):
        return RELEVANT.to(device)
