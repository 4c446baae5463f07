"""Settings of a growing world, for training, evaluation and Gymnasium.

Rent, budget and rate are numbers, or ranges (low, high) to draw from in every episode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from sys import float_info
from typing import Annotated, Any, Final

import torch
from pydantic import Field

from esper.contracts.actions import NUM_HEADS
from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.checks import require_int
from esper.contracts.devices import require_tensor
from esper.contracts.errors import InvalidInputError, unknown
from esper.environment.clock import Clock, ClockKind, Stop
from esper.tasks.task import Task

Term = float | tuple[float, float]
Batches = Annotated[int, Field(le=10_000)]

OFFERED: Final = ("widen_x1.25", "widen_x1.5", "widen_x2", "widen_x4")
"""Default blueprints."""
OPS: Final = ("WAIT", "GERMINATE", "PRUNE", "FOSSILIZE")
"""Ops of the controller; seeds advance and blend by themselves."""
AT_ONCE: Final[Mapping[str, tuple[str, ...]]] = {
    "op": ("WAIT", "GERMINATE", "PRUNE"),
    "tempo": ("AT_ONCE",),
    "alpha_target": ("FULL",),
    "alpha_speed": ("INSTANT",),
    "alpha_curve": ("LINEAR",),
}
"""Choices with `at_once`: when, where and how much to grow."""
SCORED_ROWS: Final = 256
"""Maximum validation rows of a score at a stop."""
LOOKED_ROWS: Final = 64
"""Maximum validation rows between stops, where scores are only observed."""
LEAST_ERROR: Final = 0.02
"""Minimum divisor of relative rewards."""
TERMS: Final[Mapping[str, tuple[float, str]]] = {
    "rent": (-inf, ""),
    "budget": (0.0, " from 0"),
    "rate": (float_info.min, " above 0"),
}
"""Terms drawn in every episode: minimum, and the minimum in words."""
MAX_TERM: Final = 1e30
"""Maximum of a term or penalty, as they become float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """Settings of a growing world; the simulated world has its own rules."""

    horizon: Batches | None = None
    """Decisions per episode; none: the task's default."""
    decision_every: Batches | None = None
    """Batches between two decisions; none: the task's default."""
    seeds_per_slot: Annotated[int, Field(le=64)] = 2
    """Maximum number of seeds in each layer that can grow."""
    slots: Annotated[int, Field(le=256)] | None = None
    """Maximum number of seeds per host. Layers that can grow share it equally. none:
    seeds_per_slot applies."""
    rent: Term = 0.01
    """Cost of added parameters: score subtracted per multiple of the host's parameters.
    A number or a range."""
    budget: Term = 4.0
    """Maximum added parameters, as a multiple of the host's. A number or a range."""
    rate: Term = 1.0
    """Host learning rate, as a multiple of the task's default. A number or a range."""
    clock: ClockKind = "batches"
    """Unit of time between decisions: batches or compute (multiply-adds)."""
    first: Annotated[float, Field(le=10_000)] = 4.0
    """Compute between the first two decisions, in batches of the initial host (clock
    compute only)."""
    ratio: Annotated[float, Field(le=16)] = 2 ** (1 / 3)
    """Ratio of total compute at one decision to that at the decision before, from the
    third decision on (clock compute only)."""
    stop: Stop = "end"
    """When to score an episode: end, or anytime (seven times, each at twice the
    compute of the one before)."""
    charge_eval: bool = True
    """Whether validation passes count as compute. Use false for static networks and
    for controllers that do not use the validation score."""
    tick: Batches = 16
    """Batches per tick, the unit of seed tempos and blending speeds."""
    penalty: float = 0.01
    """Reward subtracted for an illegal action."""
    blueprints: tuple[str, ...] | None = None
    """Blueprints that can be planted; none: the defaults for the host."""
    relative: bool = False
    """Compare with the same host without growth: the return is the fraction of its
    errors that growth removed, minus rent. This makes tasks comparable."""
    at_once: bool = False
    """Seeds take effect in the next batch, without a training and blending stage.
    Pruning removes them at once. The policy decides only when, where and how much to
    grow."""
    group_size: Annotated[int, Field(le=65_536)] = 1
    """Number of environments that share task data, host, batches, rent, budget and
    rate (common random numbers)."""

    def __post_init__(self) -> None:
        """Check all fields."""
        for name in ("horizon", "decision_every", "slots"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1)
        for name in ("seeds_per_slot", "tick", "group_size"):
            require_int(name, getattr(self, name), 1)
        for name in TERMS:
            self.range_of(name)
        penalty, names = self.penalty, self.blueprints
        if not (_is_number(penalty) and 0 <= penalty <= MAX_TERM):
            raise InvalidInputError(
                f"penalty must be a finite number from 0, got {penalty!r:.99}."
            )
        if names is None:
            return
        if not isinstance(names, tuple | list) or not names:
            raise InvalidInputError(
                f"blueprints must be a tuple of at least one name, got {names!r:.99}."
            )
        if len({*names}) != len(names):
            raise InvalidInputError(f"blueprints has a name twice: {', '.join(names)}.")
        object.__setattr__(self, "blueprints", tuple(names))

    def range_of(self, name: str) -> tuple[float, float]:
        """Return the checked range of a term."""
        return as_range(name, getattr(self, name))

    def term(self, name: str, share: float) -> float:
        """Return a term, given its position in its range from 0 to 1."""
        low, high = self.range_of(name)
        # Rents and rates are uniform on a log scale.
        if name != "budget" and low > 0:
            return float(low * (high / low) ** share)
        return low + share * (high - low)

    def applied_to(self, task: Task) -> Task:
        """Return the task with this horizon and interval between decisions.

        With the clock `compute` and no horizon, the task's compute sets the horizon.
        """
        given = {name: getattr(self, name) for name in ("horizon", "decision_every")}
        if self.horizon is None and self.clock == "compute" and task.compute:
            given["horizon"] = self.decisions_within(task.compute)
        return replace(task, **{k: v for k, v in given.items() if v is not None})

    def decisions_within(self, compute: float) -> int:
        """Return the decisions within this compute, with the clock `compute`."""
        clock = Clock("compute", 1, self.first, self.ratio, self.stop)
        return clock.decisions_within(compute)

    def clock_of(self, task: Task) -> Clock:
        """Return the clock of the task."""
        first = task.decision_every if self.clock == "batches" else self.first
        return Clock(self.clock, task.horizon, float(first), self.ratio, self.stop)

    def narrowed(self) -> dict[str, tuple[str, ...]]:
        """Return the heads with restricted choices."""
        return {"op": OPS, "style": ("ADD",), **(AT_ONCE if self.at_once else {})}

    def seeds_per_place(self, task: Task) -> int:
        """Return the number of seeds per place of the task's host."""
        if self.slots is None:
            return self.seeds_per_slot
        places = len(task.host.slots)
        if self.slots % places:
            raise InvalidInputError(
                f"world.slots is {self.slots}, but {task.host} has {places} places; "
                "use a multiple."
            )
        return self.slots // places


def find_blueprints(names: tuple[str, ...]) -> tuple[Blueprint, ...]:
    """Return widening blueprints by name."""
    known = {b.name: b for b in BLUEPRINTS if b.form is Form.WIDEN}
    for name in names:
        if name not in known:
            raise unknown("this world cannot plant", name, known)
    return tuple(known[name] for name in names)


def as_range(name: str, term: Any) -> tuple[float, float]:  # noqa: ANN401
    """Return one or two numbers as the checked range of a term."""
    ends = tuple(term) if isinstance(term, tuple | list) else (term, term)
    least, words = TERMS[name]
    known = len(ends) == 2 and all(map(_is_number, ends))
    if known and max(least, -MAX_TERM) <= ends[0] <= ends[1] <= MAX_TERM:
        return float(ends[0]), float(ends[1])
    raise InvalidInputError(
        f"{name} must be a finite number{words} or a range (low, high) up to "
        f"{MAX_TERM:g}; got {term!r:.99}."
    )


def check_actions(actions: Any, envs: int) -> None:  # noqa: ANN401
    """Check type, dtype and shape of actions."""
    device = getattr(actions, "device", torch.device("cpu"))
    require_tensor("actions", actions, (envs, NUM_HEADS), torch.int64, device)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
