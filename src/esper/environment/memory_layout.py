"""Memory layout of a host with its seeds: one flat row per environment.

All weights of a host and of the seeds in its slots are one vector, and so are its
activations and their gradients. A slot has room for the largest blueprint, unit after
unit, so that a smaller one is a prefix. Rows of a minibatch are the last axis.

    layer of a host   weight [out, in, tap], bias [out]
    seed in a slot    first [unit, in, tap], its bias [unit],
                      last [unit, ..., out, tap], its bias [out]

A tap is a position of a 3 x 3 kernel; a dense layer has one. To the kernels all of
these are maps: a seed is two of them, from the inputs of one layer to its own units,
and from there to the outputs of the next layer.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from esper.tasks.hosts import CONV, DENSE, Host, LayerShape

MAP: Final[Any] = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("kind", "inputs", "outputs", "high", "wide", "taps", "padded"),
            *("weight", "bias", "by_out", "by_in", "x", "z", "gz", "gx"),
        )
    ],
    align=True,
)
"""A map: its shape; where its weights and biases are, and how far apart the weights of
two outputs and of two inputs; where its inputs, its outputs and their gradients are."""


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
        self.lengths: list[int] = []
        """Lengths of the parts of an environment's weights, in their order."""
        self.parameters = 0
        """Weights of host and seeds."""
        self.activations = 0
        """Activations and gradients per row of a minibatch."""
        layers = [self._map(own) for own in shapes]
        self.host_parameters = self.parameters
        """Weights of the host, which come first."""
        self.host_activations = self.activations
        """Activations of the host per row of a minibatch, which come first."""
        spans = [
            (
                replace(first, outputs=units),
                replace(last, inputs=units * inputs_per_unit(first, last)),
            )
            for first, last in pairwise(shapes)
        ]
        # The slots of a place share room for the gradients at their units.
        gradients = [
            (
                self._room(first.outputs * first.padded),
                self._room(last.inputs * last.positions),
            )
            for first, last in spans
        ]
        firsts, lasts = [], []
        for slot in range(self.slots):
            place = slot % self.places
            (first, last), (gz, gx) = spans[place], gradients[place]
            before, own = layers[place], layers[place + 1]
            firsts.append(self._map(first, x=before["x"], gz=gz, gx=before["gx"]))
            to = {"z": own["z"], "gz": own["gz"]}
            lasts.append(self._map(last, by_input=True, gx=gx, **to))
        self.layers, self.firsts, self.lasts = (
            np.array([tuple(each[name] for name in MAP.names) for each in maps], MAP)
            for maps in (layers, firsts, lasts)
        )
        """Maps of the host; first and last maps of the slots."""

    def _map(
        self, own: LayerShape, *, by_input: bool = False, **at: int
    ) -> dict[str, int]:
        """A map with room for its weights, and for activations that are nowhere yet."""
        rooms = {
            "x": own.inputs * own.padded,
            "z": own.outputs * own.positions,
            "gz": own.outputs * own.padded,
            "gx": own.inputs * own.positions,
        }
        weight, bias = self.parameters, self.parameters + own.weights
        self.lengths += [own.weights, own.outputs]
        self.parameters = bias + own.outputs
        return {
            **{name: getattr(own, name) for name in MAP.names[:7]},
            "weight": weight,
            "bias": bias,
            "by_out": own.taps if by_input else own.inputs * own.taps,
            "by_in": own.outputs * own.taps if by_input else own.taps,
            **{name: self._room(rooms[name]) for name in rooms if name not in at},
            **at,
        }

    def _room(self, length: int) -> int:
        """Where so many new activations lie."""
        self.activations += length
        return self.activations - length

    @property
    def tables(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]:
        """What the kernels read."""
        return self.layers, self.firsts, self.lasts, self.host_parameters

    def extent(self, slot: int) -> tuple[int, int]:
        """Where the weights of a slot's seed begin and end."""
        begins = [*self.firsts["weight"].tolist(), self.parameters]
        return begins[slot], begins[slot + 1]

    def is_dense(self, place: int) -> bool:
        """Whether both layers of a place are dense."""
        first, last = self.shapes[place : place + 2]
        return first.kind == last.kind == DENSE
