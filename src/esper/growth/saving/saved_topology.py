"""Format and validation of the saved state of a grown host.

    esper_seeds._extra_state    the topology as JSON in a byte tensor
    esper_seeds.slot_3.*        weights of a seed

A state may come from a stranger. All of it is checked before anything is built, so that
it controls neither which code runs nor how much memory is used.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final

import torch
from pydantic import FailFast, Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from esper.contracts.errors import InvalidInputError
from esper.contracts.stages import Stage
from esper.files import require_readable
from esper.growth import lifecycle
from esper.growth.analysis.interlayer import SavedSteps
from esper.growth.blueprints.geometry import Geometry
from esper.growth.blueprints.registry import find
from esper.growth.lifecycle import SeedStates

NAME: Final = "esper_seeds"
"""Name of the submodule of a host that holds its seeds."""
HINT: Final = "load it with esper.rebuild(host, state_dict)"
"""A key of a grown state, so that torch's error for unknown keys tells what to do."""
TOPOLOGY: Final = f"{NAME}._extra_state"
MAX_BYTES: Final = 2**20
MAX_COMMAS: Final = 30_000
"""Limits of the text of a saved topology."""
MAX_PLACES: Final = 1024
MAX_SLOTS: Final = 4096
Text = Annotated[str, Field(max_length=1024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlace:
    """A place of a host."""

    name: Text
    geometry: Geometry
    interlayer: SavedSteps
    depth: Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSeed:
    """A seed without its weights."""

    slot: Text
    blueprint: Text
    size: Annotated[int, Field(ge=0, lt=2**31)]
    gated: bool
    """Whether a user's module is multiplied by a gate."""
    state: dict[str, Any]
    """Its `SeedStates`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTopology:
    """Seeds of a host without their weights, oldest first."""

    format: int
    places: Annotated[tuple[SavedPlace, ...], Field(max_length=MAX_PLACES), FailFast()]
    slots: Annotated[tuple[Text, ...], Field(max_length=MAX_SLOTS), FailFast()]
    seeds: Annotated[tuple[SavedSeed, ...], Field(max_length=MAX_SLOTS), FailFast()]
    generator: Annotated[str, Field(max_length=2**16)]
    """State of the random generator in hexadecimal digits."""

    def to_tensor(self) -> Tensor:
        """JSON bytes in a tensor, since some formats hold only tensors."""
        text = bytearray(_ADAPTER.dump_json(self, exclude_defaults=True))
        return torch.frombuffer(text, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class _Header:
    format: int | None = None


_HEADER: Final = TypeAdapter(_Header)
_ADAPTER: Final = TypeAdapter(SavedTopology)


def read_topology(state: Mapping[str, Any], prefix: str = "") -> SavedTopology | None:
    """Read and check the topology in a host's state; None if there are no seeds."""
    raw = state.get(f"{prefix}{TOPOLOGY}")
    if raw is None:
        lost = [name for name in state if name.startswith(f"{prefix}{NAME}.")]
        if lost:
            raise InvalidInputError(
                f"the state has {lost[0]!r} but no topology. The file is damaged."
            )
        return None
    check_tensor("the topology", raw)
    if raw.dtype != torch.uint8 or raw.dim() != 1 or raw.numel() > MAX_BYTES:
        raise InvalidInputError(
            f"the topology of the saved network must be at most {MAX_BYTES:,} bytes, "
            f"it is {raw.dtype} {[*raw.shape]}."
        )
    text = raw.cpu().numpy().tobytes()
    if text.count(b",") > MAX_COMMAS:  # each may take hundreds of bytes when read
        raise InvalidInputError(
            "the topology of the saved network has too many values."
        )
    try:
        found = _HEADER.validate_json(text, strict=True).format
        require_readable("the saved network", found, "Train it again.")
        topology = _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        raise InvalidInputError(
            f"the topology of the saved network is damaged: {_first(error)}."
        ) from None
    _check_topology(topology)
    return topology


def _first(error: ValidationError) -> str:
    """First error in one line, without the input, which may be large."""
    first, *_ = error.errors(
        include_url=False, include_context=False, include_input=False
    )
    where = ".".join(str(key)[:40] for key in first["loc"][:12])
    return " ".join(f"{where} {first['msg']}".split())


def _check_topology(topology: SavedTopology) -> None:
    """Raise if values are of the right types but impossible."""
    names = {field.name for field in fields(SeedStates)} - {"blueprint"}
    places = [place.name for place in topology.places]
    rounds = len(topology.slots) // max(1, len(places))
    slots = tuple(f"{place}#{n}" for n in range(rounds) for place in places)
    if topology.slots != slots or len({*slots}) < len(slots):
        raise InvalidInputError(
            "the slots of the saved network are not those of its places."
        )
    free = {*topology.slots}
    for seed in topology.seeds:
        slot, state = seed.slot, seed.state
        wrong = ""
        if slot not in free:
            wrong = "is named twice or unknown"
        elif set(state) != names or not all(
            type(value) is float and 0 <= value < 2**31 for value in state.values()
        ):
            wrong = "has an invalid state"
        elif any(state[n] % 1 for n in names if not n.startswith("alpha")):
            wrong = "has a state that is not a whole number"
        elif state["stage"] not in {*Stage} - {Stage.DORMANT}:
            wrong = f"is in stage {state['stage']:.0f}, which does not exist"
        elif not all(state[n] <= 1 for n in names if n.startswith("alpha")):
            wrong = "has an alpha outside [0, 1]"
        elif state["style"] > 1 or state["curve"] >= len(lifecycle.CURVES):
            wrong = "has a style or curve that does not exist"
        if wrong:
            raise InvalidInputError(
                f"the seed in {slot!r} of the saved network {wrong}."
            )
        free.discard(slot)
        find(seed.blueprint)


def check_tensors(
    host: nn.Module, grown: nn.ModuleDict, state: Mapping[str, Any], prefix: str
) -> None:
    """Raise unless the state has exactly the tensors of a host with these seeds."""
    own = host_tensors(host)
    seeds = {
        f"{NAME}.{slot}.{name}": tensor
        for slot, seed in grown.items()
        for name, tensor in seed.state_dict().items()
    }
    found = {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix)
    }
    held = {name for name in found if name.startswith(f"{NAME}.")}
    for name in sorted({*seeds} ^ (held - {TOPOLOGY, f"{NAME}.{HINT}"})):
        lack = "lack" if name in seeds else "have an unknown"
        raise InvalidInputError(f"the saved seeds {lack} {name!r}.")
    tied = [alike for alike in tied_names(host) if not found.keys().isdisjoint(alike)]
    for name in sorted(({*own} ^ (found.keys() - held)).difference(*tied)):
        raise InvalidInputError(
            f"the saved host is another one: {name} was "
            f"{'absent and is here' if name in own else 'there and is absent'}."
        )
    for name, mine in {**own, **seeds}.items():
        value = found.get(name, mine)
        if not isinstance(mine, Tensor):
            continue
        check_tensor(name, value, own.get(name))
        if value.shape != mine.shape:
            raise InvalidInputError(
                f"the saved host is another one: {name} was {[*value.shape]} and is "
                f"{[*mine.shape]}."
            )
        if value.is_floating_point() and name in seeds and not value.isfinite().all():
            raise InvalidInputError(f"{name} of the saved network is not finite.")
    tensors = [found[name] for name in seeds if isinstance(found[name], Tensor)]
    if _bytes_held(tensors) < sum(value.nbytes for value in tensors):
        raise InvalidInputError(
            "the saved seeds share their numbers. Copy the tensors before saving."
        )


def check_tensor(name: str, value: object, like: Tensor | None = None) -> None:
    """Raise if a value is no tensor, or has less memory than its shape needs.

    A tensor may be expanded if `like`, the host's own, already has that shape.
    """
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise InvalidInputError(f"{name} of the saved network is no tensor.")
    known = like is not None and like.shape == value.shape
    if value.is_meta or (not known and _bytes_held([value]) < value.nbytes):
        raise InvalidInputError(
            f"{name} of the saved network has fewer numbers than its shape."
        )


def _bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory of some tensors; shared memory counts once."""
    stores = [tensor.untyped_storage() for tensor in tensors]
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


def tied_names(host: nn.Module) -> list[list[str]]:
    """Names of each tied parameter; some formats save only one of them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in host.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [alike for alike in names.values() if len(alike) > 1]


def host_tensors(host: nn.Module) -> dict[str, Tensor]:
    """State of a host without its seeds."""
    state = host.state_dict()
    return {name: t for name, t in state.items() if not name.startswith(f"{NAME}.")}
