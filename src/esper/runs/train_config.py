"""The settings of a training, and presets of them.

    TrainConfig(tasks=("letter",), budget=Budget(minutes=5))
    resolve({"preset": "quick", "learner.ppo.learning_rate": "1e-3"})

`resolve` layers a preset, files and options; the later ones win.
"""

import hashlib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import field, fields
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from esper.contracts.actions import HEAD_NAMES
from esper.contracts.messages import quoted, refusal, short, unknown
from esper.environment.settings import WorldSettings as World
from esper.files import read_text
from esper.runs.records import ENDLESS, LADDER, STATIC
from esper.runs.run import validate_name
from esper.runs.settings import (
    NONE,
    Count,
    RngSeed,
    Text,
    as_flat,
    as_toml,
    construct,
    one_of,
    parsed_options,
    settings,
    table_of,
)
from esper.runs.sinks import LoggerName
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.registry import CONTROLLERS

FAMILY: Final = "family"
"""A family of tasks, each drawn at random, see `esper.tasks.family`."""
SIMULATED: Final = "simulated"
"""A world without networks: a formula, a thousand times as fast."""
WARM: Final = "warm"
"""Start from a policy pretrained on the simulated world."""
RECORDINGS: Final = "recordings"
"""Start from a policy fitted to recordings of the run's own tasks."""


def _tasks() -> Collection[str]:
    from esper.tasks.catalogue import TASKS

    return (SIMULATED, FAMILY, *TASKS)


TaskName = Annotated[str, one_of("task", _tasks)]
ArmName = Annotated[str, one_of("controller", lambda: (*CONTROLLERS, *STATIC, *LADDER))]
Rounds = Annotated[int, Field(ge=1, le=1_000_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@settings
class Budget:
    """When training ends: at the first limit that is reached."""

    rounds: Rounds | None = None
    """Maximum number of rounds. A round is one episode per environment and one PPO
    update."""
    minutes: Annotated[float, Field(gt=0, le=525_600)] | None = None
    """Maximum training time in minutes."""
    env_steps: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Maximum number of decisions, summed over all environments."""

    def __post_init__(self) -> None:
        """Refuse a training without an end."""
        if self.rounds is None and self.minutes is None and self.env_steps is None:
            raise refusal("set at least one of rounds, minutes and env_steps.")

    def rounds_of(self, env_steps: int) -> int:
        """Maximum number of rounds, if each takes `env_steps` decisions."""
        rounds = ENDLESS if self.rounds is None else self.rounds
        if self.env_steps is not None:
            rounds = min(rounds, ceil(self.env_steps / env_steps))
        return rounds


@settings
class Learner:
    """The policy and how it learns."""

    gamma: Fraction = 1.0
    """Discount factor per decision. With 1, the return is the final score minus
    rent."""
    gae_lambda: Fraction = 0.95
    """GAE lambda: 0 is one-step TD, 1 is Monte Carlo."""
    end_factor: Fraction = 0.1
    """The learning rate and entropy coefficients decay linearly to this fraction of
    their initial value."""
    ppo: PPOConfig = field(
        default_factory=lambda: PPOConfig(
            # Returns are noisy: few and small steps on all episodes at once.
            learning_rate=1e-3,
            epochs=2,
            minibatches=1,
            max_grad_norm=1.0,
            entropy_coef=5e-4,
            head_entropy={"op": 2e-3, "blueprint": 1e-3},
        )
    )
    """How the policy is improved from one rollout."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The size and kind of the policy."""

    def __post_init__(self) -> None:
        """Refuse entropy coefficients of heads that do not exist."""
        self.ppo.require_heads(*HEAD_NAMES)


@settings
class EvalConfig:
    """How the policy is compared with controllers that do not learn."""

    every: Rounds = 20
    """Rounds between two evaluations on the validation hosts, which select the best
    checkpoint."""
    hosts: Count = 16
    """Number of hosts per task in each evaluation."""
    controllers: tuple[ArmName, ...] = (*CONTROLLERS, "static")
    """Controllers and static networks to compare with the policy at the end. An empty
    list skips the final evaluation."""

    def __post_init__(self) -> None:
        """Refuse a controller that is named twice."""
        if self.controllers:
            require_distinct("controllers", self.controllers)


@settings
class CheckpointConfig:
    """Checkpoints of a run."""

    every: Rounds = 10
    """Rounds between two checkpoints."""
    last: Annotated[int, Field(ge=1, le=1_000)] = 3
    """Number of recent checkpoints to keep. The best one is always kept."""


@settings
class TrainConfig:
    """A training of Tamiyo."""

    tasks: tuple[TaskName, ...] = ("teacher", "mnist1d")
    """Tasks to train on (see esper tasks). Or "family": random tasks; or "simulated": a
    fast formula instead of networks. These two cannot be combined with other tasks."""
    num_envs: Count = 16
    """Number of environments per task."""
    variants: Count = 7
    """Number of random tasks per round (tasks "family" only)."""
    rng_seed: RngSeed = 0
    """Random seed of the run. If it is not given, esper train draws one."""
    name: Text | None = None
    """Name of the run; none: a generated name."""
    runs: Text = "runs"
    """Folder that contains the runs."""
    device: Text = "cpu"
    """Device of the policy and its updates, such as cuda. Worlds run on the CPU."""
    logger: tuple[LoggerName, ...] = ()
    """Also log metrics with csv, mlflow, tensorboard, trackio or wandb. NAME:FOLDER
    writes to that folder."""
    start_from: Text | None = WARM
    """Initial policy. RUN: the best policy of that run. FOLDER: pretrained on
    recordings of esper record. "warm": pretrained on the simulated world (half a
    minute). "recordings": pretrained on new recordings of this run's tasks (requires
    world.at_once). none: random weights."""
    recordings: Count = 300
    """Number of tasks to record (start_from "recordings" only)."""
    budget: Budget = field(default_factory=lambda: Budget(rounds=150))
    """When training ends."""
    learner: Learner = field(default_factory=Learner)
    """The policy and how it learns."""
    world: World = field(default_factory=World)
    """How real networks grow."""
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    """How the policy is compared with controllers that do not learn."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints of a run."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        from esper.growth.blueprints.registry import blueprints

        require_distinct("tasks", self.tasks)
        if self.name is not None:
            validate_name(self.name)
        for name in self.world.blueprints or ():
            if name not in (known := blueprints()):
                raise unknown("world.blueprints: there is no", name, known)
        for alone in (SIMULATED, FAMILY):
            if alone in self.tasks and len(self.tasks) > 1:
                raise refusal(
                    f"tasks has {alone!r} and others. Give {alone!r} alone, or leave "
                    "it out."
                )
        for item in fields(self.world) if self.simulated else ():
            value = getattr(self.world, item.name)
            if value != item.default:
                raise refusal(
                    f"world.{item.name} is {quoted(value)}, but the simulated world "
                    "has no such setting. Leave it out."
                )
        if self.start_from == RECORDINGS and not self.world.at_once:
            raise refusal(
                "start_from is 'recordings', which requires world.at_once and tasks "
                "other than 'simulated'. Set world.at_once to true."
            )
        count = self.variants if self.family else len(self.tasks)
        total, minibatches = self.num_envs * count, self.learner.ppo.minibatches
        if minibatches > total:
            raise refusal(
                f"learner.ppo.minibatches is {minibatches}, but there are only {total} "
                f"environments (num_envs {self.num_envs} x tasks {count}). Lower it."
            )
        if self.num_envs % self.world.group_size:
            raise refusal(
                f"world.group_size is {self.world.group_size}, which does not divide "
                f"num_envs {self.num_envs}. Make num_envs a multiple of it."
            )

    @property
    def simulated(self) -> bool:
        """Whether the world is simulated."""
        return SIMULATED in self.tasks

    @property
    def family(self) -> bool:
        """Whether tasks are drawn."""
        return FAMILY in self.tasks


def require_distinct(what: str, names: Collection[Any]) -> None:
    """Refuse an empty list and repetitions."""
    if not names:
        raise refusal(f"{what} is empty; name at least one.")
    seen = set()
    for name in names:
        if name in seen:
            raise refusal(f"{what} has {quoted(name)} twice; name it once.")
        seen.add(name)


DEFAULT: Final = "default"
MAX_CONFIG_BYTES: Final = 1 << 16
"""Maximum size of a settings file."""
_CHANGES: Final[Mapping[str, dict[str, Any]]] = {
    "quick": {
        "start_from": None,
        "budget.rounds": 16,
        "evaluation.every": 8,
        "evaluation.hosts": 8,
        "evaluation.controllers": ("never", "random", "early"),
        "checkpoint.every": 8,
    },
    DEFAULT: {},
    "thorough": {
        "tasks": ("teacher", "mnist1d", "letter"),
        "budget.rounds": 400,
        "evaluation.every": 50,
        "evaluation.hosts": 64,
        "checkpoint.every": 25,
    },
    FAMILY: {
        "tasks": (FAMILY,),
        "num_envs": 8,
        "start_from": RECORDINGS,
        "recordings": 270,
        "budget.rounds": 30,
        # The best action differs between episodes and can be observed.
        "world.slots": 6,
        "world.rent": (0.001, 0.1),
        "world.budget": (0.5, 15.0),
        "world.rate": (0.5, 2.0),
        "world.at_once": True,
        "world.relative": True,
        "world.group_size": 4,
        "evaluation.every": 15,
        "checkpoint.every": 15,
    },
    SIMULATED: {
        "tasks": (SIMULATED,),
        "num_envs": 256,
        "start_from": None,
        "budget.rounds": 420,
        "learner.gae_lambda": 0.85,
        "learner.end_factor": 0.03,
        "learner.ppo.learning_rate": 3e-3,
        "learner.ppo.epochs": 4,
        "learner.ppo.minibatches": 4,
        "learner.ppo.entropy_coef": 0.02,
        # Most random actions do harm, so waiting looks best at first. Op and
        # blueprint need more exploration.
        "learner.ppo.head_entropy": {"op": 0.15, "blueprint": 0.1},
        "checkpoint.every": 70,
    },
}
"""Differences of the presets from the defaults."""
PRESETS: Final[Mapping[str, TrainConfig]] = {
    name: construct(TrainConfig, changes) for name, changes in _CHANGES.items()
}
"""Duration on two cores: quick a minute, default five, thorough thirty, family ten,
simulated three."""


def preset(name: str) -> TrainConfig:
    """The preset of this name."""
    if name not in PRESETS:
        raise unknown("there is no preset", name, PRESETS)
    return PRESETS[name]


def from_toml(text: str) -> TrainConfig:
    """The configuration in a TOML text; absent settings have their defaults."""
    return construct(TrainConfig, table_of(text, TrainConfig))


def digest(config: TrainConfig) -> str:
    """SHA-256 of the configuration without device and loggers, which may change."""
    lines = as_toml(config).splitlines(keepends=True)
    kept = (line for line in lines if not line.startswith(("device = ", "logger = ")))
    return hashlib.sha256("".join(kept).encode()).hexdigest()


def resolve(options: Mapping[str, Any], *, draw_seed: bool = False) -> TrainConfig:
    """Combine a preset, files and options.

    Args:
        options: Texts by dotted names of settings; "preset" is the name of one and
            "config" a list of files.
        draw_seed: Whether to draw a random seed if none is given.
    """
    texts = dict(options)
    below = as_flat(preset(texts.pop("preset", DEFAULT)))
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file in texts.pop("config", ()):
        prefix = f"{short(Path(file))}: "
        table = table_of(read_text(Path(file), MAX_CONFIG_BYTES), TrainConfig, prefix)
        given |= table
        origins |= dict.fromkeys(table, prefix)
    values, flags = parsed_options(TrainConfig, texts)
    given, origins = given | values, origins | flags
    # A given limit of minutes or steps replaces the preset's rounds.
    others = (given.get("budget.minutes"), given.get("budget.env_steps"))
    if "budget.rounds" not in given and any(o not in (None, NONE) for o in others):
        given["budget.rounds"] = None
    if draw_seed and "rng_seed" not in given:
        given["rng_seed"] = secrets.randbelow(2**32)
    return construct(TrainConfig, {**below, **given}, origins)
