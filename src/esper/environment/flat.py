r"""A growing world for agents that know numbers only: one to say, one row to see.

`FlatActions` numbers WAIT and every op in every slot; planting also names the
blueprint and SET_ALPHA the target, all else is said gently. Which numbers are possible
follows from the table of transitions, with what fits and can be paid for.

`flatten` writes all that is observed as one row in [-1, 1]. Shares and flags are only
clamped; a size, which has no bounds, becomes

    y = x / (half + |x|).

What is not known reads 0 and has a flag beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, ActionSpec, Op
from esper.contracts.observation import Observation
from esper.contracts.stages import LEGAL, Stage

GENTLY: Final = MappingProxyType(
    {
        "style": "ADD",
        "tempo": "STANDARD",
        "alpha_target": "FULL",
        "alpha_speed": "FAST",
        "alpha_curve": "COSINE",
    }
)
"""What is said where an agent has no choice, as far as the world allows it."""
CHOSEN: Final = MappingProxyType(
    {Op.GERMINATE: "blueprint", Op.SET_ALPHA: "alpha_target"}
)
"""The head that an agent chooses besides op and slot."""


@dataclass(frozen=True, slots=True)
class FlatActions:
    """Every sentence that an agent can say by its number; 0 is WAIT."""

    spec: ActionSpec
    sentences: Int64[Tensor, "action head"]
    names: tuple[str, ...]
    """Such as `GERMINATE 2 widen_8`: the op, the slot, and what was chosen."""

    @classmethod
    def of(cls, spec: ActionSpec) -> "FlatActions":
        """Number the sentences of an action space."""
        allowed = {
            head.name: [c for c in range(size) if bool(spec.allowed[index, c])]
            for index, (head, size) in enumerate(zip(HEADS, spec.sizes, strict=True))
        }
        rows, names = [[0] * len(HEADS)], [Op.WAIT.name]
        for op in map(Op, allowed["op"]):
            if op is Op.WAIT:
                continue
            head = CHOSEN.get(op)
            choices = [None] if head is None else allowed[head]
            for slot, choice in product(allowed["slot"], choices):
                said = {"op": op.value, "slot": slot}
                if head is not None and choice is not None:
                    said[head] = choice
                rows.append([_said(said, name.name, op, allowed) for name in HEADS])
                names.append(_name(spec, op, slot, choice))
        return cls(spec, torch.tensor(rows), tuple(names))

    def __len__(self) -> int:
        """How many there are."""
        return len(self.names)

    def possible(self, see: Observation) -> Bool[Tensor, "env action"]:
        """Which of them would be carried out now; WAIT always is."""
        slots, offers, device = see.slots, see.offers, see.slots.stage.device
        sentences = self.sentences.to(device)
        op, slot, kind = (
            sentences[:, HEAD[name]] for name in ("op", "slot", "blueprint")
        )
        old = (slots.age[:, slot] >= self.spec.slots.min_age).long()
        settled = slots.alpha_settled[:, slot].long()
        legal = LEGAL.to(device)[op, slots.stage[:, slot], old, settled]
        paid = offers.parameters[:, slot, kind] <= see.host.budget_left.unsqueeze(1)
        plantable = offers.fits[:, slot, kind] & paid
        return (op == Op.WAIT) | (legal & (plantable | (op != Op.GERMINATE)))


HOST: Final[Mapping[str, float | None]] = MappingProxyType(
    {
        "progress": None,
        "budget_left": 0.5,
        "budget_unlimited": None,
        "rent": 0.1,
        "added": 0.5,
        "score": None,
        "score_slope": 0.01,
        "loss": 0.5,
        "loss_slope": 0.05,
        "plateau": None,
    }
)
"""What is seen of a host, and the size that reads 1/2; None for shares and flags."""

SLOT: Final[Mapping[str, float | None]] = MappingProxyType(
    {
        **{f"is_{stage.name.lower()}": None for stage in Stage},
        "age": 4.0,
        "alpha": None,
        "alpha_target": None,
        "alpha_settled": None,
        "style": None,
        "parameters": 0.1,
        "depth": None,
        "capacity": None,
        "liveness": None,
        "gradient_share": None,
        "contribution": 0.1,
        "contribution_measured": None,
    }
)
"""What is seen of a slot."""

OFFER: Final[Mapping[str, float | None]] = MappingProxyType(
    {
        "fits": None,
        "affordable": None,
        "planted": None,
        "parameters": 0.1,
        "macs": 0.1,
        "promise": 0.1,
        "promise_known": None,
    }
)
"""What is seen of a blueprint at a slot."""

HUGE: Final = 1e8
"""Sizes are cut here: squashed it is 1."""


def flatten(see: Observation) -> Float[Tensor, "env feature"]:
    """All that is seen of every environment, each number in [-1, 1]."""
    host, slots, offers = see.host, see.slots, see.offers
    unlimited = torch.isinf(host.budget_left)
    kinds = torch.arange(offers.fits.shape[2], device=offers.fits.device)
    stages = {f"is_{stage.name.lower()}": slots.stage == stage.value for stage in Stage}
    return torch.cat(
        [
            _table(
                HOST,
                host,
                budget_left=torch.where(unlimited, 0.0, host.budget_left),
                budget_unlimited=unlimited,
            ),
            _table(
                SLOT,
                slots,
                contribution=torch.where(
                    slots.contribution_measured, slots.contribution, 0.0
                ),
                **stages,
            ),
            _table(
                OFFER,
                offers,
                affordable=offers.parameters <= host.budget_left[:, None, None],
                planted=slots.blueprint.unsqueeze(2) == kinds,
                promise=torch.where(offers.promise_known, offers.promise, 0.0),
            ),
        ],
        dim=1,
    )


def feature_names(spec: ActionSpec) -> tuple[str, ...]:
    """What stands in each place of a row, such as `slot 2 widen_8 promise`."""
    slots = range(spec.slots.max_slots)
    return (
        *(f"host {name}" for name in HOST),
        *(f"slot {slot} {name}" for slot in slots for name in SLOT),
        *(
            f"slot {slot} {blueprint.name} {name}"
            for slot in slots
            for blueprint in spec.blueprints
            for name in OFFER
        ),
    )


def _table(
    columns: Mapping[str, float | None], record: object, **computed: Tensor
) -> Float[Tensor, "env feature"]:
    """The columns of a record side by side, bounded."""
    values = torch.stack(
        [
            (computed[name] if name in computed else getattr(record, name)).float()
            for name in columns
        ],
        dim=-1,
    )
    curves = [(1.0, 0.0) if half is None else (half, 1.0) for half in columns.values()]
    plain, bend = torch.tensor(curves, device=values.device).unbind(1)
    values = values.nan_to_num(nan=0.0).clamp(-HUGE, HUGE)
    return (values / (plain + bend * values.abs())).clamp(-1.0, 1.0).flatten(1)


def _said(
    said: Mapping[str, int], head: str, op: Op, allowed: Mapping[str, list[int]]
) -> int:
    """The choice of one head: what was said, else gently; 0 where it is not used."""
    if head in said:
        return said[head]
    used = HEADS[HEAD[head]]
    if op not in used.used_by:
        return 0
    gentle = [*used.choices].index(GENTLY[head])
    return gentle if gentle in allowed[head] else allowed[head][-1]


def _name(spec: ActionSpec, op: Op, slot: int, choice: int | None) -> str:
    words = [op.name, str(slot)]
    if choice is not None and op is Op.GERMINATE:
        words.append(spec.blueprints[choice].name)
    elif choice is not None:
        words.append([*HEADS[HEAD[CHOSEN[op]]].choices][choice])
    return " ".join(words)
