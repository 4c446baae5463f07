r"""Memory layout of a growing network: blocks of one vector, and axes of units.

Every hidden layer is one axis of units: those of the host, then those of each seed in
birth order. A weight block connects a range of units to a range of the next axis:

    host <- host    the host's own layer
    seed <- host    incoming weights of new units
    host <- seed    outgoing weights of new units
    seed <- seed    connections between seeds of neighbouring layers

A block belongs to the younger of its two ranges. The vector holds the host's blocks in
the order of `parameters_to_vector`, then those of each seed in birth order. A block is
`[out, in, tap]`; a tap is a position of a 3 x 3 kernel, and a dense layer has one. Rows
of a minibatch are the last axis of activations.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.tasks.hosts import LayerShape

HOST = 0
"""Owner of the host's units; the seed in slot q is owner q + 1."""


def _record(names: str) -> Any:  # noqa: ANN401
    return np.dtype([(name, np.int64) for name in names.split()], align=True)


LAYER = _record(
    "kind inputs outputs high wide taps padded x z gz gx biases weights end each"
)
"""A layer: shape; offsets of inputs, outputs and their gradients; range of its blocks,
biases first; inputs per unit of the axis before."""
BLOCK = _record("layer offset length out outs into ins out_owner in_owner owner")
"""A block: layer and part of the vector; ranges of outputs and inputs and their owners;
the younger of the two owners. A bias has no inputs."""


class Widening(NamedTuple):
    """New units of a place."""

    slot: int
    place: int
    units: int


class UnitRange(NamedTuple):
    """Consecutive units of one axis with the same owner."""

    owner: int
    begin: int
    units: int


class NetworkLayout:
    """Positions of all blocks and activations of one network."""

    def __init__(
        self, shapes: Sequence[LayerShape], seeds: Sequence[Widening] = ()
    ) -> None:
        self.shapes, self.seeds = tuple(shapes), tuple(seeds)
        self.axes = self._axes()
        self.blocks = self._blocks()
        self.parameters = int(self.blocks["length"].sum())
        """Weights and biases of host and seeds."""
        positions = np.array([own.positions for own in self.shapes])
        weights = self.blocks[self.blocks["ins"] > 0]
        self.macs = int((weights["length"] * positions[weights["layer"]]).sum())
        """Multiply-adds per row."""
        self.layers, self.activations = self._layers()

    @property
    def widths(self) -> list[int]:
        """Units of every axis, seeds included; the last is the output."""
        return [sum(part.units for part in axis) for axis in self.axes]

    def shared_with(self, other: "NetworkLayout") -> NDArray[np.bool_]:
        """Return which blocks the other layout has too, in the same order."""
        alive = [HOST, *(seed.slot + 1 for seed in other.seeds)]
        ends = self.blocks["out_owner"], self.blocks["in_owner"]
        shared: NDArray[np.bool_] = np.isin(ends[0], alive) & np.isin(ends[1], alive)
        return shared

    def parameters_of(self, blocks: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the positions of the parameters of these blocks."""
        chosen = self.blocks[blocks]
        starts = np.repeat(chosen["offset"], chosen["length"])
        ends = np.cumsum(chosen["length"])
        within = np.arange(len(starts)) - np.repeat(
            ends - chosen["length"], chosen["length"]
        )
        places: NDArray[np.int64] = starts + within
        return places

    def _axes(self) -> list[list[UnitRange]]:
        """Ranges of units of every axis; the last is the output."""
        axes = [[UnitRange(HOST, 0, own.outputs)] for own in self.shapes]
        for seed in self.seeds:
            axis = axes[seed.place]
            begin = axis[-1].begin + axis[-1].units
            axis.append(UnitRange(seed.slot + 1, begin, seed.units))
        return axes

    def _each(self, layer: int) -> int:
        """Inputs of a layer per unit of the axis before it."""
        if layer == 0:
            return 1
        return self.shapes[layer].inputs // self.shapes[layer - 1].outputs

    def _blocks(self) -> NDArray[Any]:
        """All blocks, layer by layer, biases first."""
        born = {HOST: 0} | {s.slot + 1: n + 1 for n, s in enumerate(self.seeds)}
        found: list[tuple[int, ...]] = []
        for layer, own in enumerate(self.shapes):
            each = self._each(layer)
            before = [UnitRange(HOST, 0, own.inputs // each)]
            if layer > 0:
                before = self.axes[layer - 1]
            for to in self.axes[layer]:
                nothing = (0, 0, to.owner, to.owner, to.owner)
                found.append((layer, 0, to.units, to.begin, to.units, *nothing))
            for to in self.axes[layer]:
                for since in before:
                    ins = since.units * each
                    younger = max(to.owner, since.owner, key=born.__getitem__)
                    ranges = (to.begin, to.units, since.begin * each, ins)
                    owners = (to.owner, since.owner, younger)
                    length = to.units * ins * own.taps
                    found.append((layer, 0, length, *ranges, *owners))
        blocks = np.array(found, dtype=BLOCK)
        # Sorted by age of the owner, then by layer, weights before biases.
        ages = np.array([born[int(owner)] for owner in blocks["owner"]])
        order = np.lexsort((blocks["ins"] == 0, blocks["layer"], ages))
        ends = np.cumsum(blocks["length"][order])
        blocks["offset"][order] = ends - blocks["length"][order]
        return blocks

    def _layers(self) -> tuple[NDArray[Any], int]:
        """Layers as records for the engine, and the size of the activations."""
        layers = np.zeros(len(self.shapes), dtype=LAYER)
        room, widths = 0, self.widths
        for n, own in enumerate(self.shapes):
            each = self._each(n)
            inputs = own.inputs if n == 0 else widths[n - 1] * each
            mine = np.flatnonzero(self.blocks["layer"] == n)
            sizes = (
                inputs * own.padded,
                widths[n] * own.positions,
                widths[n] * own.padded,
                inputs * own.positions,
            )
            x, z, gz, gx = (room + sum(sizes[:k]) for k in range(4))
            room += sum(sizes)
            layers[n] = (
                *(own.kind, inputs, widths[n], own.high, own.wide, own.taps),
                *(own.padded, x, z, gz, gx),
                *(mine[0], mine[0] + len(self.axes[n]), mine[-1] + 1, each),
            )
        return layers, room
