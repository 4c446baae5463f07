"""Acting as it is usually written: one distribution object per head, one by one."""

import torch
from torch import Generator, Tensor
from torch.distributions import Categorical

from esper.contracts.actions import HEAD_NAMES, NUM_HEADS, ActionMasks
from esper.tamiyo.policy.features import Features
from esper.tamiyo.policy.heads import HEAD_GROUPS
from esper.tamiyo.policy.network import TamiyoPolicy


def act_with_categoricals(
    policy: TamiyoPolicy,
    features: Features,
    masks: ActionMasks,
    first: Tensor,
    state: Tensor,
    generator: Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same network; masks filled with -1e8, a `Categorical` per head.

    Draws come from torch's global stream, as `Categorical` offers no other.
    """
    context, state = policy._encode_step(features, first, state)
    actions = torch.zeros(first.shape[0], NUM_HEADS, dtype=torch.int64)
    log_probs: dict[str, Tensor] = {}
    groups = policy.head_logits(context)
    choice = None
    for heads in HEAD_GROUPS:
        group_logits = groups.send(choice).view(len(first), len(heads), -1)
        for index, head in enumerate(heads):
            logits = group_logits[:, index]
            row = masks[HEAD_NAMES[head]]
            logits = logits[:, : row.shape[1]].masked_fill(~row, -1e8)
            distribution = Categorical(logits=logits)
            actions[:, head] = distribution.sample()
            choice = actions[:, head]
            log_probs[HEAD_NAMES[head]] = distribution.log_prob(actions[:, head])
    return actions, torch.stack(list(log_probs.values()), dim=1), state
