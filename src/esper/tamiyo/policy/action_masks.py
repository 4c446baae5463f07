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
from jaxtyping import Bool, Float
from torch import Tensor

from esper.contracts.actions import HEAD, ActionMasks, ActionSpec, Op
from esper.contracts.blueprints import NUM_BLUEPRINTS
from esper.contracts.devices import usable_device
from esper.contracts.errors import InvalidInputError
from esper.contracts.slots import SlotConfig, SlotMaskState, SlotStates
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

EMPTY: Final = SlotMaskState(Stage.DORMANT, age=0, alpha_settled=True)


def compute_masks(observation: Observation, spec: ActionSpec) -> ActionMasks:
    """Return the legal actions in every environment, on the observation's device."""
    slots, offers = observation.slots, observation.offers
    return _masks(
        slots.stage,
        slots.age,
        slots.alpha_settled,
        spec,
        offers.fits,
        offers.parameters,
        observation.host.budget_left,
    )


def compute_batch_masks(
    batch_slot_states: SlotStates | Sequence[Sequence[SlotMaskState | None]],
    slot_config: SlotConfig,
    device: torch.device | str = "cpu",
    *,
    spec: ActionSpec | None = None,
    fits: Bool[Tensor, "env slot blueprint"] | None = None,
    costs: Float[Tensor, "env slot blueprint"] | None = None,
    budget_left: Float[Tensor, " env"] | None = None,
) -> ActionMasks:
    """Return the legal actions in every environment, from slot states.

    Args:
        batch_slot_states: All slots as arrays, or a list of slots per environment, in
            which an empty slot is None.
        slot_config: Number of slots and minimum age.
        device: Device of the masks.
        spec: The action space; every op and all blueprints if None.
        fits: Whether a blueprint fits a slot; always if None.
        costs: Cost of each blueprint; 0 if None.
        budget_left: Remaining budget; unlimited if None.
    """
    if not isinstance(slot_config, SlotConfig):
        raise InvalidInputError(
            f"slot_config must be a SlotConfig, got {type(slot_config).__name__}."
        )
    if spec is None:
        spec = _whole_spec(slot_config)
    elif spec.slots != slot_config:
        raise InvalidInputError(
            f"spec and slot_config must agree, got {spec.slots} and {slot_config}. "
            "Pass slot_config=spec.slots."
        )
    if budget_left is not None and costs is None:
        raise InvalidInputError("budget_left needs costs. Pass both.")
    if isinstance(batch_slot_states, SlotStates):
        states = batch_slot_states
        slots = (states.stage, states.age, states.alpha_settled)
    else:
        slots = _from_rows(batch_slot_states, slot_config.max_slots)
    where = usable_device(device)
    stage, age, settled = (value.to(where) for value in slots)
    return _masks(stage, age, settled, spec, fits, costs, budget_left)


def compute_action_masks(
    slot_states: Sequence[SlotMaskState | None],
    slot_config: SlotConfig,
    device: torch.device | str = "cpu",
) -> ActionMasks:
    """Return the legal actions in one environment, as a batch of one."""
    return compute_batch_masks([slot_states], slot_config, device)


def _masks(
    stage: Tensor,
    age: Tensor,
    settled: Tensor,
    spec: ActionSpec,
    fits: Tensor | None,
    costs: Tensor | None,
    budget_left: Tensor | None,
) -> ActionMasks:
    """Return the masks; all arguments are checked."""
    envs, device = stage.shape[0], stage.device
    places = (envs, spec.slots.max_slots)
    offers = (*places, len(spec.blueprints))
    for name, value, shape, dtype in (
        ("stage", stage, places, torch.int64),
        ("age", age, places, torch.int64),
        ("alpha_settled", settled, places, torch.bool),
        ("fits", fits, offers, torch.bool),
        ("costs", costs, offers, None),
        ("budget_left", budget_left, (envs,), None),
    ):
        if value is not None and (
            value.shape != shape
            or value.device != device
            or (dtype is not None and value.dtype is not dtype)
        ):
            raise InvalidInputError(
                f"{name} must be {[*shape]} {dtype or 'float'} on {device} in this "
                f"action space, got {[*value.shape]} {value.dtype} on {value.device}."
            )
    rules = _rules(spec, device)
    blueprint = (stage == DORMANT).unsqueeze(2)
    blueprint = blueprint & (rules.all_fit.expand(offers) if fits is None else fits)
    if costs is not None and budget_left is not None:
        blueprint &= costs <= budget_left.view(-1, 1, 1)
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
    fixed = rules.fixed.expand(envs, -1, -1).clone()
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
    all_fit: Tensor


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
                all_fit=torch.tensor(True, device=device),
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
    if not flat:
        empty = torch.empty(0, max_slots, dtype=torch.int64)
        return empty, empty, empty.bool()
    states = [EMPTY if state is None else state for state in flat]
    stage = np.array([state.stage for state in states])
    age = np.array([state.age for state in states])
    settled = np.array([state.alpha_settled for state in states])
    # One value of a wrong type changes the dtype of the array.
    if (stage.dtype.kind, age.dtype.kind, settled.dtype.kind) != ("i", "i", "b") or (
        stage.min() < 0 or stage.max() >= len(Stage) or age.min() < 0
    ):
        index = next(i for i, state in enumerate(states) if not _is_valid(state))
        raise InvalidInputError(
            f"slot {index % max_slots} of environment {index // max_slots} must have "
            "a Stage, an age of at least 0 and a bool alpha_settled, got "
            f"{states[index]!r}."
        )
    shape = (-1, max_slots)
    return (
        torch.from_numpy(stage.astype(np.int64, copy=False).reshape(shape)),
        torch.from_numpy(age.astype(np.int64, copy=False).reshape(shape)),
        torch.from_numpy(settled.reshape(shape)),
    )


def _is_valid(state: SlotMaskState) -> bool:
    return (
        all(
            isinstance(value, int | np.integer) and not isinstance(value, bool)
            for value in (state.stage, state.age)
        )
        and state.stage in range(len(Stage))
        and state.age in range(2**63)
        and isinstance(state.alpha_settled, bool | np.bool_)
    )
