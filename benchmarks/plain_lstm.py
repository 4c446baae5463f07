"""Recurrent PPO as one plain script would have it, to be timed beside `esper.PPO`.

In the manner of CleanRL's LSTM agents: an `nn.LSTM` that is stepped through time with
its state zeroed where episodes begin, policy and value on top of it, minibatches of
whole environments, Gymnasium's own vectors, one Discrete action, no masks.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

State = tuple[Tensor, Tensor]
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class Agent(nn.Module):
    """Encoder, LSTM, policy and value."""

    def __init__(self, inputs: int, actions: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
        self.lstm = nn.LSTM(width, width)
        self.policy = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, actions)
        )
        self.value = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, seen: Tensor, first: Tensor, state: State) -> tuple[Any, ...]:
        """Policy, value and state after `[time, env]` steps."""
        hidden, outputs = self.encoder(seen), []
        for inputs, fresh in zip(hidden, first, strict=True):
            keep = 1.0 - fresh.view(1, -1, 1)
            state = (keep * state[0], keep * state[1])
            output, state = self.lstm(inputs.unsqueeze(0), state)
            outputs.append(output)
        hidden = torch.cat(outputs).flatten(0, 1)
        return Categorical(logits=self.policy(hidden)), self.value(hidden)[:, 0], state


class PlainLSTM:
    """Rollouts and updates of one agent."""

    def __init__(self, make: Any, envs: int, steps: int, parts: int) -> None:  # noqa: ANN401
        same = AutoresetMode.SAME_STEP
        self.envs = SyncVectorEnv([make] * envs, autoreset_mode=same)
        self.count, self.steps, self.parts = envs, steps, parts
        space, actions = self.envs.single_observation_space, self.envs.action_space
        assert isinstance(actions, gymnasium.spaces.MultiDiscrete)
        assert space.shape is not None
        self.agent = Agent(space.shape[0], int(actions.nvec[0]), 64)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), 3e-4, eps=1e-5)
        self.seen = self.envs.reset(seed=0)[0]
        self.episode_start = np.ones(envs, np.float32)
        self.state: State = (torch.zeros(1, envs, 64), torch.zeros(1, envs, 64))

    def round(self) -> None:
        """One rollout and four epochs."""
        start, rows = self.state, []
        for _ in range(self.steps):
            seen, first = (
                torch.from_numpy(self.seen),
                torch.from_numpy(self.episode_start),
            )
            with torch.no_grad():
                chances, value, self.state = self.agent(
                    seen[None], first[None], self.state
                )
                action = chances.sample()
            found = self.envs.step(action.numpy())
            self.seen, ended = found[0], found[2] | found[3]
            self.episode_start = ended.astype(np.float32)
            reward = torch.from_numpy(found[1]).float()
            log_prob = chances.log_prob(action)
            rows.append((seen.clone(), first, action, log_prob, value, reward))
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        columns += self._advantages(columns)
        for _ in range(4):
            for part in torch.randperm(self.count).chunk(self.parts):
                inside = (start[0][:, part], start[1][:, part])
                self._step([column[:, part] for column in columns], inside)

    def _advantages(self, columns: list[Tensor]) -> list[Tensor]:
        """Advantages and returns by a loop over time."""
        _, first, _, _, values, rewards = columns
        seen, fresh = torch.from_numpy(self.seen), torch.from_numpy(self.episode_start)
        with torch.no_grad():
            following = self.agent(seen[None], fresh[None], self.state)[1]
        advantages, trace, is_first = torch.zeros_like(values), 0.0, fresh
        for time in reversed(range(self.steps)):
            going = 1.0 - is_first
            delta = rewards[time] + GAMMA * going * following - values[time]
            trace = delta + GAMMA * LAMBDA * going * trace
            advantages[time] = trace
            following, is_first = values[time], first[time]
        return [advantages, advantages + values]

    def _step(self, part: list[Tensor], state: State) -> None:
        """One optimiser step."""
        seen, first, action, log_prob, _, _, advantage, target = part
        chances, value, _ = self.agent(seen, first, state)
        ratio = (chances.log_prob(action.flatten()) - log_prob.flatten()).exp()
        gain = advantage.flatten()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.min(gain * ratio, gain * clipped).mean()
        loss = loss + 0.25 * (value - target.flatten()).square().mean()
        loss = loss - 0.01 * chances.entropy().mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
        self.optimizer.step()
