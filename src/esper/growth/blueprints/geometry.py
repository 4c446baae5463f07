"""Shapes and layouts of the tensors at an insertion point.

A seed reads the tensor at its slot's inlet and adds to the tensor at its outlet. There
are five layouts: vector `[B, D]`, sequence `[B, T, D]`, signal `[B, C, L]`, image
`[B, C, H, W]` and grid `[B, H, W, D]`, which may have more axes of positions. Width is
the number of channels.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Annotated

from pydantic import FailFast, Field

Shape = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(max_length=8), FailFast()
]
"""Sizes of some axes; the limits apply to shapes from a file."""


class Layout(IntEnum):
    """Order of the axes of a tensor; the batch axis is first."""

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
    """Size, stride, padding and dilation of a convolution, one number per axis."""

    size: Shape
    stride: Shape
    padding: Shape
    dilation: Shape

    @classmethod
    def same(cls, size: int, axes: int) -> "Kernel":
        """A kernel that keeps the number of positions."""
        one = (1,) * axes
        return cls((size,) * axes, one, (size // 2,) * axes, one)


@dataclass(frozen=True, slots=True)
class Gate:
    """A second layer whose output is combined with the first one's (gated MLP)."""

    kernel: Kernel | None
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shapes and layers at the inlet and outlet of a seed, without the batch axis."""

    inlet_layout: Layout
    """Layout of the tensor that the seed reads."""
    outlet_layout: Layout
    """Layout of the tensor that the seed adds to."""
    inlet_shape: Shape
    """Shape of the tensor that the seed reads."""
    outlet_shape: Shape
    """Shape of the tensor that the seed adds to."""
    residual: bool
    """Whether inlet and outlet are the same tensor."""
    inlet_kernel: Kernel | None = None
    """Kernel of the convolution that reads the inlet; None for other modules."""
    outlet_kernel: Kernel | None = None
    """Kernel of the convolution before the outlet; None for other modules."""
    inlet_bias: bool = True
    """Whether the layer that reads the inlet has a bias."""
    gate: Gate | None = None
    """The layer that reads the same tensor as the first layer of a span and joins its
    output, if any; it gets as many new units."""
    beside: bool = False
    """Whether the slot is parallel to one linear or convolution layer."""
    spans: bool = False
    """Whether new hidden units fit: the slot spans two layers with only channel-wise
    steps between them."""
    hidden_shape: Shape = ()
    """Shape of the second layer's input, if the slot is a span."""
    unit_inputs: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Inputs of the second layer per unit of the first; above 1 if a convolution is
    flattened into a linear layer."""
    why_no_span: str = ""
    """Why new hidden units do not fit; empty if they do."""

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
        """Whether inlet and outlet have the same layout and shape."""
        same_layout = self.inlet_layout is self.outlet_layout
        return same_layout and self.inlet_shape == self.outlet_shape


def width(shape: tuple[int, ...], layout: Layout) -> int:
    """Number of channels of a shape without its batch axis."""
    return shape[0] if layout.channels_first else shape[-1]


def spatial_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """A shape without its channels."""
    return shape[1:] if layout.channels_first else shape[:-1]


def convolved(positions: tuple[int, ...], kernel: Kernel) -> tuple[int, ...]:
    """Spatial shape after a convolution."""
    numbers = (kernel.size, kernel.stride, kernel.padding, kernel.dilation)
    return tuple(
        (length + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        for length, size, stride, padding, dilation in zip(
            positions, *numbers, strict=True
        )
    )
