"""What the slots of a declared host could be planted with."""

from dataclasses import fields
from difflib import get_close_matches

import torch

from esper.contracts.blueprints import BLUEPRINTS, Blueprint
from esper.contracts.errors import BadInput
from esper.contracts.observation import BlueprintOffers
from esper.environment.bank import FORMS
from esper.growth.blueprints.geometry import Geometry, Layout
from esper.growth.blueprints.seed import cost, misfit
from esper.tasks.hosts import MlpHost


def find_blueprints(names: tuple[str, ...]) -> tuple[Blueprint, ...]:
    """Blueprints by name; two-matrix forms only."""
    known = {b.name: b for b in BLUEPRINTS if b.form in FORMS}
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)
            raise BadInput(
                f"this world cannot plant {name!r}; did you mean {near[0]!r}?"
            )
    return tuple(known[name] for name in names)


def span(host: MlpHost, place: int) -> Geometry:
    """The pair of layers that a place spans."""
    return Geometry(
        inlet_layout=Layout.VECTOR,
        outlet_layout=Layout.VECTOR,
        inlet_shape=(host.widths[place],),
        outlet_shape=(host.widths[place + 2],),
        residual=False,
        spans=True,
        hidden_shape=(host.widths[place + 1],),
    )


def offers_of(
    host: MlpHost,
    geometry: list[Geometry],
    blueprints: tuple[Blueprint, ...],
    per_place: int,
) -> BlueprintOffers:
    """What every slot of one host could be planted with."""
    costs = [[cost(b, place) for b in blueprints] for place in geometry]
    parameters, macs = (
        torch.tensor([[getattr(c, what) for c in row] for row in costs]).float()
        for what in ("parameters", "macs")
    )
    fits = [[not misfit(b, place) for b in blueprints] for place in geometry]
    shape = (1, per_place * len(geometry), len(blueprints))
    return BlueprintOffers(
        fits=torch.tensor(fits).repeat(per_place, 1).unsqueeze(0),
        parameters=(parameters / host.parameters).repeat(per_place, 1).unsqueeze(0),
        macs=(macs / host.macs).repeat(per_place, 1).unsqueeze(0),
        promise=torch.zeros(shape),
        promise_known=torch.zeros(shape, dtype=torch.bool),
    )


def spread(offers: BlueprintOffers, envs: int, device: str) -> BlueprintOffers:
    """The offers of one host for every environment."""
    return BlueprintOffers(
        **{
            field.name: getattr(offers, field.name).to(device).repeat(envs, 1, 1)
            for field in fields(BlueprintOffers)
        }
    )
