"""The forms: one line each.

A form is a family of functions of the tensor at a slot's inlet. It says where it fits,
which layers it is made of, what it costs beyond them and how it is applied. All are
zero at birth, by a zero that is their very last operation, and learn from there. On a
sequence no form looks ahead, and no form looks at other samples of the batch. `apply`
takes parameters and inputs of one model or, with a leading env axis, of many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from esper.contracts.blueprints import Form
from esper.growth.blueprints.attention import (
    attention,
    attention_fit,
    attention_layers,
    attention_macs,
)
from esper.growth.blueprints.convolutions import (
    bottleneck,
    bottleneck_layers,
    channels_fit,
    conv,
    conv_layers,
    depthwise,
    depthwise_layers,
    neighbours_fit,
)
from esper.growth.blueprints.gates import (
    same_shape_fit,
    scale_shift,
    scale_shift_layers,
    squeeze_excite,
    squeeze_excite_layers,
    squeeze_excite_macs,
)
from esper.growth.blueprints.geometry import Geometry
from esper.growth.blueprints.layers import Layer, Params
from esper.growth.blueprints.two_matrix import (
    low_rank,
    low_rank_fit,
    low_rank_layers,
    residual_mlp,
    residual_mlp_layers,
    widen,
    widen_fit,
    widen_layers,
)

Middle = Callable[[Tensor], Tensor]


def _nothing(geometry: Geometry, size: int) -> int:
    del geometry, size
    return 0


@dataclass(frozen=True, slots=True)
class FormSpec:
    """A form as pure functions of a place and a size."""

    fits: Callable[[Geometry, int], str]
    """Empty if it fits there, else why it does not."""
    layers: Callable[[Geometry, int], dict[str, Layer]]
    """Its layers by name; the one called `last` begins at zero."""
    apply: Callable[[Params, Tensor, Geometry, Middle], Tensor]
    """Parameters, inlet, place and what the host does between two layers (which only a
    widening seed asks for), to a tensor shaped like the outlet."""
    further_macs: Callable[[Geometry, int], int] = _nothing
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
        return sum(layer.macs for layer in layers) + self.further_macs(geometry, size)

    def init(
        self, geometry: Geometry, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """First parameters, float32 on the CPU; chance comes from `generator` alone."""
        return {
            key: value
            for name, layer in self.layers(geometry, size).items()
            for key, value in layer.init(name, generator).items()
        }


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
