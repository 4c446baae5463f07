"""Features of the policy: all numbers of an observation, bounded and scale-free.

The column tables and their scaling are in `contracts.features`. Unmeasured values are 0
and have a flag in another column.
"""

from dataclasses import fields
from math import inf, log2
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
    Features,
    feature_scales,
    feature_table,
)
from esper.contracts.stages import Stage
from esper.contracts.world import Observation

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
    _require_shapes(observation, spec)
    host, slots, offers = observation.host, observation.slots, observation.offers
    rent = host.rent.clamp(-OVERFLOW_LIMIT, OVERFLOW_LIMIT)
    stages = torch.arange(len(Stage), device=rent.device)
    at_stage = (slots.stage.unsqueeze(-1) == stages).unbind(-1)
    kinds = torch.arange(len(spec.blueprints), device=rent.device)
    contribution, measured = slots.contribution, slots.contribution_measured
    net = torch.addcmul(contribution, slots.parameters, rent.view(-1, 1), value=-1.0)
    known, charged = offers.promise_known, offers.parameters * rent.view(-1, 1, 1)
    return Features(
        feature_table(
            HOST_COLUMNS,
            host,
            budget_left=host.budget_left.clamp(max=OVERFLOW_LIMIT),
            budget_unlimited=host.budget_left == inf,
            small_rent=rent,
        ),
        feature_table(
            SLOT_COLUMNS,
            slots,
            contribution=torch.where(measured, contribution, 0.0),
            net_contribution=torch.where(measured, net, 0.0),
            **dict(zip(STAGE_COLUMNS, at_stage, strict=True)),
        ),
        feature_table(
            OFFER_COLUMNS,
            offers,
            affordable=offers.parameters <= host.budget_left.view(-1, 1, 1),
            planted=slots.blueprint.unsqueeze(2) == kinds,
            rent=charged,
            small_rent=charged,
            promise=torch.where(known, offers.promise, 0.0),
            net_promise=torch.where(known, offers.promise - charged, 0.0),
        ),
    )


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
    table = torch.tensor(rows, dtype=torch.float32, device="cpu")
    plain, bend = feature_scales(BLUEPRINT_COLUMNS, table.device)
    return table.div(plain + bend * table.abs())


def _require_shapes(observation: Observation, spec: ActionSpec) -> None:
    """Raise an error that names the first field with a wrong shape or device."""
    start, slots = observation.episode_start, spec.slots.max_slots
    shape: tuple[int, ...] = tuple(start.shape)
    for record, own in (
        (observation.host, ()),
        (observation.slots, (slots,)),
        (observation.offers, (slots, len(spec.blueprints))),
    ):
        for field in fields(record):
            value = getattr(record, field.name)
            if value.shape != shape + own or value.device != start.device:
                raise InvalidInputError(
                    f"{type(record).__name__}.{field.name} must be "
                    f"{[*shape, *own]} on {start.device}, got {[*value.shape]} on "
                    f"{value.device}. Take observation and spec from the same world."
                )
