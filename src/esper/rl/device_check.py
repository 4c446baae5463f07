"""Check of a device: the same training on the CPU and on the device.

`compare` trains two agents with the same seed, for every memory, in a small environment
with masks and two heads. It returns the largest difference of their weights.
"""

import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from esper.contracts.devices import usable_device
from esper.contracts.errors import InvalidInputError
from esper.contracts.state import save
from esper.rl.ppo import PPO
from esper.simic.agent.memory import MEMORIES

SIZES: Final = (3, 4)
EPISODE_STEPS: Final = 12
ROLLOUT_STEPS: Final = 32
TOLERANCE: Final = 1e-3
"""Rounding gives differences below 1e-5; an error gives some above 1e-2."""


class MatchEnv(gymnasium.Env[Any, Any]):
    """Rewards actions that match the last observation; some actions are illegal."""

    observation_space = spaces.Box(0, 3, (2,), np.float32)
    action_space = spaces.MultiDiscrete([*SIZES])

    def action_masks(self) -> np.ndarray[Any, Any]:
        """Legal choices: all but one of each head."""
        banned = [(int(self._seen[0]) + 1) % 3, 3 + (int(self._seen[1]) + 1) % 4]
        return ~np.isin(np.arange(sum(SIZES)), banned)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Start an episode."""
        super().reset(seed=seed)
        self._time = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        """Reward the heads that match."""
        reward = float((np.asarray(action) == self._seen).mean())
        self._time += 1
        is_last, is_cut = self._time == EPISODE_STEPS, bool(self._seen[0])
        return self._observe(), reward, is_last and not is_cut, is_last and is_cut, {}

    def _observe(self) -> np.ndarray[Any, Any]:
        self._seen = self.np_random.integers(SIZES).astype(np.float32)
        return self._seen


class DeviceComparison(NamedTuple):
    """Trainings with one memory on the CPU and on a device."""

    memory: str
    difference: float
    """Largest difference between two weights."""
    cpu_seconds: float
    device_seconds: float

    @property
    def passed(self) -> bool:
        """Whether the weights are equal up to rounding; False for NaN."""
        return self.difference <= TOLERANCE


def compare(device: torch.device | str, updates: int = 3) -> Iterator[DeviceComparison]:
    """Train on the CPU and on a device, with every memory.

    Raises:
        InvalidInputError: This machine cannot use the device.
    """
    where = usable_device(device)
    if where.type == "meta":
        raise InvalidInputError("device 'meta' has no numbers. Use another one.")
    for memory in MEMORIES:
        weights, seconds = [], []
        for each in (torch.device("cpu"), where):
            start = time.perf_counter()
            agent = PPO(
                MatchEnv,
                memory=memory,  # type: ignore[arg-type]
                num_envs=8,
                rollout_steps=ROLLOUT_STEPS,
                minibatches=2,
                device=each,
            )
            agent.learn(updates * agent.settings.num_envs * ROLLOUT_STEPS)
            weights.append(save(agent.policy))
            seconds.append(time.perf_counter() - start)
        cpu, other = (torch.cat([*map(torch.flatten, w.values())]) for w in weights)
        yield DeviceComparison(memory, float((cpu - other).abs().max()), *seconds)
