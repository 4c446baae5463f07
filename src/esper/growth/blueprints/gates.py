r"""Forms that scale channels, and the zero gate for modules that do not begin at zero.

    SCALE_SHIFT      h a + b                                           a = b = 0
    SQUEEZE_EXCITE   h (2 sigmoid(W2 relu(W1 pool(h) + b1) + b2) - 1)  W2 = b2 = 0

`pool` is the mean over positions; on a sequence it is the mean over the positions up to
each one, so that nothing looks ahead; a vector is its own pool.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esper.growth.blueprints.geometry import Geometry, Layout
from esper.growth.blueprints.layers import Layer, Params, mix, per_channel


def same_shape_fit(geometry: Geometry, size: int) -> str:
    """Why the inlet cannot be scaled into the outlet, if it cannot."""
    del size
    if geometry.keeps_shape:
        return ""
    return (
        "needs an outlet shaped like the inlet, they are "
        f"{geometry.outlet_shape} and {geometry.inlet_shape}"
    )


def scale_shift_layers(geometry: Geometry, size: int) -> dict[str, Layer]:
    """Two numbers per channel."""
    del size
    width = geometry.outlet_width
    positions = geometry.outlet_positions
    return {
        "last": Layer(
            inputs=width, outputs=width, positions=positions, diagonal=True, zero=True
        )
    }


def scale_shift(
    params: Params, h: Tensor, geometry: Geometry, middle: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """Each channel, scaled and shifted."""
    del middle
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


def squeeze_excite_macs(geometry: Geometry, size: int) -> int:
    """The gate times every channel at every position."""
    del size
    return geometry.outlet_width * geometry.outlet_positions


def squeeze_excite(
    params: Params, h: Tensor, geometry: Geometry, middle: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """Each channel, scaled by what all channels are on average."""
    del middle
    layout = geometry.outlet_layout
    hidden = mix(pool(h, layout), params["first"], params["first_bias"]).relu()
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


class Gated(nn.Module):
    """A module times one number per channel that begins at zero."""

    def __init__(self, module: nn.Module, width: int, layout: Layout) -> None:
        super().__init__()
        self.module = module
        self.gate = nn.Parameter(torch.zeros(width))
        self.layout = layout

    def forward(self, h: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """What the module gives, times the gate."""
        result: Tensor = self.module(h)
        return result * per_channel(self.gate, result, self.layout)
