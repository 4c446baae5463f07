"""A grown network from a plain host and a saved state, in one line.

`rebuild` grows a plain host as a `state_dict` says, `save` and `load` do so with a
safetensors file: for inference, without optimiser or example.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from esper.contracts.errors import BadInput
from esper.growth.blueprints.registry import find, first_line
from esper.growth.grown import GEOMETRY, Grown, grown_part
from esper.growth.host_layers import fit_sizes
from esper.growth.middle import restore_middle
from esper.growth.saved_topology import NAME, TOPOLOGY, read_topology, tied_names
from esper.growth.slots import InsertionPoint, parse


def rebuild(host: nn.Module, state_dict: Mapping[str, Any]) -> nn.Module:
    """A plain host with the seeds and weights of a grown one's `state_dict()`.

    Args:
        host: As it was before anything grew; it is changed and returned.
        state_dict: Of a grown host, of an export in which all seeds were merged (layers
            get its sizes), or of a plain one.
    """
    if not isinstance(host, nn.Module) or not isinstance(state_dict, Mapping):
        raise BadInput("rebuild takes the plain host and a state_dict.")
    attached: list[Grown] = []
    state_dict = _with_tied(host, state_dict)
    _refuse_unmerged(state_dict)
    topologies = [n for n in state_dict if n.endswith(TOPOLOGY)]
    put_back = None
    try:
        for name in topologies:
            prefix = name.removesuffix(TOPOLOGY)
            attached.append(_attached(host, state_dict, prefix))
        if not topologies:
            put_back = fit_sizes(host, state_dict)
        host.load_state_dict(state_dict)
    except BaseException:
        for grown in attached:
            grown.detach()
        if put_back is not None:
            put_back()
        raise
    return host


def _refuse_unmerged(state: Mapping[str, Any]) -> None:
    """Refuse seeds without a topology: nothing says how they are built."""
    grown = any(name.endswith(TOPOLOGY) for name in state)
    if not grown and any(name.startswith(f"{NAME}.") for name in state):
        raise BadInput(
            "this is the state of an export in which not all seeds were merged; save "
            "that one whole with torch.save(module, path), or the host with esper.save."
        )


def _with_tied(host: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with all names of tied weights, of which some formats save one."""
    tied = {
        name: state[saved]
        for alike in tied_names(host)
        for saved in [n for n in alike if n in state][:1]
        for name in alike
        if name not in state
    }
    return {**state, **tied}


def _attached(host: nn.Module, state: Mapping[str, Any], prefix: str) -> Grown:
    """A host, or a part of it by its prefix, ready for the seeds that a state has."""
    try:
        part = host.get_submodule(prefix.removesuffix("."))
    except AttributeError as error:
        raise BadInput(f"the host has no module {prefix[:-1]!r}.") from error
    if grown_part(part) is not None:
        raise BadInput("the host has grown already; pass a plain one.")
    topology = read_topology(state, prefix)
    assert topology is not None
    places = tuple(_saved_place(n, at, part) for n, at in topology["places"].items())
    kinds = [*dict.fromkeys(find(seed["blueprint"]) for seed in topology["seeds"])]
    grown = Grown(part, places, topology["slots"], kinds)
    grown.validated(state, prefix)
    grown.attach()
    return grown


def save(model: nn.Module, path: str | Path) -> None:
    """Write a network, grown or not, to a safetensors file; whole or not at all."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"save takes a module, got {type(model).__name__}.")
    path = Path(path)
    state = {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    _refuse_unmerged(state)
    beside = path.with_name(f".{path.name}.part")
    try:
        save_file(state, beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())  # or a power cut leaves an empty file
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"cannot write {path.name!r}: {first_line(error)}") from error
    finally:
        beside.unlink(missing_ok=True)


def load(path: str | Path, host: nn.Module) -> nn.Module:
    """The network that `save` has written, grown on a plain host."""
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"{Path(path).name!r} cannot be read: {first_line(error)}"
        ) from error
    return rebuild(host, state)


def _saved_place(
    name: str, saved: Mapping[str, Any], host: nn.Module
) -> InsertionPoint:
    site = parse(name)
    try:
        return InsertionPoint(
            site=site,
            geometry=GEOMETRY.validate_python(saved["geometry"]),
            inlet=host.get_submodule(site.inlet),
            outlet=host.get_submodule(site.outlet),
            middle=restore_middle(saved["middle"], host),
            recipe=tuple(saved["middle"]),
            depth=float(saved["depth"]),
        )
    except (AttributeError, KeyError, ValueError) as error:
        raise BadInput(
            f"the host does not fit the saved network at {name!r}: {first_line(error)}"
        ) from error
