"""Memory layout of a host with its seeds: one flat row per environment.

All weights of a host and of the seeds in its slots are one vector, and so are its
activations and their gradients. A slot has room for the largest blueprint, unit after
unit, so that a smaller one is a prefix. Rows of a minibatch are the last axis.

    layer of a host   weight [out, in, tap], bias [out]
    seed in a slot    first [unit, in, tap], its bias [unit],
                      last [unit, ..., out, tap], its bias [out]

A tap is a position of a 3 x 3 kernel; a dense layer has one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from esper.tasks.hosts import CnnHost, Host, MlpHost

DENSE, CONV = 0, 1


def _record(names: str) -> Any:  # noqa: ANN401
    return np.dtype([(name, np.int64) for name in names.split()], align=True)


LAYER = _record("kind inputs outputs high wide taps padded weight bias x z gz gx")
"""A layer: its shape; offsets of weights, inputs, outputs and their gradients."""
SEED = _record("place first first_bias last last_bias u hid gu ghid each")
"""A slot: its place; offsets of weights, units and gradients; inputs per unit."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer: its kind, channels and positions."""

    kind: int
    inputs: int
    outputs: int
    high: int
    wide: int
    """Positions of input and output; 1 x 1 if dense."""

    @property
    def taps(self) -> int:
        """Weights per pair of channels."""
        return 9 if self.kind == CONV else 1

    @property
    def weights(self) -> int:
        """Weights without biases."""
        return self.inputs * self.outputs * self.taps

    @property
    def positions(self) -> int:
        """Positions without padding."""
        return self.high * self.wide

    @property
    def padded(self) -> int:
        """Positions with the zero padding that its kernel needs."""
        return (self.high + 2) * (self.wide + 2) if self.kind == CONV else 1


def inputs_per_unit(first: LayerShape, last: LayerShape) -> int:
    """Inputs of the second layer that come from one unit of the first."""
    return last.inputs // first.outputs


def layer_shapes(host: Host) -> Iterator[LayerShape]:
    """The layers of a declared host."""
    match host:
        case MlpHost():
            for inputs, outputs in pairwise(host.widths):
                yield LayerShape(DENSE, inputs, outputs, 1, 1)
        case CnnHost():
            channels = pairwise((host.image[0], *host.channels))
            for (inputs, outputs), side in zip(channels, host.sides, strict=False):
                yield LayerShape(CONV, inputs, outputs, *side)
            yield LayerShape(DENSE, host.flattened, host.classes, 1, 1)


def place_geometries(host: Host) -> list[Geometry]:
    """Geometry of every place of a host: the pairs of layers that seeds span."""
    return [_geometry(*pair) for pair in pairwise(layer_shapes(host))]


def _geometry(first: LayerShape, last: LayerShape) -> Geometry:
    def shape(own: LayerShape, channels: int) -> tuple[int, ...]:
        return (channels, own.high, own.wide) if own.kind == CONV else (channels,)

    layouts = [Layout.IMAGE if s.kind == CONV else Layout.VECTOR for s in (first, last)]
    kernels = [Kernel.same(3, 2) if s.kind == CONV else None for s in (first, last)]
    hidden = (first.outputs, first.high // 2, first.wide // 2)
    return Geometry(
        inlet_layout=layouts[0],
        outlet_layout=layouts[1],
        inlet_shape=shape(first, first.inputs),
        outlet_shape=shape(last, last.outputs),
        residual=False,
        inlet_kernel=kernels[0],
        outlet_kernel=kernels[1],
        spans=True,
        hidden_shape=hidden if last.kind == CONV else (last.inputs,),
        unit_inputs=inputs_per_unit(first, last),
    )


class _Offsets:
    """Hands out offsets one after the other."""

    def __init__(self) -> None:
        self.length = 0

    def take(self, length: int) -> int:
        start, self.length = self.length, self.length + length
        return start


class MemoryLayout:
    """Offsets of everything of a host with slots of so many units.

    Args:
        host: The declared host.
        units: Hidden units that a slot has room for.
        seeds_per_slot: Slots of each place; slot s stands at place s % places.
    """

    def __init__(self, host: Host, units: int, seeds_per_slot: int) -> None:
        self.shapes = tuple(layer_shapes(host))
        self.units = units
        self.places = len(self.shapes) - 1
        self.slots = self.places * seeds_per_slot
        weights, activations = _Offsets(), _Offsets()
        rows = [_layer(shape, weights, activations) for shape in self.shapes]
        self.layers: NDArray[Any] = np.array(rows, dtype=LAYER)
        self.host_parameters = weights.length
        """Weights of the host, which come first."""
        self.host_activations = activations.length
        """Activations of the host per row of a minibatch, which come first."""
        pairs = list(pairwise(self.shapes))
        # The slots of a place share room for the gradients at their units.
        shared = [_gradients(*pair, units, activations) for pair in pairs]
        seeds = [
            (place, *_seed(*pair, units, weights, activations), *shared[place])
            for _ in range(seeds_per_slot)
            for place, pair in enumerate(pairs)
        ]
        self.seeds: NDArray[Any] = np.array(seeds, dtype=SEED)
        self.parameters = weights.length
        """Weights of host and seeds."""
        self.activations = activations.length
        """Activations and gradients per row of a minibatch."""

    @property
    def tables(self) -> tuple[NDArray[Any], NDArray[Any], int]:
        """What the kernels read."""
        return self.layers, self.seeds, self.host_parameters

    @property
    def lengths(self) -> list[int]:
        """Lengths of the parts of an environment's weights, in their order."""
        found = [n for own in self.shapes for n in (own.weights, own.outputs)]
        for slot in range(self.slots):
            first, last = self.shapes[slot % self.places :][:2]
            found += _seed_lengths(first, last, self.units)
        return found

    def extent(self, slot: int) -> tuple[int, int]:
        """Where the weights of a slot's seed begin and end."""
        begins = [*self.seeds["first"].tolist(), self.parameters]
        return begins[slot], begins[slot + 1]

    def is_dense(self, place: int) -> bool:
        """Whether both layers of a place are dense."""
        first, last = self.shapes[place : place + 2]
        return first.kind == last.kind == DENSE


def _layer(
    own: LayerShape, weights: _Offsets, activations: _Offsets
) -> tuple[int, ...]:
    """A `LAYER`."""
    return (
        own.kind,
        own.inputs,
        own.outputs,
        own.high,
        own.wide,
        own.taps,
        own.padded,
        weights.take(own.weights),
        weights.take(own.outputs),
        activations.take(own.inputs * own.padded),
        activations.take(own.outputs * own.positions),
        activations.take(own.outputs * own.padded),
        activations.take(own.inputs * own.positions),
    )


def _seed(
    first: LayerShape,
    last: LayerShape,
    units: int,
    weights: _Offsets,
    activations: _Offsets,
) -> tuple[int, ...]:
    """A `SEED` without its place and without what the slots of a place share."""
    each = inputs_per_unit(first, last)
    return (
        *(weights.take(length) for length in _seed_lengths(first, last, units)),
        activations.take(units * first.positions),
        activations.take(units * each * last.padded),
    )


def _seed_lengths(first: LayerShape, last: LayerShape, units: int) -> list[int]:
    """Lengths of a seed's four parts: two maps, each with its bias."""
    each = inputs_per_unit(first, last)
    return [
        units * first.inputs * first.taps,
        units,
        units * each * last.outputs * last.taps,
        last.outputs,
    ]


def _gradients(
    first: LayerShape, last: LayerShape, units: int, activations: _Offsets
) -> tuple[int, ...]:
    """What the slots of a place share: gradients at their units, inputs per unit."""
    each = inputs_per_unit(first, last)
    return (
        activations.take(units * first.padded),
        activations.take(units * each * last.positions),
        each,
    )
