"""Settings of `esper.PPO` and of a run of `esper ppo`.

The names are those of the constructor of `PPO` and of the options of `esper ppo`.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from esper.rl.vector import Vectorization
from esper.runs.run import validate_name
from esper.runs.settings import Count, RngSeed, Text, settings
from esper.runs.train_config import CheckpointConfig, check_limits
from esper.simic.agent.memory import MemoryName
from esper.simic.agent.ppo import PPOConfig
from esper.workers.deadline import TIMEOUT

Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@settings
class PPOSettings(PPOConfig):
    """Everything that was chosen about an agent, apart from its environment."""

    learning_rate: float = 2e-3
    minibatches: int = 8
    memory: MemoryName = "none"
    """Memory type: mingru, gru, lstm or none."""
    num_envs: Count = 16
    """Number of parallel environments."""
    rollout_steps: Count = 128
    """Steps per environment between two updates."""
    vectorization: Vectorization = "sync"
    """Where environments run: sync (one process), async (a process each) or native
    (the environment's own)."""
    env_timeout: Annotated[float, Field(gt=0, le=10**6)] = TIMEOUT
    """Time limit of one environment call in seconds."""
    gamma: Fraction = 0.99
    """Discount factor per step."""
    gae_lambda: Fraction = 0.95
    """GAE lambda: 0 is one-step TD, 1 is Monte Carlo."""
    end_factor: Fraction = 0.1
    """Learning rate and entropy coefficients fall linearly to this fraction."""
    width: Count = 64
    """Width of the hidden layers and of the memory."""
    layers: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of memory layers."""
    separate_value: bool = False
    """Use a separate encoder and memory for the value function."""
    autoregressive: bool = False
    """Condition each action head on the actions of the heads before it."""
    normalize: bool = True
    """Normalise numeric observations with running statistics."""
    seed: RngSeed = 0
    """Seed of weights, actions, minibatches and environments."""

    def __post_init__(self) -> None:
        """Refuse what the fields alone let through."""
        PPOConfig.__post_init__(self)
        check_limits("", self, PPOConfig)


@settings
class PPORunConfig(PPOSettings):
    """A run of PPO in one environment."""

    env: Text = "CartPole-v1"
    """Gymnasium id of the environment."""
    total_steps: Annotated[int, Field(ge=1, le=10**12)] = 100_000
    """Total environment steps, summed over all environments."""
    device: Text = "cpu"
    """Device of the policy and its updates, such as cuda. Environments run on the
    CPU."""
    checkpoint: CheckpointConfig = field(
        default_factory=lambda: CheckpointConfig(every=20)
    )
    """Checkpoints and logs; every checkpoint starts new episodes."""
    episodes: Count = 20
    """Episodes of the final evaluation."""
    name: Annotated[str, Field(max_length=255)] | None = None
    """Name of the run; none: a generated name."""
    runs: Text = "runs"
    """Folder that contains the runs."""

    def __post_init__(self) -> None:
        """Refuse what the fields alone let through."""
        PPOSettings.__post_init__(self)
        if self.name is not None:
            validate_name(self.name)


def plain(value: Any) -> Any:  # noqa: ANN401
    """A value without NumPy's numbers, which files do not hold."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return value.item() if isinstance(value, np.generic) else value
