r"""What the policy sees: every number of an observation, bounded and scale-free.

The tables name every column. Shares and flags lie in [0, 1] by nature and are only
clamped. A size, which has no bounds, becomes

    y = x / (half + |x|),

the logistic function of log(|x| / half) with the sign of x: every doubling is seen,
most clearly around `half`, and 1e30 is just 1. (tanh is flat soon after its scale, so
it tells sizes of one decade apart; contributions, promises and rents span two.)
Gross and net gains have different halves, and so have large and small rents, so that
both hundredths and halves of a score are told apart. What was not measured reads 0 and
has a flag beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf, log2, prod
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import Form
from esper.contracts.errors import InvalidInputError
from esper.contracts.features import (
    BLUEPRINT_COLUMNS,
    HOST_COLUMNS,
    OFFER_COLUMNS,
    SLOT_COLUMNS,
    STAGE_COLUMNS,
    Column,
    Features,
)
from esper.contracts.slots import SlotStates
from esper.contracts.stages import Stage
from esper.contracts.world import BlueprintOffers, HostStates, Observation

__all__ = [
    "BLUEPRINT_COLUMNS",
    "HOST_COLUMNS",
    "OFFER_COLUMNS",
    "SLOT_COLUMNS",
    "Features",
    "blueprint_table",
    "compute_features",
]

HUGE: Final = 1e8
"""Rents and budgets are cut here: squashed it is 1, and its products stay finite."""


def compute_features(observation: Observation, spec: ActionSpec) -> Features:
    """All features of all environments in one pass, each in [-1, 1].

    Args:
        observation: What is seen. Values of any finite size are welcome; NaN in a
            value that counts stays NaN, for the buffer to refuse.
        spec: How many slots and blueprints there must be.
    """
    host, slots, offers = observation.host, observation.slots, observation.offers
    envs, places = observation.episode_start.shape[0], spec.slots.max_slots
    blueprints = len(spec.blueprints)
    for name, value, shape in (
        ("host.rent", host.rent, (envs,)),
        ("slots.stage", slots.stage, (envs, places)),
        ("offers.fits", offers.fits, (envs, places, blueprints)),
    ):
        if value.shape != shape:
            raise InvalidInputError(
                f"{name} must be {list(shape)} in this action space, got "
                f"{list(value.shape)}; take observation and spec from one world."
            )
    layout = _layout(envs, places, blueprints, host.rent.device)
    # The tables lie behind each other in one tensor, so that one squash serves all.
    flat = torch.empty_like(layout.plain)
    tables = [flat.as_strided(*geometry) for geometry in layout.tables]
    try:
        rent = host.rent.clamp(-HUGE, HUGE)
        values = (
            _read(HOST_COLUMNS, host, _of_host(host)),
            _read(SLOT_COLUMNS, slots, _of_slots(slots, rent, layout)),
            _read(OFFER_COLUMNS, offers, _of_offers(offers, slots, host, rent, layout)),
        )
        for table, columns in zip(tables, values, strict=True):
            torch.stack(columns, dim=-1, out=table)
    except RuntimeError as error:
        _refuse_uneven(observation, error)
        raise
    flat.div_(torch.addcmul(layout.plain, layout.bend, flat.abs())).clamp_(-1.0, 1.0)
    return Features(*tables)


def blueprint_table(spec: ActionSpec) -> Float[Tensor, "blueprint column"]:
    """What is declared of each blueprint: `BLUEPRINT_COLUMNS`, on the CPU."""
    rows = [
        [
            log2(max(1, blueprint.size)),
            blueprint.share,
            blueprint.merges,
            *(blueprint.form is f for f in Form if f is not Form.CUSTOM),
        ]
        for blueprint in spec.blueprints
    ]
    plain, bend = _curve(BLUEPRINT_COLUMNS)
    table = torch.tensor(rows, dtype=torch.float32)
    return table.div(plain + bend * table.abs())


# Host and slot flags become floats here, since stacking columns of one type is much
# faster; the many offers are stacked faster as they are.


def _of_host(host: HostStates) -> dict[str, Tensor]:
    return {
        "budget_left": host.budget_left.clamp(max=HUGE),
        "budget_unlimited": (host.budget_left == inf).float(),
        "end_known": host.end_known.float(),
        "small_rent": host.rent.clamp(-HUGE, HUGE),
    }


def _of_slots(slots: SlotStates, rent: Tensor, layout: "_Layout") -> dict[str, Tensor]:
    measured, contribution = slots.contribution_measured, slots.contribution
    net = torch.addcmul(contribution, slots.parameters, rent.view(-1, 1), value=-1.0)
    at_stage = (slots.stage == layout.stages).float()
    return {
        "age": slots.age.float(),
        "alpha_settled": slots.alpha_settled.float(),
        "style": slots.style.float(),
        "contribution": torch.where(measured, contribution, layout.zero),
        "net_contribution": torch.where(measured, net, layout.zero),
        "contribution_measured": measured.float(),
        **dict(zip(STAGE_COLUMNS, at_stage.unbind(), strict=True)),
    }


def _of_offers(
    offers: BlueprintOffers,
    slots: SlotStates,
    host: HostStates,
    rent: Tensor,
    layout: "_Layout",
) -> dict[str, Tensor]:
    known, parameters = offers.promise_known, offers.parameters
    charged = parameters * rent.view(-1, 1, 1)
    return {
        "affordable": parameters <= host.budget_left.view(-1, 1, 1),
        "planted": slots.blueprint.unsqueeze(2) == layout.blueprints,
        "rent": charged,
        "small_rent": charged,
        "promise": torch.where(known, offers.promise, layout.zero),
        "net_promise": torch.where(known, offers.promise - charged, layout.zero),
    }


def _read(
    columns: tuple[Column, ...], record: object, computed: Mapping[str, Tensor]
) -> list[Tensor]:
    names = [column.name for column in columns]
    return [computed[n] if n in computed else getattr(record, n) for n in names]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tables lie in the flat tensor, and what squashes each number."""

    tables: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """Size, stride and offset of the host, slot and offer tables."""
    plain: Tensor
    """With `bend`: y = x / (plain + bend |x|), where sizes have `half` and 1, the
    rest 1 and 0."""
    bend: Tensor
    stages: Tensor
    """Every stage, [stage, 1, 1]."""
    blueprints: Tensor
    """Every blueprint's index."""
    zero: Tensor


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # whoever asks first, gradients may follow
def _layout(envs: int, slots: int, blueprints: int, device: torch.device) -> _Layout:
    tables, curves, offset = [], [], 0
    for columns, *leading in (
        (HOST_COLUMNS, envs),
        (SLOT_COLUMNS, envs, slots),
        (OFFER_COLUMNS, envs, slots, blueprints),
    ):
        size = (*leading, len(columns))
        stride = tuple(prod(size[axis + 1 :]) for axis in range(len(size)))
        tables.append((size, stride, offset))
        curves.append(_curve(columns).repeat(1, prod(leading)))
        offset += prod(size)
    plain, bend = torch.cat(curves, dim=1).to(device)
    return _Layout(
        tuple(tables),
        plain,
        bend,
        stages=torch.arange(len(Stage), device=device).view(-1, 1, 1),
        blueprints=torch.arange(blueprints, device=device),
        zero=torch.zeros((), device=device),
    )


def _curve(columns: tuple[Column, ...]) -> Float[Tensor, "2 column"]:
    return torch.tensor(
        [(1.0, 0.0) if c.half is None else (c.half, 1.0) for c in columns]
    ).T


def _refuse_uneven(see: Observation, cause: RuntimeError) -> None:
    """Name the field that does not go with its neighbours, if that was the cause."""
    for record, model in (
        (see.host, see.host.rent),
        (see.slots, see.slots.stage),
        (see.offers, see.offers.fits),
    ):
        for field in fields(record):
            value = getattr(record, field.name)
            if value.shape != model.shape or value.device != model.device:
                raise InvalidInputError(
                    f"{type(record).__name__}.{field.name} must be "
                    f"{list(model.shape)} on {model.device}, got "
                    f"{list(value.shape)} on {value.device}."
                ) from cause
