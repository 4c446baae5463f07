"""Slots of a host: named, found and checked with one example before anything grows.

    "fc1->fc2"   reads the input of fc1, adds to the output of fc2
    "fc2->fc2"   beside one layer: reads its input, adds to its output
    "block"      residual: reads and adds to the output of block

Names are the host's own module names. The host is called twice in eval mode (the
outputs must agree) and once in training mode, forwards and backwards. What cannot work
is refused here in one line, by name. The host is left as it was.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from esper.contracts.errors import BadInput, unknown
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout, width
from esper.growth.blueprints.registry import first_line
from esper.growth.macs import count_macs
from esper.growth.tracing import (
    Example,
    PathTracer,
    batch_size,
    call,
    describe_middle,
    first_tensor,
    isolated,
    path_modules,
    tensors_of,
)

ARROW: Final = "->"
REACH: Final = 3
"""How many layers further on `suggest_slots` looks for the partner of a layer."""
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
LAYOUT_LAYERS: Final = (*SIGNAL_LAYERS, nn.Linear, nn.LayerNorm, nn.Embedding)
"""Layers whose type says where the channels of their output are."""
LAYERS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d)
"""Layers that a seed can be put beside, between, and merged into."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where seeds of one place read and write, by module name."""

    inlet: str
    outlet: str
    residual: bool

    @property
    def name(self) -> str:
        """The name as a user writes it."""
        return self.outlet if self.residual else f"{self.inlet}{ARROW}{self.outlet}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertionPoint:
    """A site of a host with all that planting needs to know of it."""

    site: Site
    geometry: Geometry
    inlet: nn.Module
    outlet: nn.Module
    middle: tuple[nn.Module, ...]
    """What lies between the two layers of a span."""
    recipe: tuple[Mapping[str, Any], ...]
    """The same as plain data, to be saved."""
    depth: float
    """Where the outlet lies between the host's input (0) and output (1)."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A host's places and size, as one example shows them."""

    places: tuple[InsertionPoint, ...]
    parameters: int
    macs: int
    """Multiply-adds per example row."""


def parse(slot: str) -> Site:
    """A site from its name."""
    ends = [end.strip() for end in slot.split(ARROW)]
    if len(ends) > 2 or not all(ends):
        raise BadInput(
            f"slot {slot!r} must be a module name, or two joined by '->' as in "
            "'fc1->fc2'."
        )
    return Site(ends[0], ends[-1], residual=len(ends) == 1)


def survey(host: nn.Module, slots: Iterable[str], example: Example) -> Survey:
    """Find slots of a host by an example; refuses those that cannot be grown."""
    sites = _find_sites(host, slots)
    if torch.is_inference_mode_enabled():
        raise BadInput("a host cannot be surveyed in inference mode; leave it first.")
    with isolated(host, training=False), torch.no_grad():
        trace = _trace(host, sites, example)
        again = tensors_of(_call(host, example))
        macs = count_macs(lambda: call(host, example))
    if not trace.outputs:
        raise BadInput("the host's answer holds no floating-point tensor.")
    if any(
        not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(trace.outputs, again, strict=True)
    ):
        raise BadInput(
            "two calls of the host in eval mode disagree; its forward must not be "
            "random or change with every call."
        )
    modules = dict(host.named_modules())
    places = tuple(_insertion_point(site, modules, trace) for site in sites)
    _check_backward(host, places, example)
    return Survey(
        places,
        parameters=sum(p.numel() for p in host.parameters()),
        macs=macs // max(1, batch_size(example)),
    )


def suggest_slots(model: nn.Module, example: Example) -> tuple[str, ...]:
    """Names of slots that can be grown, for `Grower(slots=...)`, input to output.

    Pairs of layers with only channel-wise work between them, for new hidden units; the
    places beside single layers for a host without such pairs.

    Args:
        model: The host.
        example: What it is called with: a tensor, a tuple or a dictionary.
    """

    def usable(slot: str, kind: str) -> bool:
        try:
            place = survey(model, [slot], example).places[0]
        except BadInput:
            return False
        return bool(getattr(place.geometry, kind))

    _check_host(model)
    layers = [name for name, module in model.named_modules() if is_layer(module)]
    beside = {name: parse(f"{name}{ARROW}{name}") for name in layers if name}
    with isolated(model, training=False), torch.no_grad():
        records = _trace(model, tuple(beside.values()), example).records
    called = [name for name in beside if records[name].calls == 1]
    called.sort(key=lambda name: records[name].order)
    spans = [
        f"{first}{ARROW}{second}"
        for index, first in enumerate(called)
        for second in called[index + 1 : index + 1 + REACH]
    ]
    found = [slot for slot in spans if usable(slot, "spans")] or [
        beside[name].name for name in called if usable(beside[name].name, "beside")
    ]
    if not found:
        raise BadInput(
            "no linear or convolution layer of the host can be grown; name slots by "
            "hand."
        )
    return tuple(found)


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
    """The window of a convolution; None for anything else."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or not is_layer(module):
        return None
    return Kernel(
        tuple(module.kernel_size),
        tuple(module.stride),
        tuple(int(pad) for pad in module.padding),
        tuple(module.dilation),
    )


def _find_sites(host: nn.Module, slots: Iterable[str]) -> tuple[Site, ...]:
    """The sites of a host; refuses names that no slot can have."""
    _check_host(host)
    sites = tuple(parse(slot) for slot in slots)
    if not sites:
        raise BadInput(
            "slots is empty; name a place, or let esper.suggest_slots(model, example) "
            "find some."
        )
    doubled = [site for site, count in Counter(sites).items() if count > 1]
    if doubled:
        raise BadInput(
            f"slot {doubled[0].name!r} is named twice; a place holds several seeds "
            "by itself (seeds_per_slot)."
        )
    names = {name: module for name, module in host.named_modules() if name}
    for site in sites:
        for end in (site.inlet, site.outlet):
            if end not in names:
                raise unknown("the host has no module", end, names)
            _check_not_shared(host, end, names[end])
    return sites


def _check_host(host: nn.Module) -> None:
    if not isinstance(host, nn.Module):
        raise BadInput(f"the host must be an nn.Module, got {type(host).__name__}.")
    kind, parameters = type(host), [*host.parameters()]
    compiled = (
        name
        for name, module in host.named_modules()
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    )
    inside = next(compiled, None)
    devices = sorted({str(p.device) for p in parameters if p.is_floating_point()})
    for wrong, line in (
        (
            isinstance(host, DataParallel | DistributedDataParallel),
            f"is wrapped in {kind.__name__}; pass model.module",
        ),
        (
            inside is not None,
            f"is compiled{f' at {inside!r}' if inside else ''}, and a compiled graph "
            "does not grow; pass the module before torch.compile and compile "
            "export()'s result",
        ),
        (
            kind.__module__.startswith("torch.jit"),
            "is a TorchScript module; pass the nn.Module itself",
        ),
        (
            # By name, since importing the class takes long.
            kind.__name__ == "FullyShardedDataParallel"
            or any(type(p.data).__name__ == "DTensor" for p in parameters),
            "is sharded (FSDP), and a sharded host does not grow; use "
            "DistributedDataParallel",
        ),
        (not parameters, "has no parameters; there is nothing to grow"),
        (
            any(is_lazy(parameter) for parameter in parameters),
            "has lazy parameters; run it once on an example before growing",
        ),
        (
            len(devices) > 1,
            f"lies on several devices ({', '.join(devices)}); use one",
        ),
    ):
        if wrong:
            raise BadInput(f"the host {line}.")


def _check_not_shared(host: nn.Module, name: str, module: nn.Module) -> None:
    """Refuse a module that the host holds under two names, or whose weights it ties."""
    aliases = [
        other
        for other, found in host.named_modules(remove_duplicate=False)
        if found is module
    ]
    if len(aliases) > 1:
        raise BadInput(
            f"module {name!r} is shared with {aliases[aliases[0] == name]!r}; a slot "
            "needs a module of its own."
        )
    mine = {id(parameter): key for key, parameter in module.named_parameters()}
    for other, parameter in host.named_parameters(remove_duplicate=False):
        if id(parameter) in mine and not f"{other}.".startswith(f"{name}."):
            raise BadInput(
                f"{name}.{mine[id(parameter)]} is tied to {other}; a slot needs "
                "weights of its own."
            )


@dataclass(slots=True)
class _Record:
    """What was seen at one module in one call of the host."""

    inputs: Any = None
    given_version: int = 0
    version_after: dict[str, int] = field(default_factory=dict)
    """Version of what was given, when another module returned."""
    outputs: Any = None
    calls: int = 0
    last_leaf: nn.Module | None = None
    order: int = 0


@dataclass(slots=True)
class _Trace:
    """One call of the host."""

    records: dict[str, _Record]
    tracer: PathTracer = field(default_factory=PathTracer)
    leaves: int = 0
    outputs: list[Tensor] = field(default_factory=list)


def _trace(host: nn.Module, sites: tuple[Site, ...], example: Example) -> _Trace:
    """Call the host once and record what happens at every site."""
    ends = {end for site in sites for end in (site.inlet, site.outlet)}
    trace = _Trace({name: _Record() for name in ends})
    records, tracer = trace.records, trace.tracer
    names = {module: name for name, module in host.named_modules()}
    spans = [site for site in sites if not site.residual and site.inlet != site.outlet]
    last_leaf: nn.Module | None = None

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        nonlocal last_leaf
        given = first_tensor((*args, *kwargs.values()))
        if not [*module.children()]:
            tracer.running.append(module)
            trace.leaves += 1
            if isinstance(module, LAYOUT_LAYERS):
                last_leaf = module
        name = names[module]
        if name in records:
            records[name].calls += 1
            records[name].inputs = given
            records[name].given_version = getattr(given, "_version", 0)
        for site in spans:
            if site.outlet == name:
                tracer.arrive(site.name, given)

    def leave(module: nn.Module, args: Any, answer: Any) -> None:  # noqa: ANN401
        if not [*module.children()]:
            tracer.running.pop()
        name = names[module]
        if name in records:
            record = records[name]
            record.outputs, record.order = answer, trace.leaves
            record.last_leaf = last_leaf
            for other in records.values():
                if other.calls:
                    other.version_after[name] = getattr(other.inputs, "_version", 0)
        for site in spans:
            if site.inlet == name and isinstance(answer, Tensor):
                tracer.begin(site.name, answer)

    with ExitStack() as stack:
        for module in names:
            before = module.register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(leave).remove)
        with tracer:
            answer = _call(host, example)
    trace.outputs = [t.clone() for t in tensors_of(answer)]
    return trace


def _call(host: nn.Module, example: Example) -> Any:  # noqa: ANN401
    try:
        return call(host, example)
    except Exception as error:
        raise BadInput(
            f"the host cannot be called with the example: {first_line(error)}"
        ) from error


def _insertion_point(
    site: Site, modules: dict[str, nn.Module], trace: _Trace
) -> InsertionPoint:
    for end in (site.inlet, site.outlet):
        calls = trace.records[end].calls
        if calls != 1:
            often = "never called" if calls == 0 else f"called {calls} times"
            raise BadInput(
                f"module {end!r} is {often} in one pass of the host; a slot needs a "
                "module that is called once."
            )
    read, written = trace.records[site.inlet], trace.records[site.outlet]
    outlet = _tensor(written.outputs, f"module {site.outlet!r} answers with")
    inlet = outlet
    if not site.residual:
        inlet = _tensor(read.inputs, f"module {site.inlet!r} is given")
        if site.outlet not in read.version_after:
            raise BadInput(
                f"{site.outlet!r} comes before {site.inlet!r} in a pass of the host; "
                f"write '{site.outlet}{ARROW}{site.inlet}'."
            )
        if read.version_after[site.outlet] != read.given_version:
            raise BadInput(
                f"what {site.inlet!r} reads is changed in place before "
                f"{site.outlet!r} returns; use the out-of-place operation."
            )
        if inlet.shape[0] != outlet.shape[0]:
            raise BadInput(
                f"slot {site.name!r} reads {inlet.shape[0]} rows and writes "
                f"{outlet.shape[0]}; inlet and outlet must share the batch."
            )
    first, second = modules[site.inlet], modules[site.outlet]
    outlet_layout = _layout(outlet, written.last_leaf, site.outlet)
    inlet_layout = outlet_layout if site.residual else _layout(inlet, first, site.inlet)
    middle: tuple[nn.Module, ...] = ()
    recipe: list[dict[str, Any]] = []
    hidden: tuple[int, ...] = ()
    problem, unit_inputs = "the slot does not span two layers", 1
    if not site.residual and site.inlet != site.outlet:
        middle, problem, hidden, unit_inputs = _span(
            site, first, second, trace, inlet_layout
        )
        names = {module: name for name, module in modules.items()}
        path = trace.tracer.paths.get(site.name)
        if not problem and path is not None:
            recipe = describe_middle([step.module for step in path.steps], names)
    return InsertionPoint(
        site=site,
        geometry=Geometry(
            inlet_layout=inlet_layout,
            outlet_layout=outlet_layout,
            inlet_shape=tuple(inlet.shape[1:]),
            outlet_shape=tuple(outlet.shape[1:]),
            residual=site.residual,
            inlet_kernel=None if site.residual else kernel_of(first),
            outlet_kernel=kernel_of(second),
            inlet_bias=getattr(first, "bias", None) is not None,
            beside=site.inlet == site.outlet and not site.residual and is_layer(second),
            spans=not problem,
            hidden_shape=hidden,
            unit_inputs=unit_inputs,
            why_no_span=problem,
        ),
        inlet=first,
        outlet=second,
        middle=middle,
        recipe=tuple(recipe),
        depth=min(1.0, written.order / max(1, trace.leaves)),
    )


def _span(
    site: Site, first: nn.Module, second: nn.Module, trace: _Trace, layout: Layout
) -> tuple[tuple[nn.Module, ...], str, tuple[int, ...], int]:
    """What lies between, why no units fit there, the hidden shape, inputs per unit."""
    for end, layer in ((site.inlet, first), (site.outlet, second)):
        if not is_layer(layer):
            return (), f"{end!r} is no plain linear or convolution layer", (), 1
    units = int(first.get_parameter("weight").shape[0])
    middle, problem = path_modules(trace.tracer.paths.get(site.name), units, layout)
    hidden = trace.records[site.outlet].inputs
    shape = tuple(hidden.shape[1:]) if isinstance(hidden, Tensor) else ()
    inputs = 1
    if not problem:
        if isinstance(second, nn.Linear) and layout.channels_first:
            inputs = shape[-1] // units
        elif width(shape, layout) != units:
            problem = "the channels of the first layer do not reach the second"
    return middle, problem, shape, inputs


def _tensor(value: object, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise BadInput(
            f"{what} {type(value).__name__}; name a module inside it that works on "
            "one tensor."
        )
    if not value.is_floating_point():
        raise BadInput(f"{what} {value.dtype}; a slot needs floating-point tensors.")
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


def _check_backward(
    host: nn.Module, places: tuple[InsertionPoint, ...], example: Example
) -> None:
    """Refuse outlets that no gradient reaches in training mode."""
    offsets: dict[str, Tensor] = {}

    def add_offset(name: str) -> Any:  # noqa: ANN401
        def hook(module: nn.Module, args: Any, answer: Tensor) -> Tensor:  # noqa: ANN401
            offsets[name] = torch.zeros_like(answer, requires_grad=True)
            return answer + offsets[name]

        return hook

    with ExitStack() as stack:
        for name, outlet in {p.site.outlet: p.outlet for p in places}.items():
            handle = outlet.register_forward_hook(add_offset(name))
            stack.callback(handle.remove)
        try:
            with isolated(host, training=True), torch.enable_grad():
                answers = tensors_of(_call(host, example))
                total = torch.stack([a.float().sum() for a in answers]).sum()
                found = torch.autograd.grad(
                    total, [*offsets.values()], allow_unused=True
                )
        except RuntimeError as error:
            raise BadInput(
                f"nothing flows back through the host: {first_line(error)}"
            ) from error
    for name, gradient in zip(offsets, found, strict=True):
        if gradient is None:
            raise BadInput(
                f"no gradient reaches {name!r}; a seed there could not learn."
            )
