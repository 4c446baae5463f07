"""Settings of `esper.PPO` and of a run of `esper ppo`.

The names are those of the constructor of `PPO` and of the options of `esper ppo`.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import wraps
from inspect import signature
from math import cos, inf, pi
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypedDict, TypeVar, cast

import numpy as np
from pydantic import Field, PlainValidator, WithJsonSchema

from esper.contracts.messages import quoted, refusal, unknown
from esper.rl.vector import Vectorization
from esper.runs.run import validate_name
from esper.runs.settings import Count, RngSeed, Text, settings
from esper.runs.sinks import LoggerName
from esper.runs.train_config import CheckpointConfig
from esper.simic.agent.losses import ClipMode
from esper.simic.agent.memory import MemoryName
from esper.simic.agent.ppo import PPOConfig
from esper.workers.deadline import TIMEOUT

F = TypeVar("F", bound=Callable[..., Any])
Fraction = Annotated[float, Field(ge=0, le=1)]

FALLS: Final[dict[str, Callable[[float], float]]] = {
    "constant": lambda progress: 0.0,
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 - 0.5 * cos(pi * progress),
}
"""How much of the way to `end_factor` is done at some progress from 0 to 1."""
MANY_ENVS: Final = 32
FEW_ENVS: Final = 16
ROLLOUT: Final = 2048
"""Steps of all environments between two updates, by default."""
EXPLORATION: Final = 0.006
SCHEDULES: Final = ("schedule", "clip_schedule")
LOST: Final = "function "
"""Start of a schedule that was a function; a file keeps only its name."""
Schedule = Literal["constant", "linear", "cosine"] | Callable[[float], float]


def _schedule(given: object) -> object:
    if callable(given) or (isinstance(given, str) and given.startswith(LOST)):
        return given
    if not isinstance(given, str) or given not in FALLS:
        raise unknown("there is no schedule", str(given), FALLS)
    return given


ScheduleSetting = Annotated[
    Schedule, PlainValidator(_schedule), WithJsonSchema({"type": "string"})
]


SETTINGS_BEFORE: Final = MappingProxyType({"exploration_coef": 0.0})
"""Values of settings that older files do not have."""


@settings
class PPOSettings(PPOConfig):
    """Everything that was chosen about an agent, apart from its environment."""

    learning_rate: float = 5e-3
    minibatches: int = cast("int", None)
    """Minibatches per pass; 8 without memory, 4 with memory."""
    exploration_coef: float = cast("float", None)
    """Coefficient of -KL(uniform || policy) of choices; 0 without memory, 0.006 with
    memory. It falls with the square of the schedule."""
    memory: MemoryName = "none"
    """Memory type: conv-mingru, mingru, attention, gru, lstm or none."""
    num_envs: Count = cast("int", None)
    """Number of parallel environments; 32 without memory, 16 with memory."""
    rollout_steps: Count = cast("int", None)
    """Steps per environment between two updates; 2048 in all environments together."""
    vectorization: Vectorization = "sync"
    """Where environments run: sync (one process), async (several processes) or native
    (the environment's own)."""
    num_workers: Count | None = None
    """Processes of async environments; none: one per core."""
    env_timeout: Annotated[float, Field(gt=0, le=10**6)] = TIMEOUT
    """Time limit of one environment call in seconds."""
    gamma: Fraction = 0.99
    """Discount factor per step."""
    gae_lambda: Fraction = 0.95
    """GAE lambda: 0 is one-step TD, 1 is Monte Carlo."""
    schedule: ScheduleSetting = "linear"
    """How learning rate and entropy coefficients fall: linear, cosine or constant."""
    clip_schedule: ScheduleSetting = "constant"
    """How the clip range falls: linear, cosine or constant."""
    end_factor: Fraction = 0.1
    """Linear and cosine schedules fall to this fraction."""
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
        """Fill in what depends on other settings, and check all values."""
        # With memory, long rows matter more than many environments.
        has_memory = self.memory != "none"
        self._fill("num_envs", FEW_ENVS if has_memory else MANY_ENVS)
        self._fill("rollout_steps", max(ROLLOUT // self.num_envs, 1))
        # Rows of few environments are noisy: with memory, a minibatch has more steps.
        self._fill("minibatches", 4 if has_memory else 8)
        self._fill("exploration_coef", EXPLORATION if has_memory else 0.0)
        PPOConfig.__post_init__(self)

    def _fill(self, name: str, value: float) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def factors(self, progress: float) -> tuple[float, float]:
        """Factor of learning rate and entropy, and of the clip range, at a progress."""
        main, clip = (self._factor(name, progress) for name in SCHEDULES)
        return main, clip

    def _factor(self, name: str, progress: float) -> float:
        schedule: Schedule = getattr(self, name)
        if isinstance(schedule, str):
            return 1.0 + (self.end_factor - 1.0) * FALLS[schedule](progress)
        factor: object = schedule(progress)
        if not isinstance(factor, float | int | np.number) or not 0.0 <= factor < inf:
            raise refusal(
                f"{name} must return a finite number from 0, got {quoted(factor)} at "
                f"progress {progress:.3g}."
            )
        return float(factor)

    def require_schedules(self) -> None:
        """Refuse schedules that were functions and were not given again."""
        for name in SCHEDULES:
            text = getattr(self, name)
            if isinstance(text, str) and text.startswith(LOST):
                raise refusal(
                    f"{name} was the {text[:60]}, and a file holds no functions. Give "
                    f"{name}=... again."
                )


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


class Changes(TypedDict, total=False):
    """Settings that `PPO.load` can change; the others belong to the weights."""

    num_envs: int
    rollout_steps: int
    vectorization: Vectorization
    num_workers: int | None
    env_timeout: float
    seed: int | None
    gamma: float
    gae_lambda: float
    learning_rate: float
    epochs: int
    minibatches: int
    clip_range: float
    clip_mode: ClipMode
    target_kl: float
    entropy_coef: float | None
    head_entropy: Mapping[str, float]
    exploration_coef: float
    value_coef: float
    value_clip: float | None
    value_norm_decay: float
    max_grad_norm: float
    schedule: Schedule
    clip_schedule: Schedule
    end_factor: float


def changed(settings: PPOSettings, changes: Mapping[str, Any]) -> PPOSettings:
    """Settings of a saved agent with some changes; refuses what the weights fix."""
    for name in changes:
        if name not in Changes.__annotations__:
            if name in (*PPOSettings.__dataclass_fields__, "head_relevance"):
                raise refusal(f"{name} belongs to the saved weights. Omit it.")
            raise unknown("there is no setting", name, Changes.__annotations__)
    return replace(settings, **plain(numbers(changes)))


def numbers(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values; refuses schedules in place of numbers, as SB3 takes them."""
    for name, schedule in zip(("learning_rate", "clip_range"), SCHEDULES, strict=True):
        if callable(given := values.get(name)) or isinstance(given, str):
            raise refusal(
                f"{name} must be a number, got {quoted(given)}. Use {schedule}=..., "
                "such as 'linear' or a function from progress to a factor."
            )
    return values


def names_checked(method: F) -> F:
    """The method; an argument that it does not have raises an error with the name."""
    _, *known = signature(method).parameters

    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        given = [name for name in options if name not in known]
        if any(isinstance(each, str) and each.endswith("Policy") for each in args):
            given.append("policy")
        for name in given:
            raise unknown("there is no argument", name, known)
        return method(*args, **options)

    return cast("F", call)


def plain(value: Any) -> Any:
    """A value without NumPy's numbers, which files do not hold."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return value.item() if isinstance(value, np.generic) else value
