"""Growth by a schedule: what to plant, how often and when.

The n-th growth at every place is due at start + n * every. If it was not possible then,
it is made later. Times are fractions of the horizon, or octaves: log2 of the compute so
far. If the end is unknown, progress stays 0. `Scheduled` evaluates many schedules as
tensors; every environment may follow its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import ActionMasks, ActionSpec
from esper.contracts.checks import require_int, require_number, require_one_of
from esper.contracts.errors import InvalidInputError, unknown
from esper.contracts.stages import Stage
from esper.contracts.world import ControllerState, Observation
from esper.tamiyo.rule_based import (
    BLEND_AT_ONCE,
    SizePreference,
    count_planted,
    next_actions,
    planted_at_places,
)

LARGEST: Final = "largest"
"""Blueprint name for the largest widening that can be planted."""
TIME_SCALES: Final = ("share", "octaves")
LEAST_ERROR: Final = 0.02
"""Smaller errors count as this."""
_ROUNDING: Final = 1e-5  # 0.7 < 7 * 0.1; decisions are further apart than this


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What to plant and when."""

    blueprint: str = "widen_x2"
    """Blueprint to plant; "largest" is the largest widening that fits."""
    count: int = 2
    """Number of seeds to plant at every place."""
    start: float = 0.0
    """Time of the first growth."""
    every: float = 0.1
    """Time between growths."""
    until: float = inf
    """Time after which nothing is planted."""
    scale: str = "share"
    """Unit of times: share (fraction of the horizon) or octaves (log2 of compute)."""
    cut: float = inf
    """Time from which seeds are pruned, the youngest first, and nothing is planted."""
    keep: int = 0
    """Number of seeds to keep at every place when pruning."""

    def __post_init__(self) -> None:
        """Check all values."""
        for name in ("count", "keep"):
            require_int(name, getattr(self, name), 0)
        for name in ("start", "every", "until", "cut"):
            require_number(name, getattr(self, name))
        require_one_of("scale", self.scale, TIME_SCALES)

    @property
    def needs_end(self) -> bool:
        """Whether some time depends on the end of training, which must be known."""
        later = self.start > 0 or (self.every > 0 and self.count > 1)
        return self.scale == "share" and (later or min(self.until, self.cut) < inf)


EARLY: Final = Schedule(count=2, every=0.0)
"""Doubles the width twice, as soon as possible."""
PERIODIC: Final = Schedule(blueprint="widen_x1.25", count=8, start=0.1)
"""Widens by a quarter at every tenth of the horizon."""
DOUBLING: Final = Schedule(count=6, start=5.0, every=2.0, scale="octaves")
"""Doubles the width whenever compute has grown fourfold."""
LARGE_THEN_CUT: Final = Schedule(
    blueprint="widen_x4", count=2, every=0.0, cut=0.5, keep=1
)
"""Widens at the start and removes a part at half of the horizon."""
UNKNOWN_END: Final = Schedule(count=1, start=7.0, scale="octaves")
"""Best schedule on generated tasks if the end is unknown (`python -m research rules`),
up to the rent `UNKNOWN_END_RENT`. Above it nothing grows."""
UNKNOWN_END_RENT: Final = 0.0113
GAINS: Final[Mapping[str, float]] = {
    "widen_x1.25": 0.10,
    "widen_x1.5": 0.14,
    "widen_x2": 0.21,
    "widen_x4": 0.29,
}
"""Share of the errors that widening every narrow layer removes; with `NARROW` and
`ERROR` from `python -m research controller_trial`."""
NARROW: Final = 12.0
"""Units at which half of these gains is left."""
ERROR: Final = (0.49, 1.06)
"""Factor and exponent: the error at the end, expected from that at `CHOICE_TIME`."""
CHOICE_TIME: Final = 0.06
"""Share of the horizon after which a size is chosen: decision 2 of 20 to 33."""


class Scheduled(SizePreference):
    """Follows one schedule, or one per environment.

    Schedules are kept as tensors over `[plan]`; `_plan` chooses among them.

    Args:
        spec: The action space.
        schedule: One for all environments, or a sequence with one per environment.
    """

    def __init__(
        self, spec: ActionSpec, schedule: Schedule | Sequence[Schedule]
    ) -> None:
        schedules = [schedule] if isinstance(schedule, Schedule) else [*schedule]
        if not schedules:
            raise InvalidInputError("expected at least one schedule, got none.")
        super().__init__(spec)
        self._count = len(schedules)
        self.needs_end = any(plan.needs_end for plan in schedules)
        """Whether a schedule needs to know the end of training."""
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

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Plant what is due; the state counts seeds planted at every place."""
        return self._follow(self._plan(observation), observation, masks, state)

    def _follow(
        self,
        plan: Int64[Tensor, " env"],
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
    ) -> tuple[Int64[Tensor, "env head"], Int64[Tensor, "env slot"]]:
        """Return the actions of the plans, and the seeds planted at every place."""
        planted, place = planted_at_places(state, observation)
        now = self._time(plan, observation)
        wanted = self._flags[plan][:, None, 1:]  # [env, 1, blueprint]
        count, keep = self._whole[plan].unbind(1)
        start, every, until, cut = self._real[plan].unbind(1)
        slots = observation.slots
        times = planted.gather(1, place)  # [env, slot]
        due = now[:, None] >= start[:, None] + every[:, None] * times
        # After the cut nothing is planted, even if seeds are missing.
        due &= times < count[:, None]
        due &= (now < torch.minimum(until, cut))[:, None]
        free = (masks.blueprint & wanted).any(dim=2) & due
        order = times * times.shape[1] + torch.arange(times.shape[1], device=now.device)
        order = torch.where(free, order, torch.iinfo(order.dtype).max)
        first = free & (order == order.amin(dim=1, keepdim=True))
        scores = self.scores(observation.offers)
        scores = torch.where(wanted & first[:, :, None], scores, -torch.inf)
        living = (slots.stage != Stage.DORMANT) & (slots.stage != Stage.COOLING)
        excess = living.sum(dim=1) > keep * (place.amax(dim=1) + 1)
        youngest = living & (living.flip(1).cumsum(dim=1).flip(1) == 1)
        prunes = youngest & ((now >= cut) & excess)[:, None]
        actions = next_actions(observation, masks, scores, BLEND_AT_ONCE, prunes)
        return actions, count_planted(planted, place, actions)

    def keeps(self, observation: Observation) -> Bool[Tensor, " env"]:
        """Return where holding seeds will not be pruned any more."""
        plan = self._plan(observation)
        now = self._time(plan, observation)
        keep, cut = self._whole[plan, 1], self._real[plan, 3]
        stage = observation.slots.stage
        living = (stage != Stage.DORMANT) & (stage != Stage.COOLING)
        _, place = planted_at_places(None, observation)
        is_cut = living.sum(dim=1) <= keep * (place.amax(dim=1) + 1)
        return (cut == inf) | ((now >= cut) & is_cut)

    def _time(
        self, plan: Int64[Tensor, " env"], observation: Observation
    ) -> Float[Tensor, " env"]:
        """Return the time on the scale of each plan."""
        host = observation.host
        self._flags, self._whole, self._real = (
            table.to(plan.device) for table in (self._flags, self._whole, self._real)
        )
        octaves = self._flags[plan, 0]
        return torch.where(octaves, host.compute, host.progress) + _ROUNDING

    def _plan(self, observation: Observation) -> Int64[Tensor, " env"]:
        """Return the index of the schedule of each environment."""
        envs = len(observation.episode_start)
        if self._count not in (1, envs):
            raise InvalidInputError(
                f"there are schedules for {self._count} environments, got {envs}. "
                "Pass one per environment, or one for all."
            )
        device = observation.episode_start.device
        return torch.arange(self._count, device=device).expand(envs)


class ScheduledByRent(Scheduled):
    r"""Widens every layer once, by the factor that is worth its rent.

        worth = gain * narrow^2 / (narrow^2 + units^2) - rent * size / expected error

    is the share of the errors that growth removes, less its rent. The factor is chosen
    at `CHOICE_TIME`; the error expected at the end follows from the error then. If the
    end is unknown, it follows `UNKNOWN_END`.

    Args:
        spec: The action space.
    """

    def __init__(self, spec: ActionSpec) -> None:
        offered = {known.name: known.share for known in spec.blueprints}
        # Without a known widening, the largest one counts as the largest of them.
        names = [name for name in GAINS if name in offered] or [LARGEST]
        growths = [Schedule(blueprint=name, count=1) for name in names]
        nothing = Schedule(blueprint=LARGEST, count=0)
        super().__init__(spec, [nothing, *growths, playable(spec, UNKNOWN_END)])
        self.needs_end = False  # it has a schedule for an unknown end
        gains = [GAINS.get(name, max(GAINS.values())) for name in names]
        shares = [offered.get(name, 0.0) for name in names]
        self._prices = torch.tensor([gains, shares])  # [2, plan]

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Plant what is due; the state also holds the plans, -1 before the choice."""
        start, host = observation.episode_start, observation.host
        planted, plan = state if isinstance(state, tuple) else (None, start.long() - 1)
        plan = torch.where(start, -1, plan)
        due = (plan < 0) & (host.progress >= CHOICE_TIME)
        plan = torch.where(due, self._best(observation), plan)
        late = torch.where(host.rent <= UNKNOWN_END_RENT, self._count - 1, 0)
        plan = torch.where(host.end_known, plan, late)
        actions, planted = self._follow(plan.clamp(min=0), observation, masks, planted)
        return actions, (planted, plan)

    def keeps(self, observation: Observation) -> Bool[Tensor, " env"]:
        """Return True everywhere: nothing is pruned."""
        return torch.ones_like(observation.episode_start)

    def _best(self, observation: Observation) -> Int64[Tensor, " env"]:
        """Return the plan of the largest worth; 0 if growing is not worth its rent."""
        host, slots, offers = observation.host, observation.slots, observation.offers
        self._prices = self._prices.to(host.rent.device)
        (gains, shares), wanted = (
            self._prices,
            self._flags[1:-1, 1:].to(host.rent.device),
        )
        _, place = planted_at_places(None, observation)
        first = torch.arange(place.shape[1], device=place.device) == place
        fits = offers.fits & first[:, :, None]
        costs = torch.where(fits, offers.parameters, 0.0).sum(dim=1)  # [env, blueprint]
        there = wanted & fits.any(dim=1)[:, None]  # [env, plan, blueprint]
        added = torch.where(there, costs[:, None], torch.inf).amin(dim=2)
        # Weights between two layers that both grow are counted once as inputs and once
        # as outputs; the sum of all layers exceeds the host by them.
        between = (added - shares).clamp(min=0.0)
        added = added + torch.where(shares > 0.0, between * shares, 0.0)
        possible = (added <= host.budget_left[:, None]) & (added < torch.inf)
        units = torch.where(slots.units > 0.0, slots.units, torch.inf).amin(dim=1)
        units = torch.where(units < torch.inf, units, 0.0)
        gain = gains * (NARROW**2 / (NARROW**2 + units**2))[:, None]
        factor, exponent = ERROR
        expected = factor * (1.0 - host.score).clamp(min=LEAST_ERROR) ** exponent
        worth = gain - host.rent[:, None] * added / expected[:, None]
        value, best = torch.where(possible, worth, -torch.inf).max(dim=1)
        return torch.where(value > 0.0, best + 1, 0)


def playable(spec: ActionSpec, schedule: Schedule) -> Schedule:
    """Return the schedule, with the largest widening if its own is not offered."""
    offered = schedule.blueprint in {known.name for known in spec.blueprints}
    return schedule if offered else replace(schedule, blueprint=LARGEST)


def _wanted(spec: ActionSpec, blueprint: str) -> list[bool]:
    """Return which blueprints a schedule may plant."""
    names = [known.name for known in spec.blueprints]
    if blueprint != LARGEST and blueprint not in names:
        raise unknown(
            "this action space has no blueprint", blueprint, [*names, LARGEST]
        )
    return [blueprint in (LARGEST, name) for name in names]
