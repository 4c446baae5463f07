"""A seed: a blueprint's form with weights of its own, as a module.

`build` makes one from a blueprint and a place, `misfit` is the reason why one does not
fit there, and `cost` what it would add. A seed begins in float32 on the CPU; planting
moves it to its host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esper.contracts.blueprints import Blueprint, Form
from esper.growth.analysis.macs import count_macs
from esper.growth.blueprints.forms import FORMS, cross_layer
from esper.growth.blueprints.geometry import Geometry
from esper.growth.blueprints.registry import Factory, make_module, registered


class FormSeed(nn.Module):
    """Parameters of a form, applied."""

    def __init__(
        self,
        blueprint: Blueprint,
        geometry: Geometry,
        params: dict[str, Tensor],
        interlayer: nn.Module,
    ) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.geometry = geometry
        self.weights = nn.ParameterDict(params)
        self.interlayer = interlayer
        self.cross = nn.ParameterDict()
        """Blocks between its units and those of older seeds at neighbouring places,
        `from_<slot>` and `into_<slot>`."""

    @property
    def widens(self) -> bool:
        """Whether it has hidden units between two layers of the host."""
        return self.blueprint.form is Form.WIDEN

    def forward(
        self,
        h: Float[Tensor, "..."],
        fed: Sequence[Tensor] = (),
        kept: list[Tensor] | None = None,
    ) -> Float[Tensor, "..."]:
        """What the seed adds to the outlet.

        Args:
            h: The tensor at the inlet.
            fed: What units of other seeds add to its first layer.
            kept: Takes its own units, as its last layer reads them.
        """
        weights, size = dict(self.weights.items()), self.blueprint.size

        def interlayer(hidden: Tensor, *gates: Tensor) -> Tensor:
            for more in fed:
                hidden = hidden + more
            units: Tensor = self.interlayer(hidden, *gates)
            if kept is not None:
                kept.append(units)
            return units

        form = FORMS[self.blueprint.form]
        return form.apply(weights, h, self.geometry, size, interlayer)

    def feed(
        self, slot: int, above: Mapping[int, tuple["FormSeed", Tensor]]
    ) -> list[Tensor]:
        """What units of seeds at the place before add to its first layer."""
        fed = []
        for other, (seed, units) in above.items():
            sizes = seed.blueprint.size, self.blueprint.size
            weight = self.block(slot, other, seed)
            fed.append(cross_layer(seed.geometry, *sizes).apply(units, weight, None))
        return fed

    def block(self, slot: int, other: int, above: "FormSeed") -> Tensor:
        """The block from the units of a seed above; the younger of the two owns it."""
        own = f"from_{other}" in self.cross
        weight: Tensor = (
            self.cross[f"from_{other}"] if own else above.cross[f"into_{slot}"]
        )
        return weight

    def extra_repr(self) -> str:
        """The blueprint's name."""
        return self.blueprint.name


@dataclass(frozen=True, slots=True)
class Cost:
    """What a seed adds to its host."""

    parameters: int
    macs: int
    """Multiply-adds per sample."""

    def __add__(self, other: "Cost") -> "Cost":
        """Both together."""
        return Cost(self.parameters + other.parameters, self.macs + other.macs)


def build(
    blueprint: Blueprint,
    geometry: Geometry,
    generator: torch.Generator,
    interlayer: nn.Module,
    gated: bool | None = None,
) -> nn.Module:
    """A new seed for a place that it fits: zero at birth, from `generator` alone.

    Only a widening seed uses `interlayer`, what the host does between the two layers
    of a span; it must be the seed's own where it has state. For `gated` see
    `make_module`.
    """
    if blueprint.form is Form.CUSTOM:
        return make_module(blueprint.name, geometry, generator, gated)
    params = FORMS[blueprint.form].init(geometry, blueprint.size, generator)
    return FormSeed(blueprint, geometry, params, interlayer)


def misfit(blueprint: Blueprint, geometry: Geometry) -> str:
    """Why a blueprint does not fit a place; empty if it does."""
    if blueprint.form is Form.CUSTOM:
        fits = registered(blueprint.name).fits
        return "" if fits is None else fits(geometry)
    if blueprint.size < 1 and not blueprint.share:
        return f"needs a size of at least 1, it is {blueprint.size}"
    return FORMS[blueprint.form].fits(geometry, blueprint.size)


def cost(blueprint: Blueprint, geometry: Geometry) -> Cost:
    """Parameters and multiply-adds of a blueprint at a place that it fits."""
    if blueprint.form is Form.CUSTOM:
        return _counted(blueprint.name, registered(blueprint.name).factory, geometry)
    spec = FORMS[blueprint.form]
    shapes = spec.shapes(geometry, blueprint.size).values()
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    return Cost(parameters, spec.macs(geometry, blueprint.size))


@lru_cache(maxsize=256)
def _counted(name: str, factory: Factory, geometry: Geometry) -> Cost:
    """Cost of a user's module, by building and running one; the factory is a key."""
    del factory
    module = make_module(name, geometry, torch.Generator().manual_seed(0)).eval()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    # Scaling by a weight is not counted as a product of matrices, but it is work.
    one = torch.zeros(1, *geometry.inlet_shape)
    return Cost(parameters, max(count_macs(lambda: module(one)), parameters))
