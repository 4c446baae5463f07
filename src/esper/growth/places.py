"""Looking at a host's places with one example, before anything is planted.

The host is called twice in eval mode (the answers must agree) and once in training
mode, forwards and backwards. What cannot work is refused here, by name: a module that
is called twice or never, an answer that is no tensor, a tensor that is changed in
place on the way, an outlet that nothing flows back to. The host is left as it was.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from esper.contracts.errors import BadInput
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout, width
from esper.growth.calls import Example, batch_size, call, shielded, tensors_of
from esper.growth.sites import Site
from esper.growth.trace import Watch, describe_way

SIGNAL_LAYERS: Final = (
    nn.Conv1d,
    nn.ConvTranspose1d,
    nn.BatchNorm1d,
    nn.MaxPool1d,
    nn.AvgPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
    nn.InstanceNorm1d,
    nn.GroupNorm,
)
TELLING: Final = (*SIGNAL_LAYERS, nn.Linear, nn.LayerNorm, nn.Embedding)
"""Layers whose output tells where its channels are."""
LAYERS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d)
"""Layers that a seed can stand beside, span, and merge into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A site of a host with all that planting needs to know of it."""

    site: Site
    geometry: Geometry
    inlet: nn.Module
    outlet: nn.Module
    middle: tuple[nn.Module, ...]
    """What lies between the two layers of a span."""
    depth: float
    """Where the outlet lies between the host's input (0) and output (1)."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A host as one example shows it."""

    places: tuple[Place, ...]
    parameters: int
    macs: int
    """Multiply-adds per example row."""


@dataclass(slots=True)
class _Sight:
    """What was seen at one module."""

    given: Any = None
    given_version: int = 0
    spoken_version: dict[str, int] = field(default_factory=dict)
    """Version of what was given, when another module spoke."""
    answer: Any = None
    calls: int = 0
    last_leaf: nn.Module | None = None
    order: int = 0


def survey(host: nn.Module, sites: Iterable[Site], example: Example) -> Survey:
    """Look at the sites of a host; refuses those that cannot be grown."""
    sites = tuple(sites)
    if torch.is_inference_mode_enabled():
        raise BadInput("a host cannot be surveyed in inference mode; leave it first.")
    with shielded(host, training=False), torch.no_grad():
        sights, watch, leaves, first = _watch(host, sites, example)
        *_, again = _watch(host, sites, example)
    if not first:
        raise BadInput("the host's answer holds no floating-point tensor.")
    if any(
        not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(first, again, strict=True)
    ):
        raise BadInput(
            "two calls of the host in eval mode disagree; its forward must not be "
            "random or change with every call."
        )
    modules = dict(host.named_modules())
    places = tuple(
        _place(site, modules, sights, watch, max(1, leaves)) for site in sites
    )
    _try_backwards(host, places, example)
    with shielded(host, training=False), torch.no_grad():
        counter = FlopCounterMode(display=False)
        # The counter knows the plain kernel of attention, not the fused ones.
        with counter, sdpa_kernel(SDPBackend.MATH):
            call(host, example)
    return Survey(
        places,
        parameters=sum(p.numel() for p in host.parameters()),
        macs=counter.get_total_flops() // 2 // max(1, batch_size(example)),
    )


def _call(host: nn.Module, example: Example) -> Any:  # noqa: ANN401
    try:
        return call(host, example)
    except Exception as error:
        raise BadInput(
            f"the host cannot be called with the example: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _watch(
    host: nn.Module, sites: tuple[Site, ...], example: Example
) -> tuple[dict[str, _Sight], Watch, int, list[Tensor]]:
    """Call the host once and note what happens at every site."""
    modules = dict(host.named_modules())
    names = {site.inlet for site in sites} | {site.outlet for site in sites}
    sights = {name: _Sight() for name in names}
    watch = Watch()
    spans = [site for site in sites if not site.residual and site.inlet != site.outlet]
    count = Counter[str]()
    last: list[nn.Module] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        if not [*module.children()]:
            watch.running.append(module)
            count["leaves"] += 1
            if isinstance(module, TELLING):
                last[:] = [module]
        for name in names:
            if modules[name] is module:
                sight = sights[name]
                sight.calls += 1
                sight.given = first_tensor((*args, *kwargs.values()))
                if isinstance(sight.given, Tensor):
                    sight.given_version = sight.given._version
        for site in spans:
            if modules[site.outlet] is module:
                watch.arrive(site.name, first_tensor((*args, *kwargs.values())))

    def leave(module: nn.Module, args: Any, answer: Any) -> None:  # noqa: ANN401
        if not [*module.children()]:
            watch.running.pop()
        for name in names:
            if modules[name] is module:
                sight = sights[name]
                sight.answer = answer
                sight.order = count["leaves"]
                sight.last_leaf = last[0] if last else None
                for other in sights.values():
                    if isinstance(other.given, Tensor):
                        other.spoken_version[name] = other.given._version
        for site in spans:
            if modules[site.inlet] is module and isinstance(answer, Tensor):
                watch.leave(site.name, answer)

    with ExitStack() as stack:
        for module in modules.values():
            before = module.register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(leave).remove)
        with watch:
            answer = _call(host, example)
    return sights, watch, count["leaves"], [t.clone() for t in tensors_of(answer)]


def first_tensor(given: Iterable[Any]) -> Any:  # noqa: ANN401
    """The first tensor among what a module was called with; None if there is none."""
    return next((value for value in given if isinstance(value, Tensor)), None)


def _place(
    site: Site,
    modules: dict[str, nn.Module],
    sights: dict[str, _Sight],
    watch: Watch,
    leaves: int,
) -> Place:
    for end in (site.inlet, site.outlet):
        calls = sights[end].calls
        if calls != 1:
            often = "never called" if calls == 0 else f"called {calls} times"
            raise BadInput(
                f"module {end!r} is {often} in one pass of the host; a slot needs a "
                "module that is called once."
            )
    seen = sights[site.outlet]
    outlet = _tensor(seen.answer, f"module {site.outlet!r} answers with")
    inlet = outlet
    if not site.residual:
        inlet = _tensor(sights[site.inlet].given, f"module {site.inlet!r} is given")
        read = sights[site.inlet]
        if read.spoken_version[site.outlet] != read.given_version:
            raise BadInput(
                f"what {site.inlet!r} reads is changed in place before "
                f"{site.outlet!r} speaks; use the out-of-place operation."
            )
        if inlet.shape[0] != outlet.shape[0]:
            raise BadInput(
                f"slot {site.name!r} reads {inlet.shape[0]} rows and writes "
                f"{outlet.shape[0]}; inlet and outlet must share the batch."
            )
    first, second = modules[site.inlet], modules[site.outlet]
    outlet_layout = _layout(outlet, seen.last_leaf, site.outlet)
    inlet_layout = outlet_layout if site.residual else _layout(inlet, first, site.inlet)
    middle: tuple[nn.Module, ...] = ()
    hidden: tuple[int, ...] = ()
    trouble, unit_inputs = "the slot does not span two layers", 1
    if not site.residual and site.inlet != site.outlet:
        middle, trouble, hidden, unit_inputs = _span(
            site, first, second, sights, watch, inlet_layout
        )
    layers = is_layer(second)
    return Place(
        site=site,
        geometry=Geometry(
            inlet_layout=inlet_layout,
            outlet_layout=outlet_layout,
            inlet_shape=tuple(inlet.shape[1:]),
            outlet_shape=tuple(outlet.shape[1:]),
            residual=site.residual,
            inlet_kernel=None if site.residual else kernel_of(first),
            outlet_kernel=kernel_of(second),
            beside=site.inlet == site.outlet and not site.residual and layers,
            spans=not trouble,
            hidden_shape=hidden,
            unit_inputs=unit_inputs,
            why_no_span=trouble,
        ),
        inlet=first,
        outlet=second,
        middle=middle,
        depth=min(1.0, seen.order / leaves),
    )


def _span(
    site: Site,
    first: nn.Module,
    second: nn.Module,
    sights: dict[str, _Sight],
    watch: Watch,
    layout: Layout,
) -> tuple[tuple[nn.Module, ...], str, tuple[int, ...], int]:
    """What lies between, what stands in the way, the hidden shape, inputs per unit."""
    for end, layer in ((site.inlet, first), (site.outlet, second)):
        if not is_layer(layer):
            return (), f"{end!r} is no plain linear or convolution layer", (), 1
    units = int(first.get_parameter("weight").shape[0])
    middle, trouble = describe_way(watch.ways.get(site.name), units, layout)
    hidden = sights[site.outlet].given
    shape = tuple(hidden.shape[1:]) if isinstance(hidden, Tensor) else ()
    inputs = 1
    if not trouble:
        if isinstance(second, nn.Linear) and layout.channels_first:
            inputs = shape[-1] // units
        elif width(shape, layout) != units:
            trouble = "the channels of the first layer do not reach the second"
    return middle, trouble, shape, inputs


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a plain linear map over channels (and a window)."""
    if type(module) not in LAYERS or hasattr(module, "parametrizations"):
        return False
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return (
            module.groups == 1
            and module.padding_mode == "zeros"
            and not isinstance(module.padding, str)
        )
    return True


def kernel_of(module: nn.Module) -> Kernel | None:
    """How a convolution walks; None for anything else."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or not is_layer(module):
        return None
    return Kernel(
        tuple(module.kernel_size),
        tuple(module.stride),
        tuple(int(pad) for pad in module.padding),
        tuple(module.dilation),
    )


def _tensor(value: object, who: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise BadInput(
            f"{who} {type(value).__name__}; name a module inside it that works on "
            "one tensor."
        )
    if not value.is_floating_point():
        raise BadInput(f"{who} {value.dtype}; a slot needs floating-point tensors.")
    return value


def _layout(tensor: Tensor, leaf: nn.Module | None, name: str) -> Layout:
    layouts = {2: Layout.VECTOR, 3: Layout.SEQUENCE, 4: Layout.IMAGE}
    layout = layouts.get(tensor.dim())
    if layout is None or (tensor.dim() == 4 and isinstance(leaf, nn.Linear)):
        raise BadInput(
            f"the tensor at {name!r} is {[*tensor.shape]}; seeds serve [B, D], "
            "[B, T, D], [B, C, L] and [B, C, H, W]."
        )
    if layout is Layout.SEQUENCE and isinstance(leaf, SIGNAL_LAYERS):
        return Layout.SIGNAL
    return layout


def _try_backwards(
    host: nn.Module, places: tuple[Place, ...], example: Example
) -> None:
    """Call the host in training mode and walk back to every outlet."""
    offsets: dict[str, Tensor] = {}
    handles: list[RemovableHandle] = []

    def offset(name: str) -> Any:  # noqa: ANN401
        def hook(module: nn.Module, args: Any, answer: Tensor) -> Tensor:  # noqa: ANN401
            offsets[name] = torch.zeros_like(answer, requires_grad=True)
            return answer + offsets[name]

        return hook

    for place in places:
        if place.site.outlet not in offsets:
            offsets[place.site.outlet] = torch.empty(0)
            hook = offset(place.site.outlet)
            handles.append(place.outlet.register_forward_hook(hook))
    try:
        with shielded(host, training=True), torch.enable_grad():
            answers = tensors_of(_call(host, example))
            total = torch.stack([answer.float().sum() for answer in answers]).sum()
            found = torch.autograd.grad(total, [*offsets.values()], allow_unused=True)
    except RuntimeError as error:
        raise BadInput(
            f"nothing flows back through the host: {_first_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    for name, gradient in zip(offsets, found, strict=True):
        if gradient is None:
            raise BadInput(
                f"no gradient reaches {name!r}; a seed there could not learn."
            )


def watch_once(
    host: nn.Module, sites: Iterable[Site], example: Example
) -> dict[str, int]:
    """When each outlet spoke; 0 for one that never did or more than once."""
    sites = tuple(sites)
    sights, *_ = _watch(host, sites, example)
    return {
        site.outlet: sights[site.outlet].order if sights[site.outlet].calls == 1 else 0
        for site in sites
    }
