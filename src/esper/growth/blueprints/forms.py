r"""The forms: families of functions of the tensor at a slot's inlet.

    SCALE_SHIFT      h a + b
    SQUEEZE_EXCITE   h (2 sigmoid(W2 relu(W1 pool(h) + b1) + b2) - 1)
    LOW_RANK         B (A h)                     an adapter, parallel to a layer
    DEPTHWISE        a convolution with one kernel per channel
    WIDEN            B interlayer(A h + a)           new hidden units between two layers
                     B interlayer(A h + a, C h + c)  if a gate joins them
    RESIDUAL_MLP     B gelu(A h + a) + b
    BOTTLENECK       up(gelu(mix(gelu(down(h)))))
    CONV             a convolution of gelu(h)
    ATTENTION        softmax(q k' / sqrt(d)) v B + b,   q, k, v = norm(h) W

A form defines where it fits, its layers, and its forward pass. The last layer (`last`)
is initialised to zero, so a new seed outputs zero. On a sequence every form is causal:
`pool` is the mean up to each position. Samples of a batch are independent.

Forms are made of affine maps. A `Layer` defines their parameter shapes, multiply-adds,
initial weights and forward pass.

    matrix        y = x W + b        W [inputs, outputs], channels last
    convolution   y = W * x + b      W [outputs, inputs / groups, ...], channels first
    diagonal      y = w x + b        w [outputs]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from esper.contracts.blueprints import Blueprint, Form
from esper.growth.blueprints.geometry import (
    Geometry,
    Kernel,
    Layout,
    convolved,
    spatial_shape,
)

Layers = dict[str, "Layer"]
Params = Mapping[str, Tensor]
CONVOLVE = {1: F.conv1d, 2: F.conv2d}
InterlayerFn = Callable[..., Tensor]
"""The host's computation between two layers: hidden tensor, and gate if any."""
Run = Callable[[str, Tensor], Tensor]
"""Applies one of a form's layers, by name."""
BOTTLENECK_KERNEL: Final = 3
MAX_ATTENTION_POSITIONS: Final = 1024


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


@dataclass(frozen=True, slots=True)
class FormSpec:
    """A form as pure functions of a geometry and a size."""

    fits: Callable[[Geometry, int], str]
    """Why the form does not fit; empty if it does."""
    layers: Callable[[Geometry, int], Layers]
    """Layers by name; `last` is initialised to zero."""
    forward: Callable[[Run, Tensor, Geometry, InterlayerFn], Tensor]
    """Maps the inlet's tensor to one of the outlet's shape; WIDEN uses the last
    argument."""
    further_macs: Callable[[Geometry], int] = lambda at: 0
    """Multiply-adds per sample outside the layers."""

    def apply(
        self,
        params: Params,
        h: Tensor,
        at: Geometry,
        size: int,
        interlayer: InterlayerFn,
    ) -> Tensor:
        """The form's output with these parameters."""
        layers = _layers(self.layers, at, size)

        def run(name: str, x: Tensor) -> Tensor:
            return layers[name].apply(x, params[name], params.get(f"{name}_bias"))

        return self.forward(run, h, at, interlayer)

    def shapes(self, at: Geometry, size: int) -> dict[str, tuple[int, ...]]:
        """Parameter shapes by name."""
        return {
            key: shape
            for name, layer in self.layers(at, size).items()
            for key, shape in layer.shapes(name).items()
        }

    def macs(self, at: Geometry, size: int) -> int:
        """Multiply-adds per sample."""
        layers = self.layers(at, size).values()
        return sum(layer.macs for layer in layers) + self.further_macs(at)

    def init(
        self, at: Geometry, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Initial parameters, float32 on the CPU, drawn from `generator`."""
        return {
            key: value
            for name, layer in self.layers(at, size).items()
            for key, value in layer.init(name, generator).items()
        }


@lru_cache(maxsize=1024)
def _layers(make: Callable[[Geometry, int], Layers], at: Geometry, size: int) -> Layers:
    """A form's layers, cached because every forward pass needs them."""
    return make(at, size)


# Where forms fit: why not, or empty if they do.


def same_shape_fit(at: Geometry, _size: int) -> str:
    """Inlet and outlet must have the same shape."""
    if at.keeps_shape:
        return ""
    shapes = f"{at.outlet_shape} and {at.inlet_shape}"
    return f"needs an outlet shaped like the inlet, they are {shapes}"


def no_grid_fit(at: Geometry) -> str:
    """Positions must be one axis, or come after the channels."""
    grid = at.outlet_layout is Layout.GRID
    return "needs positions after the channels, or one axis of them" if grid else ""


def channels_fit(at: Geometry, _size: int) -> str:
    """Inlet and outlet may differ only in channels."""
    before = spatial_shape(at.inlet_shape, at.inlet_layout)
    after = spatial_shape(at.outlet_shape, at.outlet_layout)
    if at.inlet_layout is at.outlet_layout and before == after:
        return ""
    shapes = f"{at.inlet_shape} and {at.outlet_shape}"
    return f"needs inlet and outlet to differ only in channels, they are {shapes}"


def neighbours_fit(at: Geometry, size: int) -> str:
    """There must be positions to convolve over."""
    if at.outlet_layout is Layout.VECTOR:
        return "needs positions to mix, the outlet is a vector"
    if reason := no_grid_fit(at) or same_shape_fit(at, size):
        return reason
    if at.outlet_layout.channels_first and size % 2 == 0:
        return f"needs an odd kernel to keep the positions, it is {size}"
    return ""


def low_rank_fit(at: Geometry, size: int) -> str:
    """The rank must be below full, and the adapter must have its layer's outlet."""
    kernel = adapted_kernel(at)
    most = min(low_rank_layers(at, size)["first"].fan_in, at.outlet_width)
    if size > most:
        return f"needs a rank of at most {most} at this layer, it is {size}"
    if kernel is None:
        return channels_fit(at, size)
    after = convolved(spatial_shape(at.inlet_shape, at.inlet_layout), kernel)
    if after == spatial_shape(at.outlet_shape, at.outlet_layout):
        return ""
    return f"needs an outlet with positions {after}, it has shape {at.outlet_shape}"


def widen_fit(at: Geometry, _size: int) -> str:
    """There must be two layers with only channel-wise steps between them."""
    if not at.spans:
        return at.why_no_span or "needs two layers for hidden units between them"
    for end, layout, kernel in (
        ("inlet", at.inlet_layout, at.inlet_kernel),
        ("outlet", at.outlet_layout, at.outlet_kernel),
    ):
        if layout.channels_first is (kernel is None):
            what = layout.name.lower()
            return f"needs a layer over channels at its {end}, which is a {what}"
    return ""


def attention_fit(at: Geometry, size: int) -> str:
    """`size` heads must divide the width, and there may not be too many positions."""
    if reason := neighbours_fit(at, 1):
        return reason
    if at.outlet_positions > MAX_ATTENTION_POSITIONS:
        most = f"at most {MAX_ATTENTION_POSITIONS} positions"
        return f"needs {most}, there are {at.outlet_positions}"
    if at.outlet_width % size:
        return f"needs a width that {size} heads divide, it is {at.outlet_width}"
    return ""


# Layers.


def scale_shift_layers(at: Geometry, _size: int) -> Layers:
    """A scale and a shift per channel."""
    return {
        "last": Layer(
            inputs=at.outlet_width,
            outputs=at.outlet_width,
            positions=at.outlet_positions,
            diagonal=True,
            axes_behind=at.outlet_layout.axes_behind,
            zero=True,
        )
    }


def squeeze_excite_layers(at: Geometry, size: int) -> Layers:
    """From the pooled channels to `width / size` units and back."""
    width = at.outlet_width
    hidden = max(1, width // size)
    pools = at.outlet_positions if at.outlet_layout is Layout.SEQUENCE else 1
    return {
        "first": Layer(inputs=width, outputs=hidden, positions=pools),
        "last": Layer(inputs=hidden, outputs=width, positions=pools, zero=True),
    }


def adapted_kernel(at: Geometry) -> Kernel | None:
    """The kernel of the convolution that the slot is parallel to, if any."""
    return at.outlet_kernel if at.beside else None


def low_rank_layers(at: Geometry, size: int) -> Layers:
    """Down to `size` channels with the adapted layer's kernel, and up."""
    first = pointwise(at, at.inlet_width, size, bias=False)
    kernel = adapted_kernel(at)
    return {
        "first": first if kernel is None else replace(first, kernel=kernel),
        "last": pointwise(at, size, at.outlet_width, bias=False, zero=True),
    }


def widen_layers(at: Geometry, size: int) -> Layers:
    """Layers like the host's first and second (and gate), with `size` hidden units.

    After a flatten the second layer reads `unit_inputs` adjacent inputs per unit.
    """
    positions = at.inlet_positions
    if at.inlet_kernel is not None:
        inlet = spatial_shape(at.inlet_shape, at.inlet_layout)
        positions = prod(convolved(inlet, at.inlet_kernel))
    first = Layer(
        inputs=at.inlet_width,
        outputs=size,
        positions=positions,
        kernel=at.inlet_kernel,
        bias=at.inlet_bias,
    )
    gates = {}
    if at.gate is not None:
        gates["gate"] = replace(first, kernel=at.gate.kernel, bias=at.gate.bias)
    return {
        "first": first,
        **gates,
        "last": Layer(
            inputs=size * at.unit_inputs,
            outputs=at.outlet_width,
            positions=at.outlet_positions,
            kernel=at.outlet_kernel,
            bias=False,
            zero=True,
        ),
    }


def cross_layer(at: Geometry, units: int, size: int) -> Layer:
    """From `units` new units at one span to `size` new units at the next span.

    It is like the layer that both spans share.
    """
    return replace(widen_layers(at, units)["last"], outputs=size)


def residual_mlp_layers(at: Geometry, size: int) -> Layers:
    """Two layers over channels."""
    return {
        "first": pointwise(at, at.inlet_width, size),
        "last": pointwise(at, size, at.outlet_width, zero=True),
    }


def bottleneck_layers(at: Geometry, size: int) -> Layers:
    """Down to `size` channels, a convolution over positions, and up."""
    vector = at.outlet_layout is Layout.VECTOR
    between = (
        pointwise(at, size, size) if vector else neighbours(at, size, BOTTLENECK_KERNEL)
    )
    first, last = residual_mlp_layers(at, size).values()
    return {"first": first, "between": between, "last": last}


def depthwise_layers(at: Geometry, size: int) -> Layers:
    """One kernel per channel."""
    width = at.outlet_width
    return {"last": neighbours(at, width, size, groups=width, zero=True)}


def conv_layers(at: Geometry, size: int) -> Layers:
    """One full convolution."""
    return {"last": neighbours(at, at.outlet_width, size, zero=True)}


def attention_layers(at: Geometry, size: int) -> Layers:
    """Queries, keys and values in one matrix, and the output projection."""
    width, positions = at.outlet_width, at.outlet_positions
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


# Forward passes of more than one line.


def widen(run: Run, h: Tensor, at: Geometry, interlayer: InterlayerFn) -> Tensor:
    """New hidden units, with those of the gate if there is one."""
    gates = [] if at.gate is None else [run("gate", h)]
    return run("last", interlayer(run("first", h), *gates))


def squeeze_excite(run: Run, h: Tensor, at: Geometry, _: InterlayerFn) -> Tensor:
    """Each channel, scaled by a function of the means of all channels."""
    hidden = run("first", pool(h, at.outlet_layout)).relu()
    gate = 2 * run("last", hidden).sigmoid() - 1
    return h * gate.reshape(*gate.shape, *(1,) * (h.dim() - gate.dim()))


def pool(h: Float[Tensor, "..."], layout: Layout) -> Float[Tensor, "..."]:
    """Mean over the positions, `[..., C]`; per prefix `[..., T, C]` on a sequence."""
    if layout is Layout.VECTOR:
        return h
    if layout is Layout.SEQUENCE:
        lengths = torch.arange(1, h.shape[-2] + 1, dtype=h.dtype, device=h.device)
        return h.cumsum(-2) / lengths.unsqueeze(-1)
    return h.mean(-1) if layout is Layout.SIGNAL else h.mean((-2, -1))


def attention(run: Run, h: Tensor, at: Geometry, _: InterlayerFn) -> Tensor:
    """Self-attention over positions after a layer norm without weights."""
    behind = at.outlet_layout.axes_behind
    # [..., positions, channels]
    x = h.flatten(-behind).transpose(-1, -2) if behind else h
    # [row, position, 3, head, depth]
    triple = run("first", F.layer_norm(x, x.shape[-1:]))
    queries, keys, values = triple.permute(2, 0, 3, 1, 4)
    causal = at.outlet_layout is Layout.SEQUENCE
    read = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
    out = run("last", read.transpose(1, 2).reshape(x.shape))
    return out.transpose(-1, -2).reshape(h.shape) if behind else out


def _last(run: Run, h: Tensor, *_: object) -> Tensor:
    return run("last", h)


FORMS: Final[Mapping[Form, FormSpec]] = MappingProxyType(
    {
        Form.SCALE_SHIFT: FormSpec(same_shape_fit, scale_shift_layers, _last),
        Form.SQUEEZE_EXCITE: FormSpec(
            lambda at, size: no_grid_fit(at) or same_shape_fit(at, size),
            squeeze_excite_layers,
            squeeze_excite,
            lambda at: at.outlet_width * at.outlet_positions,
        ),
        Form.LOW_RANK: FormSpec(
            low_rank_fit,
            low_rank_layers,
            lambda run, h, *_: run("last", run("first", h)),
        ),
        Form.DEPTHWISE: FormSpec(neighbours_fit, depthwise_layers, _last),
        Form.WIDEN: FormSpec(widen_fit, widen_layers, widen),
        Form.RESIDUAL_MLP: FormSpec(
            channels_fit,
            residual_mlp_layers,
            lambda run, h, *_: run("last", F.gelu(run("first", h))),
        ),
        Form.BOTTLENECK: FormSpec(
            lambda at, size: no_grid_fit(at) or channels_fit(at, size),
            bottleneck_layers,
            lambda run, h, *_: run(
                "last", F.gelu(run("between", F.gelu(run("first", h))))
            ),
        ),
        Form.CONV: FormSpec(
            neighbours_fit, conv_layers, lambda run, h, *_: run("last", F.gelu(h))
        ),
        Form.ATTENTION: FormSpec(
            attention_fit,
            attention_layers,
            attention,
            # Scores and weighted sums over all pairs of positions.
            lambda at: 2 * at.outlet_positions**2 * at.outlet_width,
        ),
    }
)


class FormSeed(nn.Module):
    """A built-in form as a module."""

    def __init__(
        self,
        blueprint: Blueprint,
        geometry: Geometry,
        params: dict[str, Tensor],
        interlayer: nn.Module,
    ) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.geometry = geometry
        self.weights = nn.ParameterDict(params)
        self.interlayer = interlayer
        self.cross = nn.ParameterDict()
        """Weights between its units and those of older seeds at neighbouring spans,
        `from_<slot>` and `into_<slot>`."""

    @property
    def widens(self) -> bool:
        """Whether it has hidden units between two layers of the host."""
        return self.blueprint.form is Form.WIDEN

    def forward(
        self,
        h: Float[Tensor, "..."],
        fed: Sequence[Tensor] = (),
        kept: list[Tensor] | None = None,
    ) -> Float[Tensor, "..."]:
        """The seed's output from the tensor at the inlet.

        `fed` is added to its hidden units. `kept` collects its units, as the last layer
        reads them.
        """
        weights, size = dict(self.weights.items()), self.blueprint.size

        def interlayer(hidden: Tensor, *gates: Tensor) -> Tensor:
            for more in fed:
                hidden = hidden + more
            units: Tensor = self.interlayer(hidden, *gates)
            if kept is not None:
                kept.append(units)
            return units

        form = FORMS[self.blueprint.form]
        return form.apply(weights, h, self.geometry, size, interlayer)

    def feed(
        self, slot: int, above: Mapping[int, tuple["FormSeed", Tensor]]
    ) -> list[Tensor]:
        """What units of seeds at the previous span add to its first layer."""
        fed = []
        for other, (seed, units) in above.items():
            sizes = seed.blueprint.size, self.blueprint.size
            weight = self.block(slot, other, seed)
            fed.append(cross_layer(seed.geometry, *sizes).apply(units, weight, None))
        return fed

    def block(self, slot: int, other: int, above: "FormSeed") -> Tensor:
        """The weights from the units of a seed above; the younger seed owns them."""
        weight: Tensor | None = self.cross.get(f"from_{other}")
        return above.cross[f"into_{slot}"] if weight is None else weight

    def extra_repr(self) -> str:
        """The blueprint's name."""
        return self.blueprint.name
