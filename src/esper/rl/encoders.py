"""Encoders that turn one observation into a vector: those for images, and your own.

    side up to 16    3x3 convolutions with strides 1 and 2: 7 x 7 becomes 32 x 4 x 4
    side up to 63    3x3 convolutions with stride 2, until no side is longer than 8
    larger           8x8/4, 4x4/2, 3x3/1 (Mnih et al. 2015): 84 x 84 becomes 64 x 7 x 7

An encoder of your own must treat every row by itself and always in the same way, since
updates encode it again in other batches.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

import torch
from gymnasium import Space
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import described, one_line
from esper.rl.spaces import SpaceSpec

Encoder = nn.Module | Callable[[Space[Any]], nn.Module]
SMALL_SIDE: Final = 16
LARGE_SIDE: Final = 64
MIN_LARGE_SIDE: Final = 36
"""Shortest side that the layers for large images leave something of."""
# Channels, kernel, stride and padding.
SMALL: Final = ((16, 3, 1, 1), (32, 3, 2, 1))
MEDIUM: Final = ((32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1))
LARGE: Final = ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0))
ROWS: Final = 3
"""Batch size of the trial of an encoder."""


def image_encoder(shape: tuple[int, ...], width: int) -> nn.Module:
    """Convolutions for images of a shape, channels first, and one linear layer."""
    channels, *sides = shape
    layers: tuple[tuple[int, int, int, int], ...] = MEDIUM
    if max(sides) <= SMALL_SIDE:
        layers = SMALL
    elif max(sides) >= LARGE_SIDE and min(sides) >= MIN_LARGE_SIDE:
        layers = LARGE
    parts: list[nn.Module] = []
    for number, kernel, stride, padding in layers:
        if layers is MEDIUM and max(sides) <= SMALL_SIDE // 2:
            break
        parts += [nn.Conv2d(channels, number, kernel, stride, padding), nn.ReLU()]
        sides = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
        channels = number
    return nn.Sequential(
        *parts, nn.Flatten(), nn.Linear(channels * sides[0] * sides[1], width)
    )


def own_encoder(given: Encoder, spec: SpaceSpec) -> tuple[nn.Module, int]:
    """A usable encoder on the CPU, new or copied, and the width of its output."""
    chance, leaves = torch.Generator().manual_seed(0), spec.observation
    with torch.device("cpu"):  # also where the rest is made without memory
        rows = {
            name: torch.rand(ROWS, *leaf.shape, generator=chance)
            for name, leaf in leaves.items()
        }
        try:
            is_module = isinstance(given, nn.Module)
            module: Any = deepcopy(given) if is_module else given(spec.encoder_space)
            if not isinstance(module, nn.Module):
                raise TypeError(f"it makes a {type(module).__name__}, not an nn.Module")
            module = module.to("cpu")
            for part in module.modules():
                is_random = isinstance(part, _DropoutNd) and part.p
                if part.training and (is_random or isinstance(part, _BatchNorm)):
                    raise _refusal(
                        f"has a {type(part).__name__} in training mode, which depends "
                        "on chance or other rows. Call its eval(), or use LayerNorm"
                    )
            with torch.no_grad():
                trials = (
                    {n: x[:count] for n, x in rows.items()} for count in (ROWS, 1)
                )
                found, alone = (module(spec.encoder_input(trial)) for trial in trials)
        except InvalidInputError:
            raise
        except Exception as error:
            raise _refusal(f"failed: {described(error)}") from error
    if not isinstance(found, Tensor) or found.dtype != torch.float32:
        kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise _refusal(f"must return float32 numbers, got {kind}")
    if found.ndim != 2 or len(found) != ROWS or not found.shape[1]:
        raise _refusal(
            f"must return [batch, features], here [{ROWS}, n], got {[*found.shape]}"
        )
    if not torch.allclose(found[:1], alone, rtol=1e-3, atol=1e-4):
        raise _refusal("must give a row the same result alone and in a batch")
    return module, found.shape[1]


def _refusal(what: str) -> InvalidInputError:
    return InvalidInputError(one_line(f"encoder {what}."))
