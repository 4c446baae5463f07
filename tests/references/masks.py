"""Legality, one environment, one slot and one op at a time.

`is_legal` states the rules as sentences; `masks_of` asks it everything there is to
ask. `naive_batch_masks` is what the benchmark measures against: eight small tensors
for every environment, then one stack per head.
"""

from math import inf
from typing import NamedTuple

import torch

from esper.contracts.actions import HEADS, ActionSpec
from esper.contracts.blueprints import NUM_BLUEPRINTS
from esper.contracts.slots import SlotConfig, SlotMaskState
from esper.contracts.stages import Stage

OPS = ("WAIT", "GERMINATE", "ADVANCE", "SET_ALPHA", "PRUNE", "FOSSILIZE")


class Slot(NamedTuple):
    """One slot, with the blueprints that fit it and what each costs."""

    stage: str
    age: int
    settled: bool
    fits: list[bool]
    costs: list[float]


def plantable(slot: Slot, budget: float) -> list[bool]:
    """Which blueprints an empty slot can take: those that fit and can be paid."""
    return [
        slot.stage == "DORMANT" and fits and cost <= budget
        for fits, cost in zip(slot.fits, slot.costs, strict=True)
    ]


def is_legal(op: str, slot: Slot, *, min_age: int, budget: float) -> bool:
    """Whether an op is possible in a slot."""
    if op == "WAIT":
        return False  # it names no slot
    if op == "GERMINATE":
        return any(plantable(slot, budget))
    if not slot.settled:
        return False  # nothing may be done to a seed whose alpha is moving
    if op == "ADVANCE":
        return slot.stage in ("TRAINING", "BLENDING") and slot.age >= min_age
    if op == "PRUNE":
        living = slot.stage in ("TRAINING", "BLENDING", "HOLDING")
        return living and slot.age >= min_age
    if op == "SET_ALPHA":
        return slot.stage in ("BLENDING", "HOLDING")
    assert op == "FOSSILIZE"
    return slot.stage == "HOLDING"


def masks_of(slots: list[Slot], budget: float, spec: ActionSpec) -> dict[str, list]:
    """The op, slot and blueprint tables of one environment."""
    allowed = spec.narrowed.get("op", OPS)
    min_age = spec.slots.min_age
    table = [
        [
            op in allowed and is_legal(op, slot, min_age=min_age, budget=budget)
            for slot in slots
        ]
        for op in OPS
    ]
    return {
        "op": [op == "WAIT" or any(row) for op, row in zip(OPS, table, strict=True)],
        "slot": table,
        "blueprint": [
            plantable(slot, budget)
            if "GERMINATE" in allowed
            else [False] * len(slot.fits)
            for slot in slots
        ],
    }


def slots_from(observation, env: int) -> tuple[list[Slot], float]:
    """The slots of one environment of an observation, and its budget."""
    stage, age, settled, fits, costs = (
        tensor[env].tolist()
        for tensor in (
            observation.slots.stage,
            observation.slots.age,
            observation.slots.alpha_settled,
            observation.offers.fits,
            observation.offers.parameters,
        )
    )
    names = [Stage(value).name for value in stage]
    slots = [Slot(*row) for row in zip(names, age, settled, fits, costs, strict=True)]
    return slots, observation.host.budget_left[env].item()


def slots_from_row(row: list[SlotMaskState | None]) -> tuple[list[Slot], float]:
    """A row of slots in which everything fits, costs nothing and may be spent."""
    fits, costs = [True] * NUM_BLUEPRINTS, [0.0] * NUM_BLUEPRINTS
    slots = [
        Slot("DORMANT", 0, True, fits, costs)
        if state is None
        else Slot(Stage(state.stage).name, state.age, state.alpha_settled, fits, costs)
        for state in row
    ]
    return slots, inf


def naive_action_masks(
    slot_states: list[SlotMaskState | None], slot_config: SlotConfig, device: str
) -> dict[str, torch.Tensor]:
    """One environment: a small tensor per head, filled slot by slot."""
    op = torch.zeros(len(OPS), dtype=torch.bool, device=device)
    slot = torch.zeros(slot_config.max_slots, dtype=torch.bool, device=device)
    blueprint = torch.zeros(NUM_BLUEPRINTS, dtype=torch.bool, device=device)
    legal = {"WAIT"}
    for index, state in enumerate(slot_states):
        usable = set()
        if state is None or state.stage == Stage.DORMANT:
            usable.add("GERMINATE")
        elif state.alpha_settled:
            old = state.age >= slot_config.min_age
            if state.stage in (Stage.TRAINING, Stage.BLENDING) and old:
                usable.add("ADVANCE")
            if state.stage in (Stage.BLENDING, Stage.HOLDING):
                usable.add("SET_ALPHA")
            if state.stage in (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING) and old:
                usable.add("PRUNE")
            if state.stage == Stage.HOLDING:
                usable.add("FOSSILIZE")
        if usable:
            slot[index] = True
        legal |= usable
    for index, name in enumerate(OPS):
        if name in legal:
            op[index] = True
    if "GERMINATE" in legal:
        for index in range(NUM_BLUEPRINTS):
            blueprint[index] = True
    masks = {"op": op, "slot": slot, "blueprint": blueprint}
    for head in HEADS[3:]:
        size = len(head.choices)
        masks[head.name] = torch.ones(size, dtype=torch.bool, device=device)
    return masks


def naive_batch_masks(
    batch_slot_states: list[list[SlotMaskState | None]],
    slot_config: SlotConfig,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """All environments: one by one, then stacked head by head."""
    masks_list = [
        naive_action_masks(slot_states, slot_config, device)
        for slot_states in batch_slot_states
    ]
    return {
        key: torch.stack([masks[key] for masks in masks_list]) for key in masks_list[0]
    }
