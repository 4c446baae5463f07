"""How what has grown in a host is saved: names, and what a state must hold.

    esper_seeds._extra_state    the topology as JSON in a byte tensor
    esper_seeds.slot_3.*        weights of a seed

All of a state is checked before anything is built from it.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from typing import Any, Final

from torch import Tensor, nn

from esper.contracts.errors import BadInput
from esper.contracts.stages import Stage
from esper.growth import lifecycle
from esper.growth.blueprints.registry import find, first_line
from esper.growth.lifecycle import SeedStates

NAME: Final = "esper_seeds"
"""The submodule of a host that holds what has grown."""
HINT: Final = "load it with esper.rebuild(host, state_dict)"
"""A key of a grown state, so that torch's refusal to load it says what to do."""
TOPOLOGY: Final = f"{NAME}._extra_state"
FORMAT: Final = 1
"""Version of a saved topology."""


def read_topology(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any] | None:
    """The topology in a host's state; None if nothing has grown in it."""
    raw = state.get(f"{prefix}{TOPOLOGY}")
    if raw is None:
        lost = [name for name in state if name.startswith(f"{prefix}{NAME}.")]
        if lost:
            raise BadInput(f"the state has {lost[0]!r} but no topology; it is damaged.")
        return None
    try:
        topology: dict[str, Any] = json.loads(bytes(raw.cpu().tolist()))
        _check_topology(topology)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f"the topology of the saved network is damaged: {first_line(error)}"
        ) from error
    return topology


def _check_topology(topology: dict[str, Any]) -> None:
    if topology["format"] != FORMAT:
        raise BadInput("the network was saved by another version of Esper.")
    seen = set[str]()
    names = {field.name for field in fields(SeedStates)} - {"blueprint"}
    for seed in topology["seeds"]:
        slot, state = seed["slot"], seed["state"]
        numbers = [value for value in state.values() if not isfinite(value)]
        whole = all(
            isinstance(value, int) and value >= 0
            for name, value in state.items()
            if not name.startswith("alpha")
        )
        wrong = ""
        if slot in seen or slot not in topology["slots"]:
            wrong = "is named twice or unknown"
        elif set(state) != names or numbers or not whole:
            wrong = "has a state that is none"
        elif state["stage"] not in {*Stage} - {Stage.DORMANT}:
            wrong = f"is in stage {state['stage']}, which does not exist"
        elif not all(0 <= state[n] <= 1 for n in names if n.startswith("alpha")):
            wrong = "has an alpha outside [0, 1]"
        elif state["style"] > 1 or state["curve"] >= len(lifecycle.CURVES):
            wrong = "has a style or curve that does not exist"
        elif not isinstance(seed["size"], int) or seed["size"] < 0:
            wrong = f"has size {seed['size']}"
        if wrong:
            raise BadInput(f"the seed in {slot!r} of the saved network {wrong}.")
        seen.add(slot)
        find(seed["blueprint"])


def check_tensors(
    host: nn.Module, grown: nn.ModuleDict, state: Mapping[str, Any], prefix: str
) -> None:
    """Refuse tensors that are not all that a host with these seeds has."""
    own = host_tensors(host)
    kept = {
        name.removeprefix(prefix)
        for name in state
        if name.startswith(prefix) and not name.startswith(f"{prefix}{NAME}.")
    }
    tied = {
        name
        for alike in tied_names(host)
        if not kept.isdisjoint(alike)
        for name in alike
    }
    for name in sorted(({*own} ^ kept) - tied):
        raise BadInput(
            f"the saved host is another one: {name} was "
            f"{'absent and is here' if name in own else 'there and is absent'}."
        )
    seeds = nn.ModuleDict.state_dict(grown) if len(grown) else {}
    extra = ("_extra_state", HINT)
    seeds = {f"{NAME}.{n}": t for n, t in seeds.items() if n not in extra}
    begun = f"{prefix}{NAME}."
    found = {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(begun) and name.removeprefix(begun) not in extra
    }
    odd = sorted({*seeds} ^ {*found})
    if odd:
        missing = odd[0] in seeds
        raise BadInput(
            f"the saved seeds {'lack' if missing else 'have an unknown'} {odd[0]!r}."
        )
    for name, mine in {**own, **seeds}.items():
        value = state.get(f"{prefix}{name}", mine)
        if not isinstance(mine, Tensor):
            continue
        if not isinstance(value, Tensor):
            raise BadInput(f"{name} of the saved network is no tensor.")
        if value.shape != mine.shape:
            raise BadInput(
                f"the saved host is another one: {name} was {[*value.shape]} and is "
                f"{[*mine.shape]}."
            )
        if value.is_floating_point() and name in seeds and not value.isfinite().all():
            raise BadInput(f"{name} of the saved network is not finite.")


def tied_names(host: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several; some formats save one of them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in host.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [alike for alike in names.values() if len(alike) > 1]


def host_tensors(host: nn.Module) -> dict[str, Tensor]:
    """A host's own state, without that of seeds."""
    state = host.state_dict()
    return {name: t for name, t in state.items() if not name.startswith(f"{NAME}.")}
