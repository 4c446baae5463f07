"""Random minibatches for the objective, and what the reference says of them."""

from dataclasses import replace

import torch
from torch import Generator

from esper.contracts.actions import NUM_HEADS
from esper.contracts.devices import map_tensors
from esper.simic.agent.distribution import (
    Evaluation,
    chosen,
    masked_log_softmax,
    sample,
)
from esper.simic.agent.losses import PPOConfig, Targets, loss_weights, ppo_terms
from esper.simic.agent.rollout_buffer import SequenceBatch
from esper.tamiyo.policy.features import Features
from tests.references import ppo as reference

CHOICES = 6


def weights(
    mode="joint", value=0.5, value_clip=None, entropy=0.01, clip=0.2, exploration=0.0
):
    """Settings, and the weights of entropy and exploration of each head."""
    if not isinstance(entropy, torch.Tensor):
        entropy = entropy * (1.0 + torch.arange(NUM_HEADS))
    config = PPOConfig(
        clip_range=clip, clip_mode=mode, value_coef=value, value_clip=value_clip
    )
    return config, entropy, exploration * (1.0 + torch.arange(NUM_HEADS))


class Case:
    """A random minibatch; `view(logits)` is what a policy with them would say."""

    def __init__(self, rng_seed, envs=2, time=3, scale=0.3, open_share=0.5, **fixed):
        generator = Generator().manual_seed(rng_seed)
        shape = (envs, time, NUM_HEADS, CHOICES)

        def noise(*axes):
            return torch.randn(envs, time, *axes, generator=generator)

        legal = torch.rand(shape, generator=generator) < 0.6
        forced = torch.rand(shape[:3], generator=generator) > open_share
        legal = fixed.get("masks", legal & ~forced.unsqueeze(-1))
        nothing = ~legal.any(dim=-1)
        place = torch.randint(CHOICES, shape[:3], generator=generator)
        legal = legal | torch.nn.functional.one_hot(place, CHOICES).bool() & (
            nothing.unsqueeze(-1)
        )
        old_logits = noise(NUM_HEADS, CHOICES)
        old = masked_log_softmax(old_logits, legal)
        actions = sample(old, legal, generator)
        self.logits = old_logits + scale * noise(NUM_HEADS, CHOICES)
        self.values, self.targets, self.old_values = noise(), noise(), noise()
        valid = torch.rand(envs, time, generator=generator) < 0.8
        self.batch = SequenceBatch(
            features=Features(noise(1), noise(1, 1), noise(1, 1, 1)),
            episode_start=torch.zeros(envs, time, dtype=torch.bool),
            masks=legal,
            actions=actions,
            log_probs=chosen(old, actions),
            distribution=old,
            values=self.old_values,
            advantages=fixed.get("advantages", noise()),
            returns=self.targets,
            valid_mask=fixed.get("valid", valid),
            state=torch.zeros(envs, 1, 1),
        )

    def terms(self, settings, logits=None, values=None):
        logits = self.logits if logits is None else logits
        distribution = masked_log_softmax(logits, self.batch.masks)
        new = Evaluation(
            logits=logits,
            distribution=distribution,
            log_probs=chosen(distribution, self.batch.actions),
            normalized_values=self.values if values is None else values,
        )
        batch = replace(self.batch, returns=self.targets, values=self.old_values)
        return ppo_terms(new, Targets.of(batch), settings[0], loss_weights(*settings))

    def twice(self):
        """Have every environment twice, one batch after the other."""
        self.batch = map_tensors(lambda x: torch.cat((x, x)), self.batch)
        for name in ("logits", "values", "targets", "old_values"):
            setattr(self, name, torch.cat((getattr(self, name),) * 2))

    def expected(self, settings):
        """The same objective from the reference, one real step at a time."""
        batch, steps = self.batch, []
        for env, time in batch.valid_mask.nonzero().tolist():
            here, choices = (env, time), []
            for head in range(NUM_HEADS):
                row = batch.masks[env, time, head]
                legal = [i for i in range(CHOICES) if row[i]]
                if len(legal) > 1:
                    new = self.logits[env, time, head, legal].tolist()
                    old = batch.distribution[env, time, head, legal].tolist()
                    taken = legal.index(int(batch.actions[env, time, head]))
                    choices.append(reference.Choice(head, new, old, taken))
            numbers = (batch.advantages, self.values, self.targets, self.old_values)
            steps.append(reference.Step(choices, *(float(x[here]) for x in numbers)))
        return reference.objective(
            steps,
            heads=NUM_HEADS,
            clip=settings[0].clip_range,
            mode=settings[0].clip_mode,
            value_clip=settings[0].value_clip,
            value_weight=settings[0].value_coef,
            entropy_weights=settings[1].tolist(),
            exploration_weights=settings[2].tolist(),
        )
