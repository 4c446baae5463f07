"""The engine in torch operations: for every device, and to be compared with.

All hosts at once: parameters have a leading env axis, convolutions are grouped, and a
seed is a prefix of the units that its slot has room for. Units that take no part are
removed by selection, never by a zero factor: NaN times 0 is NaN. They stay zero, as do
their gradients and moments, so that only whole seeds must be kept from moving.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.environment.engine import (
    B1,
    B2,
    EPS,
    GELU,
    LINEAR,
    NEWBORN_RATE,
    NEWBORN_STEPS,
    REST1,
    REST2,
)
from esper.environment.memory_layout import MemoryLayout, inputs_per_unit
from esper.growth.blueprints.geometry import Kernel
from esper.growth.blueprints.layers import convolve
from esper.tasks.hosts import CONV, LayerShape

Values = Float[Tensor, "env parameter"]
PerSlot = Float[Tensor, "env slot"]
Whole = Int64[Tensor, "env slot"]
Layers = list[Tensor]
"""A tensor of every layer, `[env, row, ...]`."""


def train(
    layout: MemoryLayout,
    features: Float[Tensor, "_ example input"],
    labels: Int64[Tensor, "_ example"],
    picked: Int64[Tensor, "env step row"],
    rates: Float[Tensor, "env step"],
    values: Values,
    mean: Values,
    square: Values,
    clocks: Int64[Tensor, "env group"],
    size: Whole,
    act: Whole,
    alpha: PerSlot,
    shadow: PerSlot,
    training: Bool[Tensor, "env slot"],
    decay: float,
) -> tuple[Tensor, Tensor, tuple[Layers, Layers, Layers]]:
    """Train every host and its seeds on its minibatches, as `engine.train` does.

    Returns the mean losses of the hosts and of their shadow passes; and of the last
    minibatch the inputs and outputs of every layer, and the gradients at the outputs.
    """
    device = values.device
    owner = owners(layout).to(device)
    active = F.pad(((alpha > 0) | training) & (size > 0), (1, 0), value=True)
    read = device.type != "meta"  # which has no values
    trains = F.pad(training, (1, 0))[:, owner] if not read or training.any() else None
    envs = torch.arange(len(values), device=device).unsqueeze(1) % len(features)
    total = shadow_total = torch.zeros(len(values), device=device, dtype=values.dtype)
    seen: tuple[Layers, Layers, Layers] = ([], [], [])
    for step, rate in enumerate(rates.unbind(1)):
        rows = picked[:, step]
        x, y = shaped(layout, features[envs, rows]), labels[envs, rows]
        leaf = values.detach().requires_grad_()
        inputs, outputs = forward(layout, leaf, x, size, act, alpha)
        loss = losses(outputs[-1], y)
        found, *at_outputs = torch.autograd.grad(loss.sum(), [leaf, *outputs])
        total = total + loss.detach()
        if trains is not None:
            held = layout.host_parameters
            frozen = torch.cat([leaf[:, :held].detach(), leaf[:, held:]], dim=1)
            _, beside = forward(layout, frozen, x, size, act, shadow)
            shadow_loss = losses(beside[-1], y)
            (from_shadow,) = torch.autograd.grad(shadow_loss.sum(), [leaf])
            found = torch.where(trains, from_shadow, found)
            there = training.any(dim=1)
            shadow_total = shadow_total + torch.where(there, shadow_loss.detach(), 0.0)
        young = (1 - clocks.double() / NEWBORN_STEPS).clamp(min=0.0)
        boost = 1 + (NEWBORN_RATE - 1) * young
        boost[:, 0] = 1.0
        clocks += active
        far = rate.unsqueeze(1) * boost
        adamw(owner, values, found, mean, square, active, far, clocks, decay)
        seen = ([h.detach() for h in inputs], [z.detach() for z in outputs], at_outputs)
    return total / picked.shape[1], shadow_total / picked.shape[1], seen


def forward(
    layout: MemoryLayout,
    values: Values,
    x: Tensor,
    size: Whole,
    act: Whole,
    alpha: PerSlot,
) -> tuple[Layers, Layers]:
    """Inputs and outputs of every layer over `x [env, row, ...]`, seeds blended.

    Outputs are those before the activation; the last are the logits.
    """
    parts = iter(values.split(layout.lengths, dim=1))
    host = [(next(parts), next(parts)) for _ in layout.shapes]
    slots = [tuple(next(parts) for _ in range(4)) for _ in range(layout.slots)]
    inputs, outputs = [x], []
    for n, own in enumerate(layout.shapes):
        weight, bias = host[n]
        z = _apply(own, inputs[n], weight.unflatten(1, _shape(own)), bias)
        for q in range(layout.slots):
            if q % layout.places == n - 1:
                here = (size[:, q, None], act[:, q, None], alpha[:, q])
                z = z + _seed(layout, n, inputs[n - 1], slots[q], *here)
        outputs.append(z)
        inputs.append(_pool(own, torch.relu(z)))
    return inputs[:-1], outputs


def _seed(
    layout: MemoryLayout,
    n: int,
    h: Tensor,
    parts: tuple[Tensor, ...],
    size: Int64[Tensor, "env 1"],
    act: Int64[Tensor, "env 1"],
    alpha: Float[Tensor, " env"],
) -> Tensor:
    """What the seeds in one slot of every environment add to layer n."""
    before, own, units = layout.shapes[n - 1], layout.shapes[n], layout.units
    each = inputs_per_unit(before, own)
    first, first_bias, last, last_bias = parts
    numbers = torch.arange(units, device=h.device)
    used = (numbers < size) & (alpha > 0)[:, None]
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
    biased = (act == GELU) & (alpha > 0)[:, None] & (size > 0)
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


def shaped(layout: MemoryLayout, rows: Float[Tensor, "env row input"]) -> Tensor:
    """Rows as the first layer reads them."""
    own = layout.shapes[0]
    image = (own.inputs, own.high, own.wide)
    return rows.unflatten(2, image) if own.kind == CONV else rows


def losses(
    logits: Float[Tensor, "env row classes"], y: Int64[Tensor, "env row"]
) -> Float[Tensor, " env"]:
    """Mean cross-entropy of every host."""
    each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return each.view(y.shape).mean(dim=1)


def owners(layout: MemoryLayout) -> Int64[Tensor, " parameter"]:
    """Owner of each weight: 0 the host, 1 + slot a seed."""
    begins = torch.from_numpy(layout.firsts["weight"].copy())
    numbers = torch.arange(layout.parameters)
    return torch.searchsorted(begins, numbers, right=True)


def adamw(
    owner: Int64[Tensor, " parameter"],
    values: Values,
    found: Values,
    mean: Values,
    square: Values,
    active: Bool[Tensor, "env group"],
    rate: Float[Tensor, "env group"],
    clock: Int64[Tensor, "env group"],
    decay: float,
) -> None:
    """One step in place; groups are the host and its slots."""
    move, time = active[:, owner], clock.clamp(min=1).double()
    scale1 = (1 / (1 - B1**time)).to(values.dtype)[:, owner]
    scale2 = (1 - B2**time).rsqrt().to(values.dtype)[:, owner]
    far = rate.to(values.dtype)[:, owner]
    m = B1 * mean + REST1 * found
    q = B2 * square + REST2 * found.square()
    step = far * (decay * values + m * scale1 / (q.sqrt() * scale2 + EPS))
    values.copy_(torch.where(move, values - step, values))
    mean.copy_(torch.where(move, m, mean))
    square.copy_(torch.where(move, q, square))
