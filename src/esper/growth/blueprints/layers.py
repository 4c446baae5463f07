r"""The affine maps that forms are made of, for one model or for many at once.

    matrix        y = x W + b        W [inputs, outputs], channels last
    convolution   y = W * x + b      W [outputs, inputs / groups, ...], channels first
    diagonal      y = w x + b        w [outputs]

A `Layer` declares a map: from it follow shapes, multiply-adds and first weights. Every
tensor may have a leading env axis: weights `[E, ...]` on inputs `[E, B, ...]` give
what the E single maps would give; the weight's number of axes says which it is. N
models are one grouped convolution, each a group. On a sequence a convolution is padded
on the left alone, so that no position reads a later one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from esper.growth.blueprints.geometry import Geometry, Kernel, Layout

Params = Mapping[str, Tensor]
CONVOLVE = {1: F.conv1d, 2: F.conv2d}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One affine map, evaluated at some positions of each sample."""

    inputs: int
    outputs: int
    positions: int = 1
    """Positions of one sample at which it gives outputs."""
    kernel: Kernel | None = None
    """None for a matrix."""
    groups: int = 1
    bias: bool = True
    diagonal: bool = False
    """Each channel is scaled by itself."""
    split: tuple[int, ...] = ()
    """How a matrix keeps its outputs apart, such as in heads; they multiply to it."""
    zero: bool = False
    """Whether it begins at zero; the last layer of a form does."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of its weight."""
        if self.diagonal:
            return (self.outputs,)
        if self.kernel is None:
            return (self.inputs, *(self.split or (self.outputs,)))
        return (self.outputs, self.inputs // self.groups, *self.kernel.size)

    @property
    def fan_in(self) -> int:
        """Numbers that one output is a sum of."""
        if self.diagonal:
            return 1
        walked = prod(self.kernel.size) if self.kernel else 1
        return self.inputs // self.groups * walked

    @property
    def macs(self) -> int:
        """Multiply-adds per sample."""
        return self.positions * self.outputs * self.fan_in

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Shapes of its parameters under this name."""
        bias = {f"{name}_bias": (self.outputs,)} if self.bias else {}
        return {name: self.weight_shape, **bias}

    def init(self, name: str, generator: torch.Generator) -> dict[str, Tensor]:
        """First weights: zero, or uniform as torch begins its own layers."""
        bound = 0.0 if self.zero else self.fan_in**-0.5
        params = {
            key: torch.zeros(shape, dtype=torch.float32, device="cpu")
            for key, shape in self.shapes(name).items()
        }
        for value in params.values() if bound else ():
            value.uniform_(-bound, bound, generator=generator)
        return params


def axes(layout: Layout) -> int:
    """Axes of positions."""
    return {Layout.VECTOR: 0, Layout.IMAGE: 2}.get(layout, 1)


def mix(
    h: Float[Tensor, "..."], weight: Float[Tensor, "..."], bias: Tensor | None
) -> Float[Tensor, "..."]:
    """A matrix over the last axis; a leading env axis if the weight has three axes."""
    if weight.dim() == 2:
        return F.linear(h, weight.transpose(0, 1), bias)
    rows = h.flatten(1, -2)  # [env, batch * positions, channels]
    mixed = (
        torch.bmm(rows, weight)
        if bias is None
        else torch.baddbmm(bias.unsqueeze(1), rows, weight)
    )
    return mixed.reshape(*h.shape[:-1], weight.shape[-1])


def convolve(
    h: Float[Tensor, "..."],
    weight: Float[Tensor, "..."],
    bias: Tensor | None,
    kernel: Kernel,
    groups: int = 1,
) -> Float[Tensor, "..."]:
    """`h [B, C, ...]` by `weight [O, C / groups, ...]`, or both with an env axis."""
    count = len(kernel.size)
    window = (kernel.stride, kernel.padding, kernel.dilation)
    if weight.dim() == count + 2:
        return CONVOLVE[count](h, weight, bias, *window, groups)
    envs, outputs = weight.shape[:2]
    side_by_side = h.transpose(0, 1).flatten(1, 2)  # [batch, env * channels, ...]
    flat_bias = None if bias is None else bias.flatten()
    result = CONVOLVE[count](
        side_by_side, weight.flatten(0, 1), flat_bias, *window, envs * groups
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
    unpadded = Kernel((size,), (1,), (0,), (1,))
    return convolve(past, weight, bias, unpadded, groups).transpose(-1, -2)


def pointwise_layer(
    geometry: Geometry,
    inputs: int,
    outputs: int,
    *,
    bias: bool = True,
    zero: bool = False,
) -> Layer:
    """The layer that `pointwise` applies at the positions of the outlet."""
    layout, positions = geometry.outlet_layout, geometry.outlet_positions
    kernel = Kernel.same(1, axes(layout)) if layout.channels_first else None
    return Layer(
        inputs=inputs,
        outputs=outputs,
        positions=positions,
        kernel=kernel,
        bias=bias,
        zero=zero,
    )


def neighbour_layer(
    geometry: Geometry, width: int, size: int, *, groups: int = 1, zero: bool = False
) -> Layer:
    """The layer that `neighbours` applies at the positions of the outlet."""
    return Layer(
        inputs=width,
        outputs=width,
        positions=geometry.outlet_positions,
        kernel=Kernel.same(size, axes(geometry.outlet_layout)),
        groups=groups,
        zero=zero,
    )


def per_channel(
    vector: Float[Tensor, "..."], h: Float[Tensor, "..."], layout: Layout
) -> Float[Tensor, "..."]:
    """A vector `[C]` or `[E, C]` shaped to be broadcast over the tensor h."""
    after = axes(layout) if layout.channels_first else 0
    before = h.dim() - vector.dim() - after
    shape = (*vector.shape[:-1], *(1,) * before, vector.shape[-1], *(1,) * after)
    return vector.reshape(shape)
