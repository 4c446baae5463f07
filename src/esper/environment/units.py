"""What lies between the two maps of a bank: activation and selection in one pass.

    unit = act(pre) where it is felt, 0 elsewhere;    act in {relu, identity, gelu}

As separate tensor operations this is six passes over the largest tensor of a cohort
forwards and a dozen backwards; compiled it is one and one. Elsewhere than on the CPU
the same is written with tensors.
"""

import math
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int8
from torch import Tensor

from esper.scan import kernel

DEAD: Final = 0
RELU: Final = 1
LINEAR: Final = 2
GELU: Final = 3
"""What a unit does in a pass; a dead one says nothing, whatever it holds."""
ROOT_HALF: Final = math.sqrt(0.5)
ROOT_TURN: Final = 1 / math.sqrt(2 * math.pi)

Kinds = Int8[Tensor, "env unit"]


def speak(
    pre: Float[Tensor, "env row unit"], kind: Kinds
) -> Float[Tensor, "env row unit"]:
    """What units say; not differentiable, see `slope`."""
    if pre.device.type == "cpu":
        said = torch.empty_like(pre)
        _speak(pre.numpy(), kind.numpy(), said.numpy())
        return said
    return _speak_anywhere(pre, kind)


def slope(
    given: Float[Tensor, "env row unit"],
    pre: Float[Tensor, "env row unit"],
    kind: Kinds,
) -> Float[Tensor, "env row unit"]:
    """The gradient that reaches `pre` if `given` reaches what units say."""
    if pre.device.type == "cpu":
        back = torch.empty_like(pre)
        _slope(given.contiguous().numpy(), pre.numpy(), kind.numpy(), back.numpy())
        return back
    return _slope_anywhere(given, pre, kind)


@kernel
def _speak(pre: Any, kind: Any, said: Any) -> None:  # noqa: ANN401
    envs, rows, units = pre.shape
    zero = pre.dtype.type(0)
    up, down = np.empty(units, pre.dtype), np.empty(units, pre.dtype)
    for env in range(envs):
        curved = False
        for unit in range(units):
            k = kind[env, unit]
            curved = curved or k == GELU
            up[unit] = 1 if k != DEAD else 0
            down[unit] = 1 if k == LINEAR else 0
        for row in range(rows):
            x, y = pre[env, row], said[env, row]
            for unit in range(units):  # no branches: this loop runs in lanes
                v, a, b = x[unit], up[unit], down[unit]
                high = v * a if a > zero else zero
                low = v * b if b > zero else zero
                y[unit] = low if v <= zero else high  # NaN is high, as in torch
            if curved:
                for unit in range(units):
                    if kind[env, unit] == GELU:
                        v = x[unit]
                        y[unit] = 0.5 * v * (1.0 + math.erf(v * ROOT_HALF))


@kernel
def _slope(given: Any, pre: Any, kind: Any, back: Any) -> None:  # noqa: ANN401
    envs, rows, units = pre.shape
    zero = pre.dtype.type(0)
    up, down = np.empty(units, pre.dtype), np.empty(units, pre.dtype)
    for env in range(envs):
        curved = False
        for unit in range(units):
            k = kind[env, unit]
            curved = curved or k == GELU
            up[unit] = 1 if k != DEAD else 0
            down[unit] = 1 if k == LINEAR else 0
        for row in range(rows):
            x, g, y = pre[env, row], given[env, row], back[env, row]
            for unit in range(units):
                v, w, a, b = x[unit], g[unit], up[unit], down[unit]
                high = w * a if a > zero else zero
                low = w * b if b > zero else zero
                y[unit] = low if v <= zero else high  # NaN is high, as in torch
            if curved:
                for unit in range(units):
                    if kind[env, unit] == GELU:
                        v = x[unit]
                        bell = ROOT_TURN * math.exp(-0.5 * v * v)
                        rise = 0.5 * (1.0 + math.erf(v * ROOT_HALF)) + v * bell
                        y[unit] = g[unit] * rise


def _speak_anywhere(pre: Tensor, kind: Tensor) -> Tensor:
    """The same, as tensors."""
    kinds = kind.unsqueeze(1)
    said = torch.where(kinds == LINEAR, pre, torch.relu(pre))
    said = torch.where(kinds == GELU, torch.nn.functional.gelu(pre), said)
    return torch.where(kinds == DEAD, 0.0, said)


def _slope_anywhere(given: Tensor, pre: Tensor, kind: Tensor) -> Tensor:
    """The same, as tensors."""
    kinds = kind.unsqueeze(1)
    bell = ROOT_TURN * torch.exp(-0.5 * pre.square())
    curved = 0.5 * (1 + torch.erf(pre * ROOT_HALF)) + pre * bell
    back = torch.where((pre <= 0) & (kinds != LINEAR), 0.0, given)
    back = torch.where(kinds == GELU, given * curved, back)
    return torch.where(kinds == DEAD, 0.0, back)
