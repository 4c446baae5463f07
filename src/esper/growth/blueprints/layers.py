r"""The affine maps that forms are made of.

    matrix        y = x W + b        W [inputs, outputs], channels last
    convolution   y = W * x + b      W [outputs, inputs / groups, ...], channels first
    diagonal      y = w x + b        w [outputs]

A `Layer` defines parameter shapes, multiply-adds, initial weights and the forward pass.
On a sequence a convolution is causal: it is padded on the left only.
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
    """One affine map, applied at some positions of each sample."""

    inputs: int
    outputs: int
    positions: int = 1
    """Output positions per sample."""
    kernel: Kernel | None = None
    """None for a matrix."""
    causal: bool = False
    """Whether it is a causal convolution over a sequence, channels last."""
    groups: int = 1
    bias: bool = True
    diagonal: bool = False
    """Whether it scales each channel separately."""
    axes_behind: int = 0
    """Axes after the channels in the input of a diagonal."""
    split: tuple[int, ...] = ()
    """Axes that a matrix splits its outputs into, such as heads."""
    zero: bool = False
    """Whether it is initialised to zero; the last layer of a form is."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        if self.diagonal:
            return (self.outputs,)
        if self.kernel is None:
            return (self.inputs, *(self.split or (self.outputs,)))
        return (self.outputs, self.inputs // self.groups, *self.kernel.size)

    @property
    def fan_in(self) -> int:
        """Inputs per output."""
        if self.diagonal:
            return 1
        window = prod(self.kernel.size) if self.kernel else 1
        return self.inputs // self.groups * window

    @property
    def macs(self) -> int:
        """Multiply-adds per sample."""
        return self.positions * self.outputs * self.fan_in

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Parameter shapes; the weight is called `name`, the bias `<name>_bias`."""
        bias = {f"{name}_bias": (self.outputs,)} if self.bias else {}
        return {name: self.weight_shape, **bias}

    def init(self, name: str, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters: zero, or uniform as in torch's own layers."""
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
        """Apply the layer to a tensor; `split` adds axes to the output."""
        if self.diagonal:
            h = h * per_channel(weight, self.axes_behind)
            return h if bias is None else h + per_channel(bias, self.axes_behind)
        if self.kernel is None:
            matrix = weight.flatten(1) if self.split else weight
            mixed = F.linear(h, matrix.T, bias)
            return mixed.unflatten(-1, self.split) if self.split else mixed
        if self.causal:
            h = F.pad(h.transpose(-1, -2), (self.kernel.size[0] - 1, 0))
        window = (self.kernel.stride, self.kernel.padding, self.kernel.dilation)
        convolve = CONVOLVE[len(self.kernel.size)]
        result = convolve(h, weight, bias, *window, self.groups)
        return result.transpose(-1, -2) if self.causal else result


def pointwise(
    at: Geometry, inputs: int, outputs: int, *, bias: bool = True, zero: bool = False
) -> Layer:
    """A layer that mixes channels at each position: a matrix, or a 1x1 convolution."""
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
    """A convolution over positions that keeps their number."""
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


def per_channel(vector: Float[Tensor, " channel"], axes_behind: int) -> Tensor:
    """Reshape a vector to broadcast over a tensor with axes after its channels."""
    return vector.reshape(-1, *(1,) * axes_behind)
