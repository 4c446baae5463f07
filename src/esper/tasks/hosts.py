r"""Initial networks of tasks, declared as plain data.

    MlpHost    Linear, ReLU, ..., Linear
    CnnHost    (Conv 3x3, ReLU, MaxPool 2), ..., Flatten, Linear

Sizes, slots and the network follow from the shapes of the layers. Weights and biases
are drawn like PyTorch's defaults, uniformly within 1 / sqrt(inputs of a unit), in the
order of the layers. MACs are multiply-adds per row. A host with one output is trained
with the squared error (`loss_of`).
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final, Literal

import torch
from torch import Generator, nn
from torch.nn.utils import skip_init

from esper.contracts.checks import require_int
from esper.contracts.errors import InvalidInputError

KERNEL: Final = 3
"""Kernel size of every convolution."""
DENSE, CONV = 0, 1
"""Kinds of layers; a convolution is followed by 2 x 2 max pooling."""
Loss = Literal["classification", "regression"]


def loss_of(outputs: int) -> Loss:
    """Return the kind of loss for this number of outputs."""
    return "regression" if outputs == 1 else "classification"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Kind, channels and positions of one layer."""

    kind: int
    inputs: int
    outputs: int
    high: int = 1
    wide: int = 1
    """Positions of input and output; 1 x 1 if dense."""

    @property
    def taps(self) -> int:
        """Weights per pair of channels."""
        return KERNEL**2 if self.kind == CONV else 1

    @property
    def weights(self) -> int:
        """Weights without biases."""
        return self.inputs * self.outputs * self.taps

    @property
    def positions(self) -> int:
        """Positions without padding."""
        return self.high * self.wide

    @property
    def padded(self) -> int:
        """Positions with zero padding."""
        return (self.high + 2) * (self.wide + 2) if self.kind == CONV else 1

    def build(self, generator: Generator) -> nn.Linear | nn.Conv2d:
        """Build the layer on the generator's device and draw its weights."""
        sizes, device = (self.inputs, self.outputs), generator.device
        layer = (
            skip_init(nn.Conv2d, *sizes, KERNEL, padding=KERNEL // 2, device=device)
            if self.kind == CONV
            else skip_init(nn.Linear, *sizes, device=device)
        )
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        bound = (self.inputs * self.taps) ** -0.5
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        return layer


class _Declared:
    """Properties that follow from the layers."""

    __slots__ = ()

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers."""
        raise NotImplementedError

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return sum(own.weights + own.outputs for own in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-adds per row."""
        return sum(own.weights * own.positions for own in self.layers)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots: one for each pair of consecutive layers."""
        steps = (3 if own.kind == CONV else 2 for own in self.layers[:-1])
        places = [*accumulate(steps, initial=0)]
        places[-1] += self.layers[0].kind == CONV  # after a Flatten
        return tuple(f"{inlet}->{outlet}" for inlet, outlet in pairwise(places))

    def build(self, generator: Generator) -> nn.Sequential:
        """Build the network on the generator's device."""
        modules: list[nn.Module] = []
        for own in self.layers[:-1]:
            modules += [own.build(generator), nn.ReLU()]
            if own.kind == CONV:
                modules.append(nn.MaxPool2d(2))
        if self.layers[0].kind == CONV:
            modules.append(nn.Flatten())
        return nn.Sequential(*modules, self.layers[-1].build(generator))


@dataclass(frozen=True, slots=True)
class MlpHost(_Declared):
    """A multilayer perceptron: inputs, hidden widths, classes (1 for regression)."""

    widths: tuple[int, ...]
    kind: Literal["mlp"] = field(default="mlp", init=False)

    def __post_init__(self) -> None:
        """Require at least two layers."""
        _check_counts("widths", self.widths, least=3)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return (self.widths[0],)

    @property
    def num_outputs(self) -> int:
        """Outputs of the last layer."""
        return self.widths[-1]

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers."""
        return tuple(LayerShape(DENSE, *pair) for pair in pairwise(self.widths))

    def __str__(self) -> str:
        """Such as `mlp 16-12-12-26`."""
        return f"{self.kind} {'-'.join(map(str, self.widths))}"


@dataclass(frozen=True, slots=True)
class CnnHost(_Declared):
    """A small CNN; each convolution is followed by pooling."""

    image: tuple[int, int, int]
    """Channels, height and width of one image."""
    channels: tuple[int, ...]
    num_outputs: int
    kind: Literal["cnn"] = field(default="cnn", init=False)

    def __post_init__(self) -> None:
        """Check that the image is large enough for the pooling layers."""
        _check_counts("image", self.image, least=3)
        _check_counts("channels", self.channels, least=1)
        require_int("num_outputs", self.num_outputs)
        if len(self.image) != 3 or min(self.image[1:]) < 2 ** len(self.channels):
            raise InvalidInputError(
                f"image must be (channels, height, width) and large enough to be "
                f"halved {len(self.channels)} times; got image {self.image}."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.image

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers."""
        inputs, high, wide = self.image
        found = []
        for outputs in self.channels:
            found.append(LayerShape(CONV, inputs, outputs, high, wide))
            inputs, high, wide = outputs, high // 2, wide // 2
        return (*found, LayerShape(DENSE, inputs * high * wide, self.num_outputs))

    def __str__(self) -> str:
        """Such as `cnn 1x28x28-4-8-10`."""
        image = "x".join(map(str, self.image))
        rest = "-".join(map(str, (*self.channels, self.num_outputs)))
        return f"{self.kind} {image}-{rest}"


Host = MlpHost | CnnHost


def _check_counts(word: str, counts: object, *, least: int) -> None:
    if (
        not isinstance(counts, tuple)
        or len(counts) < least
        or any(type(count) is not int or count < 1 for count in counts)
    ):
        raise InvalidInputError(
            f"{word} must be a tuple of at least {least} positive integers; got "
            f"{counts!r}."
        )
