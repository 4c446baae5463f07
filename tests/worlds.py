"""Tiny worlds with known answers, and observations with nothing in them."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Generator, Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.slots import SlotConfig, SlotStates
from esper.contracts.world import (
    BlueprintOffers,
    HostStates,
    Observation,
    StepResult,
)

PROBE_SPEC = ActionSpec(
    slots=SlotConfig(max_slots=2, min_age=1), blueprints=BLUEPRINTS[:3]
)


def blank_slots(envs: int, slots: int) -> SlotStates:
    """Empty slots: only WAIT and GERMINATE are possible."""
    shape = (envs, slots)
    yes, whole = torch.ones(shape) > 0, torch.zeros(shape, dtype=torch.int64)
    return SlotStates(
        **zeros(SlotStates, shape)
        | {"stage": whole, "age": whole, "blueprint": whole - 1, "style": whole}
        | {"alpha_settled": yes, "contribution_measured": ~yes}
    )


def zeros(record: type, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """0 for every field of a record."""
    return {each.name: torch.zeros(shape) for each in fields(record)}


def blank_observation(envs: int, spec: ActionSpec = PROBE_SPEC) -> Observation:
    """Hosts of which nothing is known and in which everything can be planted."""
    shape = (envs, spec.slots.max_slots, len(spec.blueprints))
    yes, unlimited = torch.ones(shape) > 0, torch.full((envs,), torch.inf)
    return Observation(
        episode_start=torch.zeros(envs, dtype=torch.bool),
        host=HostStates(
            **zeros(HostStates, (envs,))
            | {"budget_left": unlimited, "end_known": unlimited > 0}
        ),
        slots=blank_slots(*shape[:2]),
        offers=BlueprintOffers(
            **zeros(BlueprintOffers, shape) | {"fits": yes, "promise_known": ~yes}
        ),
    )


class PlainWorld:
    """What a `VectorWorld` has besides its environments."""

    group_size = 1


@dataclass
class ProbeWorld(PlainWorld):
    """Episodes in which one shown bit and one choice decide the reward.

    `show` maps (time, bit) to the score column, `pay` maps (time, bit, actions) to the
    reward; both see whole batches. Slots stay empty. With `limit`, episodes are
    *truncated* after a random number of steps up to it, else terminated at `length`.
    """

    num_envs: int
    pay: Callable[[Tensor, Tensor, Tensor], Tensor]
    show: Callable[[Tensor, Tensor], Tensor] = lambda time, bit: bit.float()
    length: int = 1
    limit: int | None = None
    fits: Tensor | None = None
    rng_seed: int = 0
    spec: ActionSpec = PROBE_SPEC
    time: Tensor = field(init=False)
    bit: Tensor = field(init=False)
    ends_at: Tensor = field(init=False)

    def __post_init__(self):
        self._generator = Generator().manual_seed(self.rng_seed)
        self.time = torch.zeros(self.num_envs, dtype=torch.int64)
        self.bit = torch.zeros(self.num_envs, dtype=torch.int64)
        self.ends_at = torch.zeros(self.num_envs, dtype=torch.int64)

    def reset(self) -> Observation:
        self._renew(torch.ones(self.num_envs, dtype=torch.bool))
        return self._observe()

    def step(self, actions: Tensor) -> StepResult:
        reward = self.pay(self.time, self.bit, actions).float()
        self.time = self.time + 1
        ended = self.time >= self.ends_at
        final = self._observe() if self.limit is not None else None
        self._renew(ended)
        cut = ended if self.limit is not None else torch.zeros_like(ended)
        return StepResult(
            observation=self._observe(),
            reward=reward,
            terminated=ended & ~cut,
            truncated=cut,
            final=final,
        )

    def _renew(self, where: Tensor) -> None:
        shape = (self.num_envs,)
        bit = torch.randint(0, 2, shape, generator=self._generator)
        longest = self.limit if self.limit is not None else self.length
        shortest = 1 if self.limit is not None else self.length
        ends = torch.randint(shortest, longest + 1, shape, generator=self._generator)
        self.bit = torch.where(where, bit, self.bit)
        self.ends_at = torch.where(where, ends, self.ends_at)
        self.time = torch.where(where, 0, self.time)

    def _observe(self) -> Observation:
        blank = blank_observation(self.num_envs, self.spec)
        offers = blank.offers
        if self.fits is not None:
            offers = replace(offers, fits=self.fits.expand_as(offers.fits))
        progress = torch.zeros(self.num_envs)
        if self.limit is None:
            progress = self.time / self.length
        host = replace(
            blank.host,
            score=self.show(self.time, self.bit).float(),
            progress=progress,
        )
        return replace(blank, episode_start=self.time == 0, host=host, offers=offers)
