"""Spaces that hold other spaces: as plain data, and their values in batches."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import quoted

Array = NDArray[Any]
MAX_NUMBERS: Final = 1 << 20
"""Numbers of an observation, or choices of an action; images are smaller by far."""
DTYPES: Final = frozenset(
    ("bool", *(f"{k}int{b}" for k in ("", "u") for b in (8, 16, 32, 64)))
) | {f"float{bits}" for bits in (16, 32, 64)}
"""Kinds of numbers that a space in a file may have."""


def is_text(space: Space[Any]) -> bool:
    """Whether it holds text, like MiniGrid's MissionSpace, which is no Text."""
    return space.dtype is not None and np.dtype(space.dtype).kind in "US"


def without_text(space: Space[Any], path: str = "") -> tuple[Space[Any], list[str]]:
    """A space without the texts of its Dicts, and what they are called."""
    if not isinstance(space, spaces.Dict):
        return space, []
    kept, dropped = [], []
    for name, inner in space.spaces.items():
        if is_text(inner):
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
            # As pairs: files sort the names of mappings, and heads have an order.
            pairs = [[name, space_data(part)] for name, part in space.spaces.items()]
            return {"kind": "Dict", "spaces": pairs}
        case spaces.Tuple():
            return {"kind": "Tuple", "spaces": [space_data(p) for p in space.spaces]}
        case spaces.Discrete():
            n, start = int(space.n), int(space.start)
            kind = str(space.dtype)
            return {"kind": "Discrete", "n": n, "start": start, "dtype": kind}
        case spaces.MultiDiscrete():
            nvec, start = space.nvec.tolist(), space.start.tolist()
            kind = str(space.dtype)
            return {
                "kind": "MultiDiscrete",
                "nvec": nvec,
                "start": start,
                "dtype": kind,
            }
        case spaces.MultiBinary():
            return {"kind": "MultiBinary", "n": space.n}
        case spaces.Box():
            return {
                "kind": "Box",
                "low": _constant(space.low),
                "high": _constant(space.high),
                "shape": [*space.shape],
                "dtype": str(space.dtype),
            }
    raise InvalidInputError(f"a space of {type(space).__name__} cannot be saved.")


def space_of(data: Mapping[str, Any]) -> Space[Any]:
    """The space that `space_data` wrote; refuses one that takes much memory."""
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
            return spaces.MultiDiscrete(
                np.array(data["nvec"]),
                dtype=_dtype(data).type,
                start=np.array(data["start"]),
            )
        case "MultiBinary":
            return spaces.MultiBinary(data["n"])
        case "Box":
            shape, kind = tuple(data["shape"]), _dtype(data)
            low, high = (
                np.broadcast_to(np.array(data[name]), shape).astype(kind)
                for name in ("low", "high")
            )
            return spaces.Box(low, high, shape, dtype=kind.type)
    raise InvalidInputError(f"there is no space {quoted(data['kind'])}.")


def _require_size(data: Mapping[str, Any]) -> None:
    """Refuse a space of a file by its size, before it is made."""
    sizes = data["shape"] if "shape" in data else data.get("n", 0)
    sizes = sizes if isinstance(sizes, list) else [sizes]
    if any(type(size) is not int or size < 0 for size in sizes):
        raise InvalidInputError(f"a space has the size {quoted(sizes)}.")
    if prod(sizes) > MAX_NUMBERS:
        raise InvalidInputError(
            f"a space has {quoted(sizes)} numbers, {MAX_NUMBERS:,} are the limit."
        )


def _dtype(data: Mapping[str, Any]) -> np.dtype[Any]:
    if data["dtype"] not in DTYPES:
        raise InvalidInputError(f"a space has the dtype {quoted(data['dtype'])}.")
    return np.dtype(str(data["dtype"]))


def _constant(bounds: Array) -> Any:  # noqa: ANN401
    """One number if all are the same; as text, since JSON has no infinity."""
    texts = bounds.astype(str)
    same = bounds.size and (bounds == bounds.flat[0]).all()
    return str(texts.flat[0]) if same else texts.tolist()


def batch_of_one(space: Space[Any], observation: Any) -> Any:  # noqa: ANN401
    """A batch of one."""
    if isinstance(space, spaces.Dict):
        return {n: batch_of_one(s, observation[n]) for n, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        inner: Sequence[Space[Any]] = space.spaces
        return tuple(batch_of_one(s, observation[i]) for i, s in enumerate(inner))
    return np.asarray(observation)[None]


def first_of(space: Space[Any], actions: Any) -> Any:  # noqa: ANN401
    """The action of one environment from a batch of one."""
    if isinstance(space, spaces.Dict):
        return {n: first_of(s, actions[n]) for n, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(first_of(s, actions[i]) for i, s in enumerate(space.spaces))
    return actions[0]
