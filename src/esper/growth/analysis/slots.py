"""Slots of a host: parsed from names and checked with one example, or found.

    "fc1->fc2"   reads the input of fc1, adds to the output of fc2
    "fc2->fc2"   parallel to one layer: reads its input, adds to its output
    "block"      residual: reads and adds to the output of block

Names are the host's module names. The host is called in eval mode, where outputs must
be deterministic, and in training mode, with a backward pass. Between two layers the
modes may differ in dropout only, and numbers must not depend on the sizes of the
example. Slots that cannot grow are refused. `suggest_slots` finds slots: the call on
the example shows which layer reads the output of which.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from esper.contracts.errors import InvalidInputError, unknown
from esper.contracts.messages import described
from esper.growth.analysis.config_fields import Axis, configured_parts, fields_of_axes
from esper.growth.analysis.host_layers import (
    is_layer,
    kernel_of,
    kind_of,
    units_axis,
    units_of,
    why_no_layer,
)
from esper.growth.analysis.interlayer import (
    Join,
    SavedSteps,
    describe_interlayer,
    every_step,
)
from esper.growth.analysis.tracing import (
    CHANNELS_LAST,
    MAX_TRAINING_CALLS,
    SIGNAL_LAYERS,
    Example,
    NoSpanError,
    Trace,
    batch_size,
    call,
    compare_sizes,
    compare_training,
    count_macs,
    isolated,
    path_modules,
    run_example,
    tensors_of,
    unit_macs,
)
from esper.growth.blueprints.geometry import Gate, Geometry, Layout, width

ARROW: Final = "->"
WILDCARDS: Final = frozenset("*?[")

Reject = Callable[["InsertionPoint"], str]
"""Returns why an insertion point is not wanted; empty if it is."""


@dataclass(frozen=True, slots=True)
class Site:
    """The modules where seeds read and write, by name."""

    inlet: str
    outlet: str
    residual: bool

    @property
    def name(self) -> str:
        """The name as a user writes it."""
        return self.outlet if self.residual else f"{self.inlet}{ARROW}{self.outlet}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertionPoint:
    """A site of a host with everything that planting needs."""

    site: Site
    geometry: Geometry
    inlet: nn.Module
    outlet: nn.Module
    interlayer: tuple[nn.Module, ...]
    """The steps between the two layers of a span."""
    recipe: SavedSteps
    """The same steps as plain data."""
    depth: float
    """Position of the outlet between the host's input (0) and output (1)."""
    in_mlp: bool = False
    """Whether all layers of the host are linear and work on vectors."""
    unit_macs: int = 0
    """Multiply-adds per row of the steps between two layers, per unit."""

    @property
    def gate(self) -> str:
        """Name of the gate layer that joins the path; empty if there is none."""
        return _gate(self.interlayer)

    @property
    def units_axis(self) -> Axis:
        """The axis of the inlet's weight that has the units of a span."""
        return f"{self.site.inlet}.weight", units_axis(self.inlet)

    def first_layers(self, host: nn.Module) -> dict[str, nn.Module]:
        """The layers of a host, or of its copy, that get the new units of a span."""
        names = {"first": self.site.inlet, "gate": self.gate}
        return {key: host.get_submodule(name) for key, name in names.items() if name}

    @property
    def widened(self) -> list[str]:
        """Names of the layers that get the new units of a span."""
        inner = [
            step.name
            for join, saved in zip(self.interlayer, self.recipe, strict=True)
            if isinstance(join, Join) and not join.layer
            for module, step in zip(join.branch, saved.branch, strict=True)
            if is_layer(module)
        ]
        return [name for name in (self.site.inlet, self.gate, *inner) if name]


@dataclass(frozen=True, slots=True)
class HostAnalysis:
    """The insertion points and the size of a host."""

    places: tuple[InsertionPoint, ...]
    parameters: int
    macs: int
    """Multiply-adds per example row."""


def parse_slot(slot: str) -> Site:
    """The site of a slot's name."""
    ends = [end.strip() for end in slot.split(ARROW)]
    if len(ends) > 2 or not all(ends):
        raise InvalidInputError(
            f"slot {slot!r} must be a module name, or two such as 'fc1->fc2'."
        )
    return Site(ends[0], ends[-1], residual=len(ends) == 1)


def analyse_host(
    host: nn.Module, slots: Iterable[str], example: Example
) -> HostAnalysis:
    """Analyse a host's slots with an example; refuses slots that cannot grow."""
    sites = _find_sites(host, slots)
    with isolated(host, training=False), torch.no_grad():
        ends = (end for site in sites for end in (site.inlet, site.outlet))
        trace = Trace(host, ends, example)
        again = tensors_of(run_example(host, example))
        macs = count_macs(lambda: call(host, example))
    if not trace.outputs:
        raise InvalidInputError("the host's output has no floating-point tensor.")
    if any(
        not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(trace.outputs, again, strict=True)
    ):
        raise InvalidInputError(
            "two calls of the host in eval mode differ; make its forward deterministic."
        )
    compare_sizes(host, trace, example)
    compare_training(host, trace, example)
    places = tuple(insertion_point(site, trace) for site in sites)
    for gate in filter(None, (place.gate for place in places)):
        check_not_shared(host, gate, trace.modules[gate])
    _refuse_overlap(places)
    for name in without_gradient(host, places, example):
        raise InvalidInputError(
            f"no gradient reaches {name!r}, so a seed cannot learn; use another slot."
        )
    return HostAnalysis(
        places,
        parameters=sum(p.numel() for p in host.parameters()),
        macs=macs // max(1, batch_size(example)),
    )


def _find_sites(host: nn.Module, slots: Iterable[str]) -> tuple[Site, ...]:
    """The sites of a host; refuses names that cannot be slots."""
    check_host(host)
    sites = tuple(parse_slot(slot) for slot in slots)
    doubled = [site for site, count in Counter(sites).items() if count > 1]
    if doubled:
        raise InvalidInputError(
            f"slot {doubled[0].name!r} is named twice; use seeds_per_slot for several "
            "seeds in one slot."
        )
    names = {name: module for name, module in host.named_modules() if name}
    for site in sites:
        for end in (site.inlet, site.outlet):
            if end not in names:
                raise unknown("the host has no module", end, names)
            check_not_shared(host, end, names[end])
    return sites


def check_host(host: nn.Module) -> None:
    """Refuse a host that cannot grow with any slots."""
    if not isinstance(host, nn.Module):
        raise InvalidInputError(
            f"the host must be an nn.Module, got {type(host).__name__}."
        )
    if torch.is_inference_mode_enabled():
        raise InvalidInputError("a host cannot grow in inference mode; leave it first.")
    kind, parameters = type(host), [*host.parameters()]
    compiled = [
        name
        for name, module in host.named_modules()
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    ]
    inside = f" at {compiled[0]!r}" if any(compiled[:1]) else ""
    wrapped = isinstance(host, DataParallel | DistributedDataParallel)
    scripted = kind.__module__.startswith("torch.jit")
    # By name, since importing the classes is slow.
    sharded = kind.__name__ == "FullyShardedDataParallel" or any(
        type(p.data).__name__ == "DTensor" for p in parameters
    )
    on_meta = any(p.is_meta for p in parameters if not is_lazy(p))
    devices = sorted({str(p.device) for p in parameters if p.is_floating_point()})
    for wrong, line in (
        (wrapped, f"is wrapped in {kind.__name__}; pass model.module"),
        (
            bool(compiled),
            f"is compiled{inside}; pass the module before torch.compile, and compile "
            "the result of export()",
        ),
        (scripted, "is a TorchScript module; pass the nn.Module itself"),
        (sharded, "is sharded (FSDP); use DistributedDataParallel"),
        (not parameters, "has no parameters; there is nothing to grow"),
        (on_meta, "is on the meta device and has no weights; load them first"),
        (any(map(is_lazy, parameters)), "has lazy parameters; call it once first"),
        (len(devices) > 1, f"is on several devices ({', '.join(devices)}); use one"),
    ):
        if wrong:
            raise InvalidInputError(f"the host {line}.")


def check_not_shared(host: nn.Module, name: str, module: nn.Module) -> None:
    """Refuse a module that has two names in the host, or tied weights."""
    aliases = [
        other
        for other, found in host.named_modules(remove_duplicate=False)
        if found is module
    ]
    if len(aliases) > 1:
        raise InvalidInputError(
            f"module {name!r} is shared with {aliases[aliases[0] == name]!r}; a slot "
            "needs a module that is used once."
        )
    mine = {id(parameter): key for key, parameter in module.named_parameters()}
    for other, parameter in host.named_parameters(remove_duplicate=False):
        if id(parameter) in mine and not f"{other}.".startswith(f"{name}."):
            raise InvalidInputError(
                f"{name}.{mine[id(parameter)]} is tied to {other}; a slot needs "
                "untied weights."
            )


def insertion_point(site: Site, trace: Trace) -> InsertionPoint:
    """The insertion point at a site; refuses a site that seeds cannot use."""
    for end in (site.inlet, site.outlet):
        calls = trace.records[end].calls
        if calls != 1:
            often = "never called" if calls == 0 else f"called {calls} times"
            raise InvalidInputError(
                f"module {end!r} is {often} in one forward pass; a slot needs a module "
                "that is called once."
            )
    modules = trace.modules
    first, second = modules[site.inlet], modules[site.outlet]
    read, written = trace.records[site.inlet], trace.records[site.outlet]
    outlet = _require_tensor(written.outputs, f"module {site.outlet!r} returns")
    outlet_layout = _layout(outlet, second, written.last_leaf, site.outlet)
    inlet, inlet_layout = outlet, outlet_layout
    if not site.residual:
        inlet = _require_tensor(read.inputs, f"module {site.inlet!r} reads")
        if site.outlet not in read.version_after:
            raise InvalidInputError(
                f"{site.outlet!r} is called before {site.inlet!r}; write "
                f"'{site.outlet}{ARROW}{site.inlet}'."
            )
        if read.version_after[site.outlet] != read.given_version:
            raise InvalidInputError(
                f"the input of {site.inlet!r} is changed in place before "
                f"{site.outlet!r} returns; use the out-of-place operation."
            )
        if inlet.shape[0] != outlet.shape[0]:
            raise InvalidInputError(
                f"slot {site.name!r} reads {inlet.shape[0]} rows and writes "
                f"{outlet.shape[0]}; inlet and outlet must share the batch."
            )
        inlet_layout = _layout(inlet, first, first, site.inlet)
    try:
        interlayer, facts = _span(site, trace, inlet_layout)
        steps = trace.paths[first].steps
    except NoSpanError as error:
        interlayer, facts, steps = (), {"why_no_span": str(error)}, []
    return InsertionPoint(
        site=site,
        geometry=Geometry(
            inlet_layout=inlet_layout,
            outlet_layout=outlet_layout,
            inlet_shape=tuple(inlet.shape[1:]),
            outlet_shape=tuple(outlet.shape[1:]),
            **layer_facts(site, modules, _gate(interlayer)),
            **facts,
        ),
        inlet=first,
        outlet=second,
        interlayer=interlayer,
        recipe=describe_interlayer((step.module for step in steps), trace.names),
        depth=min(1.0, written.order / max(1, trace.leaves)),
        in_mlp=_is_mlp(trace),
        unit_macs=unit_macs(steps, units_of(first)) if steps else 0,
    )


def _is_mlp(trace: Trace) -> bool:
    """Whether all modules with matrices are linear layers and work on vectors."""
    for name, module in trace.modules.items():
        if all(p.dim() < 2 for p in module.parameters(recurse=False)):
            continue
        answer = trace.records[name].outputs if name in trace.records else None
        works_on_vectors = not isinstance(answer, Tensor) or answer.dim() == 2
        if not (isinstance(module, nn.Linear) and works_on_vectors):
            return False
    return True


def _gate(interlayer: Iterable[nn.Module]) -> str:
    return next((m.layer for m in interlayer if isinstance(m, Join) and m.layer), "")


def _span(
    site: Site, trace: Trace, layout: Layout
) -> tuple[tuple[nn.Module, ...], dict[str, Any]]:
    """The steps between two layers, and their part of the geometry."""
    if site.residual or site.inlet == site.outlet:
        raise NoSpanError("the slot does not span two layers")
    first, second = trace.modules[site.inlet], trace.modules[site.outlet]
    for module in (first, second):
        if why := why_no_layer(module):
            raise NoSpanError(f"{trace.names[module]!r} {why}")
    path, units = trace.paths.get(first), units_of(first)
    if path is None:
        raise NoSpanError(f"{site.inlet!r} does not return one tensor")
    interlayer = path_modules(path, units, layout)
    if path.reader is None:
        raise NoSpanError("no channel-wise path leads to the second layer")
    if path.reader is not second:
        reader = trace.names[path.reader]
        raise NoSpanError(f"{reader!r} reads the first layer's output")
    gate = _gate(interlayer)
    if gate and trace.records[gate].calls != 1:
        raise NoSpanError(f"the gate {gate!r} is called more than once")
    if differs := path.differs or (path.joined.differs if path.joined else ""):
        raise InvalidInputError(
            f"slot {site.name!r} works in eval mode only: in training mode {differs}. "
            "Use the same computation in both modes."
        )
    shape, unit_inputs = tuple(trace.records[site.outlet].inputs.shape[1:]), 1
    if kernel_of(second) is None and layout.channels_first:
        unit_inputs = shape[-1] // units
    elif width(shape, layout) != units:
        raise NoSpanError("the channels of the first layer do not reach the second")
    return interlayer, {
        "spans": True,
        "hidden_shape": shape,
        "unit_inputs": unit_inputs,
    }


def layer_facts(
    site: Site, modules: Mapping[str, nn.Module], gate: str
) -> dict[str, Any]:
    """The fields of a site's geometry that follow from its layers."""
    first, second = modules[site.inlet], modules[site.outlet]
    beside = site.inlet == site.outlet and not site.residual
    return {
        "residual": site.residual,
        "inlet_kernel": None if site.residual else kernel_of(first),
        "outlet_kernel": kernel_of(second),
        "inlet_bias": _has_bias(first),
        "gate": Gate(kernel_of(modules[gate]), _has_bias(modules[gate]))
        if gate
        else None,
        "beside": beside and is_layer(second),
    }


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def _refuse_overlap(places: Iterable[InsertionPoint]) -> None:
    """Refuse two slots that widen the same layer of a gated pair."""
    taken: dict[str, str] = {}
    for place in places:
        name = place.site.name
        for layer in place.widened if place.geometry.spans else ():
            if layer in taken:
                raise InvalidInputError(
                    f"slots {taken[layer]!r} and {name!r} both widen {layer!r}; use "
                    "one of them."
                )
            taken[layer] = name


def _require_tensor(value: object, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise InvalidInputError(
            f"{what} {type(value).__name__}; name a submodule that works on one tensor."
        )
    if not value.is_floating_point():
        raise InvalidInputError(
            f"{what} {value.dtype}; a slot needs floating-point tensors."
        )
    return value


def _layout(
    tensor: Tensor, module: nn.Module, leaf: nn.Module | None, name: str
) -> Layout:
    """Layout of a tensor at a module, from the type of the last layer before it."""
    kind = None if leaf is None else kind_of(leaf)
    matrix = kind is not None and not kind.convolves
    last = matrix or isinstance(leaf, CHANNELS_LAST)
    if tensor.dim() >= 4 and leaf is module and last:
        return Layout.GRID
    layouts = {2: Layout.VECTOR, 3: Layout.SEQUENCE, 4: Layout.IMAGE}
    layout = layouts.get(tensor.dim())
    if layout is None or (tensor.dim() == 4 and last):
        # Channels may have been moved to the front after a channels-last layer.
        raise InvalidInputError(
            f"the tensor at {name!r} is {[*tensor.shape]}; supported are [B, D], "
            "[B, T, D], [B, C, L], [B, C, H, W], and [B, H, W, D] at a linear layer."
        )
    if layout is Layout.SEQUENCE and isinstance(leaf, SIGNAL_LAYERS):
        return Layout.SIGNAL
    return layout


def without_gradient(
    host: nn.Module, places: Iterable[InsertionPoint], example: Example
) -> list[str]:
    """Names of outlets without a gradient in training mode."""
    offsets: dict[str, Tensor] = {}
    reached: dict[str, bool] = {}

    def add_offset(name: str) -> Any:  # noqa: ANN401
        def hook(module: nn.Module, args: Any, answer: Tensor) -> Tensor:  # noqa: ANN401
            offsets[name] = torch.zeros_like(answer, requires_grad=True)
            return answer + offsets[name]

        return hook

    outlets = {place.site.outlet: place.outlet for place in places}
    with ExitStack() as stack:
        for name, outlet in outlets.items():
            handle = outlet.register_forward_hook(add_offset(name))
            stack.callback(handle.remove)
        stack.enter_context(isolated(host, training=True))
        for _ in range(MAX_TRAINING_CALLS):
            offsets.clear()
            try:
                with torch.enable_grad():
                    answers = tensors_of(run_example(host, example))
                    total = torch.stack([a.float().sum() for a in answers]).sum()
                    found: Iterable[Tensor | None] = ()
                    if offsets:
                        given = [*offsets.values()]
                        found = torch.autograd.grad(total, given, allow_unused=True)
            except RuntimeError as error:
                raise InvalidInputError(
                    f"the host's backward pass fails: {described(error)}"
                ) from error
            for name, gradient in zip(offsets, found, strict=True):
                reached[name] = gradient is not None
            if reached.keys() == outlets.keys():
                break
    return [name for name in outlets if not reached.get(name, False)]


# Finding slots.


class SlotSuggestions(tuple[str, ...]):
    """Names of slots from input to output, and skipped layers; `print` shows both."""

    skipped: Mapping[str, str]
    """Layers that cannot be widened, and why."""

    def __new__(
        cls, found: Iterable[str], skipped: Mapping[str, str]
    ) -> "SlotSuggestions":
        """A tuple of the names, with `skipped` as an attribute."""
        made = super().__new__(cls, found)
        made.skipped = dict(skipped)
        return made

    def __str__(self) -> str:
        """One line per slot and per skipped layer."""
        left = [f"  {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([*self, *(["skipped:", *left] if left else [])])


def suggest_slots(
    model: nn.Module,
    example: Example,
    *,
    reject: Reject = lambda place: "",
    tie_widths: bool = True,
) -> SlotSuggestions:
    """Names of slots that can grow, from input to output, for `Grower(slots=...)`.

    These are pairs of layers with only channel-wise steps between them. A host without
    such pairs gets slots parallel to single layers. If fields of the model's config
    size some of them, as in Hugging Face models, the others are skipped.

    Args:
        model: The host.
        example: Input of the host: a tensor, a tuple or a dictionary.
        reject: Returns why an insertion point is not wanted; "" if it is.
        tie_widths: Whether to skip layers that no field of the model's config sizes.
    """
    return _suggested(
        model, example, reject, fields_of_axes(model) if tie_widths else {}
    )


def _suggested(
    model: nn.Module, example: Example, reject: Reject, fields: Mapping[Axis, str]
) -> SlotSuggestions:
    check_host(model)
    with isolated(model, training=False), torch.no_grad():
        trace = Trace(model, (), example)
    compare_sizes(model, trace, example)
    compare_training(model, trace, example)
    names = trace.names
    layers = {names[module]: module for module in names if is_layer(module)}
    called = sorted(layers, key=lambda name: trace.records[name].order)
    skipped = {
        name: why_no_layer(module)
        for module, name in names.items()
        if name not in layers and _has_matrix(module)
    }
    found: list[InsertionPoint] = []
    for name in called:
        try:
            found.append(_span_from(model, name, trace, found))
        except InvalidInputError as error:
            skipped[name] = str(error).removesuffix(".")
        except Exception as error:  # user code: skip the layer, not the whole host
            skipped[name] = f"analysing it failed, {described(error)}"
    for place in found:
        for step in filter(names.__contains__, every_step(place.interlayer)):
            if names[step] in skipped:
                skipped[names[step]] = f"it is widened together with {place.site.name}"
    sized = {prefix for prefix in configured_parts(model) if fields}
    if any(place.units_axis in fields for place in found):
        for place in [p for p in found if p.units_axis not in fields]:
            if not any(place.site.inlet.startswith(prefix) for prefix in sized):
                continue
            found.remove(place)
            skipped[place.site.inlet] = (
                "no field of the model's config sizes it; name it, or pass "
                "tie_widths=False"
            )
    found = _wanted(model, found, example, reject, skipped)
    if not found:
        parallel = [*_parallel_points(model, called, trace)]
        found = _wanted(model, parallel, example, reject, {})
    if not found:
        first = next((f" ({name}: {why})" for name, why in skipped.items()), "")
        raise InvalidInputError(
            f"no linear or convolution layer of the host can grow{first}; name slots "
            "by hand."
        )
    return SlotSuggestions((place.site.name for place in found), skipped)


def choose_slots(
    model: nn.Module,
    slots: Sequence[str] | str,
    example: Example,
    reject: Reject = lambda place: "",
    fields: Mapping[Axis, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Names of slots from names and patterns; "auto" is every suggested slot.

    A pattern such as "*.mlp" matches the name of a slot or of a module around it.
    """
    if isinstance(slots, str) and slots == "auto":
        return _suggested(model, example, reject, fields)
    listed = isinstance(slots, Sequence) and not isinstance(slots, str)
    if not listed or not all(isinstance(slot, str) for slot in slots):
        raise InvalidInputError(
            f"slots must be a list of names or 'auto', got {slots!r}."
        )
    if not slots:
        raise InvalidInputError(
            "slots is empty; esper.suggest_slots(model, example) finds slots."
        )
    if not any(WILDCARDS & {*slot} for slot in slots):
        return tuple(slots)
    suggested = _suggested(model, example, reject, {})
    chosen: list[str] = []
    for slot in slots:
        pattern = bool(WILDCARDS & {*slot})
        matching = [s for s in suggested if _matches(s, slot)] if pattern else [slot]
        if not matching:
            raise InvalidInputError(
                f"no slot matches {slot!r}; print(esper.suggest_slots(model, example)) "
                "lists the slots."
            )
        chosen += matching
    return tuple(dict.fromkeys(chosen))


def _matches(slot: str, pattern: str) -> bool:
    """Whether a pattern matches a slot, or a module that contains both its ends."""
    ends = [end.split(".") for end in slot.split(ARROW)]
    shared = 0
    while all(len(end) > shared + 1 and end[shared] == ends[0][shared] for end in ends):
        shared += 1
    holders = [".".join(ends[0][:depth]) for depth in range(1, shared + 1)]
    return any(fnmatchcase(name, pattern) for name in (slot, *holders))


def _span_from(
    model: nn.Module, name: str, trace: Trace, before: Sequence[InsertionPoint]
) -> InsertionPoint:
    """The span that starts with a layer; refuses a layer without a span."""
    modules, calls = trace.modules, trace.records[name].calls
    path = trace.paths.get(modules[name])
    if path is None or calls != 1:
        raise InvalidInputError(f"it is called {calls} times in one forward pass")
    if path.problem:
        raise InvalidInputError(path.problem)
    if path.reader is None or not name:
        raise InvalidInputError("no other layer reads its output")
    outlet = trace.names[path.reader]
    if why := why_no_layer(path.reader):
        raise InvalidInputError(f"{outlet!r} {why}")
    place = insertion_point(Site(name, outlet, residual=False), trace)
    if not place.geometry.spans:
        raise InvalidInputError(place.geometry.why_no_span)
    for end in filter(None, (name, outlet, place.gate)):
        check_not_shared(model, end, modules[end])
    taken = next((p.site.name for p in before if name in p.widened), None)
    if taken is not None:
        raise InvalidInputError(f"it is widened together with {taken}")
    return place


def _parallel_points(
    model: nn.Module, called: Iterable[str], trace: Trace
) -> Iterable[InsertionPoint]:
    """Insertion points parallel to single layers."""
    for name in filter(None, called):
        with suppress(InvalidInputError):
            check_not_shared(model, name, trace.modules[name])
            yield insertion_point(Site(name, name, residual=False), trace)


def _wanted(
    model: nn.Module,
    places: Sequence[InsertionPoint],
    example: Example,
    reject: Reject,
    skipped: dict[str, str],
) -> list[InsertionPoint]:
    """Insertion points that are wanted and get gradients; others go to `skipped`."""
    cut = {*without_gradient(model, places, example)} if places else set[str]()
    whys = {
        place.site.inlet: f"no gradient reaches {place.site.outlet!r}"
        if place.site.outlet in cut
        else reject(place)
        for place in places
    }
    skipped.update({name: why for name, why in whys.items() if why})
    return [place for place in places if not whys[place.site.inlet]]


def _has_matrix(module: nn.Module) -> bool:
    """Whether a module has its own matrix that maps channels to channels."""
    own = module.parameters(recurse=False)
    return not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in own)
