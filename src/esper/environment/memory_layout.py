"""Memory layout of a host with its seeds: one flat row per environment.

All weights of a host and of the seeds in its slots are one vector, and so are its
activations and their gradients. A slot has room for the largest blueprint, unit after
unit, so that a smaller one is a prefix. Rows of a minibatch are the last axis.

    layer of a host   weight [out, in, tap], bias [out]
    seed in a slot    first [unit, in, tap], its bias [unit],
                      last [unit, ..., out, tap], its bias [out]

A tap is a position of a 3 x 3 kernel; a dense layer has one.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from esper.tasks.hosts import CONV, DENSE, Host, LayerShape


def _record(names: str) -> Any:  # noqa: ANN401
    return np.dtype([(name, np.int64) for name in names.split()], align=True)


LAYER = _record("kind inputs outputs high wide taps padded weight bias x z gz gx")
"""A layer: its shape; offsets of weights, inputs, outputs and their gradients."""
SEED = _record("place first first_bias last last_bias u hid gu ghid each")
"""A slot: its place; offsets of weights, units and gradients; inputs per unit."""


def inputs_per_unit(first: LayerShape, last: LayerShape) -> int:
    """Inputs of the second layer that come from one unit of the first."""
    return last.inputs // first.outputs


def place_geometries(host: Host) -> list[Geometry]:
    """Geometry of every place of a host: the pairs of layers that seeds span."""
    return [_geometry(*pair) for pair in pairwise(host.layers)]


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


class MemoryLayout:
    """Offsets of everything of a host with slots of so many units.

    Args:
        host: The declared host.
        units: Hidden units that a slot has room for.
        seeds_per_slot: Slots of each place; slot s stands at place s % places.
    """

    def __init__(self, host: Host, units: int, seeds_per_slot: int) -> None:
        self.shapes = shapes = host.layers
        self.units = units
        self.places = len(shapes) - 1
        self.slots = self.places * seeds_per_slot
        spans = [(*pair, inputs_per_unit(*pair)) for pair in pairwise(shapes)]
        of_layers = [(own.weights, own.outputs) for own in shapes]
        of_seeds = seeds_per_slot * [
            (
                units * first.inputs * first.taps,
                units,
                units * each * last.outputs * last.taps,
                last.outputs,
            )
            for first, last, each in spans
        ]
        self.lengths = [*chain(*of_layers, *of_seeds)]
        """Lengths of the parts of an environment's weights, in their order."""
        weights = accumulate(self.lengths, initial=0)
        layer_weights, seed_weights = _offsets(weights, of_layers, of_seeds)
        activations = [
            (
                own.inputs * own.padded,
                own.outputs * own.positions,
                own.outputs * own.padded,
                own.inputs * own.positions,
            )
            for own in shapes
        ]
        # The slots of a place share room for the gradients at their units.
        gradients = [
            (units * first.padded, units * each * last.positions)
            for first, last, each in spans
        ]
        hidden = seeds_per_slot * [
            (units * first.positions, units * each * last.padded)
            for first, last, each in spans
        ]
        ends = accumulate(chain(*activations, *gradients, *hidden), initial=0)
        layer_at, gradient_at, hidden_at = _offsets(
            ends, activations, gradients, hidden
        )
        self.layers: NDArray[Any] = np.array(
            [
                (
                    *(own.kind, own.inputs, own.outputs, own.high, own.wide),
                    *(own.taps, own.padded, *of_weights, *of_activations),
                )
                for own, of_weights, of_activations in zip(
                    shapes, layer_weights, layer_at, strict=True
                )
            ],
            dtype=LAYER,
        )
        self.seeds: NDArray[Any] = np.array(
            [
                (
                    *(slot % self.places, *seed_weights[slot], *hidden_at[slot]),
                    *(*gradient_at[slot % self.places], spans[slot % self.places][2]),
                )
                for slot in range(self.slots)
            ],
            dtype=SEED,
        )
        self.host_parameters = sum(chain(*of_layers))
        """Weights of the host, which come first."""
        self.host_activations = sum(chain(*activations))
        """Activations of the host per row of a minibatch, which come first."""
        self.parameters = next(weights)
        """Weights of host and seeds."""
        self.activations = next(ends)
        """Activations and gradients per row of a minibatch."""

    @property
    def tables(self) -> tuple[NDArray[Any], NDArray[Any], int]:
        """What the kernels read."""
        return self.layers, self.seeds, self.host_parameters

    def extent(self, slot: int) -> tuple[int, int]:
        """Where the weights of a slot's seed begin and end."""
        begins = [*self.seeds["first"].tolist(), self.parameters]
        return begins[slot], begins[slot + 1]

    def is_dense(self, place: int) -> bool:
        """Whether both layers of a place are dense."""
        first, last = self.shapes[place : place + 2]
        return first.kind == last.kind == DENSE


def _offsets(
    ends: Iterator[int], *tables: Sequence[tuple[int, ...]]
) -> list[list[tuple[int, ...]]]:
    """Offsets in the shape of tables of lengths, which lie behind each other."""
    return [[tuple(next(ends) for _ in row) for row in table] for table in tables]
