"""What the slots of a declared host could be planted with."""

from dataclasses import fields
from difflib import get_close_matches

import torch

from esper.contracts.blueprints import BLUEPRINTS, Blueprint
from esper.contracts.errors import BadInput
from esper.contracts.observation import BlueprintOffers
from esper.environment.chart import CONV, Map, each_unit
from esper.environment.cohort import ACTS
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from esper.growth.blueprints.seed import Cost, cost, misfit
from esper.tasks.hosts import Host


def find_blueprints(names: tuple[str, ...]) -> tuple[Blueprint, ...]:
    """Blueprints by name; two-matrix forms only."""
    known = {b.name: b for b in BLUEPRINTS if b.form in ACTS}
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)
            raise BadInput(
                f"this world cannot plant {name!r}; did you mean {near[0]!r}?"
            )
    return tuple(known[name] for name in names)


def span(first: Map, last: Map) -> Geometry:
    """The pair of layers that a place spans."""
    hidden = (first.outputs, first.high // 2, first.wide // 2)
    return Geometry(
        inlet_layout=Layout.IMAGE if first.kind == CONV else Layout.VECTOR,
        outlet_layout=Layout.IMAGE if last.kind == CONV else Layout.VECTOR,
        inlet_shape=_shape(first, first.inputs),
        outlet_shape=_shape(last, last.outputs),
        residual=False,
        inlet_kernel=_kernel(first),
        outlet_kernel=_kernel(last),
        spans=True,
        hidden_shape=hidden if last.kind == CONV else (last.inputs,),
        unit_inputs=each_unit(first, last),
    )


def _shape(own: Map, channels: int) -> tuple[int, ...]:
    return (channels, own.high, own.wide) if own.kind == CONV else (channels,)


def _kernel(own: Map) -> Kernel | None:
    return Kernel.same(3, 2) if own.kind == CONV else None


def offers_of(
    host: Host,
    geometry: list[Geometry],
    blueprints: tuple[Blueprint, ...],
    per_place: int,
) -> BlueprintOffers:
    """What every slot of one host could be planted with."""
    fits = [[not misfit(b, place) for b in blueprints] for place in geometry]
    costs = [
        [
            cost(b, place) if fit else Cost(0, 0)
            for b, fit in zip(blueprints, row, strict=True)
        ]
        for place, row in zip(geometry, fits, strict=True)
    ]
    parameters, macs = (
        torch.tensor([[getattr(c, what) for c in row] for row in costs]).float()
        for what in ("parameters", "macs")
    )
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
