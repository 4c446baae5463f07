"""Nested spaces: conversion to plain data and back, and access to their values.

Files come from strangers: `space_of` checks sizes and dtypes before it makes a space.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import quoted

Array = NDArray[Any]
Path = tuple[str | int, ...]
MAX_NUMBERS: Final = 1 << 20
"""Limit of the numbers of an observation and of the choices of an action."""
DTYPES: Final = frozenset(
    ("bool", *(f"{k}int{b}" for k in ("", "u") for b in (8, 16, 32, 64)))
) | {f"float{bits}" for bits in (16, 32, 64)}
"""Dtypes that a space in a file may have."""


def without_text(space: Space[Any], path: str = "") -> tuple[Space[Any], list[str]]:
    """A space without the texts of its Dicts, and the names of these texts."""
    if not isinstance(space, spaces.Dict):
        return space, []
    kept, dropped = [], []
    for name, inner in space.spaces.items():
        # MiniGrid's MissionSpace holds text and is not a `Text`.
        if inner.dtype is not None and np.dtype(inner.dtype).kind in "US":
            dropped.append(f"{path}{name}")
            continue
        part, more = without_text(inner, f"{path}{name}.")
        kept.append((name, part))
        dropped += more
    return (spaces.Dict(kept) if dropped else space), dropped


def space_data(space: Space[Any]) -> dict[str, Any]:
    """A space as plain data."""
    match space:
        case spaces.Dict():
            # Pairs keep the order of heads; files sort the names of mappings.
            pairs = [[name, space_data(part)] for name, part in space.spaces.items()]
            return {"kind": "Dict", "spaces": pairs}
        case spaces.Tuple():
            return {"kind": "Tuple", "spaces": [space_data(p) for p in space.spaces]}
        case spaces.Discrete():
            values = {"n": int(space.n), "start": int(space.start)}
            return {"kind": "Discrete", **values, "dtype": str(space.dtype)}
        case spaces.MultiDiscrete():
            lists = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"kind": "MultiDiscrete", **lists, "dtype": str(space.dtype)}
        case spaces.MultiBinary():
            return {"kind": "MultiBinary", "n": space.n}
        case spaces.Box():
            bounds = {"low": _constant(space.low), "high": _constant(space.high)}
            shape = {"shape": [*space.shape], "dtype": str(space.dtype)}
            return {"kind": "Box", **bounds, **shape}
    raise InvalidInputError(f"a space of {type(space).__name__} cannot be saved.")


def space_of(data: Mapping[str, Any]) -> Space[Any]:
    """The space of some plain data; raises if it would take too much memory."""
    if data["kind"] not in ("Dict", "Tuple"):
        _require_size(data)
    match data["kind"]:
        case "Dict":
            return spaces.Dict([(n, space_of(part)) for n, part in data["spaces"]])
        case "Tuple":
            return spaces.Tuple([space_of(part) for part in data["spaces"]])
        case "Discrete":
            made = spaces.Discrete(data["n"], start=data["start"])
            made.dtype = _dtype(data)
            return made
        case "MultiDiscrete":
            nvec, start = np.array(data["nvec"]), np.array(data["start"])
            return spaces.MultiDiscrete(nvec, dtype=_dtype(data).type, start=start)
        case "MultiBinary":
            return spaces.MultiBinary(data["n"])
        case "Box":
            shape, kind = tuple(data["shape"]), _dtype(data)
            bounds = [np.array(data[name]) for name in ("low", "high")]
            if kind.kind == "b":  # NumPy reads "False" as True
                bounds = [texts == "True" for texts in bounds]
            low, high = (np.broadcast_to(x, shape).astype(kind) for x in bounds)
            return spaces.Box(low, high, shape, dtype=kind.type)
    raise InvalidInputError(f"there is no space {quoted(data['kind'])}.")


def _require_size(data: Mapping[str, Any]) -> None:
    """Raise if the size of a space in a file is invalid or too large."""
    sizes = data["shape"] if "shape" in data else data.get("n", 0)
    sizes = sizes if isinstance(sizes, list) else [sizes]
    if any(type(size) is not int or size < 0 for size in sizes):
        raise InvalidInputError(f"a space has the size {quoted(sizes)}.")
    if prod(sizes) > MAX_NUMBERS:
        raise InvalidInputError(
            f"a space has {quoted(sizes)} numbers. The limit is {MAX_NUMBERS:,}."
        )


def _dtype(data: Mapping[str, Any]) -> np.dtype[Any]:
    if data["dtype"] not in DTYPES:
        raise InvalidInputError(f"a space has the dtype {quoted(data['dtype'])}.")
    return np.dtype(str(data["dtype"]))


def _constant(bounds: Array) -> Any:
    """Bounds as text, since JSON has no infinity; one text if all are equal."""
    texts = bounds.astype(str)
    same = bounds.size and (bounds == bounds.flat[0]).all()
    return str(texts.flat[0]) if same else texts.tolist()


def value_at(value: Any, path: Path) -> Any:
    """The part of a nested value at a path."""
    for name in path:
        value = value[name]
    return value


def from_parts(
    space: Space[Any],
    part: Callable[[Path], Any],
    path: Path = (),
    kinds: tuple[Any, Any] = (dict, tuple),
) -> Any:
    """A value of a nested space; `part` returns the value at each path."""
    if isinstance(space, spaces.Dict):
        inner = space.spaces.items()
        return kinds[0]([(n, from_parts(s, part, (*path, n), kinds)) for n, s in inner])
    if isinstance(space, spaces.Tuple):
        each = enumerate(space.spaces)
        return kinds[1]([from_parts(s, part, (*path, i), kinds) for i, s in each])
    return part(path)


def batch_of_one(space: Space[Any], observation: Any) -> Any:
    """An observation as a batch of one."""
    return from_parts(space, lambda path: np.asarray(value_at(observation, path))[None])


def first_of(space: Space[Any], actions: Any) -> Any:
    """The first action of a batch."""
    return from_parts(space, lambda path: value_at(actions, path)[0])
