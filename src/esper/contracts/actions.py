"""The action space: ops, heads, choices, and which op uses which head.

One action has eight heads: an op, a slot, a blueprint and how to blend it. The table
`HEADS` holds the name of each head, its choices as numbers, and the ops that use it.
`RELEVANT[op, head]` is derived from it; masks, log-probabilities, entropy, KL and
metrics use it. `ActionSpec` is the action space of one run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor

from esper.contracts.blueprints import BLUEPRINTS, Blueprint
from esper.contracts.errors import InvalidInputError, unknown
from esper.contracts.features import Features, Leaf, feature_leaves
from esper.contracts.readonly import read_only
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Op as Op

if TYPE_CHECKING:  # Pyright rejects a cached_property as a protocol's property
    from builtins import property as cached_property
else:
    from functools import cached_property

ALL: Final = frozenset(Op)
PLANT: Final = frozenset({Op.GERMINATE})
PLANT_OR_SET: Final = frozenset({Op.GERMINATE, Op.SET_ALPHA})
FADE: Final = frozenset({Op.SET_ALPHA, Op.PRUNE})


@dataclass(frozen=True, slots=True)
class Head:
    """One head of an action.

    `choices` maps names to numbers: an index for styles and curves, ticks for tempos
    and speeds, alpha for targets. It is empty for `slot` and `blueprint`, whose
    choices depend on the run.
    """

    name: str
    used_by: frozenset[Op]
    choices: Mapping[str, int | float] = field(default_factory=dict)


HEADS: Final[tuple[Head, ...]] = (
    Head("op", ALL, {op.name: op for op in Op}),
    Head("slot", ALL - {Op.WAIT}),
    Head("blueprint", PLANT),
    Head("style", PLANT_OR_SET, {"ADD": 0, "SCALE": 1}),
    Head("tempo", PLANT, {"AT_ONCE": 0, "FAST": 1, "STANDARD": 2, "SLOW": 4}),
    Head("alpha_target", PLANT_OR_SET, {"HALF": 0.5, "MOST": 0.7, "FULL": 1.0}),
    Head("alpha_speed", FADE, {"INSTANT": 1, "FAST": 2, "SLOW": 4}),
    Head("alpha_curve", FADE, {"LINEAR": 0, "COSINE": 1, "SIGMOID": 2}),
)

HEAD_NAMES: Final = tuple(head.name for head in HEADS)
NUM_HEADS: Final = len(HEADS)
HEAD: Final[Mapping[str, int]] = MappingProxyType(
    {name: index for index, name in enumerate(HEAD_NAMES)}
)
"""Index of each head on the head axis."""

RELEVANT: Final[Tensor] = torch.tensor(
    [[op in head.used_by for head in HEADS] for op in Op]
)
"""Whether an op uses a head, bool [op, head]."""


@dataclass(frozen=True)
class ActionSpec:
    """The action space of one run; saved in every checkpoint.

    Args:
        slots: Number of slots and minimum age of seeds.
        blueprints: Choices of the blueprint head, in order.
        narrowed: The allowed choices of some heads; other heads allow all. A head
            with one choice has log-probability 0, entropy 0 and no gradient.
        measured: Whether the world measures liveness, gradient share, contribution and
            promise of slots. They are columns of the observation only then.
    """

    # Without annotations: protocol attributes must not be ClassVar.
    head_names = HEAD_NAMES
    numeric = (False,) * NUM_HEADS
    observation_type = Features

    slots: SlotConfig = field(default_factory=SlotConfig)
    blueprints: tuple[Blueprint, ...] = BLUEPRINTS
    narrowed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measured: bool = False

    def __post_init__(self) -> None:
        """Copy and validate the fields."""
        if not isinstance(self.slots, SlotConfig):
            raise InvalidInputError(
                f"slots must be a SlotConfig, got {type(self.slots).__name__}."
            )
        try:
            narrowed = {head: tuple(names) for head, names in self.narrowed.items()}
        except (AttributeError, TypeError):
            raise InvalidInputError(
                "narrowed must map heads to names of their choices, got "
                f"{self.narrowed!r}."
            ) from None
        object.__setattr__(self, "narrowed", MappingProxyType(narrowed))
        object.__setattr__(self, "blueprints", tuple(self.blueprints))
        if not self.blueprints:
            raise InvalidInputError("blueprints is empty. Name at least one blueprint.")
        names = [blueprint.name for blueprint in self.blueprints]
        if len(set(names)) != len(names):
            raise InvalidInputError(f"blueprints has a name twice: {', '.join(names)}.")
        for name, chosen in self.narrowed.items():
            if name not in HEAD or not HEADS[HEAD[name]].choices:
                known = [head.name for head in HEADS if head.choices]
                raise InvalidInputError(
                    f"cannot narrow {name!r}. Narrow one of {', '.join(known)}."
                )
            choices = HEADS[HEAD[name]].choices
            if not chosen:
                raise InvalidInputError(
                    f"{name!r} is narrowed to nothing. Leave one choice."
                )
            for choice in chosen:
                if choice not in choices:
                    raise unknown(f"head {name!r} has no choice", choice, choices)
        if "WAIT" not in self.narrowed.get("op", ("WAIT",)):
            raise InvalidInputError(
                "the op head must keep WAIT, which is always legal."
            )

    def __hash__(self) -> int:
        """Hash the fields; a mapping has no hash of its own."""
        return hash((self.slots, self.blueprints, frozenset(self.narrowed.items())))

    def __reduce__(self) -> tuple[type["ActionSpec"], tuple[Any, ...]]:
        """Pickle and copy by the constructor's arguments."""
        narrowed = dict(self.narrowed)
        return ActionSpec, (self.slots, self.blueprints, narrowed, self.measured)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each head, narrowed or not."""
        declared = {"slot": self.slots.max_slots, "blueprint": len(self.blueprints)}
        return tuple(declared.get(head.name, len(head.choices)) for head in HEADS)

    @cached_property
    def width(self) -> int:
        """Number of choices of the largest head: the length of a mask row."""
        return max(self.sizes)

    @cached_property
    def observation(self) -> Mapping[str, Leaf]:
        """Shapes of the tensors in `Features`, in one environment."""
        sizes = self.slots.max_slots, len(self.blueprints)
        return feature_leaves(*sizes, measured=self.measured)

    @cached_property
    def allowed(self) -> Tensor:
        """Allowed choices, bool [head, choice], False on padding; read-only."""
        rows = torch.zeros(NUM_HEADS, self.width, dtype=torch.bool)
        for index, (head, size) in enumerate(zip(HEADS, self.sizes, strict=True)):
            names = self.narrowed.get(head.name)
            if names is None:
                rows[index, :size] = True
            else:
                order = list(head.choices)
                rows[index, [order.index(name) for name in names]] = True
        return read_only(rows, "narrow a head with ActionSpec(narrowed={...}).")

    def describe(self) -> dict[str, Any]:
        """This action space as plain data, for checkpoints."""
        return {
            "max_slots": self.slots.max_slots,
            "min_age": self.slots.min_age,
            "measured": self.measured,
            "blueprints": [blueprint.name for blueprint in self.blueprints],
            "heads": {
                head.name: [
                    choice
                    for choice in head.choices
                    if choice in self.narrowed.get(head.name, head.choices)
                ]
                for head in HEADS
                if head.choices
            },
        }


@dataclass(frozen=True, slots=True, eq=False)
class ActionMasks(Mapping[str, Tensor]):
    """Legal choices of each head, as a mapping from head names to masks.

    `op`, `slot` and `blueprint` depend on each other, so their masks are tables; the
    other heads are rows of `fixed`. `masks["slot"]` and `masks["blueprint"]` are
    read-only unions: write into `masks.slot` and `masks.blueprint`. Every other
    `masks[name]` is a view.
    """

    op: Bool[Tensor, "env op"]
    """Legal ops; WAIT is always legal."""
    slot: Bool[Tensor, "env op slot"]
    """Slots legal for each op."""
    blueprint: Bool[Tensor, "env slot blueprint"]
    """Blueprints that can be planted in each slot; all False if none can."""
    fixed: Bool[Tensor, "env head choice"]
    """Choices that the run allows, padded to the width of the largest head."""

    def __getitem__(self, head: str) -> Tensor:  # bool [env, choice]
        """Legal choices of one head for any choice of the other heads."""
        if head == "op":
            return self.op
        if head == "slot":
            return _union("slot", self.slot, "op, slot")
        if head == "blueprint":
            return _union("blueprint", self.blueprint, "slot, blueprint")
        index = HEAD[head]
        return self.fixed[:, index, : len(HEADS[index].choices)]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the heads."""
        return iter(HEAD_NAMES)

    def __len__(self) -> int:
        """Number of heads."""
        return len(HEAD_NAMES)

    def to(self, device: torch.device | str) -> "ActionMasks":
        """The same masks on another device."""
        tables = (self.op, self.slot, self.blueprint, self.fixed)
        return ActionMasks(*(table.to(device) for table in tables))


def _union(name: str, table: Tensor, axes: str) -> Tensor:
    """Choices that are legal in any row of a table, read-only."""
    instead = f"masks[{name!r}] is a union; write into masks.{name}[env, {axes}]."
    return read_only(table.any(dim=1), instead)
