"""Find the slots of a host: all that can be widened, or those that match a pattern.

    slots = suggest_slots(model, example)
    print(slots)                 # found slots, and skipped layers with reasons
    Grower(model, optimizer, slots, example=example)

A call of the host on the example shows which layer reads the output of which.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import nn

from esper.contracts.errors import InvalidInputError
from esper.growth.analysis.host_layers import is_layer, why_no_layer
from esper.growth.analysis.slots import (
    ARROW,
    InsertionPoint,
    Site,
    Trace,
    check_host,
    check_not_shared,
    compare_training,
    insertion_point,
    trace_host,
    without_gradient,
)
from esper.growth.analysis.tracing import Example, isolated
from esper.growth.blueprints.registry import first_line

WILDCARDS: Final = frozenset("*?[")

Reject = Callable[[InsertionPoint], str]
"""Returns why an insertion point is not wanted; empty if it is."""


class SlotSuggestions(tuple[str, ...]):
    """Names of slots from input to output, and skipped layers; `print` shows both."""

    skipped: Mapping[str, str]
    """Layers that no slot starts with, and why."""

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
    model: nn.Module, example: Example, *, reject: Reject = lambda place: ""
) -> SlotSuggestions:
    """Names of slots that can grow, from input to output, for `Grower(slots=...)`.

    These are pairs of layers with only channel-wise steps between them. A host without
    such pairs gets slots parallel to single layers.

    Args:
        model: The host.
        example: Input of the host: a tensor, a tuple or a dictionary.
        reject: Returns why an insertion point is not wanted; "" if it is.
    """
    check_host(model)
    with isolated(model, training=False), torch.no_grad():
        trace = trace_host(model, (), example)
    compare_training(model, trace, example)
    names = trace.tracer.names
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
            skipped[name] = f"analysing it failed, {first_line(error)}"
    found = _wanted(model, found, example, reject, skipped)
    if not found:
        parallel = [*_parallel_points(model, called, trace)]
        found = _wanted(model, parallel, example, reject, {})
    if not found:
        raise InvalidInputError(
            "no linear or convolution layer of the host can grow; name slots by hand."
        )
    return SlotSuggestions((place.site.name for place in found), skipped)


def choose_slots(
    model: nn.Module,
    slots: Sequence[str] | str,
    example: Example,
    reject: Reject = lambda place: "",
) -> tuple[str, ...]:
    """Names of slots from names and patterns; "auto" is every suggested slot.

    A pattern such as "*.mlp" matches the name of a slot or of a module around it.
    """
    if isinstance(slots, str) and slots == "auto":
        return suggest_slots(model, example, reject=reject)
    listed = isinstance(slots, Sequence) and not isinstance(slots, str)
    if not listed or not all(isinstance(slot, str) for slot in slots):
        raise InvalidInputError(
            f"slots must be a list of names or 'auto', got {slots!r}."
        )
    if not any(WILDCARDS & {*slot} for slot in slots):
        return tuple(slots)
    suggested = suggest_slots(model, example, reject=reject)
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
    path = trace.tracer.paths.get(modules[name])
    if path is None or calls != 1:
        raise InvalidInputError(f"it is called {calls} times in one forward pass")
    if path.problem:
        raise InvalidInputError(path.problem)
    if path.reader is None or not name:
        raise InvalidInputError("no other layer reads its output")
    outlet = trace.tracer.names[path.reader]
    if why := why_no_layer(path.reader):
        raise InvalidInputError(f"{outlet!r} {why}")
    place = insertion_point(Site(name, outlet, residual=False), trace)
    if not place.geometry.spans:
        raise InvalidInputError(place.geometry.why_no_span)
    for end in filter(None, (name, outlet, place.gate)):
        check_not_shared(model, end, modules[end])
    taken = next((p.site.name for p in before if p.gate == name), None)
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
