"""What do the masks of all environments cost, from arrays and from lists of slots?

The twin builds eight small tensors for every environment, element by element, and
stacks them head by head. Ours looks every slot up in one table; from lists of slot
states it makes arrays first.
"""

from typing import Any

import torch

from benchmarks.rollouts import random_observation
from benchmarks.timing import Report, alternate, micro, sizes
from esper.contracts.actions import ActionSpec
from esper.contracts.slots import SlotMaskState, SlotStates
from esper.contracts.stages import Stage
from esper.tamiyo.policy.action_masks import compute_batch_masks, compute_masks
from tests.references.masks import naive_batch_masks

ENVS = (4, 16, 128, 1024)
SPEC = ActionSpec()


def run() -> Report:
    """Time the masks of growing batches."""
    report = Report(
        f"Masks, {SPEC.slots.max_slots} slots, 8 heads",
        ("envs", "naive µs", "arrays µs", "ratio", "lists µs", "lists ratio", "growth"),
        notes=[
            "From arrays, ours weighs fit and budget of every blueprint as well.",
            "Growth: our time from arrays against that of the smallest batch.",
        ],
    )
    smallest = None
    for envs in sizes(ENVS):
        generator = torch.Generator().manual_seed(envs)
        observation = random_observation(envs, generator, SPEC)
        rows = as_rows(observation.slots)
        sides: dict[str, Any] = {
            "naive": lambda rows=rows: naive_batch_masks(rows, SPEC.slots),
            "arrays": lambda seen=observation: compute_masks(seen, SPEC),
            "lists": lambda rows=rows: compute_batch_masks(rows, SPEC.slots),
        }
        best = alternate(sides, rounds=15)
        smallest = smallest or best["arrays"]
        report.add(
            envs,
            micro(best["naive"]),
            micro(best["arrays"]),
            best["naive"] / best["arrays"],
            micro(best["lists"]),
            best["naive"] / best["lists"],
            best["arrays"] / smallest,
        )
    return report


def as_rows(slots: SlotStates) -> list[list[SlotMaskState | None]]:
    """The same slots as a list per environment, None where empty."""
    columns = (slots.stage, slots.age, slots.alpha_settled)
    return [
        [
            None
            if stage == Stage.DORMANT
            else SlotMaskState(Stage(stage), age, alpha_settled=settled)
            for stage, age, settled in zip(*row, strict=True)
        ]
        for row in zip(*(column.tolist() for column in columns), strict=True)
    ]
