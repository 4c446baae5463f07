"""Features of the policy: those of the observation, and the declared blueprints."""

from dataclasses import fields
from math import log2

import torch
from jaxtyping import Float
from torch import Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import Form
from esper.contracts.devices import require_tensor
from esper.contracts.feature_tables import feature_scales, feature_tables
from esper.contracts.features import (
    BLUEPRINT_COLUMNS,
    HOST_COLUMNS,
    OFFER_COLUMNS,
    SLOT_COLUMNS,
    Features,
)
from esper.contracts.world import Observation
from esper.tamiyo.policy.action_masks import SAME_WORLD

__all__ = [
    "BLUEPRINT_COLUMNS",
    "HOST_COLUMNS",
    "OFFER_COLUMNS",
    "SLOT_COLUMNS",
    "Features",
    "blueprint_table",
    "compute_features",
]


def compute_features(observation: Observation, spec: ActionSpec) -> Features:
    """Return the features of all environments, each in [-1, 1].

    NaN in a measured value stays NaN, so that the rollout buffer rejects it.
    """
    _require_shapes(observation, spec)
    return feature_tables(observation, measured=spec.measured)


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
            name = f"{type(record).__name__}.{field.name}"
            wanted = shape + own
            require_tensor(name, value, wanted, value.dtype, start.device, SAME_WORLD)
