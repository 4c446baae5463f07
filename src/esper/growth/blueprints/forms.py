r"""The forms: families of functions of the tensor at a slot's inlet.

    SCALE_SHIFT      h a + b
    SQUEEZE_EXCITE   h (2 sigmoid(W2 relu(W1 pool(h) + b1) + b2) - 1)
    LOW_RANK         B (A h)                     beside a layer, an adapter of it
    DEPTHWISE        each channel's neighbours, weighted
    WIDEN            B middle(A h + a)           new hidden units between two layers
    RESIDUAL_MLP     B gelu(A h + a) + b
    BOTTLENECK       up(gelu(mix(gelu(down(h)))))
    CONV             a convolution of gelu(h)
    ATTENTION        softmax(q k' / sqrt(d)) v B + b,   q, k, v = norm(h) W

A form says where it fits, which layers it has, what it costs and how it is applied. All
are zero at birth, by a zero that is their very last operation (`last`), and learn from
there. On a sequence no form looks ahead: `pool` is the mean up to each position and
attention is causal. No form looks at other samples of the batch. `apply` takes
parameters and inputs of one model or, with a leading env axis, of many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from esper.contracts.blueprints import Form
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout, convolved, spots
from esper.growth.blueprints.layers import (
    Layer,
    Params,
    axes,
    convolve,
    mix,
    neighbour_layer,
    neighbours,
    per_channel,
    pointwise,
    pointwise_layer,
)

Middle = Callable[[Tensor], Tensor]
BOTTLENECK_KERNEL: Final = 3
MOST_POSITIONS: Final = 1024
"""Positions that attention is offered for."""


@dataclass(frozen=True, slots=True)
class FormSpec:
    """A form as pure functions of a place and a size."""

    fits: Callable[[Geometry, int], str]
    """Empty if it fits there, else why it does not."""
    layers: Callable[[Geometry, int], dict[str, Layer]]
    """Its layers by name; the one called `last` begins at zero."""
    apply: Callable[[Params, Tensor, Geometry, Middle], Tensor]
    """Parameters, inlet, place and what the host does between two layers (for a
    widening seed only), to a tensor shaped like the outlet."""
    further_macs: Callable[[Geometry], int] = lambda geometry: 0
    """Multiply-adds per sample outside its layers."""

    def shapes(self, geometry: Geometry, size: int) -> dict[str, tuple[int, ...]]:
        """Parameter shapes by name; a layer's bias is called `<layer>_bias`."""
        return {
            key: shape
            for name, layer in self.layers(geometry, size).items()
            for key, shape in layer.shapes(name).items()
        }

    def macs(self, geometry: Geometry, size: int) -> int:
        """Multiply-adds per sample."""
        layers = self.layers(geometry, size).values()
        return sum(layer.macs for layer in layers) + self.further_macs(geometry)

    def init(
        self, geometry: Geometry, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """First parameters, float32 on the CPU, drawn from `generator` alone."""
        return {
            key: value
            for name, layer in self.layers(geometry, size).items()
            for key, value in layer.init(name, generator).items()
        }


# Where forms fit.


def same_shape_fit(geometry: Geometry, _size: int) -> str:
    """Why the outlet is not shaped like the inlet, if it is not."""
    if geometry.keeps_shape:
        return ""
    return (
        "needs an outlet shaped like the inlet, they are "
        f"{geometry.outlet_shape} and {geometry.inlet_shape}"
    )


def channels_fit(geometry: Geometry, _size: int) -> str:
    """Why inlet and outlet differ in more than channels, if they do."""
    same_positions = spots(geometry.inlet_shape, geometry.inlet_layout) == spots(
        geometry.outlet_shape, geometry.outlet_layout
    )
    if geometry.inlet_layout is geometry.outlet_layout and same_positions:
        return ""
    return (
        "needs an inlet and an outlet that differ in channels alone, they are "
        f"{geometry.inlet_shape} and {geometry.outlet_shape}"
    )


def neighbours_fit(geometry: Geometry, size: int) -> str:
    """Why neighbours cannot be mixed in place, if they cannot."""
    if geometry.outlet_layout is Layout.VECTOR:
        return "needs positions to mix, the outlet is a vector"
    if reason := same_shape_fit(geometry, size):
        return reason
    if geometry.outlet_layout.channels_first and size % 2 == 0:
        return f"needs an odd kernel to keep the positions, it is {size}"
    return ""


def low_rank_fit(geometry: Geometry, size: int) -> str:
    """Why no adapter fits here, if none does."""
    kernel = adapted_kernel(geometry)
    if kernel is None:
        return channels_fit(geometry, size)
    inlet = spots(geometry.inlet_shape, geometry.inlet_layout)
    after = convolved(inlet, kernel)
    if after == spots(geometry.outlet_shape, geometry.outlet_layout):
        return ""
    return (
        f"needs the outlet of the convolution itself, which has positions {after}, "
        f"the outlet is {geometry.outlet_shape}"
    )


def widen_fit(geometry: Geometry, _size: int) -> str:
    """Why no hidden units can be put here, if none can."""
    if not geometry.spans:
        return geometry.why_no_span or "needs two layers to put hidden units between"
    ends = (
        ("inlet", geometry.inlet_layout, geometry.inlet_kernel),
        ("outlet", geometry.outlet_layout, geometry.outlet_kernel),
    )
    for name, layout, kernel in ends:
        if layout.channels_first is (kernel is None):
            return (
                f"needs a layer over channels at its {name}, which is a "
                f"{layout.name.lower()}"
            )
    return ""


def attention_fit(geometry: Geometry, size: int) -> str:
    """Why `size` heads cannot attend here, if they cannot."""
    if reason := neighbours_fit(geometry, 1):
        return reason
    if geometry.outlet_positions > MOST_POSITIONS:
        return (
            f"attends over at most {MOST_POSITIONS} positions, here are "
            f"{geometry.outlet_positions}"
        )
    if geometry.outlet_width % size:
        return f"needs a width that {size} heads share, it is {geometry.outlet_width}"
    return ""


# Gates.


def scale_shift_layers(geometry: Geometry, _size: int) -> dict[str, Layer]:
    """Two numbers per channel."""
    width, positions = geometry.outlet_width, geometry.outlet_positions
    return {
        "last": Layer(
            inputs=width, outputs=width, positions=positions, diagonal=True, zero=True
        )
    }


def scale_shift(
    params: Params, h: Tensor, geometry: Geometry, _middle: Middle
) -> Float[Tensor, "..."]:
    """Each channel, scaled and shifted."""
    layout = geometry.outlet_layout
    scale = per_channel(params["last"], h, layout)
    return h * scale + per_channel(params["last_bias"], h, layout)


def squeeze_excite_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """From the pooled channels to `width / size` and back, once per pool."""
    width = geometry.outlet_width
    hidden = max(1, width // size)
    sequence = geometry.outlet_layout is Layout.SEQUENCE
    pools = geometry.outlet_positions if sequence else 1
    return {
        "first": Layer(inputs=width, outputs=hidden, positions=pools),
        "last": Layer(inputs=hidden, outputs=width, positions=pools, zero=True),
    }


def squeeze_excite_macs(geometry: Geometry) -> int:
    """The gate times every channel at every position."""
    return geometry.outlet_width * geometry.outlet_positions


def squeeze_excite(
    params: Params, h: Tensor, geometry: Geometry, _middle: Middle
) -> Float[Tensor, "..."]:
    """Each channel, scaled by a function of all channels' means."""
    pooled = pool(h, geometry.outlet_layout)
    hidden = mix(pooled, params["first"], params["first_bias"]).relu()
    gate = 2 * mix(hidden, params["last"], params["last_bias"]).sigmoid() - 1
    for _ in range(h.dim() - gate.dim()):
        gate = gate.unsqueeze(-1)
    return h * gate


def pool(h: Float[Tensor, "..."], layout: Layout) -> Float[Tensor, "..."]:
    """Mean over the positions, `[..., C]`; per prefix `[..., T, C]` on a sequence."""
    if layout is Layout.VECTOR:
        return h
    if layout is Layout.SEQUENCE:
        lengths = torch.arange(1, h.shape[-2] + 1, dtype=h.dtype, device=h.device)
        return h.cumsum(-2) / lengths.unsqueeze(-1)
    return h.mean(-1) if layout is Layout.SIGNAL else h.mean((-2, -1))


# Two maps with something between them.


def adapted_kernel(geometry: Geometry) -> Kernel | None:
    """The kernel of the convolution that the slot is beside, if there is one."""
    return geometry.outlet_kernel if geometry.beside else None


def low_rank_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """Down to `size` channels as the adapted layer does, and up."""
    first = pointwise_layer(geometry, geometry.inlet_width, size, bias=False)
    kernel = adapted_kernel(geometry)
    if kernel is not None:
        first = replace(first, kernel=kernel)
    width = geometry.outlet_width
    last = pointwise_layer(geometry, size, width, bias=False, zero=True)
    return {"first": first, "last": last}


def low_rank(
    params: Params, h: Tensor, geometry: Geometry, _middle: Middle
) -> Float[Tensor, "..."]:
    """Linear, through few channels."""
    kernel = adapted_kernel(geometry)
    if kernel is None:
        down = pointwise(h, params["first"], None, geometry.inlet_layout)
    else:
        down = convolve(h, params["first"], None, kernel)
    return pointwise(down, params["last"], None, geometry.outlet_layout)


def widen_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """A layer like the host's first to `size` units, and one like its second.

    A flattened convolution hands each unit to the second layer as `unit_inputs`
    inputs, side by side.
    """
    positions = geometry.inlet_positions
    if geometry.inlet_kernel is not None:
        inlet = spots(geometry.inlet_shape, geometry.inlet_layout)
        positions = prod(convolved(inlet, geometry.inlet_kernel))
    return {
        "first": Layer(
            inputs=geometry.inlet_width,
            outputs=size,
            positions=positions,
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
    params: Params, h: Tensor, geometry: Geometry, middle: Middle
) -> Float[Tensor, "..."]:
    """What new hidden units would add to the second layer's outputs."""
    units = _like(h, params["first"], params["first_bias"], geometry.inlet_kernel)
    return _like(middle(units), params["last"], None, geometry.outlet_kernel)


def _like(
    h: Float[Tensor, "..."],
    weight: Float[Tensor, "..."],
    bias: Tensor | None,
    kernel: Kernel | None,
) -> Float[Tensor, "..."]:
    """The host's kind of layer: linear without a kernel, a convolution with one."""
    return mix(h, weight, bias) if kernel is None else convolve(h, weight, bias, kernel)


def residual_mlp_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """Two maps over channels."""
    return {
        "first": pointwise_layer(geometry, geometry.inlet_width, size),
        "last": pointwise_layer(geometry, size, geometry.outlet_width, zero=True),
    }


def residual_mlp(
    params: Params, h: Tensor, geometry: Geometry, _middle: Middle
) -> Float[Tensor, "..."]:
    """A network with one hidden layer at every position."""
    layout = geometry.outlet_layout
    hidden = F.gelu(pointwise(h, params["first"], params["first_bias"], layout))
    return pointwise(hidden, params["last"], params["last_bias"], layout)


# Convolutions and attention: forms that mix positions.


def depthwise_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """One kernel per channel."""
    width = geometry.outlet_width
    return {"last": neighbour_layer(geometry, width, size, groups=width, zero=True)}


def depthwise(
    params: Params, h: Tensor, geometry: Geometry, _middle: Middle
) -> Float[Tensor, "..."]:
    """Each channel's neighbours, weighted."""
    layout, width = geometry.outlet_layout, geometry.outlet_width
    return neighbours(h, params["last"], params["last_bias"], layout, width)


def conv_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """One full convolution."""
    return {"last": neighbour_layer(geometry, geometry.outlet_width, size, zero=True)}


def conv(
    params: Params, h: Tensor, geometry: Geometry, _middle: Middle
) -> Float[Tensor, "..."]:
    """All channels' neighbours after an activation."""
    layout = geometry.outlet_layout
    return neighbours(F.gelu(h), params["last"], params["last_bias"], layout)


def bottleneck_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """Down to `size` channels, mix them with their neighbours, and up."""
    between = Layer(inputs=size, outputs=size)
    if geometry.outlet_layout is not Layout.VECTOR:
        between = neighbour_layer(geometry, size, BOTTLENECK_KERNEL)
    return {
        "first": pointwise_layer(geometry, geometry.inlet_width, size),
        "between": between,
        "last": pointwise_layer(geometry, size, geometry.outlet_width, zero=True),
    }


def bottleneck(
    params: Params, h: Tensor, geometry: Geometry, _middle: Middle
) -> Float[Tensor, "..."]:
    """Few channels, mixed with their neighbours."""
    layout = geometry.outlet_layout
    down = F.gelu(pointwise(h, params["first"], params["first_bias"], layout))
    if layout is Layout.VECTOR:
        mixed = mix(down, params["between"], params["between_bias"])
    else:
        mixed = neighbours(down, params["between"], params["between_bias"], layout)
    return pointwise(F.gelu(mixed), params["last"], params["last_bias"], layout)


def attention_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """Queries, keys and values in one matrix, and the output projection."""
    width, positions = geometry.outlet_width, geometry.outlet_positions
    return {
        "first": Layer(
            inputs=width,
            outputs=3 * width,
            positions=positions,
            split=(3, size, width // size),
            bias=False,
        ),
        "last": Layer(inputs=width, outputs=width, positions=positions, zero=True),
    }


def attention_macs(geometry: Geometry) -> int:
    """Every position with every other, once for the weights and once for the sum."""
    return 2 * geometry.outlet_positions**2 * geometry.outlet_width


def attention(
    params: Params, h: Tensor, geometry: Geometry, _middle: Middle
) -> Float[Tensor, "..."]:
    """Self-attention over positions; the norm is over channels, without weights."""
    layout = geometry.outlet_layout
    x = h
    if layout.channels_first:
        x = h.flatten(-axes(layout)).transpose(-1, -2)  # [..., positions, channels]
    weight = params["first"]
    heads, depth = weight.shape[-2:]
    x = F.layer_norm(x, (heads * depth,))
    lead = x.shape[:-1]
    triple = mix(x, weight.flatten(-3), None).reshape(-1, lead[-1], 3, heads, depth)
    queries, keys, values = triple.permute(2, 0, 3, 1, 4)  # [rows, head, pos, depth]
    causal = layout is Layout.SEQUENCE
    read = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
    joined = read.transpose(1, 2).reshape(*lead, heads * depth)
    out = mix(joined, params["last"], params["last_bias"])
    if layout.channels_first:
        return out.transpose(-1, -2).reshape(h.shape)
    return out


FORMS: Final[Mapping[Form, FormSpec]] = MappingProxyType(
    {
        Form.SCALE_SHIFT: FormSpec(same_shape_fit, scale_shift_layers, scale_shift),
        Form.SQUEEZE_EXCITE: FormSpec(
            same_shape_fit, squeeze_excite_layers, squeeze_excite, squeeze_excite_macs
        ),
        Form.LOW_RANK: FormSpec(low_rank_fit, low_rank_layers, low_rank),
        Form.DEPTHWISE: FormSpec(neighbours_fit, depthwise_layers, depthwise),
        Form.WIDEN: FormSpec(widen_fit, widen_layers, widen),
        Form.RESIDUAL_MLP: FormSpec(channels_fit, residual_mlp_layers, residual_mlp),
        Form.BOTTLENECK: FormSpec(channels_fit, bottleneck_layers, bottleneck),
        Form.CONV: FormSpec(neighbours_fit, conv_layers, conv),
        Form.ATTENTION: FormSpec(
            attention_fit, attention_layers, attention, attention_macs
        ),
    }
)
