"""Convolutions for one model or many, and the forms that mix neighbours with them.

N models are one grouped convolution: their channels stand side by side and each model
is a group (or several). On a sequence a convolution is padded on the left alone, so
that no position ever reads a later one.

    DEPTHWISE    each channel by itself, linear        begins at zero
    CONV         all channels, of gelu(h)              begins at zero
    BOTTLENECK   up(gelu(mix(gelu(down(h)))))          `up` begins at zero
"""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from esper.growth.blueprints.gates import same_shape_fit
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from esper.growth.blueprints.layers import Layer, Params, axes, mix

CONVOLVE = {1: F.conv1d, 2: F.conv2d}
NEIGHBOURS = 3


def convolve(
    h: Float[Tensor, "..."],
    weight: Float[Tensor, "..."],
    bias: Tensor | None,
    kernel: Kernel,
    groups: int = 1,
) -> Float[Tensor, "..."]:
    """`h [B, C, ...]` by `weight [O, C / groups, ...]`, or both with an env axis."""
    count = len(kernel.size)
    walk = (kernel.stride, kernel.padding, kernel.dilation)
    if weight.dim() == count + 2:
        return CONVOLVE[count](h, weight, bias, *walk, groups)
    envs, outputs = weight.shape[:2]
    side_by_side = h.transpose(0, 1).flatten(1, 2)  # [batch, env * channels, ...]
    flat_bias = None if bias is None else bias.flatten()
    result = CONVOLVE[count](
        side_by_side, weight.flatten(0, 1), flat_bias, *walk, envs * groups
    )
    split = result.reshape(-1, envs, outputs, *result.shape[2:])
    return split.transpose(0, 1)


def pointwise(
    h: Float[Tensor, "..."],
    weight: Float[Tensor, "..."],
    bias: Tensor | None,
    layout: Layout,
) -> Float[Tensor, "..."]:
    """Mix channels at each position: a matrix, or a convolution of size one."""
    if layout.channels_first:
        return convolve(h, weight, bias, Kernel.same(1, axes(layout)))
    return mix(h, weight, bias)


def neighbours(
    h: Float[Tensor, "..."],
    weight: Float[Tensor, "..."],
    bias: Tensor | None,
    layout: Layout,
    groups: int = 1,
) -> Float[Tensor, "..."]:
    """Mix neighbouring positions and keep their number; a sequence only looks back."""
    size = weight.shape[-1]
    if layout.channels_first:
        return convolve(h, weight, bias, Kernel.same(size, axes(layout)), groups)
    past = F.pad(h.transpose(-1, -2), (size - 1, 0))
    return convolve(past, weight, bias, inside(size), groups).transpose(-1, -2)


def inside(size: int) -> Kernel:
    """A kernel over one axis without padding."""
    return Kernel((size,), (1,), (0,), (1,))


def pointwise_layer(
    inputs: int,
    outputs: int,
    layout: Layout,
    positions: int,
    *,
    bias: bool = True,
    zero: bool = False,
) -> Layer:
    """The layer that `pointwise` applies."""
    return Layer(
        inputs=inputs,
        outputs=outputs,
        positions=positions,
        kernel=Kernel.same(1, axes(layout)) if layout.channels_first else None,
        bias=bias,
        zero=zero,
    )


def neighbour_layer(
    width: int,
    size: int,
    layout: Layout,
    positions: int,
    *,
    groups: int = 1,
    zero: bool = False,
) -> Layer:
    """The layer that `neighbours` applies."""
    return Layer(
        inputs=width,
        outputs=width,
        positions=positions,
        kernel=Kernel.same(size, axes(layout)),
        groups=groups,
        zero=zero,
    )


def channels_fit(geometry: Geometry, size: int) -> str:
    """Why inlet and outlet differ in more than channels, if they do."""
    del size
    same_positions = spots(geometry.inlet_shape, geometry.inlet_layout) == spots(
        geometry.outlet_shape, geometry.outlet_layout
    )
    if geometry.inlet_layout is geometry.outlet_layout and same_positions:
        return ""
    return (
        "needs an inlet and an outlet that differ in channels alone, they are "
        f"{geometry.inlet_shape} and {geometry.outlet_shape}"
    )


def spots(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """A shape without its channels."""
    return shape[1:] if layout.channels_first else shape[:-1]


def neighbours_fit(geometry: Geometry, size: int) -> str:
    """Why neighbours cannot be mixed in place, if they cannot."""
    if geometry.outlet_layout is Layout.VECTOR:
        return "needs positions to mix, the outlet is a vector"
    if reason := same_shape_fit(geometry, size):
        return reason
    if geometry.outlet_layout.channels_first and size % 2 == 0:
        return f"needs an odd kernel to keep the positions, it is {size}"
    return ""


def depthwise_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """One kernel per channel."""
    width, layout = geometry.outlet_width, geometry.outlet_layout
    positions = geometry.outlet_positions
    return {
        "last": neighbour_layer(width, size, layout, positions, groups=width, zero=True)
    }


def depthwise(
    params: Params, h: Tensor, geometry: Geometry, middle: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """Each channel's neighbours, weighted."""
    del middle
    layout, width = geometry.outlet_layout, geometry.outlet_width
    return neighbours(h, params["last"], params["last_bias"], layout, width)


def conv_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """One full convolution."""
    width, layout = geometry.outlet_width, geometry.outlet_layout
    positions = geometry.outlet_positions
    return {"last": neighbour_layer(width, size, layout, positions, zero=True)}


def conv(
    params: Params, h: Tensor, geometry: Geometry, middle: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """All channels' neighbours after an activation."""
    del middle
    layout = geometry.outlet_layout
    return neighbours(F.gelu(h), params["last"], params["last_bias"], layout)


def bottleneck_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """Down to `size` channels, mix them with their neighbours, and up."""
    layout, positions = geometry.outlet_layout, geometry.outlet_positions
    if layout is Layout.VECTOR:
        between = Layer(inputs=size, outputs=size)
    else:
        between = neighbour_layer(size, NEIGHBOURS, layout, positions)
    return {
        "first": pointwise_layer(geometry.inlet_width, size, layout, positions),
        "between": between,
        "last": pointwise_layer(
            size, geometry.outlet_width, layout, positions, zero=True
        ),
    }


def bottleneck(
    params: Params, h: Tensor, geometry: Geometry, middle: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """Few channels, mixed with their neighbours."""
    del middle
    layout = geometry.outlet_layout
    down = F.gelu(pointwise(h, params["first"], params["first_bias"], layout))
    if layout is Layout.VECTOR:
        mixed = mix(down, params["between"], params["between_bias"])
    else:
        mixed = neighbours(down, params["between"], params["between_bias"], layout)
    return pointwise(F.gelu(mixed), params["last"], params["last_bias"], layout)
