"""Masks of the legal actions.

The rules are in `contracts.stages.TRANSITIONS`. GERMINATE also needs a blueprint that
fits the slot and the budget; WAIT is always legal. The rules are expanded once into a
table over all states of a slot, so a batch of any size is a few tensor operations.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import NoneType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from esper.contracts.actions import HEAD, ActionMasks, ActionSpec, Op
from esper.contracts.blueprints import NUM_BLUEPRINTS
from esper.contracts.devices import require_tensor, usable_device
from esper.contracts.errors import InvalidInputError
from esper.contracts.slots import SlotConfig, SlotMaskState
from esper.contracts.stages import LEGAL, Stage
from esper.contracts.world import Observation

__all__ = [
    "NUM_BLUEPRINTS",
    "ActionMasks",
    "SlotConfig",
    "SlotMaskState",
    "compute_action_masks",
    "compute_batch_masks",
    "compute_masks",
]


# Plain integers, because torch takes microseconds to convert an enum member.
DORMANT: Final = Stage.DORMANT.value
GERMINATE: Final = Op.GERMINATE.value

SAME_WORLD: Final = "Take observation and spec from the same world."
EMPTY: Final = SlotMaskState(Stage.DORMANT, age=0, alpha_settled=True)


def compute_masks(observation: Observation, spec: ActionSpec) -> ActionMasks:
    """Return the legal actions in every environment, on the observation's device."""
    slots, offers = observation.slots, observation.offers
    left, device = observation.host.budget_left, slots.stage.device
    places = (slots.stage.shape[0], spec.slots.max_slots)
    kinds = (*places, len(spec.blueprints))
    for name, value, shape, dtype in (
        ("stage", slots.stage, places, torch.int64),
        ("age", slots.age, places, torch.int64),
        ("alpha_settled", slots.alpha_settled, places, torch.bool),
        ("fits", offers.fits, kinds, torch.bool),
        ("parameters", offers.parameters, kinds, offers.parameters.dtype),
        ("budget_left", left, places[:1], left.dtype),
    ):
        require_tensor(name, value, shape, dtype, device, SAME_WORLD)
    plantable = offers.fits & (offers.parameters <= left.view(-1, 1, 1))
    return _masks(slots.stage, slots.age, slots.alpha_settled, spec, plantable)


def compute_batch_masks(
    batch_slot_states: Sequence[Sequence[SlotMaskState | None]],
    slot_config: SlotConfig,
    device: torch.device | str = "cpu",
) -> ActionMasks:
    """Return the legal actions in every environment if every blueprint fits.

    Args:
        batch_slot_states: A list of slots per environment; an empty slot is None.
        slot_config: Number of slots and minimum age.
        device: Device of the masks.
    """
    if not isinstance(slot_config, SlotConfig):
        raise InvalidInputError(
            f"slot_config must be a SlotConfig, got {type(slot_config).__name__}."
        )
    spec = _whole_spec(slot_config)
    where = usable_device(device, has_values=False)
    slots = _from_rows(batch_slot_states, slot_config.max_slots)
    stage, age, settled = (value.to(where) for value in slots)
    kinds = len(spec.blueprints)
    all_fit = torch.ones((), dtype=torch.bool, device=where)
    return _masks(stage, age, settled, spec, all_fit.expand(*stage.shape, kinds))


def compute_action_masks(
    slot_states: Sequence[SlotMaskState | None],
    slot_config: SlotConfig,
    device: torch.device | str = "cpu",
) -> ActionMasks:
    """Return the legal actions in one environment, as a batch of one."""
    return compute_batch_masks([slot_states], slot_config, device)


def _masks(
    stage: Tensor, age: Tensor, settled: Tensor, spec: ActionSpec, plantable: Tensor
) -> ActionMasks:
    """Return the masks; `plantable` is which blueprints fit slot and budget."""
    rules = _rules(spec, stage.device)
    blueprint = (stage == DORMANT).unsqueeze(2) & plantable
    if not rules.germinates:
        blueprint.zero_()
    old = age >= spec.slots.min_age
    state = torch.add(settled, stage, alpha=4).add_(old, alpha=2)
    try:
        slot = torch.embedding(rules.table, state)  # [env, slot, op]
    except IndexError as error:  # known at once on the CPU only
        raise InvalidInputError(
            f"stage must lie in 0..{len(Stage) - 1}, got {stage.min()}..{stage.max()}."
        ) from error
    torch.any(blueprint, dim=2, out=slot.select(2, GERMINATE))
    op = slot.any(dim=1).logical_or_(rules.always)
    # A copy, because the caller may write into the masks.
    fixed = rules.fixed.expand(len(stage), -1, -1).clone()
    return ActionMasks(op, slot.transpose(1, 2), blueprint, fixed)


@dataclass(frozen=True, slots=True)
class _Rules:
    """Rules of one action space on one device."""

    table: Tensor
    """Legal ops of every slot state except GERMINATE, bool [state, op]. The index of a
    state is 4 * stage + 2 * (old enough) + settled."""
    always: Tensor
    """Ops that need no slot, bool [op]."""
    germinates: bool
    """Whether GERMINATE is in the action space."""
    fixed: Tensor
    """Choices in the action space, bool [head, choice]."""


_RULES: Final[dict[Hashable, _Rules]] = {}


def _rules(spec: ActionSpec, device: torch.device) -> _Rules:
    """Return the rules of an action space, cached per device."""
    key = (device, spec.sizes, *spec.narrowed.items())
    if key not in _RULES:
        with torch.inference_mode(False):  # also used outside of inference mode
            fixed = spec.allowed.clone()
            ops = fixed[HEAD["op"], : len(Op)]
            _RULES[key] = _Rules(
                table=(LEGAL.flatten(1).T & ops).to(device),
                always=torch.tensor([op is Op.WAIT for op in Op], device=device),
                germinates="GERMINATE" in spec.narrowed.get("op", ("GERMINATE",)),
                fixed=fixed.to(device),
            )
    return _RULES[key]


@cache
def _whole_spec(slot_config: SlotConfig) -> ActionSpec:
    return ActionSpec(slots=slot_config)


def _from_rows(
    rows: Any,  # noqa: ANN401
    max_slots: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return stage, age and alpha_settled of all slots as `[env, slot]` tensors."""
    try:
        lengths = [len(row) for row in rows]
    except TypeError:
        raise InvalidInputError(
            f"slot states must be one list of slots per environment, got {rows!r:.99}."
        ) from None
    for env, length in enumerate(lengths):
        if length != max_slots:
            raise InvalidInputError(
                f"environment {env} has {length} slots, expected {max_slots}. Use None "
                "for an empty slot."
            )
    flat = list(chain.from_iterable(rows))
    if unknown := {*map(type, flat)} - {SlotMaskState, NoneType}:
        index = next(i for i, state in enumerate(flat) if type(state) in unknown)
        raise InvalidInputError(
            f"slot {index % max_slots} of environment {index // max_slots} must be a "
            f"SlotMaskState or None, got {flat[index]!r}."
        )
    states = [EMPTY if state is None else state for state in flat]
    columns = (
        np.array([state.stage for state in states], dtype=np.int64),
        np.array([state.age for state in states], dtype=np.int64),
        np.array([state.alpha_settled for state in states], dtype=np.bool_),
    )
    stage, age, settled = (
        torch.from_numpy(column.reshape(-1, max_slots)) for column in columns
    )
    return stage, age, settled
