r"""Networks that a task starts from, declared as plain data.

    MlpHost    Linear, ReLU, ..., Linear
    CnnHost    (Conv 3x3, ReLU, MaxPool 2), ..., Flatten, Linear

Weights and biases are drawn as PyTorch draws them by default, uniformly within

    1 / sqrt(inputs of a unit)

in the order of the layers, from the generator alone. MACs are multiply-adds per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Final, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import skip_init

from esper.contracts.errors import BadInput

KERNEL: Final = 3
"""Side of every convolution's kernel."""


@dataclass(frozen=True, slots=True)
class MlpHost:
    """A multilayer perceptron: inputs, hidden widths, classes."""

    widths: tuple[int, ...]
    kind: Literal["mlp"] = field(default="mlp", init=False)

    def __post_init__(self) -> None:
        """Refuse what has no two layers for a slot to span."""
        _check_counts("widths", self.widths, least=3)
        _check_classes(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return (self.widths[0],)

    @property
    def classes(self) -> int:
        """Outputs of the last layer."""
        return self.widths[-1]

    @property
    def layers(self) -> int:
        """How many layers have weights."""
        return len(self.widths) - 1

    @property
    def slots(self) -> tuple[str, ...]:
        """The span of every two consecutive layers."""
        return _spans([2 * layer for layer in range(self.layers)])

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.macs + sum(self.widths[1:])

    @property
    def macs(self) -> int:
        """Multiply-adds per row."""
        return sum(inputs * units for inputs, units in pairwise(self.widths))

    def build(self, generator: Generator) -> nn.Sequential:
        """A network of this kind on the generator's device."""
        modules: list[nn.Module] = []
        for inputs, units in pairwise(self.widths):
            modules += [_linear(inputs, units, generator), nn.ReLU()]
        return nn.Sequential(*modules[:-1])

    def __str__(self) -> str:
        """Such as `mlp 16-12-12-26`."""
        return f"{self.kind} {'-'.join(map(str, self.widths))}"


@dataclass(frozen=True, slots=True)
class CnnHost:
    """A small convolutional network; each convolution is followed by pooling."""

    image: tuple[int, int, int]
    """Channels, height and width of one image."""
    channels: tuple[int, ...]
    classes: int
    kind: Literal["cnn"] = field(default="cnn", init=False)

    def __post_init__(self) -> None:
        """Refuse an image that pooling would halve to nothing."""
        _check_counts("image", self.image, least=3)
        _check_counts("channels", self.channels, least=1)
        _check_classes(self.classes)
        if len(self.image) != 3 or min(self.image[1:]) < 2 ** len(self.channels):
            raise BadInput(
                f"expected an image (channels, height, width) that can be halved "
                f"{len(self.channels)} times; got image {self.image}; use fewer layers"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.image

    @property
    def layers(self) -> int:
        """How many layers have weights."""
        return len(self.channels) + 1

    @property
    def slots(self) -> tuple[str, ...]:
        """The span of every two consecutive layers."""
        convolutions = [3 * layer for layer in range(len(self.channels))]
        return _spans([*convolutions, 3 * len(self.channels) + 1])

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """Height and width that each layer sees; the last, what is flattened."""
        _, height, width = self.image
        return tuple((height >> k, width >> k) for k in range(self.layers))

    @property
    def flattened(self) -> int:
        """Inputs of the last layer."""
        return self.channels[-1] * prod(self.sides[-1])

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        weights = sum(KERNEL**2 * a * b for a, b in self._convolutions)
        units = sum(self.channels) + self.classes
        return weights + self.flattened * self.classes + units

    @property
    def macs(self) -> int:
        """Multiply-adds per row."""
        pixels = (prod(side) for side in self.sides[:-1])
        weights = (KERNEL**2 * a * b for a, b in self._convolutions)
        convolved = sum(a * b for a, b in zip(pixels, weights, strict=True))
        return convolved + self.flattened * self.classes

    def build(self, generator: Generator) -> nn.Sequential:
        """A network of this kind on the generator's device."""
        modules: list[nn.Module] = []
        for inputs, units in self._convolutions:
            layer = _convolution(inputs, units, generator)
            modules += [layer, nn.ReLU(), nn.MaxPool2d(2)]
        last = _linear(self.flattened, self.classes, generator)
        return nn.Sequential(*modules, nn.Flatten(), last)

    def __str__(self) -> str:
        """Such as `cnn 1x28x28-4-8-10`."""
        image = "x".join(map(str, self.image))
        rest = "-".join(map(str, (*self.channels, self.classes)))
        return f"{self.kind} {image}-{rest}"

    @property
    def _convolutions(self) -> list[tuple[int, int]]:
        """Channels in and out of each convolution."""
        return list(pairwise((self.image[0], *self.channels)))


Host = MlpHost | CnnHost


def _linear(inputs: int, units: int, generator: Generator) -> nn.Linear:
    """A linear layer, drawn from the generator."""
    layer = skip_init(nn.Linear, inputs, units, device=generator.device)
    assert isinstance(layer, nn.Linear)
    _draw(layer.weight, layer.bias, generator)
    return layer


def _convolution(inputs: int, units: int, generator: Generator) -> nn.Conv2d:
    """A convolution that keeps height and width, drawn from the generator."""
    layer = skip_init(
        nn.Conv2d, inputs, units, KERNEL, padding=KERNEL // 2, device=generator.device
    )
    assert isinstance(layer, nn.Conv2d)
    assert layer.bias is not None
    _draw(layer.weight, layer.bias, generator)
    return layer


@torch.no_grad()
def _draw(weight: Tensor, bias: Tensor, generator: Generator) -> None:
    """Fill a layer as PyTorch does by default."""
    bound = weight[0].numel() ** -0.5
    weight.uniform_(-bound, bound, generator=generator)
    bias.uniform_(-bound, bound, generator=generator)


def _spans(places: Sequence[int]) -> tuple[str, ...]:
    """Names of the spans between consecutive places of an `nn.Sequential`."""
    return tuple(f"{inlet}->{outlet}" for inlet, outlet in pairwise(places))


def _check_counts(word: str, counts: object, *, least: int) -> None:
    """Refuse all but a tuple of enough positive whole numbers."""
    whole = isinstance(counts, tuple) and all(
        isinstance(count, int) and not isinstance(count, bool) and count > 0
        for count in counts
    )
    if not whole or not isinstance(counts, tuple) or len(counts) < least:
        raise BadInput(
            f"expected {word} as a tuple of at least {least} positive whole numbers; "
            f"got {counts!r}"
        )


def _check_classes(classes: object) -> None:
    """Refuse fewer than two classes."""
    if not isinstance(classes, int) or classes < 2:
        raise BadInput(f"expected at least 2 classes; got {classes!r}")
