"""Growth by a timetable: what to plant, how often, when and where.

The n-th seed is due at start + (n - 1) * every, as shares of the horizon; a planting
that could not be made is made up for later. A schedule is plain data, so that schedules
can be drawn and searched. `Timetable` holds many of them as tensors: every environment
may follow one of its own, and all of them are one tensor program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Generator, Tensor

from esper.contracts.actions import ActionMasks, ActionSpec
from esper.contracts.blueprints import BLUEPRINTS, NOMINAL_WIDTH, Blueprint, Form
from esper.contracts.errors import BadInput, unknown
from esper.contracts.world import ControllerState, Observation
from esper.tamiyo.rule_based import (
    PATIENCE,
    SizePreference,
    episode_count,
    germinates,
    next_actions,
)

LARGEST: Final = "largest"
"""Stands for the largest widening that can be planted."""
UNLIMITED: Final = 1 << 40
"""A count that is never reached."""
PLACES: Final = {"first": -1.0, "spread": 0.0, "last": 1.0}
"""Weight of a slot's depth: nearest to the input, all in turn, to the output."""
_ROUNDING: Final = 1e-5  # 0.7 falls short of 7 * 0.1; decisions are further apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When to plant what; times are shares of the horizon."""

    blueprint: str = LARGEST
    """What is planted; "largest": the largest widening that fits."""
    count: int = 4
    """Seeds to plant in all."""
    start: float = 0.0
    """When the first is due."""
    every: float = 0.1
    """From one to the next."""
    until: float = 1.0
    """From when on nothing is planted, due or not."""
    patience: int = PATIENCE
    """Steps a seed trains before it is blended in."""
    place: str = "spread"
    """Which free slot is taken: "first", "last" or "spread"."""
    prune: bool = True
    """Whether seeds whose measured contribution is below their rent are removed."""

    def __post_init__(self) -> None:
        """Refuse what cannot be played."""
        for name, count in (("count", self.count), ("patience", self.patience)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise BadInput(f"{name} must be a whole number from 0, got {count!r}.")
        for name in ("start", "every", "until"):
            share = getattr(self, name)
            if not (isfinite(share) and 0.0 <= share <= 1.0):
                raise BadInput(f"{name} must be a share in [0, 1], got {share}.")
        if self.place not in PLACES:
            raise BadInput(
                f"place must be one of {', '.join(PLACES)}; got {self.place!r}."
            )


EARLY: Final = Schedule(count=UNLIMITED, every=0.0, until=0.3)
"""Whenever possible in the first part of the horizon."""
PERIODIC: Final = Schedule(count=UNLIMITED, start=0.1, every=0.1)
"""For the n-th time when n tenths of the horizon have passed."""
STANDARD: Final = (
    Schedule(count=0),
    replace(EARLY, count=32),
    replace(PERIODIC, count=32),
)
"""Baselines; `draw_schedules` begins with them."""


class Scheduled:
    """Follows one schedule, or one for each environment.

    The state is the number of seeds planted in the episode.

    Args:
        spec: The action space.
        schedule: One for all environments, or a sequence with one for each.
    """

    def __init__(
        self, spec: ActionSpec, schedule: Schedule | Sequence[Schedule]
    ) -> None:
        given = [schedule] if isinstance(schedule, Schedule) else [*schedule]
        self._table = Timetable(spec, given)
        self._plan = torch.arange(len(given))

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Follow the rules, and plant what is due."""
        envs = len(observation.first)
        if len(self._plan) not in (1, envs):
            raise BadInput(
                f"there are schedules for {len(self._plan)} environments, got {envs}; "
                "give as many, or one for all."
            )
        self._plan = self._plan.to(masks.op.device)
        planted = episode_count(state, observation)
        plan = self._plan.expand(envs)
        actions = self._table.actions(observation, masks, plan, planted)
        return actions, planted + germinates(actions)


class Timetable:
    """Schedules as tensors over `[plan]`.

    Args:
        spec: The action space.
        schedules: The plans, at least one.
    """

    def __init__(self, spec: ActionSpec, schedules: Sequence[Schedule]) -> None:
        if not schedules:
            raise BadInput("expected at least one schedule, got none.")
        self._preference = SizePreference(spec)
        self._flags = torch.tensor(
            [[s.prune, *_wanted(spec, s.blueprint)] for s in schedules]
        )
        self._whole = torch.tensor([[s.count, s.patience] for s in schedules])
        self._real = torch.tensor(
            [[s.start, s.every, s.until, PLACES[s.place]] for s in schedules]
        )

    def actions(
        self,
        observation: Observation,
        masks: ActionMasks,
        plan: Int64[Tensor, " env"],
        planted: Int64[Tensor, " env"],
        allowed: Bool[Tensor, " env"] | None = None,
    ) -> Int64[Tensor, "env head"]:
        """The actions that the plans ask for now.

        Args:
            observation: The observation.
            masks: The legal actions.
            plan: Index of the plan of each environment.
            planted: Seeds that each has planted in this episode.
            allowed: Where planting is allowed at all; None: everywhere.
        """
        device = plan.device
        self._flags, self._whole, self._real = (
            table.to(device) for table in (self._flags, self._whole, self._real)
        )
        flags = self._flags[plan]
        wanted = flags[:, None, 1:]  # [env, 1, blueprint]
        count, patience = self._whole[plan].unbind(1)
        start, every, until, lean = self._real[plan].unbind(1)
        progress = observation.host.progress
        due = progress + _ROUNDING >= start + every * planted
        due &= (planted < count) & (progress < until)
        if allowed is not None:
            due &= allowed
        free = (masks.blueprint & wanted).any(dim=2)
        # A lean of 0 ranks all free slots equally: the first of them is taken.
        rank = torch.where(free, lean[:, None] * observation.slots.depth, -torch.inf)
        best = rank == rank.amax(dim=1, keepdim=True)
        scores = self._preference.scores(observation.offers, due)
        scores = torch.where(wanted & best[:, :, None], scores, -torch.inf)
        return next_actions(
            observation, masks, scores, patience=patience, prunes=flags[:, 0]
        )


def playable(spec: ActionSpec, blueprint: str) -> str | None:
    """The blueprint that a schedule's `blueprint` stands for in an action space.

    Itself, or if it is not offered the largest widening that is not larger; None if
    there is none.
    """
    if blueprint == LARGEST or blueprint in {known.name for known in spec.blueprints}:
        return blueprint
    sizes = {b.name: _size(b) for b in BLUEPRINTS}
    smaller = [
        (_size(known), known.name)
        for known in spec.blueprints
        if 0 < _size(known) <= sizes.get(blueprint, -1)
    ]
    return max(smaller)[1] if smaller else None


def _size(blueprint: Blueprint) -> int:
    """Units of a widening; 0 if it is none."""
    return blueprint.units(NOMINAL_WIDTH) if blueprint.form is Form.WIDEN else 0


def _wanted(spec: ActionSpec, blueprint: str) -> list[bool]:
    """Which blueprints a schedule may plant."""
    names = [known.name for known in spec.blueprints]
    found = playable(spec, blueprint)
    if found is None:
        raise unknown("nothing offered is the blueprint", blueprint, [*names, LARGEST])
    return [found in (LARGEST, name) for name in names]


def draw_schedules(
    number: int, specs: Sequence[ActionSpec], chance: np.random.Generator
) -> list[Schedule]:
    """The standard schedules, and as many random ones as are missing.

    Args:
        number: How many in all.
        specs: Action spaces in which all of them must be playable.
        chance: The random generator.
    """
    named = dict.fromkeys(kind.name for spec in specs for kind in spec.blueprints)
    kinds = [n for n in named if all(playable(spec, n) for spec in specs)]
    drawn = [*STANDARD]
    while len(drawn) < number:
        start = float(chance.uniform(0.0, 0.5)) * bool(chance.integers(4))
        drawn.append(
            Schedule(
                blueprint=str(chance.choice([*kinds, LARGEST])),
                count=int(chance.integers(1, 9)),
                start=start,
                every=float(np.exp(chance.uniform(np.log(0.01), np.log(0.3)))),
                patience=int(chance.integers(1, 5)),
                place=str(chance.choice([*PLACES])),
                prune=bool(chance.integers(2)),
            )
        )
    return drawn[:number]
