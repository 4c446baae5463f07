"""Steps of all environments with random, legal content, one after the other."""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from esper.contracts.actions import NUM_HEADS, ActionSpec
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.slots import SlotConfig
from esper.simic.agent.rollout_buffer import SequenceBatch, TamiyoRolloutBuffer
from esper.tamiyo.policy.features import (
    HOST_COLUMNS,
    OFFER_COLUMNS,
    SLOT_COLUMNS,
    Features,
)

SPEC = ActionSpec(slots=SlotConfig(max_slots=2), blueprints=BLUEPRINTS[:3])
STATE = (2, 3)
SEEN = ("host", "slots", "offers")
COPIED = ("episode_start", "masks", "actions", "log_probs", "distribution", "values")


def make_buffer(envs: int = 2, steps: int = 4, **settings: Any) -> TamiyoRolloutBuffer:
    settings = {"state_shape": STATE, **settings}
    return TamiyoRolloutBuffer(envs, steps, SPEC, **settings)


def flags(envs: int, *chosen: int) -> Tensor:
    """True for the chosen environments."""
    return torch.tensor([env in chosen for env in range(envs)])


class Steps:
    """Makes the arguments of one `add` after the other.

    Rows are drawn first and actions from them, so every choice is legal; `first` is
    set after an end, and at the very start.
    """

    def __init__(self, envs: int = 2, rng_seed: int = 0) -> None:
        self.envs = envs
        self.generator = Generator().manual_seed(rng_seed)
        self.episode_start = torch.ones(envs, dtype=torch.bool)

    def __call__(self, **changes: Any) -> dict[str, Any]:
        envs, width = self.envs, SPEC.width
        slots, blueprints = SPEC.slots.max_slots, len(SPEC.blueprints)
        rows = (self.normal(NUM_HEADS, width) > 0) & SPEC.allowed
        rows[..., 0] |= ~rows.any(dim=-1)
        log_probs = torch.where(rows, self.normal(NUM_HEADS, width), -torch.inf)
        distribution = torch.where(rows, log_probs.log_softmax(dim=-1), 0.0)
        actions = log_probs.argmax(dim=-1)
        step = {
            "features": Features(
                host=self.normal(len(HOST_COLUMNS)),
                slots=self.normal(slots, len(SLOT_COLUMNS)),
                offers=self.normal(slots, blueprints, len(OFFER_COLUMNS)),
            ),
            "episode_start": self.episode_start,
            "masks": rows,
            "actions": actions,
            "log_probs": distribution.gather(-1, actions[..., None])[..., 0],
            "distribution": distribution,
            "values": self.normal(),
            "rewards": self.normal(),
            "terminated": flags(envs),
            "truncated": flags(envs),
            **changes,
        }
        ended = step["terminated"] | step["truncated"]
        acted = step.get("acted")
        self.episode_start = (
            ended if acted is None else torch.where(acted, ended, self.episode_start)
        )
        return step

    def normal(self, *axes: int) -> Tensor:
        return torch.randn(self.envs, *axes, generator=self.generator)


def a_step(envs: int = 2, **changes: Any) -> dict[str, Any]:
    """The arguments of a first `add`."""
    return Steps(envs)() | changes


def take(buffer: TamiyoRolloutBuffer) -> SequenceBatch:
    """What an update would see."""
    buffer.compute_advantages_and_returns()
    return buffer.get_batched_sequences()


def fields(batch: SequenceBatch) -> dict[str, Tensor]:
    """Every tensor of a batch by name."""
    seen = {name: getattr(batch.features, name) for name in SEEN}
    rest = (*COPIED, "advantages", "returns", "valid_mask", "state")
    return seen | {name: batch[name] for name in rest}


def assert_same(actual: SequenceBatch, expected: SequenceBatch) -> None:
    """Equal to the bit."""
    for name, field in fields(actual).items():
        assert_close(field, fields(expected)[name], rtol=0, atol=0)


def fill(buffer: TamiyoRolloutBuffer, *, ragged: bool) -> SequenceBatch:
    """Three moments; env 0 acts in all of them, env 1 in all or only the second."""
    steps = Steps(rng_seed=3)
    buffer.begin(torch.ones(2, *STATE))
    for moment in range(3):
        acted = flags(2, *((0, 1) if moment == 1 else (0,))) if ragged else None
        step = steps(
            truncated=flags(2, 0) if moment == 1 else flags(2),
            final_values=torch.full((2,), 2.0),
            acted=acted,
        )
        buffer.add(**step)
    buffer.finish(torch.ones(2))
    return take(buffer)
