"""The action space: ops, heads, choices, and which op uses which head.

One action is eight choices: *do this, in that slot, with this blueprint, blended in
this way*. `HEADS` is the one table: a head's name, its choices with their meaning
as numbers, and the ops that use it. `RELEVANT[op, head]` is derived from it; masks,
log-probabilities, entropy, KL and telemetry all read it. `ActionSpec` is what one run
may choose.
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

if TYPE_CHECKING:  # Pyright takes no cached property for a property of a protocol
    from builtins import property as cached_property
else:
    from functools import cached_property

ALL: Final = frozenset(Op)
PLANT: Final = frozenset({Op.GERMINATE})
PLANT_OR_SET: Final = frozenset({Op.GERMINATE, Op.SET_ALPHA})
FADE: Final = frozenset({Op.SET_ALPHA, Op.PRUNE})


@dataclass(frozen=True, slots=True)
class Head:
    """One choice of an action.

    `choices` maps a name to its meaning as a number: a style's or curve's index, a
    tempo's or speed's length in ticks, a target's alpha. It is empty for `slot` and
    `blueprint`, whose choices a run declares.
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
"""Where a head stands on the head axis."""

RELEVANT: Final[Tensor] = torch.tensor(
    [[op in head.used_by for head in HEADS] for op in Op]
)
"""Whether an op uses a head, bool [op, head]."""


@dataclass(frozen=True)
class ActionSpec:
    """The action space of one run; stored in every checkpoint.

    Args:
        slots: How many slots there are, and how long seeds must live before ops.
        blueprints: What can be planted; indices of the blueprint head.
        narrowed: For some heads, the only choices allowed. A head narrowed to one
            choice costs nothing: log-probability 0, entropy 0, no gradient.
    """

    # Without annotations, since fields of a protocol are no ClassVar.
    head_names = HEAD_NAMES
    action_dtype = torch.int64
    observation_type = Features

    slots: SlotConfig = field(default_factory=SlotConfig)
    blueprints: tuple[Blueprint, ...] = BLUEPRINTS
    narrowed: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Keep copies; refuse a space in which a head has no or unknown choices."""
        if not isinstance(self.slots, SlotConfig):
            raise InvalidInputError(
                f"slots must be a SlotConfig, got {type(self.slots).__name__}."
            )
        try:
            narrowed = {head: tuple(names) for head, names in self.narrowed.items()}
        except (AttributeError, TypeError):
            raise InvalidInputError(
                "narrowed must be a dict of heads and the names of their choices, got "
                f"{self.narrowed!r}."
            ) from None
        object.__setattr__(self, "narrowed", MappingProxyType(narrowed))
        object.__setattr__(self, "blueprints", tuple(self.blueprints))
        if not self.blueprints:
            raise InvalidInputError("blueprints is empty; name at least one blueprint.")
        names = [blueprint.name for blueprint in self.blueprints]
        if len(set(names)) != len(names):
            raise InvalidInputError(f"blueprints has a name twice: {', '.join(names)}.")
        for name, chosen in self.narrowed.items():
            if name not in HEAD or not HEADS[HEAD[name]].choices:
                known = [head.name for head in HEADS if head.choices]
                raise InvalidInputError(
                    f"cannot narrow {name!r}; narrow one of {', '.join(known)}."
                )
            choices = HEADS[HEAD[name]].choices
            if not chosen:
                raise InvalidInputError(
                    f"{name!r} is narrowed to nothing; leave one choice."
                )
            for choice in chosen:
                if choice not in choices:
                    raise unknown(f"head {name!r} has no choice", choice, choices)
        if "WAIT" not in self.narrowed.get("op", ("WAIT",)):
            raise InvalidInputError(
                "the op head must keep WAIT, which is always legal."
            )

    def __hash__(self) -> int:
        """Equal spaces have equal hashes; a mapping has none of its own."""
        return hash((self.slots, self.blueprints, frozenset(self.narrowed.items())))

    def __reduce__(self) -> tuple[type["ActionSpec"], tuple[Any, ...]]:
        """Be pickled and copied as what it was made from."""
        return ActionSpec, (self.slots, self.blueprints, dict(self.narrowed))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each head has, narrowed or not."""
        declared = {
            "slot": self.slots.max_slots,
            "blueprint": len(self.blueprints),
        }
        return tuple(declared.get(head.name, len(head.choices)) for head in HEADS)

    @cached_property
    def width(self) -> int:
        """Choices of the largest head: the length of a padded mask row."""
        return max(self.sizes)

    @cached_property
    def observation(self) -> Mapping[str, Leaf]:
        """What a policy reads in one environment, by the names of `Features`."""
        return feature_leaves(self.slots.max_slots, len(self.blueprints))

    @cached_property
    def allowed(self) -> Tensor:
        """What the run ever allows, bool [head, choice], False on padding; to read."""
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
    """What is possible now, as a mapping from each head to its legal choices.

    `op`, `slot` and `blueprint` depend on each other, so their masks are tables; the
    other heads are rows of `fixed`. No write is lost: `masks["slot"]` and
    `masks["blueprint"]` are unions over the tables and refuse to be written into, so
    write into `masks.slot` and `masks.blueprint`; every other `masks[name]` is a view.
    """

    op: Bool[Tensor, "env op"]
    """Legal ops; WAIT always is."""
    slot: Bool[Tensor, "env op slot"]
    """Slots legal for each op."""
    blueprint: Bool[Tensor, "env slot blueprint"]
    """Blueprints that can be planted in each slot; all False if none can."""
    fixed: Bool[Tensor, "env head choice"]
    """What the run allows each head, padded to the width of the largest head."""

    def __getitem__(self, head: str) -> Tensor:  # bool [env, choice]
        """The legal choices of one head, whatever the other heads choose."""
        if head == "op":
            return self.op
        if head == "slot":
            return _union("slot", self.slot, "op, slot")
        if head == "blueprint":
            return _union("blueprint", self.blueprint, "slot, blueprint")
        index = HEAD[head]
        return self.fixed[:, index, : len(HEADS[index].choices)]

    def __iter__(self) -> Iterator[str]:
        """The names of the heads, in order."""
        return iter(HEAD_NAMES)

    def __len__(self) -> int:
        """How many heads there are."""
        return len(HEAD_NAMES)

    def to(self, device: torch.device | str) -> "ActionMasks":
        """The same masks on another device."""
        tables = (self.op, self.slot, self.blueprint, self.fixed)
        return ActionMasks(*(table.to(device) for table in tables))


def _union(name: str, table: Tensor, axes: str) -> Tensor:
    """What is legal with any choice before it, for reading."""
    instead = f"masks[{name!r}] is a union: write into masks.{name}[env, {axes}]."
    return read_only(table.any(dim=1), instead)
