"""All blueprints by name: the built-in ones and a user's own.

    @blueprint("tiny_mlp")
    def tiny_mlp(geometry: Geometry) -> nn.Module:
        return nn.Sequential(nn.Linear(...), nn.GELU(), nn.Linear(...))

A factory makes a plain module for a place. It is tried on random inputs before it is
planted; one that does not begin at zero is multiplied by a gate that does. It runs as
code of this process: register only what is trusted. When a saved network is read, it is
called on torch's meta device first, to compare sizes with the saved tensors.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import InvalidInputError, unknown
from esper.growth.blueprints.geometry import Geometry, Layout
from esper.growth.blueprints.layers import per_channel

Factory = Callable[[Geometry], nn.Module]
Fits = Callable[[Geometry], str]


@dataclass(frozen=True, slots=True)
class Registered:
    """A user's own blueprint."""

    blueprint: Blueprint
    factory: Factory
    fits: Fits | None


class Gated(nn.Module):
    """A module times one number per channel that begins at zero."""

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

    `fits` says why a place does not suit it, or "" if it does; without it every place
    does. A module of one's own stays a branch when the model is exported.
    """
    if not name.isidentifier():
        raise InvalidInputError(
            f"A blueprint's name must be made of letters, digits and underscores, "
            f"got {name!r}."
        )
    if name in _BUILT_IN:
        raise InvalidInputError(f"Blueprint {name!r} is built in; choose another name.")

    def register(factory: Factory) -> Factory:
        known = _REGISTERED.get(name)
        if known is not None and not _same(known.factory, factory):
            raise InvalidInputError(
                f"Blueprint {name!r} is already registered with another factory; "
                f"choose another name or call forget({name!r}) first."
            )
        record = Blueprint(name, Form.CUSTOM, size=0, merges=False)
        _REGISTERED[name] = Registered(record, factory, fits)
        return factory

    return register


def blueprints() -> Mapping[str, Blueprint]:
    """Every blueprint by name, the built-in ones first."""
    own = {name: entry.blueprint for name, entry in _REGISTERED.items()}
    return MappingProxyType({**_BUILT_IN, **own})


def find(name: str) -> Blueprint:
    """The blueprint of this name."""
    known = blueprints()
    if name not in known:
        raise unknown("there is no blueprint", name, known)
    return known[name]


def forget(name: str) -> None:
    """Take a user's own blueprint out; seeds grown from it stay as they are."""
    if name not in _REGISTERED:
        raise unknown("there is no registered blueprint", name, _REGISTERED)
    del _REGISTERED[name]


def registered(name: str) -> Registered:
    """A user's own blueprint by name."""
    if name not in _REGISTERED:
        raise InvalidInputError(
            f"Blueprint {name!r} is not registered in this process; import the module "
            "that registers it first."
        )
    return _REGISTERED[name]


def make_module(
    name: str,
    geometry: Geometry,
    generator: torch.Generator,
    gated: bool | None = None,
) -> nn.Module:
    """Make a user's module for a place, try it and gate it if it is not zero.

    The factory and the trial draw from torch's global streams as they please; these
    are seeded from `generator` for the time and put back afterwards.

    Args:
        name: Of the blueprint.
        geometry: Of the place.
        generator: Where random numbers come from.
        gated: Whether a saved module has a gate: it was tried before it was saved.
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


class UnsuitableError(Exception):
    """Why a module cannot be planted, as what its blueprint does or must do."""


def _attempt(what: str, call: Callable[[Any], Any], given: object) -> Any:  # noqa: ANN401
    """Call code of others."""
    try:
        return call(given)
    except Exception as error:
        raise UnsuitableError(f"{what}: {first_line(error)}") from error


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        problem = f"must make an nn.Module, it made a {type(module).__name__}"
    elif any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        problem = "made a lazy module; give its layers their sizes from the geometry"
    elif not any(p.requires_grad and p.numel() for p in module.parameters()):
        problem = "made a module without trainable parameters; it could never learn"
    else:
        return
    raise UnsuitableError(problem)


def _try_all(module: nn.Module, geometry: Geometry) -> bool:
    """Whether a module is zero at birth; refuses one that cannot be planted."""
    # A copy is tried, since a forward in training may change buffers.
    what = "made a module that cannot be copied"
    trial: nn.Module = _attempt(what, copy.deepcopy, module)
    zero = all([try_out(trial, geometry, training=t) for t in (True, False)])
    if zero:
        try_gradients(trial, geometry)
    return zero


def try_out(
    module: nn.Module, geometry: Geometry, *, training: bool, scale: float = 1.0
) -> bool:
    """Whether a module gives nothing but zeros for batches of random inputs.

    Refuses outputs that cannot be added to the outlet, that depend on other samples
    of the batch, or that are random in eval mode.
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
            "draws random numbers in eval mode; draw them in training only"
        )
    torch.set_rng_state(seeded)
    if not torch.equal(alone, _run(module, others, geometry)[0]):
        raise UnsuitableError(
            "gives a sample another output with other samples in its batch "
            f"({'training' if training else 'eval'} mode); use a norm over channels "
            "instead of one over the batch"
        )
    return zero


def try_gradients(module: nn.Module, geometry: Geometry) -> None:
    """A zero at birth must be one that it can leave."""
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
            "is zero at birth and so are all its gradients; let the zero be its last "
            "operation"
        )


def _run(module: nn.Module, inputs: Tensor, geometry: Geometry) -> Tensor:
    shape, expected = tuple(inputs.shape), (len(inputs), *geometry.outlet_shape)
    result = _attempt(f"failed on an input of shape {shape}", module, inputs.clone())
    problem = ""
    if not isinstance(result, Tensor):
        problem = f"must give a tensor, it gave a {type(result).__name__}"
    elif tuple(result.shape) != expected:
        problem = (
            f"must give shape {expected} for an input of shape {shape}, it gave "
            f"{tuple(result.shape)}"
        )
    elif (result.dtype, result.device) != (inputs.dtype, inputs.device):
        problem = (
            f"must keep {inputs.dtype} on {inputs.device}, it gave {result.dtype} on "
            f"{result.device}"
        )
    elif not bool(result.isfinite().all()):
        problem = f"gave values that are not finite for shape {shape}"
    if problem:
        raise UnsuitableError(problem)
    return result  # type: ignore[no-any-return]


@contextmanager
def seeded_random_state(generator: torch.Generator) -> Iterator[None]:
    """Torch's global streams, seeded from a generator for as long as this lasts."""
    drawn = torch.randint(2**62, (), generator=generator, device=generator.device)
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        torch.manual_seed(int(drawn))
        yield


def _same(one: Factory, other: Factory) -> bool:
    """Whether a factory is the same, or was only defined a second time."""
    if one is other:
        return True
    codes, defaults, closures = (
        [getattr(factory, name, None) for factory in (one, other)]
        for name in ("__code__", "__defaults__", "__closure__")
    )
    # A closure may hold other values with the same code.
    same = codes[0] == codes[1] and defaults[0] == defaults[1]
    return same and codes[0] is not None and not any(closures)


def first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else repr(error)
