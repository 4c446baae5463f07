"""Conversion between Gymnasium's spaces and the tensors of a policy.

An observation becomes one vector and any number of images. The vector concatenates
numbers, flags and one-hot encoded choices. A Box with three axes is an image, whose
channels are its smaller outer axis.

An action has one or several heads: Discrete, MultiDiscrete, MultiBinary and Box, alone
or in a Dict or Tuple. Each entry of a Box is a number with a normal distribution, in
which [-1, 1] is the range of the space. Numbers are clipped to that range for the
environment alone: a policy learns from what it drew. Masks concern the other heads,
called choices. Other spaces raise an error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, Final

import numpy as np
import torch
from gymnasium import Space, spaces
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import InvalidInputError, NoLegalActionError
from esper.contracts.features import Leaf
from esper.contracts.messages import quoted
from esper.rl.nested import (
    MAX_NUMBERS,
    Path,
    from_parts,
    space_data,
    space_of,
    value_at,
    without_text,
)

Array = NDArray[Any]
MASK: Final = "action_mask"
"""Key of the mask in a Dict observation or an info."""
MAX_CHOICES: Final = 10_000
"""Maximum number of values of a Discrete observation, which is one-hot encoded."""


@dataclass(frozen=True)
class Part:
    """A space without parts, and its path in the whole space."""

    path: Path
    space: Space[Any]

    @property
    def name(self) -> str:
        """The path as text, for an action."""
        return ".".join(map(str, self.path)) or "action"

    @property
    def observation_name(self) -> str:
        """The path as text, for an observation."""
        return self.name if self.path else "the observation"

    @property
    def is_image(self) -> bool:
        """Whether the space has rows, columns and channels."""
        return isinstance(self.space, spaces.Box) and len(self.space.shape) == 3

    @cached_property
    def largest(self) -> float:
        """The largest absolute bound; infinite without bounds."""
        assert isinstance(self.space, spaces.Box)
        bounds = (self.space.low.astype(float), self.space.high.astype(float))
        bound = float(np.abs(bounds).max())
        return bound if 0.0 < bound < np.finfo(np.float32).max else np.inf

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each discrete entry; empty for a Box."""
        match self.space:
            case spaces.Discrete():
                return (int(self.space.n),)
            case spaces.MultiDiscrete():
                return tuple(int(n) for n in self.space.nvec.reshape(-1))
            case spaces.MultiBinary():
                return (2,) * prod(self.space.shape)
        return ()

    @cached_property
    def heads(self) -> int:
        """Number of heads of an action: of choices, or of numbers of a Box."""
        return len(self.sizes) or prod(self.space.shape or ())

    @cached_property
    def start(self) -> Array:
        """The first value of each discrete entry."""
        match self.space:
            case spaces.Discrete():
                return np.array([self.space.start])
            case spaces.MultiDiscrete():
                return self.space.start.reshape(-1)
        return np.zeros(len(self.sizes), np.int64)

    def of(self, value: Any) -> Any:
        """This part of a value of the whole space."""
        return value_at(value, self.path)


def parts_of(space: Space[Any], path: Path = ()) -> Iterator[Part]:
    """The spaces without parts of a nested space, in order."""
    if isinstance(space, spaces.Dict):
        for name, inner in space.spaces.items():
            yield from parts_of(inner, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from parts_of(inner, (*path, index))
    else:
        yield Part(path, space)


@dataclass(frozen=True)
class SpaceSpec:
    """Observation and action space of one environment.

    Args:
        observation_space: Texts of a Dict are left out.
        action_space: Discrete spaces and Boxes, nested or not.
        head_relevance: Whether a choice of the first head uses each head,
            bool [op, head]; None: all heads are always used.
    """

    observation_space: Space[Any]
    action_space: Space[Any]
    head_relevance: tuple[tuple[bool, ...], ...] | None = None
    observation_type: type = field(default=dict, init=False)
    dropped: tuple[str, ...] = field(default=(), init=False, compare=False)
    """Names of the texts that are left out."""

    def __post_init__(self) -> None:
        """Raise if PPO does not support the spaces."""
        space, dropped = without_text(self.observation_space)
        object.__setattr__(self, "observation_space", space)
        object.__setattr__(self, "dropped", tuple(dropped))
        if not self._observation_parts:
            raise InvalidInputError(
                "the observation space is empty: it holds no numbers."
            )
        for part in self._observation_parts:
            _require_observation(part)
        if not self._action_parts:
            raise InvalidInputError("the action space is empty.")
        for part in self._action_parts:
            _require_action(part)
        if len(self.sizes) * self.width > MAX_NUMBERS:
            raise InvalidInputError(
                f"the action has {len(self.sizes):,} heads of up to {self.width:,} "
                "choices, which is too many. Split it into several steps."
            )
        names = sorted(self.head_names)
        if twins := [one for one, other in pairwise(names) if one == other]:
            raise InvalidInputError(
                f"two heads of the action are called {quoted(twins[0])}. Rename one."
            )
        if self.head_relevance is None:
            return
        shape = (self.sizes[0], len(self.sizes))
        table = np.array(self.head_relevance)
        if self.numeric[0] or table.shape != shape:
            raise InvalidInputError(
                f"head_relevance must be [op, head], here {list(shape)}, and the first "
                f"head discrete, got {list(table.shape)}."
            )
        if not table[:, 0].all():
            raise InvalidInputError("head_relevance must be True for the first head.")

    @cached_property
    def _observation_parts(self) -> list[Part]:
        parts = parts_of(self.observation_space)
        return [part for part in parts if part.path[:1] != (MASK,)]

    @cached_property
    def _action_parts(self) -> list[Part]:
        return [*parts_of(self.action_space)]

    @cached_property
    def _choice_parts(self) -> list[Part]:
        return [part for part in self._action_parts if part.sizes]

    @cached_property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each head is a number: an entry of a Box."""
        return tuple(
            not part.sizes for part in self._action_parts for _ in range(part.heads)
        )

    @property
    def is_continuous(self) -> bool:
        """Whether all heads are numbers."""
        return all(self.numeric)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Choices of each head; 2 for a number: mean and log standard deviation."""
        return tuple(
            size
            for part in self._action_parts
            for size in part.sizes or (2,) * part.heads
        )

    @cached_property
    def width(self) -> int:
        """Choices of the largest head."""
        return max(self.sizes)

    @cached_property
    def head_names(self) -> tuple[str, ...]:
        """Names of the heads."""
        names = []
        for part in self._action_parts:
            alone = len(part.sizes) == 1
            each = [f"{part.name}.{index}" for index in range(part.heads)]
            names += [part.name] if alone else each
        return tuple(names)

    @cached_property
    def allowed(self) -> Bool[Tensor, "head choice"]:
        """Choices of each head, without padding."""
        return torch.arange(self.width) < torch.tensor(self.sizes)[:, None]

    @cached_property
    def _maskable(self) -> Array:
        """Entries `[head, choice]` that a mask has: those of choices."""
        rows: Array = self.allowed.numpy() & ~np.array(self.numeric)[:, None]
        return rows

    @cached_property
    def mask_entries(self) -> int:
        """Length of a mask: choices of all heads that are no numbers."""
        return int(self._maskable.sum())

    @cached_property
    def observation(self) -> Mapping[str, Leaf]:
        """Shapes and dtypes of the vector and the images, channels first."""
        leaves = {}
        columns = sum(_columns(part) for part in self._vector_parts)
        if columns:
            leaves["vector"] = Leaf((columns,))
        for index, part in enumerate(self._images):
            shape: Any = part.space.shape
            kind = torch.uint8 if part.space.dtype == np.uint8 else torch.float32
            shape = shape if _channels_first(shape) else (shape[2], *shape[:2])
            leaves[f"image{index}"] = Leaf(shape, kind)
        return leaves

    @cached_property
    def _vector_parts(self) -> list[Part]:
        return [part for part in self._observation_parts if not part.is_image]

    @cached_property
    def _images(self) -> list[Part]:
        return [part for part in self._observation_parts if part.is_image]

    @cached_property
    def image_bounds(self) -> Array:
        """The largest absolute bound of each image; infinite without bounds."""
        return np.array([part.largest for part in self._images])

    @cached_property
    def normalised(self) -> Array:
        """Which columns of the vector can be normalised: those of a Box."""
        kinds = [
            np.full(_columns(part), isinstance(part.space, spaces.Box))
            for part in self._vector_parts
        ]
        return np.concatenate(kinds) if kinds else np.zeros(0, bool)

    @cached_property
    def has_mask(self) -> bool:
        """Whether a Dict observation contains a mask."""
        space = self.observation_space
        return isinstance(space, spaces.Dict) and MASK in space.spaces

    def rows_of(self, observation: Any) -> int | None:
        """Number of observations in a batch; None for a single observation."""
        rows = []
        for part in self._observation_parts:
            own = part.space.shape or ()
            try:
                array = np.asarray(part.of(observation))
                if array.dtype == object:
                    raise TypeError
            except (LookupError, TypeError, ValueError):
                what = f"has no {part.name}."
                if not part.path:
                    what = "is not an array. Give the first result of reset or step."
                raise InvalidInputError(f"the observation {what}") from None
            shape = array.shape
            if shape != own and (shape[1:] != own or not shape[0]):
                several = ", ".join(map(str, ("n", *own))) + ("" if own else ",")
                raise InvalidInputError(
                    f"{part.observation_name} must have the shape {own}, or "
                    f"({several}) for n observations, got {tuple(shape)}."
                )
            rows.append(None if shape == own else shape[0])
        if len({*rows}) > 1:
            raise InvalidInputError(
                "some parts of the observation are batched and others are not."
            )
        return rows[0]

    def vector(self, observations: Any, envs: int) -> Array:
        """Numbers, flags and one-hot encoded choices as `[env, column]`."""
        columns = [
            _encoded(part, part.of(observations), envs) for part in self._vector_parts
        ]
        return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)

    def images(self, observations: Any, envs: int) -> dict[str, Tensor]:
        """Images by name, channels first and not scaled."""
        found = {}
        for index, part in enumerate(self._images):
            array = _checked(part, np.asarray(part.of(observations)), envs)
            if not _channels_first(array.shape[1:]):
                array = np.moveaxis(array, 3, 1)
            kind = np.uint8 if part.space.dtype == np.uint8 else np.float32
            # Copied, since the environment may reuse its buffer.
            with np.errstate(invalid="ignore"):
                copied = np.array(array, kind, order="C")
            if kind is np.uint8 and array.dtype != np.uint8 and (copied != array).any():
                wrong = array[copied != array].flat[0]
                raise InvalidInputError(
                    f"{part.observation_name} holds {wrong:g}. Return integers from 0 "
                    "to 255."
                )
            found[f"image{index}"] = torch.from_numpy(copied)
        return found

    @cached_property
    def encoder_space(self) -> Space[Any]:
        """What an encoder gets, without the batch: Boxes, nested as observations.

        Masks and texts are left out. Images have their channels first. Choices are
        one-hot encoded.
        """
        boxes: dict[Path, Space[Any]] = {}
        images = iter(self.observation[f"image{i}"] for i in range(len(self._images)))
        for part in self._observation_parts:
            shape: Any = next(images).shape if part.is_image else part.space.shape
            if isinstance(part.space, spaces.Discrete | spaces.MultiDiscrete):
                shape = (_columns(part),)
            low, high = (0, 1) if part.sizes else (-np.inf, np.inf)
            boxes[part.path] = spaces.Box(low, high, shape, np.float32)
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            inner = space.spaces.items()
            space = spaces.Dict([(name, s) for name, s in inner if name != MASK])
        kinds = (spaces.Dict, spaces.Tuple)
        found: Space[Any] = from_parts(space, boxes.__getitem__, kinds=kinds)
        return found

    def encoder_input(self, features: Mapping[str, Tensor]) -> Any:
        """Features of rows as nested tensors `[row, ...]` of `encoder_space`."""
        space, at, image = self.encoder_space, 0, 0
        found: dict[Path, Tensor] = {}
        for part in self._observation_parts:
            if part.is_image:
                found[part.path] = features[f"image{image}"]
                image += 1
            else:
                shape: Any = value_at(space, part.path).shape
                own = features["vector"][:, at : (at := at + prod(shape))]
                found[part.path] = own.reshape(-1, *shape)
        return from_parts(space, found.__getitem__)

    def to_env(self, actions: Tensor) -> Any:
        """Actions `[env, head]` as an element of the batched action space."""
        array, at, values = actions.numpy(), 0, {}
        for part in self._action_parts:
            mine = array[:, at : at + part.heads]
            at += part.heads
            if isinstance(part.space, spaces.Box):
                mine = _scaled(part.space, mine)
            else:
                mine = mine.astype(np.int64, copy=False) + part.start
            values[part.path] = mine.reshape(
                len(array), *(part.space.shape or ())
            ).astype(part.space.dtype, copy=False)
        return from_parts(self.action_space, values.__getitem__)

    def head_masks(
        self, masks: Any, envs: int, needed: Array | None = None
    ) -> Bool[Tensor, "env *op head choice"]:
        """Legal choices of each head, padded to the width of the largest head.

        Numbers have no entries in `masks`, which are about the other heads only.

        Args:
            masks: 0 or 1, or bool, in one of these forms. `[env, choices of all
                heads]`; `[env, head, choice]`, padded; one `[env, choice]` per head,
                as a tuple or as a dict; one mask as in `mask_row` per environment, as
                a list or tuple. Or `[env, op, choices of all heads]`: legal choices
                given each choice of the first head, whose own legality is the entry
                of that choice in its row.
            envs: Number of environments.
            needed: Environments whose masks are used; all choices are legal in the
                others. None: all.
        """
        if self.is_continuous:
            raise InvalidInputError("a Box has no action masks. Use masks=None.")
        flat = self._stacked(masks, envs, needed)
        if flat.shape[:1] != (envs,):
            count = len(flat) if flat.ndim else 0
            raise InvalidInputError(
                f"{envs} environments need {envs} masks, got {count}."
            )
        flat = flags(flat, needed)
        entries, total, is_table = self._maskable, self.mask_entries, False
        if flat.shape[1:] != (total,):
            own, table = entries.any(axis=1), (self.sizes[0], total)
            padded = int(own.sum()), int(entries.sum(axis=1).max())
            is_table = padded[0] > 1 and not self.numeric[0] and flat.shape[1:] == table
            if not is_table and flat.shape[1:] != padded:
                raise InvalidInputError(
                    f"an action mask must have {total} entries, or the shape "
                    f"{[*padded]} or {[*table]}, got {list(flat.shape[1:])}."
                )
            if not is_table:
                flat = flat[:, entries[own, : padded[1]]]
        numbers = self.allowed.numpy() & ~entries
        rows = np.broadcast_to(numbers, (*flat.shape[:-1], *numbers.shape)).copy()
        rows[..., entries] = flat
        if is_table:
            ops = range(self.sizes[0])
            rows[:, :, 0, : len(ops)] = flat[:, ops, ops][:, None]
        if needed is not None:
            rows[~needed] = self.allowed.numpy()
        stuck = np.logical_not(rows.any(axis=-1))  # [env, *op, head]
        if is_table:
            stuck[:, :, 1:] &= rows[:, 0, 0, : len(ops), None]
            if self.head_relevance is not None:
                stuck &= np.array(self.head_relevance)
        if stuck.any():
            env, *op, head = (int(index) for index in np.argwhere(stuck)[0])
            given = ""
            if op and head:
                given = f" with choice {op[0]} of {self.head_names[0]!r}"
            raise NoLegalActionError(
                f"the mask of environment {env} allows nothing for head "
                f"{self.head_names[head]!r}{given}. Allow at least one choice."
            )
        return torch.from_numpy(rows)

    def mask_row(self, mask: Any) -> Array:
        """The mask of one environment, whole or head by head, as one array."""
        if not isinstance(mask, Mapping | tuple | list):
            return np.asarray(mask)
        heads = [self.mask_row(head).reshape(-1) for head in self._by_head(mask)]
        return np.concatenate(heads)

    def _stacked(self, masks: Any, envs: int, needed: Array | None) -> Array:
        """Masks of all environments as one array `[env, ...]`."""
        if isinstance(masks, Mapping) or self._is_by_head(masks, envs):
            heads = [self._one_array(x, needed) for x in self._by_head(masks)]
            return np.concatenate([x.reshape(len(x), -1) for x in heads], axis=1)
        return self._one_array(masks, needed)

    def _one_array(self, masks: Any, needed: Array | None) -> Array:
        """Masks as one array; they may be one object per environment."""
        objects = isinstance(masks, np.ndarray) and masks.dtype == object
        if not isinstance(masks, list | tuple) and not (objects and masks.ndim == 1):
            return np.asarray(masks)
        if {*map(type, masks)} == {np.ndarray}:
            return np.array([*masks])
        for env, mask in enumerate(masks):
            if mask is None and (needed is None or needed[env]):
                raise InvalidInputError(
                    f"the mask of environment {env} is None. Return a mask."
                )
        each = [None if m is None else self.mask_row(m) for m in masks]
        every = self._maskable[self._maskable]
        known = next((m for m in each if m is not None), every)
        full = np.ones_like(known)
        return np.stack([full if m is None else m for m in each])

    def _is_by_head(self, masks: Any, envs: int) -> bool:
        """Whether the masks are one array `[env, choice]` per head."""
        if not isinstance(masks, tuple):
            return False
        arrays = [x for x in masks if isinstance(x, np.ndarray) and x.ndim == 2]
        fits = len(arrays) == len(masks) and all(len(x) == envs for x in arrays)
        return fits and sum(x.shape[1] for x in arrays) == self.mask_entries

    def _by_head(self, masks: Any) -> list[Any]:
        if not isinstance(masks, Mapping):
            return [*masks]
        lasts = [part.path[-1] for part in self._choice_parts if part.path]
        if {*lasts} <= masks.keys() and len({*lasts}) == len(self._choice_parts):
            return [masks[name] for name in lasts]
        try:
            if not lasts:  # the action is not a Dict
                raise LookupError
            return [part.of(masks) for part in self._choice_parts]
        except (LookupError, TypeError):
            names = ", ".join(part.name for part in self._choice_parts)
            raise InvalidInputError(
                f"an action mask by head must name {names}, got "
                f"{', '.join(map(str, masks))}."
            ) from None

    def describe(self) -> dict[str, Any]:
        """Spaces and `head_relevance` as plain data, for files."""
        return {
            "observation_space": space_data(self.observation_space),
            "action_space": space_data(self.action_space),
            "head_relevance": self.head_relevance,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "SpaceSpec":
        """The spec of the data that `describe` returned."""
        table = data["head_relevance"]
        return cls(
            space_of(data["observation_space"]),
            space_of(data["action_space"]),
            None if table is None else tuple(map(tuple, table)),
        )


def require_sizes(space: Space[Any]) -> None:
    """Raise if an observation is too large."""
    for part in parts_of(space):
        count = prod(part.space.shape or ())
        if count > MAX_NUMBERS:
            raise InvalidInputError(
                f"{part.observation_name} has {count:,} numbers. The limit is "
                f"{MAX_NUMBERS:,}."
            )


def flags(masks: Array, needed: Array | None = None, what: str = "") -> Array:
    """A copy of masks `[env, ...]` as booleans; raises unless all are 0 or 1.

    Environments that are not `needed` are not checked. Errors call the masks `what`.
    """
    if masks.dtype == bool:
        return masks.copy()
    legal: Array = masks == 1
    wrong = ~(legal | (masks == 0)).reshape(len(masks), -1)
    if needed is not None:
        wrong &= needed[:, None]
    if wrong.any():
        env, at = (int(index) for index in np.argwhere(wrong)[0])
        value = np.asarray(masks.reshape(len(masks), -1)[env, at]).item()
        number = f"{value:g}" if isinstance(value, int | float) else quoted(value)
        raise InvalidInputError(
            f"{what or f'the mask of environment {env}'} holds {number}; give 1 or "
            "True for legal choices, 0 or False for others."
        )
    return legal


def _columns(part: Part) -> int:
    if isinstance(part.space, spaces.Discrete | spaces.MultiDiscrete):
        return sum(part.sizes)
    return prod(part.space.shape or ())


def _require_observation(part: Part) -> None:
    space, name = part.space, part.observation_name
    _require_known(space, name)
    if max(part.sizes, default=0) > MAX_CHOICES:
        raise InvalidInputError(
            f"{name} has {max(part.sizes):,} values, more than {MAX_CHOICES:,}. Encode "
            "it as a Box."
        )
    if isinstance(space, spaces.Box) and len(space.shape) > 3:
        raise InvalidInputError(
            f"{name} is a Box of shape {space.shape}. Flatten it first."
        )
    if not _columns(part):
        raise InvalidInputError(f"{name} is empty. Leave it out.")


def _require_action(part: Part) -> None:
    _require_known(part.space, part.name)
    if not part.heads:
        raise InvalidInputError(f"{part.name} is empty. Leave it out.")
    is_float = np.dtype(part.space.dtype).kind == "f"
    if isinstance(part.space, spaces.Box) and not is_float:
        raise InvalidInputError(f"{part.name} is a Box of integers. Use MultiDiscrete.")


def _require_known(space: Space[Any], name: str) -> None:
    known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, known):
        raise InvalidInputError(
            f"{name} is a {type(space).__name__}, which is not supported. Use Box, "
            "Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them."
        )


def _channels_first(shape: tuple[int, ...]) -> bool:
    return shape[0] < shape[2]


def _checked(part: Part, array: Array, envs: int) -> Array:
    shape = (envs, *(part.space.shape or ()))
    if array.shape != shape:
        raise InvalidInputError(
            f"{part.observation_name} must have the shape {list(shape)}, got "
            f"{list(array.shape)}."
        )
    return array


def _encoded(part: Part, value: Any, envs: int) -> Array:
    """A part of all observations as float32 `[env, column]`."""
    array = _checked(part, np.asarray(value), envs).reshape(envs, -1)
    if isinstance(part.space, spaces.Box):
        with np.errstate(over="ignore"):  # infinity raises an error later
            return array.astype(np.float32)  # a copy, since the buffer may be reused
    sizes = np.array(part.sizes)
    with np.errstate(invalid="ignore"):
        index = array.astype(np.int64) - part.start
    outside = (index < 0) | (index >= sizes)
    if array.dtype.kind == "f":
        outside |= index + part.start != array
    if outside.any():
        env = int(outside.any(axis=1).argmax())
        raise InvalidInputError(
            f"{part.observation_name} of environment {env} is "
            f"{array[env].tolist()}, outside {part.space}."
        )
    if isinstance(part.space, spaces.MultiBinary):
        return array.astype(np.float32)
    hot = np.zeros((envs, int(sizes.sum())), np.float32)
    hot[np.arange(envs)[:, None], index + np.cumsum(sizes) - sizes] = 1.0
    return hot


def _scaled(space: spaces.Box, numbers: Array) -> Array:
    """Numbers scaled from [-1, 1] to the bounds of a Box, and clipped."""
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    # The largest float32 is how many environments write "no bound".
    bounded = np.maximum(np.abs(low), np.abs(high)) < np.finfo(np.float32).max
    with np.errstate(invalid="ignore", over="ignore"):
        middle = np.where(bounded, 0.5 * low + 0.5 * high, np.clip(0.0, low, high))
        half = np.where(bounded, 0.5 * high - 0.5 * low, 1.0)
    scaled: Array = np.clip(middle + half * numbers, low, high)
    return scaled
