"""Observations and rollouts of the size of a real run, drawn at random."""

from dataclasses import replace

import torch
from torch import Generator

from esper.contracts.actions import ActionSpec
from esper.contracts.stages import Stage
from esper.contracts.world import Observation
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import compute_features
from esper.tamiyo.policy.network import TamiyoPolicy
from tests.worlds import blank_observation

SPEC = ActionSpec()


def random_observation(
    envs: int, generator: Generator, spec: ActionSpec = SPEC
) -> Observation:
    """Slots in every stage, a twentieth of the episodes just begun."""
    blank = blank_observation(envs, spec)
    shape = blank.slots.stage.shape
    slots = replace(
        blank.slots,
        stage=torch.randint(0, len(Stage), shape, generator=generator),
        age=torch.randint(0, 5, shape, generator=generator),
        alpha=torch.rand(shape, generator=generator),
        alpha_settled=torch.rand(shape, generator=generator) < 0.7,
        contribution=torch.randn(shape, generator=generator),
        contribution_measured=torch.rand(shape, generator=generator) < 0.5,
    )
    first = torch.rand(envs, generator=generator) < 0.05
    return replace(blank, slots=slots, episode_start=first)


@torch.inference_mode()
def filled_buffer(
    policy: TamiyoPolicy, envs: int, steps: int, rng_seed: int = 0
) -> TamiyoRolloutBuffer:
    """A buffer full of `policy`'s steps in random observations."""
    generator = Generator().manual_seed(rng_seed)
    buffer = TamiyoRolloutBuffer(
        envs, steps, policy.spec, state_shape=policy.state_shape
    )
    state = policy.initial_state(envs)
    buffer.begin(state, 0)
    observation = random_observation(envs, generator, policy.spec)
    for _ in range(steps):
        features = compute_features(observation, policy.spec)
        decision = policy.act(
            features,
            compute_masks(observation, policy.spec),
            observation.episode_start,
            state,
            generator,
        )
        following = random_observation(envs, generator, policy.spec)
        buffer.add(
            features=features,
            episode_start=observation.episode_start,
            masks=decision.masks,
            actions=decision.actions,
            log_probs=decision.log_probs,
            distribution=decision.distribution,
            values=decision.values,
            rewards=torch.randn(envs, generator=generator),
            terminated=following.episode_start,
            truncated=torch.zeros_like(following.episode_start),
        )
        observation, state = following, decision.state
    buffer.finish(torch.zeros(envs))
    return buffer
