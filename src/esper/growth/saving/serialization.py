"""Save and load grown networks, for inference.

`rebuild` adds the seeds of a `state_dict` to a plain host. `save` and `load` use a
safetensors file. States and files may come from strangers: all is checked first.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from esper.contracts.errors import InvalidInputError
from esper.files import MAX_BYTES, Disk, pack, publish, read_safetensors
from esper.growth.analysis.config_fields import follow_sizes, shapes_of
from esper.growth.analysis.host_layers import fit_sizes, is_layer
from esper.growth.analysis.interlayer import Join, restore_interlayer, unsaved_function
from esper.growth.analysis.slots import InsertionPoint, layer_facts, parse_slot
from esper.growth.blueprints.registry import find
from esper.growth.saving.saved_topology import (
    NAME,
    TOPOLOGY,
    SavedPlace,
    SavedTopology,
    check_tensor,
    check_tensors,
    host_tensors,
    read_topology,
    tied_names,
)
from esper.growth.seed_modules import (
    SeedModules,
    all_or_nothing,
    grown_part,
    host_parameters,
    restore_tensors,
    uninterrupted,
)

MAX_PARTS: Final = 16
"""Submodules of one host that have seeds of their own."""


def rebuild(host: nn.Module, state_dict: Mapping[str, Any]) -> nn.Module:
    """Add the seeds and weights of a `state_dict` to a plain host, and return it.

    Args:
        host: The host without seeds; it is changed in place.
        state_dict: State of a grown host, of an export with all seeds merged (layers
            are resized), or of a plain host.
    """
    if not isinstance(host, nn.Module) or not isinstance(state_dict, Mapping):
        raise InvalidInputError("rebuild takes the plain host and a state_dict.")
    if not all(isinstance(name, str) and name.isprintable() for name in state_dict):
        raise InvalidInputError("the names in a state_dict must be printable strings.")
    state_dict = _with_tied(host, state_dict)
    _refuse_unmerged(state_dict)
    own = host_tensors(host)
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            check_tensor(name, value, own.get(name))
    prefixes = [n.removesuffix(TOPOLOGY) for n in state_dict if n.endswith(TOPOLOGY)]
    if len(prefixes) > MAX_PARTS:
        raise InvalidInputError(
            f"the state has {len(prefixes)} topologies. The file is damaged."
        )
    grown = [_empty(host, state_dict, prefix) for prefix in prefixes]
    with uninterrupted():
        undo = [restore_tensors(host)]
        with all_or_nothing(undo):
            undo.append(fit_sizes(host, state_dict))
            for part in grown:
                undo.append(part.detach)
                part.attach()
            if not grown:
                check_tensors(host, nn.ModuleDict(), state_dict, "")
            host.load_state_dict(state_dict)  # builds the seeds too
    follow_sizes(host, shapes_of(host_parameters(host)))
    return host


def _refuse_unmerged(state: Mapping[str, Any]) -> None:
    """Raise if there are seeds without a topology, which cannot be built."""
    grown = any(name.endswith(TOPOLOGY) for name in state)
    if not grown and any(name.startswith(f"{NAME}.") for name in state):
        raise InvalidInputError(
            "this is the state of an export in which not all seeds were merged. Save "
            "the module with torch.save(module, path), or the host with esper.save."
        )


def _with_tied(host: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with all names of tied weights."""
    tied = {
        name: state[saved]
        for alike in tied_names(host)
        for saved in [n for n in alike if n in state][:1]
        for name in alike
        if name not in state
    }
    return {**state, **tied}


def _empty(host: nn.Module, state: Mapping[str, Any], prefix: str) -> SeedModules:
    """Empty slots for the saved places of a host, or of a submodule (`prefix`)."""
    parts = dict(host.named_modules())
    part = parts.get(prefix.removesuffix("."))
    if part is None:
        raise InvalidInputError(f"the host has no module {prefix[:-1]!r}.")
    if grown_part(part) is not None:
        raise InvalidInputError("the host has seeds already. Pass a plain one.")
    topology = read_topology(state, prefix)
    assert topology is not None
    used = {seed.slot.rpartition("#")[0] for seed in topology.seeds}
    modules = dict(part.named_modules())
    places = tuple(
        _saved_place(place, modules, used=place.name in used)
        for place in topology.places
    )
    kinds = [*dict.fromkeys(find(seed.blueprint) for seed in topology.seeds)]
    grown = SeedModules(part, places, topology.slots, kinds)
    grown.traced = False
    return grown


def save(model: nn.Module, path: str | Path) -> None:
    """Write a network, grown or not, to a safetensors file, atomically."""
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"save takes a module, got {type(model).__name__}.")
    path = Path(path)
    state = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    _refuse_unmerged(state)
    for part in model.modules():
        if isinstance(part, SeedModules) and len(part):
            _refuse_unsaved(part.topology())
    publish(Disk(), path, pack(state, finite=False))


def _refuse_unsaved(topology: SavedTopology) -> None:
    """Raise if a seed is at a place where the host calls an unlisted function."""
    steps = {place.name: place.interlayer for place in topology.places}
    for seed in topology.seeds:
        if function := unsaved_function(steps[seed.slot.rpartition("#")[0]]):
            raise InvalidInputError(
                f"slot {seed.slot!r} has a seed where the host calls {function!r}, "
                "which no file may call. Put the call into an nn.Module, or save "
                "the result of export() with torch.save."
            )


def load(path: str | Path, host: nn.Module) -> nn.Module:
    """Load a file written by `save` into a plain host, and return the host."""
    # A grown network may be many times as large as its host.
    own = sum(tensor.nbytes for tensor in (*host.parameters(), *host.buffers()))
    limit = MAX_BYTES + 64 * own
    state, _ = read_safetensors(Path(path), sealed=False, finite=False, limit=limit)
    return rebuild(host, state)


def _saved_place(
    saved: SavedPlace, modules: Mapping[str, nn.Module], *, used: bool
) -> InsertionPoint:
    """Place as described in a file; raises if the host does not have it."""
    site = parse_slot(saved.name)
    try:
        if site.name != saved.name or not {site.inlet, site.outlet} <= modules.keys():
            raise InvalidInputError("names modules that the host does not have")
        # Modules between the layers of a place without seeds do not affect the output.
        unsaved = not used and unsaved_function(saved.interlayer)
        interlayer = () if unsaved else restore_interlayer(saved.interlayer, modules)
        joins = [m.layer for m in interlayer if isinstance(m, Join) and m.layer]
        known = {} if unsaved else layer_facts(site, modules, "".join(joins[:1]))
        layers = all(is_layer(modules[end]) for end in (site.inlet, site.outlet))
        at = saved.geometry
        if replace(at, **known) != at or len(joins) > 1 or (at.spans and not layers):
            raise InvalidInputError("has other layers")
    except InvalidInputError as error:
        raise InvalidInputError(
            f"the host does not fit the saved network: {saved.name!r} {error}."
        ) from error
    return InsertionPoint(
        site=site,
        geometry=saved.geometry,
        inlet=modules[site.inlet],
        outlet=modules[site.outlet],
        interlayer=interlayer,
        recipe=saved.interlayer,
        depth=saved.depth,
    )
