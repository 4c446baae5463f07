r"""ATTENTION: every position reads the others; on a sequence only those before it.

    x = norm(h),   q, k, v = x W,   out = softmax(q k' / sqrt(d)) v,   y = out B + b

The norm is over channels and has no weights. B and b begin at zero. The weight W keeps
its outputs apart as `[inputs, 3, heads, width / heads]`.
"""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from esper.growth.blueprints.convolutions import neighbours_fit
from esper.growth.blueprints.geometry import Geometry, Layout
from esper.growth.blueprints.layers import Layer, Params, axes, mix

MOST_POSITIONS = 1024


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


def attention_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """Queries, keys and values in one matrix, and the way out."""
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


def attention_macs(geometry: Geometry, size: int) -> int:
    """Every position with every other, once for the weights and once for the sum."""
    del size
    return 2 * geometry.outlet_positions**2 * geometry.outlet_width


def attention(
    params: Params, h: Tensor, geometry: Geometry, middle: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """What the positions say to each other."""
    del middle
    layout = geometry.outlet_layout
    count = axes(layout)
    x = h
    if layout.channels_first:
        x = h.flatten(-count).transpose(-1, -2)  # [..., positions, channels]
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
