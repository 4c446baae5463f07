"""Registry of blueprints: the built-in ones and custom ones.

    @blueprint("tiny_mlp")
    def tiny_mlp(geometry: Geometry) -> nn.Module:
        return nn.Sequential(nn.Linear(...), nn.GELU(), nn.Linear(...))

A factory returns a module for a geometry. The module is tested on random inputs before
it is planted; if its output is not zero, a gate that starts at zero is added. A factory
runs as code of this process: register only trusted ones. Loading a saved network calls
it on torch's meta device first, to compare sizes.

`build` returns a seed of any blueprint for a geometry, in float32 on the CPU; planting
moves it to its host. `misfit` tells why it does not fit, and `cost` what it costs.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import InvalidInputError, unknown
from esper.contracts.messages import described
from esper.growth.analysis.tracing import count_macs
from esper.growth.blueprints.forms import FORMS, FormSeed, per_channel
from esper.growth.blueprints.geometry import Geometry, Layout

Factory = Callable[[Geometry], nn.Module]
Fits = Callable[[Geometry], str]


@dataclass(frozen=True, slots=True)
class Registered:
    """A custom blueprint."""

    blueprint: Blueprint
    factory: Factory
    fits: Fits | None


class Gated(nn.Module):
    """A module times one gate per channel that starts at zero."""

    def __init__(self, module: nn.Module, width: int, layout: Layout) -> None:
        super().__init__()
        self.module = module
        self.gate = nn.Parameter(torch.zeros(width))
        self.axes_behind = layout.axes_behind

    def forward(self, h: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The module's output times the gate."""
        result: Tensor = self.module(h)
        return result * per_channel(self.gate, self.axes_behind)


_BUILT_IN: Mapping[str, Blueprint] = MappingProxyType({b.name: b for b in BLUEPRINTS})
_REGISTERED: dict[str, Registered] = {}


def blueprint(name: str, *, fits: Fits | None = None) -> Callable[[Factory], Factory]:
    """Register the decorated factory under a name.

    `fits` returns why the module does not fit a geometry, or "" if it does; by default
    it fits everywhere. Custom modules are not merged when the model is exported.
    """
    if not name.isidentifier():
        raise InvalidInputError(
            f"A blueprint's name needs letters, digits and underscores, got {name!r}."
        )
    if name in _BUILT_IN:
        raise InvalidInputError(f"Blueprint {name!r} is built in; choose another name.")

    def register(factory: Factory) -> Factory:
        known = _REGISTERED.get(name)
        if known is not None and not _same(known.factory, factory):
            raise InvalidInputError(
                f"Blueprint {name!r} is already registered with another factory; "
                f"choose another name or call forget({name!r})."
            )
        record = Blueprint(name, Form.CUSTOM, size=0, merges=False)
        _REGISTERED[name] = Registered(record, factory, fits)
        return factory

    return register


def blueprints() -> Mapping[str, Blueprint]:
    """All blueprints by name, the built-in ones first."""
    own = {name: entry.blueprint for name, entry in _REGISTERED.items()}
    return MappingProxyType({**_BUILT_IN, **own})


def find(name: str) -> Blueprint:
    """The blueprint of this name; "widen_x" takes any factor above 1, up to 64."""
    known = blueprints()
    times = re.fullmatch(r"widen_x(\d{1,2}(?:\.\d{1,5})?)", name)
    if name not in known and times and 1 < float(times[1]) <= 64:
        return Blueprint(name, Form.WIDEN, 0, merges=True, share=float(times[1]) - 1.0)
    if name not in known:
        raise unknown("there is no blueprint", name, known)
    return known[name]


def forget(name: str) -> None:
    """Remove a custom blueprint; its seeds stay as they are."""
    if name not in _REGISTERED:
        raise unknown("there is no registered blueprint", name, _REGISTERED)
    del _REGISTERED[name]


def registered(name: str) -> Registered:
    """A custom blueprint by name."""
    if name not in _REGISTERED:
        raise InvalidInputError(
            f"Blueprint {name!r} is not registered in this process; import the module "
            "that registers it."
        )
    return _REGISTERED[name]


def make_module(
    name: str,
    geometry: Geometry,
    generator: torch.Generator,
    gated: bool | None = None,
) -> nn.Module:
    """Build and test a custom module; adds a gate if its output is not zero.

    Torch's global random state is seeded from `generator` and restored afterwards.
    `gated` is given for a saved module, which was tested before it was saved.
    """
    entry = registered(name)
    with seeded_random_state(generator):
        try:
            module: nn.Module = _attempt("failed", entry.factory, geometry)
            _check_module(module)
            if gated is None:
                gated = not _try_all(module, geometry)
        except UnsuitableError as error:
            raise InvalidInputError(f"Blueprint {name!r} {error}.") from error
    if not gated:
        return module
    return Gated(module, geometry.outlet_width, geometry.outlet_layout)


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


class UnsuitableError(Exception):
    """Why a module cannot be planted; the message follows the blueprint's name."""


def _attempt(what: str, call: Callable[[Any], Any], given: object) -> Any:  # noqa: ANN401
    """Call user code; its errors become an `UnsuitableError`."""
    try:
        return call(given)
    except Exception as error:
        raise UnsuitableError(f"{what}: {described(error)}") from error


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise UnsuitableError(f"must return an nn.Module, it returned a {kind}")
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        raise UnsuitableError("returned a lazy module; take sizes from the geometry")
    if not any(p.requires_grad and p.numel() for p in module.parameters()):
        raise UnsuitableError("returned a module without trainable parameters")


def _try_all(module: nn.Module, geometry: Geometry) -> bool:
    """Whether a module's output is zero; refuses a module that cannot be planted."""
    # A forward pass in training mode may change buffers, so a copy is tested.
    what = "returned a module that cannot be copied"
    trial: nn.Module = _attempt(what, copy.deepcopy, module)
    zero = all([try_out(trial, geometry, training=t) for t in (True, False)])
    if zero:
        try_gradients(trial, geometry)
    return zero


def try_out(
    module: nn.Module, geometry: Geometry, *, training: bool, scale: float = 1.0
) -> bool:
    """Whether a module's outputs are all zero for random inputs.

    Refuses outputs that cannot be added to the outlet, that depend on other samples of
    the batch, or that are random in eval mode.
    """
    module.train(training)
    inputs = scale * torch.randn(3, *geometry.inlet_shape)
    others = torch.cat([inputs[:1], torch.randn(2, *geometry.inlet_shape)])
    zero = True
    for batch in (1, 2, 3):
        zero &= not bool(_run(module, inputs[:batch], geometry).count_nonzero())
    seeded = torch.get_rng_state()
    alone = _run(module, inputs, geometry)[0]
    if not training and not torch.equal(seeded, torch.get_rng_state()):
        raise UnsuitableError(
            "draws random numbers in eval mode; draw them only in training mode"
        )
    torch.set_rng_state(seeded)
    if not torch.equal(alone, _run(module, others, geometry)[0]):
        raise UnsuitableError(
            "changes the output of a sample with other samples in its batch "
            f"({'training' if training else 'eval'} mode); use a norm over channels"
        )
    return zero


def try_gradients(module: nn.Module, geometry: Geometry) -> None:
    """Refuse a module whose gradients are all zero or not finite."""
    result = _run(module.train(), torch.randn(3, *geometry.inlet_shape), geometry)
    parameters = [p for p in module.parameters() if p.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if result.requires_grad:
        loss = (result * torch.randn_like(result)).sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    live = [gradient for gradient in gradients if gradient is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in live):
        raise UnsuitableError("has gradients that are not finite")
    if not any(bool(gradient.count_nonzero()) for gradient in live):
        raise UnsuitableError(
            "has zero output and zero for all its gradients; only its last operation "
            "may be zero"
        )


def _run(module: nn.Module, inputs: Tensor, geometry: Geometry) -> Tensor:
    shape, expected = tuple(inputs.shape), (len(inputs), *geometry.outlet_shape)
    result = _attempt(f"failed on an input of shape {shape}", module, inputs.clone())
    if not isinstance(result, Tensor):
        kind = type(result).__name__
        raise UnsuitableError(f"must return a tensor, it returned a {kind}")
    for what, found, wanted in (
        ("shape", tuple(result.shape), expected),
        ("dtype", result.dtype, inputs.dtype),
        ("device", result.device, inputs.device),
    ):
        if found != wanted:
            raise UnsuitableError(
                f"must return {what} {wanted} for an input of shape {shape}, it "
                f"returned {found}"
            )
    if not bool(result.isfinite().all()):
        raise UnsuitableError(f"returned values that are not finite for shape {shape}")
    return result


@contextmanager
def seeded_random_state(generator: torch.Generator) -> Iterator[None]:
    """Seed torch's global random state from a generator inside the block."""
    drawn = torch.randint(2**62, (), generator=generator, device=generator.device)
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        torch.manual_seed(int(drawn))
        yield


def _same(one: Factory, other: Factory) -> bool:
    """Whether two factories are one, or one definition that ran twice."""
    if one is other:
        return True
    codes, defaults, closures = (
        [getattr(factory, name, None) for factory in (one, other)]
        for name in ("__code__", "__defaults__", "__closure__")
    )
    # A closure may hold other values with the same code.
    same = codes[0] == codes[1] and defaults[0] == defaults[1]
    return same and codes[0] is not None and not any(closures)
