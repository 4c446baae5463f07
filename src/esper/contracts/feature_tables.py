"""The features of an observation: all its numbers, bounded and scale-free.

`contracts.features` lists the columns and describes their scaling. Unmeasured values
are 0 and have a flag in another column.
"""

from functools import cache
from math import inf
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from esper.contracts.features import (
    HOST_COLUMNS,
    STAGE_COLUMNS,
    Column,
    Features,
    offer_columns,
    slot_columns,
)
from esper.contracts.stages import Stage
from esper.contracts.world import Observation

OVERFLOW_LIMIT: Final = 1e8
"""Rents and budgets are clamped to this, so that products stay finite."""


def feature_tables(observation: Observation, *, measured: bool) -> Features:
    """Return the features of all environments, each in [-1, 1]; NaN stays NaN.

    Args:
        observation: What a world shows.
        measured: Whether the world measures slots (`ActionSpec.measured`).
    """
    host, slots, offers = observation.host, observation.slots, observation.offers
    rent = host.rent.clamp(-OVERFLOW_LIMIT, OVERFLOW_LIMIT)
    stages = torch.arange(len(Stage), device=rent.device)
    at_stage = (slots.stage.unsqueeze(-1) == stages).unbind(-1)
    kinds = torch.arange(offers.fits.shape[2], device=rent.device)
    charged = offers.parameters * rent.view(-1, 1, 1)
    of_slots: dict[str, Tensor] = {}
    of_offers: dict[str, Tensor] = {}
    if measured:
        gain, seen = slots.contribution, slots.contribution_measured
        net = torch.addcmul(gain, slots.parameters, rent.view(-1, 1), value=-1.0)
        known, promise = offers.promise_known, offers.promise
        of_slots["contribution"] = torch.where(seen, gain, 0.0)
        of_slots["net_contribution"] = torch.where(seen, net, 0.0)
        of_offers["promise"] = torch.where(known, promise, 0.0)
        of_offers["net_promise"] = torch.where(known, promise - charged, 0.0)
    return Features(
        feature_table(
            HOST_COLUMNS,
            host,
            budget_left=host.budget_left.clamp(max=OVERFLOW_LIMIT),
            budget_unlimited=host.budget_left == inf,
            small_rent=rent,
        ),
        feature_table(
            slot_columns(measured=measured),
            slots,
            **dict(zip(STAGE_COLUMNS, at_stage, strict=True)),
            **of_slots,
        ),
        feature_table(
            offer_columns(measured=measured),
            offers,
            affordable=offers.parameters <= host.budget_left.view(-1, 1, 1),
            planted=slots.blueprint.unsqueeze(2) == kinds,
            rent=charged,
            small_rent=charged,
            **of_offers,
        ),
    )


def feature_table(
    columns: tuple[Column, ...], record: object, **computed: Tensor
) -> Float[Tensor, "*batch column"]:
    """Return bounded columns: `computed` by name, or fields of the record."""
    values = torch.stack(
        [
            (
                computed[c.name] if c.name in computed else getattr(record, c.name)
            ).float()
            for c in columns
        ],
        dim=-1,
    )
    plain, bend = feature_scales(columns, values.device)
    return values.div_(plain + bend * values.abs()).clamp_(-1.0, 1.0)


@cache
@torch.inference_mode(False)  # also used outside of inference mode
def feature_scales(
    columns: tuple[Column, ...], device: torch.device
) -> Float[Tensor, "2 column"]:
    """Return plain and bend of y = x / (plain + bend |x|) for each column."""
    return torch.tensor(
        [(1.0, 0.0) if c.half is None else (c.half, 1.0) for c in columns],
        device=device,
    ).T
