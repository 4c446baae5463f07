r"""Features of the policy: all numbers of an observation, bounded and scale-free.

The column tables are in `contracts.features`. Fractions and flags are clamped to
[0, 1]. An unbounded quantity x becomes

    y = x / (half + |x|),

the logistic function of log(|x| / half) with the sign of x, which resolves more decades
than tanh. Unmeasured values are 0 and have a flag in another column.
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

OVERFLOW_LIMIT: Final = 1e8
"""Rents and budgets are clamped to this, so that products stay finite."""


def compute_features(observation: Observation, spec: ActionSpec) -> Features:
    """Return the features of all environments, each in [-1, 1].

    NaN in a measured value stays NaN, so that the rollout buffer rejects it.
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
                f"{list(value.shape)}. Take observation and spec from the same world."
            )
    layout = _layout(envs, places, blueprints, host.rent.device)
    # All tables are views of one tensor, so that one operation bounds them all.
    flat = torch.empty_like(layout.plain)
    tables = [flat.as_strided(*geometry) for geometry in layout.tables]
    try:
        rent = host.rent.clamp(-OVERFLOW_LIMIT, OVERFLOW_LIMIT)
        values = (
            _read(HOST_COLUMNS, host, _of_host(host, rent)),
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
    """Return the declared properties of each blueprint, on the CPU."""
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


# Flags of hosts and slots become floats, because stacking columns of one dtype is much
# faster; the large tables of offers are faster to stack as they are.


def _of_host(host: HostStates, rent: Tensor) -> dict[str, Tensor]:
    return {
        "budget_left": host.budget_left.clamp(max=OVERFLOW_LIMIT),
        "budget_unlimited": (host.budget_left == inf).float(),
        "end_known": host.end_known.float(),
        "small_rent": rent,
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
    """Positions of the tables in the flat tensor, and constants of each number."""

    tables: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """Size, stride and offset of the host, slot and offer tables."""
    plain: Tensor
    """y = x / (plain + bend |x|): `half` and 1 if unbounded, else 1 and 0."""
    bend: Tensor
    stages: Tensor
    """Every stage, [stage, 1, 1]."""
    blueprints: Tensor
    """Index of every blueprint."""
    zero: Tensor


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # also used outside of inference mode
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
    """Raise an error that names the field with a wrong shape or device, if any."""
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
