"""All that decides how a run goes, as one tree of checked values.

    TrainConfig(tasks=("letter",), budget=Budget(minutes=5))

Every field has its meaning below it, which is also its help. Values are checked when
they are made, whoever makes them: a file, the command line or Python. The tree can be
written as TOML and read back as it was; None is the word "none" there.
"""

import hashlib
import tomllib
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from typing import Annotated, Any, Final

from esper.contracts.actions import HEAD_NAMES
from esper.environment.settings import WorldSettings
from esper.experiment.run import checked_name
from esper.experiment.settings.typed import (
    Between,
    OneOf,
    Rules,
    checked_table,
    conform_fields,
    construct,
    hints,
    meanings,
    refusal,
    shown,
    written,
)
from esper.growth.blueprints.registry import blueprints
from esper.simic.agent.losses import CLIP_MODES
from esper.simic.agent.memory import MEMORIES
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.registry import CONTROLLERS
from esper.tasks.catalogue import TASKS

FAMILY: Final = "family"
"""The task that is many: each drawn at random, see `esper.tasks.family`."""
SIMULATED: Final = "simulated"
"""The task that is no network: a formula, a thousand times as fast."""
WARM: Final = "warm"
"""What a run starts from if it starts from the simulated world."""
IMITATION: Final = "imitation"
"""What it starts from if it goes on from there by imitating timetables."""
MIXED: Final = {SIMULATED: "the simulated world", FAMILY: "a family"}
"""Tasks that stand alone, and what to call them."""
STATIC: Final = ("static", "longer")
"""Those that are judged beside controllers but are none: nobody grows them."""
MOST_DOTS: Final = 1_024
"""In a line; Python's parser takes minutes over names of many thousand parts."""
SIZE: Final = Between(1, 4_096)
FROM_0: Final = Between(0)
ABOVE_0: Final = Between(0, above=True)
SHARE: Final = Between(0, 1)
RULES: Final[Rules] = {
    PPOConfig: {
        "learning_rate": Between(0, 1, above=True),
        "epochs": Between(1, 1_000),
        "minibatches": Between(1, 65_536),
        "clip": ABOVE_0,
        "clip_mode": OneOf("clip_mode", lambda: CLIP_MODES),
        "target_kl": Between(0, inf, above=True, endless=True),
        "entropy": FROM_0,
        "head_entropy": OneOf("head", lambda: HEAD_NAMES),
        "value": FROM_0,
        "value_clip": ABOVE_0,
        "value_fading": SHARE,
        "max_grad_norm": ABOVE_0,
    },
    PolicyConfig: {
        "width": SIZE,
        "slot_width": SIZE,
        "offer_width": SIZE,
        "memory": OneOf("memory", lambda: MEMORIES),
        "layers": Between(1, 16),
    },
    WorldSettings: {
        "horizon": Between(1, 10_000),
        "decision_every": Between(1, 10_000),
        "seeds_per_slot": Between(1, 64),
        "slots": Between(1, 256),
        "measure_every": Between(1, 10_000),
        "penalty": FROM_0,
        "blueprints": OneOf("blueprint", blueprints),
        "group_size": Between(1, 65_536),
    },
}

World = WorldSettings

TaskName = Annotated[str, OneOf("task", lambda: (SIMULATED, FAMILY, *TASKS))]
ArmName = Annotated[str, OneOf("controller", lambda: (*CONTROLLERS, *STATIC))]
BlueprintName = Annotated[str, OneOf("blueprint", blueprints)]
Count = Annotated[int, Between(1, 65_536)]
Rounds = Annotated[int, Between(1, 1_000_000)]


class Checked:
    """A dataclass whose fields are held against their annotations at birth."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        conform_fields(self, RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Checked):
    """When training ends: with whichever of them is used up first."""

    rounds: Rounds | None = None
    """Rollouts, each of one episode of every environment, and updates."""
    minutes: Annotated[float, Between(0, 525_600, above=True)] | None = None
    """Time spent on training."""
    env_steps: Annotated[int, Between(1, 10**12)] | None = None
    """Decisions, over all environments."""

    def __post_init__(self) -> None:
        """Refuse a training without an end."""
        Checked.__post_init__(self)
        if self.rounds is None and self.minutes is None and self.env_steps is None:
            raise refusal("at least one of rounds, minutes and env_steps is needed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner(Checked):
    """Who learns, and how."""

    gamma: Annotated[float, SHARE] = 1.0
    """Discount per decision; 1 makes the return the final score minus rent."""
    gae_lambda: Annotated[float, SHARE] = 0.95
    """Trace decay of the advantages: 0 is one-step TD, 1 is Monte Carlo."""
    final_share: Annotated[float, SHARE] = 0.1
    """Share of learning rate and entropy weight that is left at the end."""
    ppo: PPOConfig = field(
        default_factory=lambda: PPOConfig(
            # What a decision is worth is small against the noise of a training: few
            # and small steps on all episodes at once, or the policy drifts away.
            learning_rate=1e-3,
            epochs=2,
            minibatches=1,
            max_grad_norm=1.0,
            entropy=5e-4,
            head_entropy={"op": 2e-3, "blueprint": 1e-3},
        )
    )
    """How the policy is improved from one rollout."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The size and kind of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging(Checked):
    """How the policy is compared with those that do not learn."""

    every: Rounds = 20
    """Rounds between two judgements of the policy on the same hosts."""
    hosts: Count = 16
    """Hosts of each task that everybody is judged on."""
    controllers: tuple[ArmName, ...] = (*CONTROLLERS, "static")
    """Who is judged beside the policy at the end; empty: nobody, not even it."""
    processes: Annotated[int, Between(1, 256)] = 2
    """Who is judged at the same time."""

    def __post_init__(self) -> None:
        """Refuse a controller that is named twice."""
        Checked.__post_init__(self)
        if self.controllers:
            _require_names("controllers", self.controllers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping(Checked):
    """What is kept of a run while it goes on."""

    every: Rounds = 10
    """Rounds between two checkpoints."""
    last: Annotated[int, Between(1, 1_000)] = 3
    """Checkpoints that are kept, besides the best."""
    tensorboard: bool = False
    """Whether to write figures for TensorBoard too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Checked):
    """A training of Tamiyo."""

    tasks: tuple[TaskName, ...] = ("teacher", "mnist1d")
    """What her hosts learn, side by side; or "family" or "simulated" alone."""
    envs: Count = 16
    """Environments of each task."""
    variants: Count = 7
    """Tasks that a family is made of."""
    rng_seed: Annotated[int, Between(0, 2**32 - 1)] = 0
    """Start of every random stream of the run."""
    name: str | None = None
    """What the run is called; none: a name is made up."""
    runs: str = "runs"
    """Folder in which runs are kept."""
    start_from: str | None = "warm"
    """Run whose policy to start from; "warm": half a minute of the simulated world;
    "imitation": that, and two minutes of timetables tried on the run's tasks."""
    budget: Budget = field(default_factory=lambda: Budget(rounds=150))
    """When training ends."""
    learner: Learner = field(default_factory=Learner)
    """Who learns, and how."""
    world: World = field(default_factory=World)
    """On what terms real networks grow."""
    judging: Judging = field(default_factory=Judging)
    """How the policy is compared with those that do not learn."""
    keeping: Keeping = field(default_factory=Keeping)
    """What is kept of a run while it goes on."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        Checked.__post_init__(self)
        _require_names("tasks", self.tasks)
        if self.name is not None:
            checked_name(self.name)
        for alone in (SIMULATED, FAMILY):
            if alone in self.tasks:
                self._require_alone(alone)
        if SIMULATED in self.tasks:
            self._require_plain_terms()
        if self.start_from == IMITATION and (SIMULATED in self.tasks or self.envs < 2):
            raise refusal(
                "start_from 'imitation' compares timetables on hosts of real tasks; it "
                "needs such tasks and at least 2 envs."
            )
        count = self.variants if FAMILY in self.tasks else len(self.tasks)
        everywhere, parts = self.envs * count, self.learner.ppo.minibatches
        if parts > everywhere:
            raise refusal(
                f"learner.ppo.minibatches is {parts}, but environments, which are not "
                f"split, are {everywhere} (envs {self.envs} x tasks {count})."
            )

        if self.envs % self.world.group_size:
            raise refusal(
                f"world.group_size is {self.world.group_size}, which does not divide "
                f"envs {self.envs}."
            )

    def _require_alone(self, name: str) -> None:
        others = [other for other in self.tasks if other != name]
        if others:
            raise refusal(
                f"tasks has {name!r} and {others[0]!r}; {MIXED[name]} cannot be mixed "
                "with other tasks."
            )

    def _require_plain_terms(self) -> None:
        for setting in fields(World):
            value = getattr(self.world, setting.name)
            if value != setting.default:
                raise refusal(
                    f"world.{setting.name} is {shown(value)}, but tasks is "
                    f"{SIMULATED!r}, whose terms are fixed; leave it out."
                )


def as_toml(config: TrainConfig, *, explain: bool = False) -> str:
    """The whole tree as text, with nothing left to defaults.

    Args:
        config: What to write.
        explain: Whether to write the meaning of every setting above it.
    """
    return "\n".join(_lines(config, "", explain)) + "\n"


def from_toml(text: str, prefix: str = "") -> TrainConfig:
    """The tree that a text describes; what it leaves out has its default."""
    made = construct(TrainConfig, table_of(text, prefix), RULES)
    assert isinstance(made, TrainConfig)
    return made


def table_of(text: str, prefix: str = "") -> dict[str, Any]:
    """The settings that a text gives, each checked by itself.

    Args:
        text: TOML.
        prefix: What every refusal begins with, such as the name of a file.
    """
    if any(line.count(".") > MOST_DOTS for line in text.split("\n")):
        raise refusal(f"{prefix}expected TOML; got a line of too many dots.")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise refusal(f"{prefix}expected TOML; got brackets too deep.") from None
    except ValueError as error:
        raise refusal(f"{prefix}expected TOML; got {error}.") from None
    return checked_table(TrainConfig, table, RULES, prefix=prefix)


def as_table(config: object) -> dict[str, Any]:
    """The tree as nested dictionaries of plain values."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}  # type: ignore[arg-type]
    return {
        name: as_table(value) if is_dataclass(value) else value
        for name, value in values.items()
    }


def digest(config: TrainConfig) -> str:
    """A fingerprint: equal for equal configurations, and only for them."""
    return hashlib.sha256(as_toml(config).encode()).hexdigest()


def _require_names(what: str, names: tuple[str, ...]) -> None:
    if not names:
        raise refusal(f"{what} is empty; name at least one.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise refusal(f"{what} has {twice!r} twice; name it once.")


def _lines(config: Any, where: str, explain: bool) -> list[str]:  # noqa: ANN401
    cls: type = type(config)
    lines, tables, meaning = [], [], meanings(cls)
    for item, _ in hints(cls, RULES):
        value, name = getattr(config, item.name), item.name
        if is_dataclass(value):
            tables += [
                "",
                f"[{where}{name}]",
                *_lines(value, f"{where}{name}.", explain),
            ]
            continue
        if explain:
            lines.append(f"# {meaning.get(name, '')}")
        lines.append(f"{name} = {written(value)}")
    return lines + tables
