"""Growth by a timetable: how much to plant, how often, when and where.

The n-th growth of all places is due at start + n * every; one that could not be made is
made up for later. Times are shares of the horizon or, where the end is not known,
octaves: log2 of the compute so far. Where it is not known no share but 0 ever comes.
A schedule is plain data, so that schedules can be searched. `Timetable` holds many of
them as tensors: every environment may follow one of its own, and all of them are one
tensor program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Final

import torch
from jaxtyping import Bool, Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, ActionMasks, ActionSpec, Op
from esper.contracts.errors import InvalidInputError, unknown
from esper.contracts.stages import Stage
from esper.contracts.world import ControllerState, Observation
from esper.tamiyo.rule_based import (
    BLEND_AT_ONCE,
    SizePreference,
    episode_count,
    next_actions,
)

LARGEST: Final = "largest"
"""Stands for the largest widening that can be planted."""
UNLIMITED: Final = 1 << 40
"""A count that is never reached."""
SCALES: Final = ("share", "octaves")
_ROUNDING: Final = 1e-5  # 0.7 falls short of 7 * 0.1; decisions are further apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When to plant how much."""

    blueprint: str = "widen_x2"
    """What is planted; "largest": the largest widening that fits."""
    count: int = 2
    """Seeds to plant at every place."""
    start: float = 0.0
    """When the first is due."""
    every: float = 0.1
    """From one to the next."""
    until: float = inf
    """From when on nothing is planted, due or not."""
    scale: str = "share"
    """What times are: shares of the horizon, or octaves of compute."""
    cut: float = inf
    """When seeds are pruned, the youngest first; from then on nothing is planted ..."""
    keep: int = 0
    """... until so many are left at every place."""

    def __post_init__(self) -> None:
        """Refuse what cannot be played."""
        for name in ("count", "keep"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise InvalidInputError(
                    f"{name} must be a whole number from 0, got {count!r}."
                )
        for name in ("start", "every", "until", "cut"):
            time = getattr(self, name)
            if isnan(time) or time < 0:
                raise InvalidInputError(f"{name} must be a time from 0, got {time}.")
        if self.scale not in SCALES:
            raise InvalidInputError(
                f"scale must be one of {', '.join(SCALES)}; got {self.scale!r}."
            )

    @property
    def needs_end(self) -> bool:
        """Whether something is due at a share of the horizon, which must be known."""
        later = self.start > 0 or (self.every > 0 and self.count > 1)
        return self.scale == "share" and (later or min(self.until, self.cut) < inf)


EARLY: Final = Schedule(count=2, every=0.0)
"""Twice as wide, and again, as soon as possible."""
PERIODIC: Final = Schedule(blueprint="widen_x1.25", count=8, start=0.1)
"""A quarter more, every tenth of the horizon."""
DOUBLING: Final = Schedule(count=6, start=5.0, every=2.0, scale="octaves")
"""Twice as wide whenever compute has grown fourfold."""
LARGE_THEN_CUT: Final = Schedule(
    blueprint="widen_x4", count=2, every=0.0, cut=0.5, keep=1
)
"""Everything at once, and a part of it removed at half time."""
BY_RENT: Final[Mapping[bool, Mapping[float, Schedule]]] = {
    True: {
        0.0014: Schedule(count=2, every=0.0),
        0.0113: Schedule(count=1),
        0.0226: Schedule(blueprint="widen_x1.5", count=1),
    },
    False: {0.0113: Schedule(count=1, start=7.0, scale="octaves")},
}
"""By whether the end is known: the best schedules on drawn tasks (`python -m benchmarks
rules`), each with the largest rent at which it is followed; above them nothing."""


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
        self.plants = self._table.plants
        """Names of the blueprints that it ever plants."""
        self._plan = torch.arange(len(given))
        self.needs_end = any(plan.needs_end for plan in given)
        """Whether something would never come due where the end is not known."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Follow the rules, and plant what is due."""
        envs = len(observation.episode_start)
        if len(self._plan) not in (1, envs):
            raise InvalidInputError(
                f"there are schedules for {len(self._plan)} environments, got {envs}; "
                "give as many, or one for all."
            )
        self._plan = self._plan.to(masks.op.device)
        planted = episode_count(state, observation)
        plan = self._plan.expand(envs)
        actions = self._table.actions(observation, masks, plan, planted)
        return actions, planted + (actions[:, HEAD["op"]] == Op.GERMINATE)


class ScheduledByRent:
    """Follows the schedule that the rent of an environment stands for.

    The state is the number of seeds planted in the episode.

    Args:
        spec: The action space.
        plans: By whether the end is known: schedules by the largest rent at which each
            is followed, ascending; above the last of them nothing is planted.
    """

    def __init__(
        self,
        spec: ActionSpec,
        plans: Mapping[bool, Mapping[float, Schedule]] = BY_RENT,
    ) -> None:
        known, unknown = plans[True], plans[False]
        for limits in ([*known], [*unknown]):
            if limits != sorted(limits):
                raise InvalidInputError(f"rents must ascend, got {limits}.")
        nothing = Schedule(blueprint=LARGEST, count=0)
        given = [*known.values(), nothing, *unknown.values(), nothing]
        self._table = Timetable(spec, [playable(spec, plan) for plan in given])
        self.plants = self._table.plants
        """Names of the blueprints that it ever plants."""
        self._known, self._unknown = (
            torch.tensor([*limits], dtype=torch.float32) for limits in (known, unknown)
        )

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Follow the rules, and plant what is due at this rent."""
        host, planted = observation.host, episode_count(state, observation)
        rent = host.rent.float()
        self._known, self._unknown = (
            limits.to(rent.device) for limits in (self._known, self._unknown)
        )
        first = 1 + len(self._known)
        plan = torch.where(
            host.end_known,
            torch.searchsorted(self._known, rent),
            first + torch.searchsorted(self._unknown, rent),
        )
        actions = self._table.actions(observation, masks, plan, planted)
        return actions, planted + (actions[:, HEAD["op"]] == Op.GERMINATE)


class Timetable:
    """Schedules as tensors over `[plan]`.

    Args:
        spec: The action space.
        schedules: The plans, at least one.
    """

    def __init__(self, spec: ActionSpec, schedules: Sequence[Schedule]) -> None:
        if not schedules:
            raise InvalidInputError("expected at least one schedule, got none.")
        self._preference = SizePreference(spec)
        wanted = [_wanted(spec, s.blueprint) for s in schedules]
        self._flags = torch.tensor(
            [
                [s.scale == "octaves", *row]
                for s, row in zip(schedules, wanted, strict=True)
            ]
        )
        self.plants = frozenset(
            kind.name
            for s, row in zip(schedules, wanted, strict=True)
            for kind, is_wanted in zip(spec.blueprints, row, strict=True)
            if is_wanted and s.count
        )
        """Names of the blueprints that any plan plants."""
        self._whole = torch.tensor([[s.count, s.keep] for s in schedules])
        self._real = torch.tensor(
            [[s.start, s.every, s.until, s.cut] for s in schedules]
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
        count, keep = self._whole[plan].unbind(1)
        start, every, until, cut = self._real[plan].unbind(1)
        host, slots = observation.host, observation.slots
        now = torch.where(flags[:, 0], host.compute, host.progress) + _ROUNDING
        # Slot s stands at place s % places, and places differ in depth.
        per_place = (slots.depth == slots.depth[:, :1]).sum(dim=1).clamp(min=1)
        places = slots.depth.shape[1] // per_place
        due = now >= start + every * (planted // places)
        # What was cut is not planted again, also where seeds are still missing.
        due &= (planted < count * places) & (now < torch.minimum(until, cut))
        if allowed is not None:
            due &= allowed
        scores = self._preference.scores(observation.offers, due)
        free = (masks.blueprint & wanted).any(dim=2)
        first = free & (free.cumsum(dim=1) == 1)
        scores = torch.where(wanted & first[:, :, None], scores, -torch.inf)
        living = (slots.stage != Stage.DORMANT) & (slots.stage != Stage.COOLING)
        excess = living.sum(dim=1) > keep * places
        youngest = living & (living.flip(1).cumsum(dim=1).flip(1) == 1)
        prunes = youngest & ((now >= cut) & excess)[:, None]
        return next_actions(observation, masks, scores, BLEND_AT_ONCE, prunes)


def playable(spec: ActionSpec, schedule: Schedule) -> Schedule:
    """The schedule, with the largest widening where its own is not offered."""
    offered = schedule.blueprint in {known.name for known in spec.blueprints}
    return schedule if offered else replace(schedule, blueprint=LARGEST)


def _wanted(spec: ActionSpec, blueprint: str) -> list[bool]:
    """Which blueprints a schedule may plant."""
    names = [known.name for known in spec.blueprints]
    if blueprint != LARGEST and blueprint not in names:
        raise unknown(
            "this action space has no blueprint", blueprint, [*names, LARGEST]
        )
    return [blueprint in (LARGEST, name) for name in names]
