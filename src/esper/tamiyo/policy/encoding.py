"""Slots, offers and host as encodings, on the CPU: few calls, gradient by hand.

What `TamiyoPolicy.encode` says before memory, for any number of rows (environments,
or environments times steps). Matrix products are torch's; sums, cuts at 0 and pools
between them are compiled loops that go over each array once.

    offer  = relu(out relu(in(x) + declared))       slot = relu(out relu(in(x) + best))
    best   = largest of the offers of a slot        core = relu(out relu(in(x) + pool))
    pool   = mean and largest of the slots of a host
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, mm
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from esper.kernels import fused

Layers = Mapping[str, Any]
"""The modules of a policy by name."""
LAYERS: Final = (
    "offer_in",
    "offer_out",
    "slot_in",
    "pooled_offers",
    "slot_out",
    "host_in",
    "pooled_slots",
    "core_out",
)

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


class Encoder(NamedTuple):
    """The weights that encode, in the order in which they are used."""

    declared: Tensor
    offer_in: Tensor
    offer_in_bias: Tensor
    offer_out: Tensor
    offer_out_bias: Tensor
    slot_in: Tensor
    slot_in_bias: Tensor
    slot_pool: Tensor
    slot_out: Tensor
    slot_out_bias: Tensor
    host_in: Tensor
    host_in_bias: Tensor
    host_pool: Tensor
    core_out: Tensor
    core_out_bias: Tensor


class Seen(NamedTuple):
    """What is read: one row per offer, per slot and per host."""

    host: Float[Tensor, "row host"]
    slots: Float[Tensor, "row slot column"]
    offers: Float[Tensor, "row slot blueprint offer"]
    blueprints: Float[Tensor, "blueprint column"]


class Hidden(NamedTuple):
    """What lies between, and is needed to go back."""

    offers: Tensor
    best: Tensor
    slots: Tensor
    pool: Tensor
    host: Tensor


class Encoded(NamedTuple):
    """What heads, value and memory read."""

    core: Float[Tensor, "row core"]
    slots: Float[Tensor, "row slot slot_width"]
    offers: Float[Tensor, "row slot blueprint offer_width"]


def encoder_of(layers: Layers) -> Encoder:
    """The weights of a policy that encode."""
    found = [layers["blueprint_in"].weight]
    for name in LAYERS:
        own = layers[name]._parameters  # a module finds them more slowly
        found += [weight for weight in own.values() if weight is not None]
    return Encoder(*found)


def encode(own: Encoder, seen: Seen) -> Encoded:
    """Encode rows, differentiable in the weights."""
    if torch.is_grad_enabled():
        return Encoded(*_apply(seen, *own))
    return forward(own, seen)[0]


def forward(own: Encoder, seen: Seen) -> tuple[Encoded, Hidden]:
    """Encodings, and what lay between."""
    rows, places, kinds, _ = seen.offers.shape
    many = rows * places
    declared = linear(seen.blueprints, own.declared, own.offer_in_bias)
    first = linear(seen.offers.reshape(many * kinds, -1), own.offer_in)
    _add_and_cut(first.view(many, kinds, -1).numpy(), declared.numpy())
    offers = linear(first, own.offer_out).view(many, kinds, -1)
    best = offers.new_empty(many, offers.shape[2])
    _cut_and_pool(offers.numpy(), own.offer_out_bias.detach().numpy(), best.numpy())

    second = linear(seen.slots.reshape(many, -1), own.slot_in, own.slot_in_bias)
    second.addmm_(best, own.slot_pool.t()).relu_()
    slots = linear(second, own.slot_out).view(rows, places, -1)
    pool = slots.new_empty(rows, 2 * slots.shape[2])
    _cut_and_pool_twice(slots.numpy(), own.slot_out_bias.detach().numpy(), pool.numpy())

    third = linear(seen.host, own.host_in, own.host_in_bias)
    third.addmm_(pool, own.host_pool.t()).relu_()
    core = linear(third, own.core_out, own.core_out_bias).relu_()
    encoded = Encoded(core, slots, offers.view(rows, places, kinds, -1))
    return encoded, Hidden(first, best, second, pool, third)


def backward(
    own: Encoder, seen: Seen, said: Encoded, hidden: Hidden, grads: Encoded
) -> Encoder:
    """Gradients of the weights, from those of the encodings."""
    rows, places, kinds, _ = seen.offers.shape
    many = rows * places
    core, core_bias = cut_back(grads.core, said.core)
    third, host_bias = cut_back(mm(core, own.core_out), hidden.host)
    pool = mm(third, own.host_pool)

    slots, slot_bias = torch.empty_like(said.slots), torch.zeros_like(own.slot_out_bias)
    _pool_twice_back(*arrays(grads.slots, said.slots, pool, slots, slot_bias))
    slots = slots.view(many, -1)
    second, slot_in_bias = cut_back(mm(slots, own.slot_out), hidden.slots)
    best = mm(second, own.slot_pool)

    given, kept = (x.reshape(many, kinds, -1) for x in (grads.offers, said.offers))
    offers, offer_bias = torch.empty_like(kept), torch.zeros_like(own.offer_out_bias)
    _pool_back(*arrays(given, kept, hidden.best, best, offers, offer_bias))
    offers = offers.view(many * kinds, -1)
    first = mm(offers, own.offer_out)
    declared = first.new_zeros(kinds, first.shape[1])
    split = first.view(many, kinds, -1), hidden.offers.view(many, kinds, -1)
    _cut_back_by_kind(*arrays(*split, declared))
    return Encoder(
        declared=mm(declared.t(), seen.blueprints),
        # Few columns: the other way round is several times as slow.
        offer_in=mm(seen.offers.reshape(many * kinds, -1).t(), first).t(),
        offer_in_bias=declared.sum(dim=0),
        offer_out=mm(offers.t(), hidden.offers),
        offer_out_bias=offer_bias,
        slot_in=mm(second.t(), seen.slots.reshape(many, -1)),
        slot_in_bias=slot_in_bias,
        slot_pool=mm(second.t(), hidden.best),
        slot_out=mm(slots.t(), hidden.slots),
        slot_out_bias=slot_bias,
        host_in=mm(third.t(), seen.host),
        host_in_bias=host_bias,
        host_pool=mm(third.t(), hidden.pool),
        core_out=mm(core.t(), hidden.host),
        core_out_bias=core_bias,
    )


def cut_back(grad: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before a cut at 0 of what was said, and its sum over rows."""
    back, total = torch.empty_like(said), said.new_zeros(said.shape[-1])
    _cut_back(*arrays(grad, said, back, total))
    return back, total


def arrays(*tensors: Tensor) -> list[Any]:
    """Tensors as contiguous arrays; those to be written to must be so."""
    plain = (x.detach() if x.requires_grad else x for x in tensors)
    return [tensor.contiguous().numpy() for tensor in plain]


class _Encode(torch.autograd.Function):
    """Encodings of rows; the gradient of what was read is never asked for."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        seen: Seen,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """Encode."""
        own = Encoder(*weights)
        said, hidden = forward(own, seen)
        ctx.seen = seen
        ctx.save_for_backward(*own, *said, *hidden)
        return tuple(said)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of the weights."""
        kept = ctx.saved_tensors
        own, said, hidden = Encoder(*kept[:15]), Encoded(*kept[15:18]), kept[18:]
        return None, *backward(own, ctx.seen, said, Hidden(*hidden), Encoded(*grads))


_apply: Final[Callable[..., tuple[Tensor, ...]]] = _Encode.apply


@fused
def _add_and_cut(offers, declared):
    """Add to every row what its blueprint declares; nothing below 0 is left."""
    zero = offers.dtype.type(0)
    for row in range(offers.shape[0]):
        for kind in range(offers.shape[1]):
            own, said = offers[row, kind], declared[kind]
            for i in range(len(own)):
                both = own[i] + said[i]
                own[i] = zero if both <= zero else both


@fused
def _cut_and_pool(items, bias, best):
    """Leave nothing below 0, and take the largest of each row's items."""
    zero = items.dtype.type(0)
    for row in range(items.shape[0]):
        top = best[row]
        top[:] = zero
        for item in range(items.shape[1]):
            own = items[row, item]
            for i in range(len(own)):
                both = own[i] + bias[i]
                kept = zero if both <= zero else both
                own[i] = kept
                top[i] = top[i] if kept <= top[i] else kept


@fused
def _cut_and_pool_twice(items, bias, pool):
    """The same, with the mean before the largest."""
    zero = items.dtype.type(0)
    count, units = items.shape[1], items.shape[2]
    share = items.dtype.type(1 / count)
    for row in range(items.shape[0]):
        mean, top = pool[row, :units], pool[row, units:]
        pool[row] = zero
        for item in range(count):
            own = items[row, item]
            for i in range(units):
                both = own[i] + bias[i]
                kept = zero if both <= zero else both
                own[i] = kept
                mean[i] += share * kept
                top[i] = top[i] if kept <= top[i] else kept


@fused
def _cut_back(grad, said, back, total):
    """Let the gradient through where something was said, and sum it over rows."""
    zero = grad.dtype.type(0)
    for row in range(grad.shape[0]):
        given, own, out = grad[row], said[row], back[row]
        for i in range(len(own)):
            kept = zero if own[i] <= zero else given[i]
            out[i] = kept
            total[i] += kept


@fused
def _cut_back_by_kind(grad, said, total):
    """The same in place, with a sum for each kind."""
    zero = grad.dtype.type(0)
    for row in range(grad.shape[0]):
        for kind in range(grad.shape[1]):
            given, own, sums = grad[row, kind], said[row, kind], total[kind]
            for i in range(len(own)):
                kept = zero if own[i] <= zero else given[i]
                given[i] = kept
                sums[i] += kept


@fused
def _pool_back(grad, said, best, felt, back, total):
    """Add what the largest felt; items that are as large as another share it."""
    zero, one = grad.dtype.type(0), grad.dtype.type(1)
    kinds, units = grad.shape[1], grad.shape[2]
    share = np.empty(units, grad.dtype)
    for row in range(grad.shape[0]):
        top, push = best[row], felt[row]
        share[:] = zero
        for kind in range(kinds):
            own = said[row, kind]
            for i in range(units):
                share[i] += one if own[i] == top[i] else zero
        for i in range(units):
            share[i] = push[i] / share[i]
        for kind in range(kinds):
            own, given, out = said[row, kind], grad[row, kind], back[row, kind]
            for i in range(units):
                both = given[i] + (share[i] if own[i] == top[i] else zero)
                kept = zero if own[i] <= zero else both
                out[i] = kept
                total[i] += kept


@fused
def _pool_twice_back(grad, said, felt, back, total):
    """The same, of the mean and the largest."""
    zero, one = grad.dtype.type(0), grad.dtype.type(1)
    places, units = grad.shape[1], grad.shape[2]
    scale = grad.dtype.type(1 / places)
    top, share = np.empty(units, grad.dtype), np.empty(units, grad.dtype)
    for row in range(grad.shape[0]):
        mean, push = felt[row, :units], felt[row, units:]
        top[:] = zero
        share[:] = zero
        for place in range(places):
            own = said[row, place]
            for i in range(units):
                top[i] = top[i] if own[i] <= top[i] else own[i]
        for place in range(places):
            own = said[row, place]
            for i in range(units):
                share[i] += one if own[i] == top[i] else zero
        for i in range(units):
            share[i] = push[i] / share[i]
        for place in range(places):
            own, given, out = said[row, place], grad[row, place], back[row, place]
            for i in range(units):
                both = given[i] + scale * mean[i]
                both += share[i] if own[i] == top[i] else zero
                kept = zero if own[i] <= zero else both
                out[i] = kept
                total[i] += kept
