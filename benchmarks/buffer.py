"""What does it cost to store one step of all environments, checks included?

The twin writes one field of one environment at a time, one head at a time, and keeps
the memory of an LSTM of 512 units at every step. Ours copies a step of all
environments per field, checks every value, and keeps memory where rows start.
"""

from typing import Any

import torch

from benchmarks.timing import Report, alternate, micro, sizes
from esper.contracts.actions import HEAD_NAMES, NUM_HEADS, ActionSpec
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.features import (
    HOST_COLUMNS,
    OFFER_COLUMNS,
    SLOT_COLUMNS,
    Features,
)
from tests.references.rollout_buffer import NaiveRolloutBuffer

SPEC = ActionSpec()
ENVS = (4, 16, 128, 1024)
STEPS = 32
HIDDEN = 512
# Host, slot and blueprint numbers in one vector, as the twin's authors had them.
OBSERVATION = 128


def run() -> list[Report]:
    """Time `add` and `get_batched_sequences` of both buffers."""
    adding = Report(
        "Storing one step of all environments",
        (
            "envs",
            "naive µs",
            "ours µs",
            "ratio",
            "with mask µs",
            "ns/env",
            "naive B",
            "ours B",
        ),
        notes=[
            "Ours checks every shape and value. With mask: of who acted, rows may "
            "differ in length.",
            f"B: bytes per environment and step. The twin's are mostly two memories of "
            f"{HIDDEN}; ours has one per row, and all choices' log-probabilities.",
        ],
    )
    reading = Report(
        f"Reading {STEPS} steps as padded sequences",
        ("envs", "naive µs", "ours µs", "ours, padded µs", "copied MB"),
        notes=[
            "The twin hands out its storage; ours copies, so that it may be reused."
        ],
    )
    for envs in sizes(ENVS):
        adding.add(*_adding(envs))
        reading.add(*_reading(envs))
    return [adding, reading]


def _adding(envs: int) -> tuple[float | int, ...]:
    naive, ours, ragged = _naive(envs), _ours(envs), _ours(envs)
    step, parts = _step(envs), _parts(envs)
    everyone = torch.ones(envs, dtype=torch.bool)

    def add_naive() -> None:
        if naive.step_counts[0] == STEPS:
            naive.reset()
        for env, part in enumerate(parts):
            naive.add(env, **part)

    def add_ours() -> None:
        if ours.is_full:
            ours.reset()
        ours.add(**step)

    def add_ragged() -> None:
        if ragged.is_full:
            ragged.reset()
        ragged.add(**step, acted=everyone)

    took = alternate({"naive": add_naive, "ours": add_ours, "ragged": add_ragged})
    return (
        envs,
        micro(took["naive"]),
        micro(took["ours"]),
        took["naive"] / took["ours"],
        micro(took["ragged"]),
        took["ours"] / envs * 1e9,
        round(naive.bytes_per_step()),
        round(ours.nbytes / (envs * STEPS)),
    )


def _reading(envs: int) -> tuple[float | int, ...]:
    naive, full, ragged = _naive(envs), _ours(envs), _ours(envs)
    step, parts = _step(envs), _parts(envs)
    everyone = torch.ones(envs, dtype=torch.bool)
    for _ in range(STEPS):
        for env, part in enumerate(parts):
            naive.add(env, **part)
        full.add(**step)
        ragged.add(**step, acted=everyone)
    for buffer in (full, ragged):
        buffer.finish(torch.zeros(envs))
        buffer.compute_advantages_and_returns()
    took = alternate(
        {
            "naive": naive.get_batched_sequences,
            "full": full.get_batched_sequences,
            "ragged": ragged.get_batched_sequences,
        }
    )
    return (envs, *(micro(seconds) for seconds in took.values()), full.nbytes / 1e6)


def _ours(envs: int) -> TamiyoRolloutBuffer:
    return TamiyoRolloutBuffer(envs, STEPS, SPEC, state_shape=(1, HIDDEN))


def _naive(envs: int) -> NaiveRolloutBuffer:
    return NaiveRolloutBuffer(
        envs, STEPS, SPEC, observation_width=OBSERVATION, hidden_width=HIDDEN
    )


def _step(envs: int) -> dict[str, Any]:
    slots, blueprints = SPEC.slots.max_slots, len(SPEC.blueprints)
    nobody = torch.zeros(envs, dtype=torch.bool)
    distribution = -torch.rand(envs, NUM_HEADS, SPEC.width)
    return {
        "features": Features(
            host=torch.rand(envs, len(HOST_COLUMNS)),
            slots=torch.rand(envs, slots, len(SLOT_COLUMNS)),
            offers=torch.rand(envs, slots, blueprints, len(OFFER_COLUMNS)),
        ),
        "episode_start": nobody,
        "masks": SPEC.allowed.expand(envs, -1, -1).clone(),
        "actions": torch.zeros(envs, NUM_HEADS, dtype=torch.int64),
        "log_probs": distribution[:, :, 0],  # of the first choice
        "distribution": distribution,
        "values": torch.rand(envs),
        "rewards": torch.rand(envs),
        "terminated": nobody,
        "truncated": nobody,
    }


def _parts(envs: int) -> list[dict[str, Any]]:
    """The same for the twin, cut up beforehand: the cutting is not timed."""
    sizes = dict(zip(HEAD_NAMES, SPEC.sizes, strict=True))
    return [
        {
            "observation": torch.rand(OBSERVATION),
            "episode_start": False,
            "actions": dict.fromkeys(HEAD_NAMES, 0),
            "log_probs": dict.fromkeys(HEAD_NAMES, -1.0),
            "masks": {
                head: torch.ones(size, dtype=torch.bool) for head, size in sizes.items()
            },
            "value": 0.5,
            "reward": 0.1,
            "terminated": False,
            "truncated": False,
            "bootstrap_value": 0.0,
            "hidden_h": torch.rand(HIDDEN),
            "hidden_c": torch.rand(HIDDEN),
        }
        for _ in range(envs)
    ]
