"""A rollout buffer as one writes it first: one environment, one field, one write.

Steps are added environment by environment; each head has its own tensors for
actions, log-probabilities and masks; the memory of an LSTM is kept at every step.
`step_counts` is a list. Nothing is checked.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper.contracts.actions import HEAD_NAMES, ActionSpec


class NaiveRolloutBuffer:
    """About thirty small writes per environment and step."""

    def __init__(
        self,
        num_envs: int,
        max_steps: int,
        spec: ActionSpec,
        *,
        observation_width: int,
        hidden_width: int,
    ) -> None:
        self.num_envs, self.max_steps = num_envs, max_steps
        shape = (num_envs, max_steps)
        sizes = dict(zip(HEAD_NAMES, spec.sizes, strict=True))
        self.step_counts = [0] * num_envs
        self.observations = torch.zeros(*shape, observation_width)
        self.episode_start = torch.zeros(shape, dtype=torch.bool)
        self.values = torch.zeros(shape)
        self.rewards = torch.zeros(shape)
        self.dones = torch.zeros(shape, dtype=torch.bool)
        self.truncated = torch.zeros(shape, dtype=torch.bool)
        self.bootstrap_values = torch.zeros(shape)
        self.actions = {h: torch.zeros(shape, dtype=torch.long) for h in sizes}
        self.log_probs = {h: torch.zeros(shape) for h in sizes}
        self.masks = {
            head: torch.zeros(*shape, size, dtype=torch.bool)
            for head, size in sizes.items()
        }
        self.hidden_h = torch.zeros(*shape, hidden_width)
        self.hidden_c = torch.zeros(*shape, hidden_width)

    def add(
        self,
        env: int,
        *,
        observation: Tensor,
        episode_start: bool,
        actions: Mapping[str, int],
        log_probs: Mapping[str, float],
        masks: Mapping[str, Tensor],
        value: float,
        reward: float,
        terminated: bool,
        truncated: bool,
        bootstrap_value: float,
        hidden_h: Tensor,
        hidden_c: Tensor,
    ) -> None:
        """Store one step of one environment."""
        t = self.step_counts[env]
        self.observations[env, t] = observation
        self.episode_start[env, t] = episode_start
        for head in HEAD_NAMES:
            self.actions[head][env, t] = actions[head]
            self.log_probs[head][env, t] = log_probs[head]
            self.masks[head][env, t] = masks[head]
        self.values[env, t] = value
        self.rewards[env, t] = reward
        self.dones[env, t] = terminated or truncated
        self.truncated[env, t] = truncated and not terminated
        self.bootstrap_values[env, t] = bootstrap_value
        self.hidden_h[env, t] = hidden_h
        self.hidden_c[env, t] = hidden_c
        self.step_counts[env] = t + 1

    def get_batched_sequences(self, device: str = "cpu") -> dict[str, Any]:
        """Everything on the device, and which steps are there."""
        counts = torch.tensor(self.step_counts, device=device)
        steps = torch.arange(self.max_steps, device=device)
        batch: dict[str, Any] = {
            name: field.to(device)
            for name, field in vars(self).items()
            if isinstance(field, Tensor)
        }
        for name in ("actions", "log_probs", "masks"):
            fields = getattr(self, name)
            batch[name] = {head: field.to(device) for head, field in fields.items()}
        batch["valid_mask"] = steps.unsqueeze(0) < counts.unsqueeze(1)
        return batch

    def reset(self) -> None:
        """Start over; storage is written over."""
        self.step_counts = [0] * self.num_envs

    def bytes_per_step(self) -> float:
        """What one step of one environment takes."""
        fields = [field for field in vars(self).values() if isinstance(field, Tensor)]
        for heads in (self.actions, self.log_probs, self.masks):
            fields += heads.values()
        return sum(field.nbytes for field in fields) / (self.num_envs * self.max_steps)
