r"""The affine maps that forms are made of, for one model or for many at once.

    matrix        y = x W + b        W [inputs, outputs], channels last
    convolution   y = W * x + b      W [outputs, inputs / groups, ...], channels first
    diagonal      y = w x + b        w [outputs]

From a `Layer` follow shapes, multiply-adds, first weights and what it computes. Every
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
    causal: bool = False
    """Whether it walks along a sequence, channels last, and looks back only."""
    groups: int = 1
    bias: bool = True
    diagonal: bool = False
    """Each channel is scaled by itself."""
    axes_behind: int = 0
    """Axes behind the channels of what a diagonal is applied to."""
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

    def apply(
        self, h: Float[Tensor, "..."], weight: Float[Tensor, "..."], bias: Tensor | None
    ) -> Float[Tensor, "..."]:
        """The map of a tensor; split outputs stay apart on axes of their own."""
        if self.diagonal:
            h = h * per_channel(weight, h, self.axes_behind)
            return h if bias is None else h + per_channel(bias, h, self.axes_behind)
        if self.split:
            parts = mix(h, weight.flatten(-len(self.split)), bias)
            return parts.reshape(*parts.shape[:-1], *self.split)
        if self.kernel is None:
            return mix(h, weight, bias)
        if not self.causal:
            return convolve(h, weight, bias, self.kernel, self.groups)
        past = F.pad(h.transpose(-1, -2), (self.kernel.size[0] - 1, 0))
        return convolve(past, weight, bias, self.kernel, self.groups).transpose(-1, -2)


def pointwise(
    at: Geometry, inputs: int, outputs: int, *, bias: bool = True, zero: bool = False
) -> Layer:
    """Mixes channels at each position: a matrix, or a convolution of size one."""
    axes = at.outlet_layout.axes_behind
    return Layer(
        inputs=inputs,
        outputs=outputs,
        positions=at.outlet_positions,
        kernel=Kernel.same(1, axes) if axes else None,
        bias=bias,
        zero=zero,
    )


def neighbours(
    at: Geometry, width: int, size: int, *, groups: int = 1, zero: bool = False
) -> Layer:
    """Mixes neighbouring positions and keeps their number."""
    causal = at.outlet_layout is Layout.SEQUENCE
    unpadded = Kernel((size,), (1,), (0,), (1,))
    return Layer(
        inputs=width,
        outputs=width,
        positions=at.outlet_positions,
        kernel=unpadded if causal else Kernel.same(size, at.outlet_layout.axes_behind),
        causal=causal,
        groups=groups,
        zero=zero,
    )


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


def per_channel(
    vector: Float[Tensor, "..."], h: Float[Tensor, "..."], axes_behind: int
) -> Float[Tensor, "..."]:
    """A vector `[C]` or `[E, C]` shaped to be broadcast over the tensor h."""
    before = h.dim() - vector.dim() - axes_behind
    return vector.reshape(
        (*vector.shape[:-1], *(1,) * before, vector.shape[-1], *(1,) * axes_behind)
    )
