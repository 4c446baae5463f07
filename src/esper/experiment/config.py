"""The settings of a training: one tree of dataclasses that pydantic validates.

    TrainConfig(tasks=("letter",), budget=Budget(minutes=5))

The text below a field is its help. Values are checked when they are made, by a file,
the command line or Python: strictly, so no text becomes a number. The tree is written
as TOML and read back equal; None is the word "none" there.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from math import isfinite
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from pydantic_core import from_json

from esper.contracts.errors import BadInput
from esper.environment.settings import WorldSettings
from esper.experiment.messages import nearest, quoted, refusal, unknown
from esper.experiment.records import STATIC
from esper.experiment.run import checked_name
from esper.growth.blueprints.registry import blueprints
from esper.simic.agent.losses import CLIP_MODES
from esper.simic.agent.memory import MEMORIES
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.registry import CONTROLLERS
from esper.tasks.catalogue import TASKS

T = TypeVar("T")
World = WorldSettings

FAMILY: Final = "family"
"""The task that is many: each drawn at random, see `esper.tasks.family`."""
SIMULATED: Final = "simulated"
"""The task that is no network: a formula, a thousand times as fast."""
WARM: Final = "warm"
"""Start from a policy pretrained on the simulated world."""
IMITATION: Final = "imitation"
"""Start from there, and then from imitated schedules."""
NONE: Final = "none"
"""None in a file or on the command line."""
MAX_DOTS: Final = 1_024
"""In a line; Python's parser takes minutes over names of many thousand parts."""
MAX_TEXT: Final = 1_000
LIMITS: Final = {
    "learning_rate": 1,
    "epochs": 1_000,
    "minibatches": 65_536,
    "width": 4_096,
    "slot_width": 4_096,
    "offer_width": 4_096,
    "layers": 16,
    "horizon": 10_000,
    "decision_every": 10_000,
    "measure_every": 10_000,
    "seeds_per_slot": 64,
    "slots": 256,
    "group_size": 65_536,
}
"""Largest values of some settings that time and memory allow."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are validated; refuses in one line."""
    made = validated(
        frozen=True,
        kw_only=True,
        config=ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True),
    )(cls)
    init = made.__init__

    def checked_init(self: object, **values: Any) -> None:  # noqa: ANN401
        try:
            init(self, **values)
        except ValidationError as error:
            raise _refusal(cls, error) from None

    made.__init__ = checked_init  # type: ignore[method-assign]
    return cast("type[T]", made)


def check_limits(where: str, config: object) -> None:
    """Refuse values that time and memory do not allow, and numbers that are none."""
    for item in fields(config):  # type: ignore[arg-type]
        name, value = f"{where}.{item.name}", getattr(config, item.name)
        limit = LIMITS.get(item.name)
        if limit is not None and value is not None and value > limit:
            raise refusal(f"{name} must be at most {limit}; got {quoted(value)}.")
        numbers = value.values() if isinstance(value, Mapping) else [value]
        # An infinite target_kl never stops an update.
        if item.name != "target_kl" and not all(map(_is_finite, numbers)):
            raise refusal(f"{name} must be finite; got {quoted(value)}.")


def one_of(kind: str, names: Callable[[], Collection[str]]) -> AfterValidator:
    """Only some names, looked up when they are needed."""

    def check(name: str) -> str:
        if name not in (known := names()):
            raise unknown(f"there is no {kind}", name, known)
        return name

    return AfterValidator(check)


def _printable(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= MAX_TEXT:
        raise refusal(
            f"expected 1 to {MAX_TEXT} printable characters, got {quoted(text)}."
        )
    return text


Text = Annotated[str, AfterValidator(_printable)]
TaskName = Annotated[str, one_of("task", lambda: (SIMULATED, FAMILY, *TASKS))]
ArmName = Annotated[str, one_of("controller", lambda: (*CONTROLLERS, *STATIC))]
BlueprintName = Annotated[str, one_of("blueprint", blueprints)]
Count = Annotated[int, Field(ge=1, le=65_536)]
Rounds = Annotated[int, Field(ge=1, le=1_000_000)]
RngSeed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@settings
class Budget:
    """When training ends: with whichever of them is used up first."""

    rounds: Rounds | None = None
    """Rollouts, each of one episode of every environment, and updates."""
    minutes: Annotated[float, Field(gt=0, le=525_600)] | None = None
    """Time spent on training."""
    env_steps: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Decisions, over all environments."""

    def __post_init__(self) -> None:
        """Refuse a training without an end."""
        if self.rounds is None and self.minutes is None and self.env_steps is None:
            raise refusal("at least one of rounds, minutes and env_steps is needed.")


@settings
class Learner:
    """The policy and how it learns."""

    gamma: Fraction = 1.0
    """Discount per decision; 1 makes the return the final score minus rent."""
    gae_lambda: Fraction = 0.95
    """Trace decay of the advantages: 0 is one-step TD, 1 is Monte Carlo."""
    final_share: Fraction = 0.1
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

    def __post_init__(self) -> None:
        """Refuse what the learner's own classes let through."""
        check_limits("ppo", self.ppo)
        check_limits("policy", self.policy)
        for where, name, known in (
            ("ppo.clip_mode", self.ppo.clip_mode, CLIP_MODES),
            ("policy.memory", self.policy.memory, MEMORIES),
        ):
            if name not in known:
                raise unknown(f"{where}: there is no", name, known)


@settings
class Judging:
    """How the policy is compared with controllers that do not learn."""

    every: Rounds = 20
    """Rounds between two judgements of the policy on the same hosts."""
    hosts: Count = 16
    """Hosts of each task that every controller is judged on."""
    controllers: tuple[ArmName, ...] = (*CONTROLLERS, "static")
    """What is judged beside the policy at the end; empty: nothing, not even it."""
    processes: Annotated[int, Field(ge=1, le=256)] = 2
    """Controllers that are judged at the same time."""

    def __post_init__(self) -> None:
        """Refuse a controller that is named twice."""
        if self.controllers:
            require_distinct("controllers", self.controllers)


@settings
class Keeping:
    """What is kept of a run while it goes on."""

    every: Rounds = 10
    """Rounds between two checkpoints."""
    last: Annotated[int, Field(ge=1, le=1_000)] = 3
    """Checkpoints that are kept, besides the best."""
    tensorboard: bool = False
    """Whether to write figures for TensorBoard too."""


@settings
class TrainConfig:
    """A training of Tamiyo."""

    tasks: tuple[TaskName, ...] = ("teacher", "mnist1d")
    """What the hosts learn, side by side; or "family" or "simulated" alone."""
    envs: Count = 16
    """Environments of each task."""
    variants: Count = 7
    """Tasks that a family is made of."""
    rng_seed: RngSeed = 0
    """Start of every random stream of the run."""
    name: Text | None = None
    """What the run is called; none: a name is made up."""
    runs: Text = "runs"
    """Folder in which runs are kept."""
    start_from: Text | None = WARM
    """Run whose policy to start from; "warm": half a minute of the simulated world;
    "imitation": that, and two minutes of timetables tried on the run's tasks."""
    budget: Budget = field(default_factory=lambda: Budget(rounds=150))
    """When training ends."""
    learner: Learner = field(default_factory=Learner)
    """The policy and how it learns."""
    world: World = field(default_factory=World)
    """How real networks grow."""
    judging: Judging = field(default_factory=Judging)
    """How the policy is compared with controllers that do not learn."""
    keeping: Keeping = field(default_factory=Keeping)
    """What is kept of a run while it goes on."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        require_distinct("tasks", self.tasks)
        if self.name is not None:
            checked_name(self.name)
        check_limits("world", self.world)
        for name in self.world.blueprints or ():
            if name not in blueprints():
                raise unknown("world.blueprints: there is no", name, blueprints())
        for alone in (SIMULATED, FAMILY):
            if alone in self.tasks and len(self.tasks) > 1:
                raise refusal(
                    f"tasks has {alone!r} beside others; it cannot be mixed with other "
                    "tasks."
                )
        if SIMULATED in self.tasks:
            self._require_default_world()
        if self.start_from == IMITATION and (SIMULATED in self.tasks or self.envs < 2):
            raise refusal(
                "start_from 'imitation' compares timetables on hosts of real tasks; it "
                "needs such tasks and at least 2 envs."
            )
        count = self.variants if FAMILY in self.tasks else len(self.tasks)
        total, minibatches = self.envs * count, self.learner.ppo.minibatches
        if minibatches > total:
            raise refusal(
                f"learner.ppo.minibatches is {minibatches}, but environments, which "
                f"are not split, are {total} (envs {self.envs} x tasks {count})."
            )
        if self.envs % self.world.group_size:
            raise refusal(
                f"world.group_size is {self.world.group_size}, which does not divide "
                f"envs {self.envs}."
            )

    def _require_default_world(self) -> None:
        for item in fields(self.world):
            value = getattr(self.world, item.name)
            if value != item.default:
                raise refusal(
                    f"world.{item.name} is {quoted(value)}, but tasks is "
                    f"{SIMULATED!r}, whose rules are fixed; leave it out."
                )


def require_distinct(what: str, names: Collection[Any]) -> None:
    """Refuse an empty list and one with repetitions."""
    if not names:
        raise refusal(f"{what} is empty; name at least one.")
    seen = set()
    for name in names:
        if name in seen:
            raise refusal(f"{what} has {quoted(name)} twice; name it once.")
        seen.add(name)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one setting, from its annotation and docstring."""

    type: str
    """As JSON schema says it: integer, number, string, boolean, array or object."""
    nullable: bool
    description: str


_ADAPTERS: Final[dict[type, Any]] = {}
_KNOWN: Final[dict[type, dict[str, Setting]]] = {}


def _adapter(cls: type) -> Any:  # noqa: ANN401
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def known_settings(cls: type) -> dict[str, Setting]:
    """Every setting of a tree of dataclasses, by its dotted name."""
    if cls in _KNOWN:
        return _KNOWN[cls]
    schema = _adapter(cls).json_schema()

    def walk(node: Mapping[str, Any], where: str) -> dict[str, Setting]:
        found: dict[str, Setting] = {}
        for name, entry in node.get("properties", {}).items():
            if "$ref" in entry:
                below = schema["$defs"][entry["$ref"].rpartition("/")[2]]
                found |= walk(below, f"{where}{name}.")
                continue
            kinds = [one.get("type") for one in entry.get("anyOf", [entry])]
            text = " ".join(entry.get("description", "").split())
            found[where + name] = Setting(kinds[0], "null" in kinds, text)
        return found

    _KNOWN[cls] = walk(schema, "")
    return _KNOWN[cls]


def flat(cls: type, table: object, prefix: str = "") -> dict[str, Any]:
    """A nested table by dotted names; refuses names that are no settings.

    Args:
        cls: The dataclass at the top of the tree.
        table: Nested settings, such as those of a TOML file.
        prefix: Start of every error message, such as the name of a file.
    """
    known = known_settings(cls)
    found: dict[str, Any] = {}
    todo = [("", table)]
    while todo:
        where, value = todo.pop()
        if where in known:
            found[where] = value
        elif where and not any(name.startswith(f"{where}.") for name in known):
            near = nearest(where if "." in where else where.lower(), known)
            raise refusal(
                f"{prefix}there is no setting {quoted(where)}; did you mean {near!r}?"
            )
        elif not isinstance(value, Mapping):
            raise refusal(
                f"{prefix}{where or 'a configuration'} must be a table of settings; "
                f"got {quoted(value)}."
            )
        else:
            dot = f"{where}." if where else ""
            todo += [(f"{dot}{name}", one) for name, one in value.items()][::-1]
    return found


def construct(
    cls: type[T],
    values: Mapping[str, Any],
    origins: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """The validated tree; settings that are left out have their defaults.

    Args:
        cls: The dataclass at the top of the tree.
        values: By dotted names, as `flat` returns them.
        origins: Start of the error messages about each, such as the name of a file.
    """
    known = known_settings(cls)
    tree: dict[str, Any] = {}
    for dotted, value in values.items():
        try:
            from_json(_json(value))
        except (ValueError, RecursionError):  # half of a sign, or hundreds of brackets
            raise refusal(
                f"{origins.get(dotted, '')}{dotted} must be a plain value; got "
                f"{quoted(value)}."
            ) from None
        *path, name = dotted.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = None if value == NONE and known[dotted].nullable else value
    try:
        # Only JSON is both strict about numbers and open to tables and lists.
        made: T = _adapter(cls).validate_json(_json(tree))
    except ValidationError as error:
        raise _refusal(cls, error, origins) from None
    return made


def as_toml(config: object, *, explain: bool = False) -> str:
    """All settings as text, including those with default values.

    Args:
        config: A tree of dataclasses.
        explain: Whether to write the description of every setting above it.
    """
    known = known_settings(type(config))
    sections: dict[str, list[str]] = {"": []}
    for name, value in as_flat(config).items():
        where, _, last = name.rpartition(".")
        lines = sections.setdefault(where, ["", f"[{where}]"])
        if explain:
            lines.append(f"# {known[name].description}")
        lines.append(f"{last} = {toml_value(value)}")
    return "\n".join(line for lines in sections.values() for line in lines) + "\n"


def from_toml(text: str, prefix: str = "") -> TrainConfig:
    """The configuration that a text describes; what it leaves out has its default."""
    table = table_of(text, prefix)
    return construct(TrainConfig, table, dict.fromkeys(table, prefix))


def table_of(text: str, prefix: str = "", cls: type = TrainConfig) -> dict[str, Any]:
    """The settings in a text, by dotted names.

    Args:
        text: TOML.
        prefix: Start of every error message, such as the name of a file.
        cls: The dataclass that they belong to.
    """
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise refusal(f"{prefix}expected TOML; got a line of too many dots.")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise refusal(f"{prefix}expected TOML; got brackets too deep.") from None
    except ValueError as error:
        raise refusal(f"{prefix}expected TOML; got {error}.") from None
    return flat(cls, table, prefix)


def as_flat(config: object, where: str = "") -> dict[str, Any]:
    """All values of a tree of dataclasses, by dotted names."""
    found: dict[str, Any] = {}
    for item in fields(config):  # type: ignore[arg-type]
        value, name = getattr(config, item.name), f"{where}{item.name}"
        found |= as_flat(value, f"{name}.") if is_dataclass(value) else {name: value}
    return found


def digest(config: TrainConfig) -> str:
    """SHA-256: equal for equal configurations, and only for them."""
    return hashlib.sha256(as_toml(config).encode()).hexdigest()


def toml_value(value: object) -> str:
    """A plain value as TOML."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # DEL is the one sign that JSON leaves and TOML forbids
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{toml_value(k)} = {toml_value(value[k])}" for k in sorted(value))
        return f"{{{', '.join(pairs)}}}"
    # -0.0 is written as the 0.0 that it equals.
    return repr(value + 0.0) if isinstance(value, float) else repr(value)


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or isfinite(value)


def _json(value: object) -> str:
    return json.dumps(value, default=lambda other: {"date": str(other)})


def _refusal(
    cls: type,
    error: ValidationError,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> BadInput:
    """The first thing that is wrong, in one line."""
    known = known_settings(cls)
    errors = error.errors(include_url=False)
    first = errors[0]
    where = ""
    for depth, part in enumerate(first["loc"]):  # noqa: B007
        if where in known:
            break
        where = f"{where}.{part}".strip(".")
    else:
        depth = len(first["loc"])
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        # Checks of a whole class begin with the name of the setting that they blame.
        setting = f"{where}.{text.split()[0].strip(':')}".strip(".")
        if setting in known:
            dot = "." if where else ""
            return refusal(f"{origins.get(setting, '')}{where}{dot}{text}")
        return refusal(f"{origins.get(where, '')}{where}: {text}" if where else text)
    if first["type"] == "missing" and depth == len(first["loc"]):
        return refusal(f"there is no {where!r}, which is needed.")
    # A union reports each of its members.
    expected = " or ".join(
        each["msg"].replace("Input should be", "must be")
        for each in errors
        if each["loc"][:depth] == first["loc"][:depth]
    )
    return refusal(
        f"{origins.get(where, '')}{where} {expected}; got {quoted(first['input'])}."
    )
