"""The engine in torch operations: for every device, and to be compared with.

All hosts at once: parameters have a leading env axis, convolutions are grouped, and a
seed is a prefix of the units that its slot has room for. Units that take no part are
removed by selection, never by a zero factor: NaN times 0 is NaN. With `compile` the
passes go through `torch.compile`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.environment.engine import B1, B2, EPS, GELU, LINEAR, REST1, REST2
from esper.environment.memory_layout import MemoryLayout, inputs_per_unit
from esper.growth.blueprints.geometry import Kernel
from esper.growth.blueprints.layers import convolve
from esper.tasks.hosts import CONV, LayerShape

Values = Float[Tensor, "env parameter"]
PerSlot = Float[Tensor, "env slot"]


@dataclass(frozen=True, slots=True)
class PlantedSeeds:
    """What is planted in the slots."""

    size: Int64[Tensor, "env slot"]
    """Units; 0 where there is none."""
    act: Int64[Tensor, "env slot"]
    """Activation: RELU, LINEAR or GELU."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Logits and activations of one pass."""

    logits: Float[Tensor, "env row classes"]
    inputs: list[Tensor]
    """Of every layer, `[env, row, ...]`."""
    outputs: list[Tensor]
    """Of every layer with its seeds, before the activation."""


def forward(
    layout: MemoryLayout, values: Values, x: Tensor, seeds: PlantedSeeds, alpha: PerSlot
) -> ForwardPass:
    """Pass of all hosts over `x [env, row, ...]`, seeds blended with these alphas."""
    parts = iter(values.split(layout.lengths, dim=1))
    host = [(next(parts), next(parts)) for _ in layout.shapes]
    slots = [tuple(next(parts) for _ in range(4)) for _ in range(layout.slots)]
    inputs, outputs = [x], []
    for n, own in enumerate(layout.shapes):
        weight, bias = host[n]
        z = _apply(own, inputs[n], weight.unflatten(1, _shape(own)), bias)
        for q in range(layout.slots):
            if q % layout.places == n - 1:
                z = z + _seed(layout, n, inputs[n - 1], slots[q], seeds, alpha[:, q], q)
        outputs.append(z)
        inputs.append(_pool(own, torch.relu(z)))
    return ForwardPass(outputs[-1], inputs[:-1], outputs)


def _seed(
    layout: MemoryLayout,
    n: int,
    h: Tensor,
    parts: tuple[Tensor, ...],
    seeds: PlantedSeeds,
    alpha: Float[Tensor, " env"],
    q: int,
) -> Tensor:
    """What slot q of every environment adds to layer n."""
    before, own, units = layout.shapes[n - 1], layout.shapes[n], layout.units
    each = inputs_per_unit(before, own)
    first, first_bias, last, last_bias = parts
    act = seeds.act[:, q, None]
    numbers = torch.arange(units, device=h.device)
    used = (numbers < seeds.size[:, q, None]) & (alpha > 0)[:, None]
    inner = replace(before, outputs=units)
    bias = torch.where(used & (act != LINEAR), first_bias, 0.0)
    first = torch.where(used[..., None], first.unflatten(1, (units, -1)), 0.0)
    u = _apply(inner, h, first.reshape(-1, *_shape(inner)), bias)
    spread = (-1, 1, units) + (1,) * (u.dim() - 3)
    kind = act.expand(-1, units).reshape(spread)
    active = torch.where(kind == LINEAR, u, torch.relu(u))
    active = torch.where(kind == GELU, F.gelu(u), active)
    hidden = _pool(before, torch.where(used.reshape(spread), active, 0.0))
    outer = replace(own, inputs=units * each)
    last = last.unflatten(1, (units, each, own.outputs, own.taps))
    last = torch.where(used[:, :, None, None, None], last, 0.0)
    last = (last * alpha.view(-1, *[1] * 4)).flatten(1, 2).transpose(1, 2)
    biased = (act == GELU) & (alpha > 0)[:, None] & (seeds.size[:, q, None] > 0)
    own_bias = torch.where(biased, last_bias, 0.0) * alpha[:, None]
    if own.kind != CONV and hidden.dim() > 3:
        hidden = hidden.flatten(2)
    return _apply(outer, hidden, last.reshape(-1, *_shape(outer)), own_bias)


def _apply(own: LayerShape, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if own.kind == CONV:
        return convolve(h, weight, bias, Kernel.same(3, 2))
    return torch.baddbmm(bias.unsqueeze(1), h.flatten(2), weight.mT)


def _pool(own: LayerShape, active: Tensor) -> Tensor:
    """Max-pooling after a convolution."""
    if own.kind != CONV:
        return active
    pooled = F.max_pool2d(active.flatten(0, 1), 2)
    return pooled.view(*active.shape[:3], *pooled.shape[2:])


def _shape(own: LayerShape) -> tuple[int, ...]:
    kernel = (3, 3) if own.kind == CONV else ()
    return (own.outputs, own.inputs, *kernel)


def losses(
    layout: MemoryLayout,
    values: Values,
    x: Tensor,
    y: Int64[Tensor, "env row"],
    seeds: PlantedSeeds,
    alpha: PerSlot,
) -> tuple[Float[Tensor, " env"], ForwardPass]:
    """Mean cross-entropy of every host, and its pass."""
    passed = forward(layout, values, x, seeds, alpha)
    each = F.cross_entropy(passed.logits.flatten(0, 1), y.flatten(), reduction="none")
    return each.view(y.shape).mean(dim=1), passed


@cache
def compiled_losses() -> Callable[..., tuple[Tensor, ForwardPass]]:
    """`losses` through `torch.compile`, for fixed shapes; returns only the losses."""
    compiled = torch.compile(lambda *given: losses(*given)[0], dynamic=False)
    return lambda *given: (compiled(*given), _EMPTY_PASS)


_EMPTY_PASS: Final = ForwardPass(torch.empty(0, 0, 0), [], [])


def gradients(
    layout: MemoryLayout,
    values: Values,
    x: Tensor,
    y: Int64[Tensor, "env row"],
    seeds: PlantedSeeds,
    alpha: PerSlot,
    shadow: PerSlot,
    trains: Bool[Tensor, "env parameter"] | None,
    find: Callable[..., tuple[Tensor, ForwardPass]] = losses,
) -> tuple[Values, Tensor, Tensor, ForwardPass, list[Tensor]]:
    """Gradients, losses of both passes, the host's pass, gradients at its outputs.

    `trains` marks weights that take theirs from the shadow pass; None skips it.
    """
    leaf = values.detach().requires_grad_()
    loss, passed = find(layout, leaf, x, y, seeds, alpha)
    own, *at_outputs = torch.autograd.grad(loss.sum(), [leaf, *passed.outputs])
    if trains is None:
        return own, loss.detach(), torch.zeros_like(loss), passed, at_outputs
    split = layout.host_parameters
    frozen = torch.cat([leaf[:, :split].detach(), leaf[:, split:]], dim=1)
    shadow_loss, _ = find(layout, frozen, x, y, seeds, shadow)
    (from_shadow,) = torch.autograd.grad(shadow_loss.sum(), [leaf])
    found = torch.where(trains, from_shadow, own)
    shadow_loss = torch.where(trains.any(dim=1), shadow_loss.detach(), 0.0)
    return found, loss.detach(), shadow_loss, passed, at_outputs


def owners(layout: MemoryLayout) -> Int64[Tensor, " parameter"]:
    """Owner of each weight: 0 the host, 1 + slot a seed."""
    lengths = layout.lengths[2 * len(layout.shapes) :]
    slots = torch.arange(1, layout.slots + 1).repeat_interleave(4)
    seeds = slots.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return torch.cat([torch.zeros(layout.host_parameters, dtype=torch.int64), seeds])


def moves(
    layout: MemoryLayout, seeds: PlantedSeeds, active: Bool[Tensor, "env slot"]
) -> Bool[Tensor, "env parameter"]:
    """Which weights the optimiser steps."""
    envs, device = seeds.size.shape[0], seeds.size.device
    parts = [torch.ones(envs, layout.host_parameters, dtype=torch.bool, device=device)]
    numbers = torch.arange(layout.units, device=device)
    for q in range(layout.slots):
        size, act = seeds.size[:, q, None], seeds.act[:, q, None]
        there = (size > 0) & active[:, q, None]
        used = (numbers < size) & there
        first, _, last, outputs = layout.lengths[2 * len(layout.shapes) + 4 * q :][:4]
        parts += [
            used.repeat_interleave(first // layout.units, dim=1),
            used & (act != LINEAR),
            used.repeat_interleave(last // layout.units, dim=1),
            (there & (act == GELU)).expand(-1, outputs),
        ]
    return torch.cat(parts, dim=1)


def adamw(
    owner: Int64[Tensor, " parameter"],
    values: Values,
    found: Values,
    mean: Values,
    square: Values,
    move: Bool[Tensor, "env parameter"],
    rate: Float[Tensor, "env group"],
    clock: Int64[Tensor, "env group"],
    decay: float,
) -> None:
    """One step in place; groups are the host and its slots."""
    time = clock.clamp(min=1).double()
    scale1 = (1 / (1 - B1**time)).to(values.dtype)[:, owner]
    scale2 = (1 - B2**time).rsqrt().to(values.dtype)[:, owner]
    far = rate.to(values.dtype)[:, owner]
    m = B1 * mean + REST1 * found
    q = B2 * square + REST2 * found.square()
    step = far * (decay * values + m * scale1 / (q.sqrt() * scale2 + EPS))
    values.copy_(torch.where(move, values - step, values))
    mean.copy_(torch.where(move, m, mean))
    square.copy_(torch.where(move, q, square))
