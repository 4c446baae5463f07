"""A seed: a module with the weights of a blueprint's form.

`build` returns a seed for a blueprint and a geometry, `misfit` the reason why it does
not fit, and `cost` its parameters and multiply-adds. A seed is built in float32 on the
CPU; planting moves it to its host.
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
    """A built-in form as a module."""

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
        """Weights between its units and those of older seeds at neighbouring spans,
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
        """The seed's output from the tensor at the inlet.

        `fed` is added to its hidden units. `kept` collects its units, as the last layer
        reads them.
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
        """What units of seeds at the previous span add to its first layer."""
        fed = []
        for other, (seed, units) in above.items():
            sizes = seed.blueprint.size, self.blueprint.size
            weight = self.block(slot, other, seed)
            fed.append(cross_layer(seed.geometry, *sizes).apply(units, weight, None))
        return fed

    def block(self, slot: int, other: int, above: "FormSeed") -> Tensor:
        """The weights from the units of a seed above; the younger seed owns them."""
        weight: Tensor | None = self.cross.get(f"from_{other}")
        return above.cross[f"into_{slot}"] if weight is None else weight

    def extra_repr(self) -> str:
        """The blueprint's name."""
        return self.blueprint.name


@dataclass(frozen=True, slots=True)
class Cost:
    """Parameters and multiply-adds per sample."""

    parameters: int
    macs: int

    def __add__(self, other: "Cost") -> "Cost":
        """The sum of two costs."""
        return Cost(self.parameters + other.parameters, self.macs + other.macs)


def build(
    blueprint: Blueprint,
    geometry: Geometry,
    generator: torch.Generator,
    interlayer: nn.Module,
    gated: bool | None = None,
) -> nn.Module:
    """A new seed with zero output, initialised from `generator`.

    Only WIDEN uses `interlayer`, the steps between the two layers of a span; pass a
    copy if it has state. For `gated` see `make_module`.
    """
    if blueprint.form is Form.CUSTOM:
        return make_module(blueprint.name, geometry, generator, gated)
    params = FORMS[blueprint.form].init(geometry, blueprint.size, generator)
    return FormSeed(blueprint, geometry, params, interlayer)


def misfit(blueprint: Blueprint, geometry: Geometry) -> str:
    """Why a blueprint does not fit a geometry; empty if it does."""
    if blueprint.form is Form.CUSTOM:
        fits = registered(blueprint.name).fits
        return "" if fits is None else fits(geometry)
    if blueprint.size < 1 and not blueprint.share:
        return f"needs a size of at least 1, it is {blueprint.size}"
    return FORMS[blueprint.form].fits(geometry, blueprint.size)


def cost(blueprint: Blueprint, geometry: Geometry) -> Cost:
    """Parameters and multiply-adds of a blueprint at a geometry that it fits."""
    if blueprint.form is Form.CUSTOM:
        factory = registered(blueprint.name).factory
        return _custom_cost(blueprint.name, factory, geometry)
    spec = FORMS[blueprint.form]
    shapes = spec.shapes(geometry, blueprint.size).values()
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    return Cost(parameters, spec.macs(geometry, blueprint.size))


@lru_cache(maxsize=256)
def _custom_cost(name: str, factory: Factory, geometry: Geometry) -> Cost:
    """Cost of a custom module, by building and running it; `factory` is a cache key."""
    del factory
    module = make_module(name, geometry, torch.Generator().manual_seed(0)).eval()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    # Elementwise products are not counted: assume at least one per parameter.
    one = torch.zeros(1, *geometry.inlet_shape)
    return Cost(parameters, max(count_macs(lambda: module(one)), parameters))
