"""Shapes and layouts of the tensors at a place.

A seed reads the tensor at its slot's inlet and writes to the one at its outlet. Five
layouts are served: vector `[B, D]`, sequence `[B, T, D]`, signal `[B, C, L]`, image
`[B, C, H, W]` and grid `[B, H, W, D]`, which may have more axes of positions. Width is
the number of channels, wherever the layout keeps them.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Annotated

from pydantic import FailFast, Field

Shape = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(max_length=8), FailFast()
]
"""Sizes along some axes; the limits hold for those that are read from a file."""


class Layout(IntEnum):
    """How a tensor is laid out; the batch comes first."""

    VECTOR = 0
    SEQUENCE = 1
    SIGNAL = 2
    IMAGE = 3
    GRID = 4

    @property
    def channels_first(self) -> bool:
        """Whether channels come before positions."""
        return self.axes_behind > 0

    @property
    def axes_behind(self) -> int:
        """Axes of positions behind the channels."""
        return {Layout.SIGNAL: 1, Layout.IMAGE: 2}.get(self, 0)


@dataclass(frozen=True, slots=True)
class Kernel:
    """The window of a convolution; one number per spatial axis."""

    size: Shape
    stride: Shape
    padding: Shape
    dilation: Shape

    @classmethod
    def same(cls, size: int, axes: int) -> "Kernel":
        """A kernel that keeps the positions."""
        one = (1,) * axes
        return cls((size,) * axes, one, (size // 2,) * axes, one)


@dataclass(frozen=True, slots=True)
class Gate:
    """A second layer whose output meets the first one's, as in a gated MLP."""

    kernel: Kernel | None
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Where a seed would stand: shapes at its inlet and outlet, without the batch."""

    inlet_layout: Layout
    """Layout of the tensor that the seed reads."""
    outlet_layout: Layout
    """Layout of the tensor that the seed writes to."""
    inlet_shape: Shape
    """Shape of the tensor that the seed reads."""
    outlet_shape: Shape
    """Shape of the tensor that the seed writes to."""
    residual: bool
    """Whether inlet and outlet are the same tensor."""
    inlet_kernel: Kernel | None = None
    """Of the convolution that the inlet leads into; None if it is no convolution."""
    outlet_kernel: Kernel | None = None
    """Of the convolution that the outlet comes from; None if it is no convolution."""
    inlet_bias: bool = True
    """Whether the layer that the inlet leads into has a bias."""
    gate: Gate | None = None
    """The layer beside the first one of a span, if their outputs meet before the
    second: it reads the same tensor and gets as many new units."""
    beside: bool = False
    """Whether the slot stands beside one linear or convolution layer."""
    spans: bool = False
    """Whether the slot spans two layers and only channel-wise work between them, so
    that new hidden units can be put there."""
    hidden_shape: Shape = ()
    """Shape of the tensor between the two layers of a span, as the second reads it."""
    unit_inputs: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Inputs of the second layer that come from one unit of the first (positions that
    a flatten lines up); 1 unless a convolution is flattened into a linear layer."""
    why_no_span: str = ""
    """What stands in the way of new hidden units, if anything."""

    @property
    def inlet_width(self) -> int:
        """Channels at the inlet."""
        return width(self.inlet_shape, self.inlet_layout)

    @property
    def outlet_width(self) -> int:
        """Channels at the outlet."""
        return width(self.outlet_shape, self.outlet_layout)

    @property
    def outlet_positions(self) -> int:
        """Positions at the outlet: 1 for a vector."""
        return prod(self.outlet_shape) // self.outlet_width

    @property
    def inlet_positions(self) -> int:
        """Positions at the inlet: 1 for a vector."""
        return prod(self.inlet_shape) // self.inlet_width

    @property
    def keeps_shape(self) -> bool:
        """Whether the inlet's tensor can be added to the outlet's as it is."""
        return (
            self.inlet_layout is self.outlet_layout
            and self.inlet_shape == self.outlet_shape
        )


def width(shape: tuple[int, ...], layout: Layout) -> int:
    """Channels of a tensor of this shape (without its batch axis)."""
    return shape[0] if layout.channels_first else shape[-1]


def spatial_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """A shape without its channels: the positions along each axis."""
    return shape[1:] if layout.channels_first else shape[:-1]


def convolved(positions: tuple[int, ...], kernel: Kernel) -> tuple[int, ...]:
    """Positions along each axis after a convolution."""
    axes = zip(
        positions,
        kernel.size,
        kernel.stride,
        kernel.padding,
        kernel.dilation,
        strict=True,
    )
    return tuple(
        (length + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        for length, size, stride, padding, dilation in axes
    )
