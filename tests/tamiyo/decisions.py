"""Observations with chosen values, and episodes of decisions over them."""

from dataclasses import replace

import torch
from torch import Generator

from esper.tamiyo.policy.action_masks import compute_masks
from tests.rollouts import require_legal
from tests.worlds import blank_observation


def observed(spec, envs=1, *, episode_start=False, host=None, offers=None, **slots):
    """Hosts with empty slots and nothing measured, apart from what is given.

    Values of hosts are broadcast to [env], of slots to [env, slot], of offers to
    [env, slot, blueprint].
    """
    blank = blank_observation(envs, spec)

    def changed(part, values):
        tensors = {
            name: torch.as_tensor(value, dtype=getattr(part, name).dtype).expand_as(
                getattr(part, name)
            )
            for name, value in values.items()
        }
        return replace(part, **tensors)

    return replace(
        blank,
        episode_start=torch.as_tensor(episode_start).expand(envs),
        host=changed(blank.host, host or {}),
        offers=changed(blank.offers, offers or {}),
        slots=changed(blank.slots, slots),
    )


def decide(controller, observation, spec, state=None, generator=None):
    """Legal actions [env, head] and the new state."""
    masks = compute_masks(observation, spec)
    generator = generator or Generator()
    actions, state = controller.decide(observation, masks, state, generator)
    require_legal(observation, spec, actions)
    return actions, state


def play(controller, episode, spec, generator=None):
    """The actions of all decisions, [decision, env, head]."""
    taken, state = [], None
    for observation in episode:
        actions, state = decide(controller, observation, spec, state, generator)
        taken.append(actions)
    return torch.stack(taken)
