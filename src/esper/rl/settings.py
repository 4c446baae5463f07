"""Settings of `esper.PPO` and of a run of `esper ppo`.

The names are those of the constructor of `PPO` and of the options of `esper ppo`.
"""

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from esper.contracts.errors import unknown
from esper.contracts.messages import quoted, refusal
from esper.rl.vector import Vectorization
from esper.runs.run import validate_name
from esper.runs.settings import Count, RngSeed, Text, settings
from esper.runs.sinks import LoggerName
from esper.runs.train_config import CheckpointConfig, check_limits
from esper.simic.agent.memory import MemoryName
from esper.simic.agent.ppo import PPOConfig
from esper.workers.deadline import TIMEOUT

DEFAULTS: Final = PPOConfig(
    learning_rate=2e-3,
    epochs=4,
    minibatches=8,
    entropy_coef=0.01,
    target_kl=0.03,
)
"""One set for all tasks."""
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@settings
class PPOSettings:
    """Everything that was chosen about an agent, apart from its environment."""

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
    ppo: PPOConfig = DEFAULTS
    """Hyperparameters of the PPO update."""

    def __post_init__(self) -> None:
        """Refuse what the fields alone let through."""
        check_limits("ppo", self.ppo)


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
    logger: tuple[LoggerName, ...] = ()
    """Also log metrics with csv, mlflow, tensorboard, trackio or wandb. NAME:FOLDER
    writes to that folder."""
    checkpoint: CheckpointConfig = field(
        default_factory=lambda: CheckpointConfig(every=20)
    )
    """Checkpoints, each of which starts new episodes."""
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


def settings_from(values: Mapping[str, Any]) -> PPOSettings:
    """Settings of an agent from the arguments of its constructor.

    Args:
        values: By name; `ppo` may be a mapping that changes some of the defaults.
    """
    ppo = values["ppo"]
    if not isinstance(ppo, PPOConfig):
        if not isinstance(ppo, Mapping):
            raise refusal(f"ppo must be a PPOConfig or a mapping, got {quoted(ppo)}.")
        usual = asdict(DEFAULTS)
        for name, value in ppo.items():
            if name not in usual:
                raise unknown("ppo has no setting", name, usual)
            if callable(value):
                raise refusal(f"ppo.{name} is a function. Schedules are not supported.")
        try:
            ppo = _PPO.validate_python(usual | _plain(ppo))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(("ppo", *map(str, first["loc"])))
            why = first["msg"].removeprefix("Input should be ")
            text = f"{name} must be {why}, got {quoted(first['input'])}."
            raise first.get("ctx", {}).get("error") or refusal(text) from None
    return PPOSettings(**_plain({**values, "ppo": ppo}))


def _plain(value: Any) -> Any:  # noqa: ANN401
    """A value without NumPy's numbers, which files do not hold."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value.item() if isinstance(value, np.generic) else value


_PPO: Final = TypeAdapter(PPOConfig)
