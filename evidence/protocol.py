"""What is compared with what, on which hosts: fixed before anything is counted.

A protocol is one TOML file. Its digest stands in the ledger, so that what was counted
under one protocol is never mixed with what was counted under another.

    seed   = 10 * block + host        hosts of one block train side by side
    rate   = learning rate against the task's own, tuned for every arm and task
    rents  = settings that make up the objective; the others fix a budget
"""

import hashlib
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from esper.environment.settings import OFFERED, as_range
from esper.experiment.config import BlueprintName, TrainConfig, World
from esper.experiment.messages import nearest, quoted, refusal, short
from esper.experiment.presets import MAX_BYTES, resolve
from esper.experiment.settings import construct, one_of, settings, table_of
from esper.tasks.catalogue import TASKS
from esper.tasks.catalogue import task as find_task
from esper.tasks.hosts import MlpHost
from esper.tasks.task import Task

ARMS: Final = (
    "never",
    "tamiyo",
    "early",
    "periodic",
    "plateau",
    "promise",
    "random",
    "searched",
    "bandit",
    "replay",
    "replay-elsewhere",
    "static",
    "static-macs",
    "longer",
    "scratch",
)
"""Everybody who can be compared, ablations aside."""
APART: Final = 10
"""Seeds between two blocks."""
PROJECTION: Final = {
    "training": 3600.0,
    "search": 1800.0,
    "bandit": 900.0,
    "tuning": 3.0,
    "counted": 8.0,
}
"""Seconds that a job takes as far as anybody knows, by its kind."""

Block = Annotated[int, Field(ge=0, le=10**6)]
ArmName = Annotated[str, one_of("arm", lambda: ARMS)]
TaskName = Annotated[str, one_of("task", lambda: TASKS)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Options = Mapping[str, str]
"""Options of `esper train`, as they are written there, by their dotted names."""


@settings
class Tuning:
    """On which hosts learning rates are chosen."""

    block: Block = 900
    hosts: Annotated[int, Field(ge=1, le=APART)] = 3


@settings
class Counted:
    """On which hosts everybody is compared."""

    first: Block = 0
    """The first block."""
    blocks: Annotated[int, Field(ge=1, le=100)] = 1
    """How many, one after the other."""
    hosts: Annotated[int, Field(ge=1, le=APART)] = 10
    """Of each block."""


@settings
class Controllers:
    """The learned controllers that are compared."""

    count: Annotated[int, Field(ge=1, le=99)] = 5
    """How many are trained, each from a random seed of its own, from 0."""
    preset: str = "default"
    """What their training starts from."""
    training: Options = field(default_factory=dict)
    """Options on top of it."""


@settings
class Ablations:
    """Controllers that were trained without something."""

    members: Annotated[int, Field(ge=1, le=99)] = 3
    """How many of each, each from a random seed of its own."""
    first_rng_seed: Annotated[int, Field(ge=0, le=10**6)] = 100
    """Of the first controller of the first ablation."""
    tasks: tuple[TaskName, ...] = ()
    """What they are judged on; none: all tasks."""
    without: Mapping[str, Options] = field(default_factory=dict)
    """For every ablation, options on top of those of the controllers. Those of the
    world hold where it is judged too."""


@settings
class Protocol:
    """All that decides what is counted."""

    tasks: tuple[TaskName, ...]
    """Held out: no controller is trained on them."""
    settings: Mapping[str, tuple[float, float]]
    """Rent and budget, by name."""
    rents: tuple[str, ...]
    """The settings whose mean is the objective."""
    rates: tuple[Rate, ...] = (
        0.5,
        1.0,
        2.0,
    )
    """Learning rates that are tried for every arm, against the task's own."""
    arms: tuple[ArmName, ...] = ARMS
    """Who is compared."""
    rents_only: tuple[ArmName, ...] = ()
    """Arms that are not run at other settings."""
    rents_only_tasks: tuple[TaskName, ...] = ()
    """Tasks on which nobody is run at other settings."""
    blueprints: tuple[BlueprintName, ...] = ("widen_8", "widen_16", "widen_32")
    """What may be planted; hosts of some kinds are offered fewer."""
    slots: Annotated[int, Field(ge=1, le=64)] = 4
    """Seeds that a host can hold, over all its places."""
    horizon: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Decisions of an episode; none: the task's own."""
    decision_every: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Batches between two decisions; none: the task's own."""
    hosts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Hidden widths of a task's host, if they are not the task's own."""
    lengths: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Decisions of a task's episode and batches between two, if not its own."""
    tuning: Tuning = field(default_factory=Tuning)
    counted: Counted = field(default_factory=Counted)
    controllers: Controllers = field(default_factory=Controllers)
    ablations: Ablations = field(default_factory=Ablations)
    search_env_steps: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Decisions that the search and the bandit each may take; none: as many as the
    training of the first controller took."""
    resamples: Annotated[int, Field(ge=100, le=1_000_000)] = 10_000
    """Of the bootstrap."""
    projection: Mapping[str, float] = field(default_factory=lambda: dict(PROJECTION))
    """Seconds that a job takes as far as is known, by its kind."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        for what in ("tasks", "rents", "rates", "arms"):
            _require_once(what, getattr(self, what))
        for rent, budget in self.settings.values():
            as_range("rent", rent), as_range("budget", budget)
        for name in self.rents:
            _require_known("rents", name, self.settings)
        for name in self.hosts:
            _require_known("hosts", name, self.tasks)
        for name in self.lengths:
            _require_known("lengths", name, self.tasks)
        for name in self.projection:
            _require_known("projection", name, PROJECTION)
        for name in self.rents_only_tasks:
            _require_known("rents_only_tasks", name, self.tasks)
        for name in self.ablations.tasks:
            _require_known("ablations.tasks", name, self.tasks)
        for name in self.ablations.without:
            if name in ARMS or not name.replace("-", "").isalnum():
                raise refusal(
                    f"ablations.without: {quoted(name)} cannot be an ablation's name; "
                    "use letters, digits and '-', and no arm's name."
                )
        counted = range(self.counted.first, self.counted.first + self.counted.blocks)
        if self.tuning.block in counted:
            raise refusal(
                f"tuning.block {self.tuning.block} is counted too; rates must be tuned "
                "on other hosts."
            )
        if "tamiyo" not in self.arms:
            raise refusal("arms: 'tamiyo' is missing; the others are compared to it.")
        for name in self.tasks:
            evidence_task(name, self)

    @property
    def blocks(self) -> tuple[int, ...]:
        """What is counted."""
        first = self.counted.first
        return tuple(range(first, first + self.counted.blocks))


def sha(toml: bytes) -> str:
    """What a protocol is known by."""
    return hashlib.sha256(toml).hexdigest()


def read_protocol(path: Path) -> tuple[Protocol, bytes]:
    """The protocol in a file, and the bytes that it is known by."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise refusal(f"{short(path)} cannot be read: {error.strerror}.") from None
    if len(data) > MAX_BYTES:
        raise refusal(f"{short(path)} is larger than {MAX_BYTES:,} bytes; no protocol.")
    return protocol_of(data, f"{short(path)}: "), data


def protocol_of(toml: bytes, prefix: str = "") -> Protocol:
    """The protocol that a text stands for.

    Args:
        toml: The text.
        prefix: What every refusal begins with, such as the name of a file.
    """
    try:
        text = toml.decode()
    except UnicodeDecodeError as error:
        raise refusal(f"{prefix}expected TOML; got {error}.") from None
    table = table_of(text, Protocol, prefix)
    made = construct(Protocol, table, dict.fromkeys(table, prefix))
    for arm in ("tamiyo", *made.ablations.without):
        training_of(arm, 0, made)
    return made


def evidence_task(name: str, protocol: Protocol) -> Task:
    """A task as it is in the evidence: every host has a split of its own."""
    task = find_task(name)
    hidden = protocol.hosts.get(name)
    if hidden is not None:
        if not isinstance(task.host, MlpHost) or not hidden:
            raise refusal(
                f"hosts.{name}: expected hidden widths of an MLP, got "
                f"{quoted(hidden)}; the host is {task.host}."
            )
        widths = task.host.widths
        task = replace(task, host=MlpHost((widths[0], *hidden, widths[-1])))
    if protocol.slots < len(task.host.slots):
        raise refusal(
            f"slots is {protocol.slots}, but {name} has {len(task.host.slots)} places; "
            "give each at least one."
        )
    if name in protocol.lengths:
        horizon, every = protocol.lengths[name]
        task = replace(task, horizon=horizon, decision_every=every)
    return replace(task, varied=True)


def evidence_world(
    task: Task, setting: str, rate: float, protocol: Protocol, arm: str = "tamiyo"
) -> World:
    """On what terms the hosts of a task grow under an arm."""
    rent, budget = protocol.settings[setting]
    world = World(
        horizon=protocol.horizon,
        decision_every=protocol.decision_every,
        seeds_per_slot=protocol.slots // len(task.host.slots),
        rent=rent,
        budget=budget,
        rate=rate,
        blueprints=protocol.blueprints,
    )
    given = protocol.ablations.without.get(arm, {})
    own = [name.removeprefix("world.") for name in given if name.startswith("world.")]
    if own:
        trained = training_of(arm, 0, protocol).world
        changes: dict[str, Any] = {name: getattr(trained, name) for name in own}
        world = replace(world, **changes)
    offered = world.blueprints or OFFERED[task.host.kind]
    if task.host.kind == "cnn":
        offered = tuple(name for name in offered if name in OFFERED["cnn"])
    if not offered:
        raise refusal(f"{arm}: nothing that may be planted fits {task.host}.")
    return replace(world, blueprints=offered)


def training_of(arm: str, member: int, protocol: Protocol) -> TrainConfig:
    """How a controller is trained, but for where it is kept."""
    controllers, ablations = protocol.controllers, protocol.ablations
    rng_seed, options = member, dict(controllers.training)
    if arm != "tamiyo":
        number = list(ablations.without).index(arm)
        rng_seed = ablations.first_rng_seed + number * ablations.members + member
        options |= ablations.without[arm]
    config = resolve({"preset": controllers.preset, **options})
    judging = replace(config.judging, controllers=())
    return replace(
        config, rng_seed=rng_seed, judging=judging, name=f"{arm}-{member}", runs="."
    )


def _require_once(what: str, values: tuple[Any, ...]) -> None:
    if not values:
        raise refusal(f"{what} is empty; name at least one.")
    if len(set(values)) < len(values):
        raise refusal(f"{what} has something twice: {quoted(values)}; name it once.")


def _require_known(what: str, name: str, names: Any) -> None:  # noqa: ANN401
    if name not in names:
        near = nearest(name, list(names)) if names else "nothing"
        raise refusal(f"{what}: there is no {quoted(name)}; did you mean {near!r}?")
