"""What `engine` does, with tensors: for every device, and to be compared with.

All hosts at once: parameters have a leading env axis, convolutions are grouped, and a
seed is a prefix of the units that its slot has room for. Units that are not felt are
removed by selection, never by a zero factor, so a broken seed reaches nobody. With
`compile` the passes go through `torch.compile`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.environment.adamw import B1, B2, EPS, REST1, REST2
from esper.environment.chart import CONV, Chart, Map, each_unit
from esper.environment.products import GELU, LINEAR
from esper.growth.blueprints.convolutions import convolve
from esper.growth.blueprints.geometry import Kernel

Values = Float[Tensor, "env parameter"]
PerSlot = Float[Tensor, "env slot"]


@dataclass(frozen=True, slots=True)
class Seeds:
    """What stands in the slots."""

    size: Int64[Tensor, "env slot"]
    act: Int64[Tensor, "env slot"]


@dataclass(frozen=True, slots=True)
class Passed:
    """What one pass said."""

    answer: Float[Tensor, "env row classes"]
    inputs: list[Tensor]
    """What every layer read, `[env, row, ...]`."""
    outputs: list[Tensor]
    """What every layer and the seeds at it said, before the activation."""


def forward(
    chart: Chart, values: Values, x: Tensor, seeds: Seeds, felt: PerSlot
) -> Passed:
    """Answers of all hosts to `x [env, row, ...]`, seeds felt with these alphas."""
    parts = iter(values.split(chart.lengths, dim=1))
    host = [(next(parts), next(parts)) for _ in chart.maps]
    slots = [tuple(next(parts) for _ in range(4)) for _ in range(chart.slots)]
    inputs, outputs = [x], []
    for n, own in enumerate(chart.maps):
        weight, bias = host[n]
        z = _apply(own, inputs[n], weight.unflatten(1, _shape(own)), bias)
        for q in range(chart.slots):
            if q % chart.places == n - 1:
                before = chart.maps[n - 1]
                told = inputs[n - 1]
                z = z + _seed(chart, before, own, told, slots[q], seeds, felt[:, q], q)
        outputs.append(z)
        inputs.append(_between(own, torch.relu(z)))
    return Passed(outputs[-1], inputs[:-1], outputs)


def _seed(
    chart: Chart,
    before: Map,
    own: Map,
    h: Tensor,
    parts: tuple[Tensor, ...],
    seeds: Seeds,
    alpha: Float[Tensor, " env"],
    q: int,
) -> Tensor:
    """What one slot of every environment adds to its outlet."""
    units, each = chart.units, each_unit(before, own)
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
    said = torch.where(kind == LINEAR, u, torch.relu(u))
    said = torch.where(kind == GELU, F.gelu(u), said)
    hidden = _between(before, torch.where(used.reshape(spread), said, 0.0))
    outer = replace(own, inputs=units * each)
    last = last.unflatten(1, (units, each, own.outputs, own.taps))
    last = torch.where(used[:, :, None, None, None], last, 0.0) * alpha.view(
        -1, *[1] * 4
    )
    last = last.flatten(1, 2).transpose(1, 2)
    heard = (act == GELU) & (alpha > 0)[:, None] & (seeds.size[:, q, None] > 0)
    own_bias = torch.where(heard, last_bias, 0.0) * alpha[:, None]
    if own.kind != CONV and hidden.dim() > 3:
        hidden = hidden.flatten(2)
    return _apply(outer, hidden, last.reshape(-1, *_shape(outer)), own_bias)


def _apply(own: Map, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if own.kind == CONV:
        return convolve(h, weight, bias, Kernel.same(3, 2))
    rows = h.flatten(2)
    return torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)


def _between(own: Map, said: Tensor) -> Tensor:
    """Pooling after a convolution."""
    if own.kind != CONV:
        return said
    pooled = F.max_pool2d(said.flatten(0, 1), 2)
    return pooled.view(*said.shape[:3], *pooled.shape[2:])


def _shape(own: Map) -> tuple[int, ...]:
    square = (3, 3) if own.kind == CONV else ()
    return (own.outputs, own.inputs, *square)


def losses(
    chart: Chart,
    values: Values,
    x: Tensor,
    y: Int64[Tensor, "env row"],
    seeds: Seeds,
    felt: PerSlot,
) -> tuple[Float[Tensor, " env"], Passed]:
    """Mean cross-entropy of every host, and what was said."""
    passed = forward(chart, values, x, seeds, felt)
    each = F.cross_entropy(passed.answer.flatten(0, 1), y.flatten(), reduction="none")
    return each.view(y.shape).mean(dim=1), passed


@cache
def compiled_losses() -> Callable[..., tuple[Tensor, Passed]]:
    """`losses` through `torch.compile`, for fixed shapes; says only the losses."""
    compiled = torch.compile(lambda *given: losses(*given)[0], dynamic=False)
    return lambda *given: (compiled(*given), _NOTHING)


_NOTHING: Final = Passed(torch.empty(0, 0, 0), [], [])


def gradients(
    chart: Chart,
    values: Values,
    x: Tensor,
    y: Int64[Tensor, "env row"],
    seeds: Seeds,
    felt: PerSlot,
    shadow: PerSlot,
    trains: Bool[Tensor, "env parameter"] | None,
    find: Callable[..., tuple[Tensor, Passed]] = losses,
) -> tuple[Values, Tensor, Tensor, Passed, list[Tensor]]:
    """Gradients, losses of both passes, what was said and the gradients at it.

    `trains` says which weights take theirs from the shadow pass; None skips it.
    """
    leaf = values.detach().requires_grad_()
    loss, passed = find(chart, leaf, x, y, seeds, felt)
    own, *said = torch.autograd.grad(loss.sum(), [leaf, *passed.outputs])
    if trains is None:
        return own, loss.detach(), torch.zeros_like(loss), passed, said
    frozen = torch.cat([leaf[:, : chart.host].detach(), leaf[:, chart.host :]], dim=1)
    beside, _ = find(chart, frozen, x, y, seeds, shadow)
    (ghost,) = torch.autograd.grad(beside.sum(), [leaf])
    found = torch.where(trains, ghost, own)
    ghosts = torch.where(trains.any(dim=1), beside.detach(), 0.0)
    return found, loss.detach(), ghosts, passed, said


def owners(chart: Chart) -> Int64[Tensor, " parameter"]:
    """Whose each weight is: 0 the host's, 1 + slot a seed's."""
    lengths = chart.lengths[2 * len(chart.maps) :]
    whose = torch.arange(1, chart.slots + 1).repeat_interleave(4)
    seeds = whose.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return torch.cat([torch.zeros(chart.host, dtype=torch.int64), seeds])


def moves(
    chart: Chart, seeds: Seeds, active: Bool[Tensor, "env slot"]
) -> Bool[Tensor, "env parameter"]:
    """Which weights an optimiser moves."""
    device = seeds.size.device
    parts = [
        torch.ones(seeds.size.shape[0], chart.host, dtype=torch.bool, device=device)
    ]
    numbers = torch.arange(chart.units, device=device)
    for q in range(chart.slots):
        size, act = seeds.size[:, q, None], seeds.act[:, q, None]
        there = (size > 0) & active[:, q, None]
        used = (numbers < size) & there
        first, _, last, outputs = chart.lengths[2 * len(chart.maps) + 4 * q :][:4]
        parts += [
            used.repeat_interleave(first // chart.units, dim=1),
            used & (act != LINEAR),
            used.repeat_interleave(last // chart.units, dim=1),
            (there & (act == GELU)).expand(-1, outputs),
        ]
    return torch.cat(parts, dim=1)


def adamw(
    whose: Int64[Tensor, " parameter"],
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
    scale1 = (1 / (1 - B1**time)).to(values.dtype)[:, whose]
    scale2 = (1 - B2**time).rsqrt().to(values.dtype)[:, whose]
    far = rate.to(values.dtype)[:, whose]
    m = B1 * mean + REST1 * found
    q = B2 * square + REST2 * found.square()
    step = far * (decay * values + m * scale1 / (q.sqrt() * scale2 + EPS))
    values.copy_(torch.where(move, values - step, values))
    mean.copy_(torch.where(move, m, mean))
    square.copy_(torch.where(move, q, square))
