"""Where everything of a host and its seeds lies: one flat row per environment.

All weights of a host and of the seeds in its slots are one vector, and so are its
activations and their gradients while it trains. A seed's slot has room for the largest
blueprint, unit after unit, so that a smaller one is a prefix. A row of a minibatch is
the last axis everywhere: products run along it.

    layer of a host   weight [out, in, tap], bias [out]
    seed in a slot    first [unit, in, tap], its bias [unit],
                      last [unit, ..., out, tap], its bias [out]

A tap is a place of a 3 x 3 kernel; a dense layer has one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.tasks.hosts import CnnHost, Host, MlpHost

DENSE, CONV = 0, 1
TAPS = (1, 9)


def _record(*names: str) -> Any:  # noqa: ANN401
    return np.dtype([(name, np.int64) for name in names], align=True)


LAYER = _record(
    "kind", "inputs", "outputs", "high", "wide", "taps", "frame", "weight", "bias",
    "x", "z", "gz", "gx",
)  # fmt: skip
"""A layer: what it is; where its weights, inputs, outputs and their gradients lie."""
SEED = _record(
    "place",
    "first",
    "first_bias",
    "last",
    "last_bias",
    "u",
    "hid",
    "gu",
    "ghid",
    "each",
)
"""A slot: its place; where weights, units and their gradients lie; inputs per unit."""


@dataclass(frozen=True, slots=True)
class Map:
    """One layer: what it is and what it reads."""

    kind: int
    inputs: int
    outputs: int
    high: int
    wide: int
    """Positions, of what it reads and of what it says; 1 if dense."""

    @property
    def taps(self) -> int:
        """Weights per pair of channels."""
        return TAPS[self.kind]

    @property
    def weights(self) -> int:
        """Weights without biases."""
        return self.inputs * self.outputs * self.taps

    @property
    def spots(self) -> int:
        """Positions without a border."""
        return self.high * self.wide

    @property
    def framed(self) -> int:
        """Positions with the border of zeros that its kernel needs."""
        return (self.high + 2) * (self.wide + 2) if self.kind == CONV else 1


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """Where everything lies."""

    maps: tuple[Map, ...]
    units: int
    """Hidden units that a slot has room for."""
    slots: int
    """Slots of all places; slot s stands at place s % places."""
    parameters: int
    """Length of an environment's weights."""
    host: int
    """How many of them, at the front, are the host's."""
    room: int
    """Length of an environment's activations, per row of a minibatch."""
    front: int
    """How much of it, at the front, is the host's."""
    layers: NDArray[Any]
    seeds: NDArray[Any]

    @property
    def places(self) -> int:
        """Spans of two layers."""
        return len(self.maps) - 1

    @property
    def tables(self) -> tuple[NDArray[Any], NDArray[Any], int]:
        """What compiled code needs to know."""
        return self.layers, self.seeds, self.host

    @property
    def lengths(self) -> list[int]:
        """Lengths of the parts of an environment's weights, in their order."""
        found = [n for own in self.maps for n in (own.weights, own.outputs)]
        for slot in range(self.slots):
            place = slot % self.places
            first, last = self.maps[place], self.maps[place + 1]
            each = each_unit(first, last)
            found += [
                self.units * first.inputs * first.taps,
                self.units,
                self.units * each * last.outputs * last.taps,
                last.outputs,
            ]
        return found

    def extent(self, slot: int) -> tuple[int, int]:
        """Where the weights of a slot's seed begin and end."""
        begin = int(self.seeds[slot]["first"])
        after = slot + 1 < self.slots
        return begin, int(self.seeds[slot + 1]["first"]) if after else self.parameters

    @classmethod
    def of(cls, host: Host, units: int, seeds_per_slot: int) -> "Chart":
        """The chart of a host with slots of so many units."""
        maps = tuple(maps_of(host))
        weights, room = _Ruler(), _Ruler()
        layers = np.array([_layer(m, weights, room) for m in maps], dtype=LAYER)
        own, front = weights.length, room.length
        spans = list(pairwise(maps))
        shared = [_felt_back(first, last, units, room) for first, last in spans]
        seeds = [
            _seed(place, *spans[place], units, weights, room) + shared[place]
            for _ in range(seeds_per_slot)
            for place in range(len(spans))
        ]
        return cls(
            maps,
            units,
            len(seeds),
            weights.length,
            own,
            room.length,
            front,
            layers,
            np.array(seeds, dtype=SEED),
        )


def maps_of(host: Host) -> Iterator[Map]:
    """The layers of a declared host."""
    match host:
        case MlpHost():
            for inputs, outputs in pairwise(host.widths):
                yield Map(DENSE, inputs, outputs, 1, 1)
        case CnnHost():
            channels = pairwise((host.image[0], *host.channels))
            for (inputs, outputs), side in zip(channels, host.sides, strict=False):
                yield Map(CONV, inputs, outputs, *side)
            yield Map(DENSE, host.flattened, host.classes, 1, 1)


class _Ruler:
    """Hands out places one after the other."""

    def __init__(self) -> None:
        self.length = 0

    def take(self, length: int) -> int:
        start, self.length = self.length, self.length + length
        return start


def _layer(own: Map, weights: _Ruler, room: _Ruler) -> tuple[int, ...]:
    """A `LAYER`."""
    return (
        own.kind,
        own.inputs,
        own.outputs,
        own.high,
        own.wide,
        own.taps,
        own.framed,
        weights.take(own.weights),
        weights.take(own.outputs),
        room.take(own.inputs * own.framed),
        room.take(own.outputs * own.spots),
        room.take(own.outputs * own.framed),
        room.take(own.inputs * own.spots),
    )


def _seed(
    place: int, first: Map, last: Map, units: int, weights: _Ruler, room: _Ruler
) -> tuple[int, ...]:
    """A `SEED` without what the slots of a place share."""
    each = each_unit(first, last)
    return (
        place,
        weights.take(units * first.inputs * first.taps),
        weights.take(units),
        weights.take(units * each * last.outputs * last.taps),
        weights.take(last.outputs),
        room.take(units * first.spots),
        room.take(units * each * last.framed),
    )


def _felt_back(first: Map, last: Map, units: int, room: _Ruler) -> tuple[int, ...]:
    """What the slots of a place share: gradients at their units, inputs per unit."""
    each = each_unit(first, last)
    return (
        room.take(units * first.framed),
        room.take(units * each * last.spots),
        each,
    )


def each_unit(first: Map, last: Map) -> int:
    """Inputs of the second layer that come from one unit of the first."""
    return last.inputs // first.outputs
