r"""Two maps with something between them: one form under three names.

    LOW_RANK       B (A h)                     beside a layer it is an adapter of it
    WIDEN          B middle(A h + a)           new hidden units between two layers
    RESIDUAL_MLP   B gelu(A h + a) + b         a small network of its own

B and b begin at zero. A widening seed copies the kinds of the two layers it stands
between, and `middle` is what the host does between them, with the seed's own norms.
With an env axis `middle` is handed `[E, B, ...]`. A flattened convolution hands each
new unit to the second layer as `unit_inputs` inputs, side by side.
"""

from collections.abc import Callable
from math import prod

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from esper.growth.blueprints.convolutions import (
    channels_fit,
    convolve,
    pointwise,
    pointwise_layer,
    spots,
)
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from esper.growth.blueprints.layers import Layer, Params, mix


def low_rank_fit(geometry: Geometry, size: int) -> str:
    """Why no adapter fits here, if none does."""
    kernel = adapted_kernel(geometry)
    if kernel is None:
        return channels_fit(geometry, size)
    walked = walk(spots(geometry.inlet_shape, geometry.inlet_layout), kernel)
    if walked == spots(geometry.outlet_shape, geometry.outlet_layout):
        return ""
    return (
        f"needs the outlet of the convolution itself, which has positions {walked}, "
        f"the outlet is {geometry.outlet_shape}"
    )


def low_rank_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """Down to `size` channels as the adapted layer walks, and up."""
    layout, positions = geometry.outlet_layout, geometry.outlet_positions
    kernel = adapted_kernel(geometry)
    if kernel is None:
        first = pointwise_layer(
            geometry.inlet_width, size, layout, positions, bias=False
        )
    else:
        first = Layer(
            inputs=geometry.inlet_width,
            outputs=size,
            positions=positions,
            kernel=kernel,
            bias=False,
        )
    width = geometry.outlet_width
    last = pointwise_layer(size, width, layout, positions, bias=False, zero=True)
    return {"first": first, "last": last}


def low_rank(
    params: Params, h: Tensor, geometry: Geometry, middle: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """Linear, through few channels."""
    del middle
    kernel = adapted_kernel(geometry)
    if kernel is None:
        down = pointwise(h, params["first"], None, geometry.inlet_layout)
    else:
        down = convolve(h, params["first"], None, kernel)
    return pointwise(down, params["last"], None, geometry.outlet_layout)


def widen_fit(geometry: Geometry, size: int) -> str:
    """Why no hidden units can be put here, if none can."""
    del size
    if not geometry.spans:
        return geometry.why_no_span or "needs two layers to put hidden units between"
    ends = (
        ("inlet", geometry.inlet_layout, geometry.inlet_kernel),
        ("outlet", geometry.outlet_layout, geometry.outlet_kernel),
    )
    for name, layout, kernel in ends:
        if layout.channels_first is (kernel is None):
            return (
                f"needs a layer over channels at its {name}, which is a {_say(layout)}"
            )
    return ""


def widen_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """A layer like the host's first to `size` units, and one like its second."""
    return {
        "first": Layer(
            inputs=geometry.inlet_width,
            outputs=size,
            positions=first_positions(geometry),
            kernel=geometry.inlet_kernel,
        ),
        "last": Layer(
            inputs=size * geometry.unit_inputs,
            outputs=geometry.outlet_width,
            positions=geometry.outlet_positions,
            kernel=geometry.outlet_kernel,
            bias=False,
            zero=True,
        ),
    }


def widen(
    params: Params, h: Tensor, geometry: Geometry, middle: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """What new hidden units would add to the second layer's outputs."""
    units = like(h, params["first"], params["first_bias"], geometry.inlet_kernel)
    return like(middle(units), params["last"], None, geometry.outlet_kernel)


def residual_mlp_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """Two maps over channels."""
    layout, positions = geometry.outlet_layout, geometry.outlet_positions
    width = geometry.outlet_width
    return {
        "first": pointwise_layer(geometry.inlet_width, size, layout, positions),
        "last": pointwise_layer(size, width, layout, positions, zero=True),
    }


def residual_mlp(
    params: Params, h: Tensor, geometry: Geometry, middle: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """A network with one hidden layer at every position."""
    del middle
    layout = geometry.outlet_layout
    hidden = F.gelu(pointwise(h, params["first"], params["first_bias"], layout))
    return pointwise(hidden, params["last"], params["last_bias"], layout)


def adapted_kernel(geometry: Geometry) -> Kernel | None:
    """The kernel of the convolution that the slot stands beside, if there is one."""
    return geometry.outlet_kernel if geometry.beside else None


def like(
    h: Float[Tensor, "..."],
    weight: Float[Tensor, "..."],
    bias: Tensor | None,
    kernel: Kernel | None,
) -> Float[Tensor, "..."]:
    """The host's kind of layer: linear without a kernel, a convolution with one."""
    return mix(h, weight, bias) if kernel is None else convolve(h, weight, bias, kernel)


def first_positions(geometry: Geometry) -> int:
    """Positions of a span's first layer's outputs."""
    if geometry.inlet_kernel is None:
        return geometry.inlet_positions
    shape = spots(geometry.inlet_shape, geometry.inlet_layout)
    return prod(walk(shape, geometry.inlet_kernel))


def walk(positions: tuple[int, ...], kernel: Kernel) -> tuple[int, ...]:
    """Positions after a convolution."""
    steps = zip(
        positions,
        kernel.size,
        kernel.stride,
        kernel.padding,
        kernel.dilation,
        strict=True,
    )
    return tuple(
        (length + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        for length, size, stride, padding, dilation in steps
    )


def _say(layout: Layout) -> str:
    return layout.name.lower()
