"""Logits and values given all choices, on the CPU: few calls, gradient by hand.

What `TamiyoPolicy.head_logits` says of rows whose sentences are known. A sentence is
one vector: core with the meaning of its op, chosen slot, chosen offer; later heads read
a longer part of it. Matrix products are torch's; what lies between them, gathers and
scatters too, are compiled loops that go over each array once.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, mm
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from esper.contracts import actions as words
from esper.contracts.actions import HEAD, NUM_HEADS
from esper.kernels import fused_with, summed_with
from esper.tamiyo.policy.encoding import Encoded, Layers, arrays, cut_back

OP: Final = HEAD["op"]
SLOT: Final = HEAD["slot"]
BLUEPRINT: Final = HEAD["blueprint"]
fused, summed = fused_with(words), summed_with(words)

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


class Heads(NamedTuple):
    """The weights of value and heads, in the order in which they are used."""

    value_hidden: Tensor
    value_hidden_bias: Tensor
    value_out: Tensor
    value_out_bias: Tensor
    op_hidden: Tensor
    op_hidden_bias: Tensor
    op_out: Tensor
    op_out_bias: Tensor
    op_embedding: Tensor
    slot_query: Tensor
    slot_query_bias: Tensor
    slot_key: Tensor
    slot_score: Tensor
    slot_score_bias: Tensor
    offer_query: Tensor
    offer_query_bias: Tensor
    offer_key: Tensor
    offer_score: Tensor
    offer_score_bias: Tensor
    rest_hidden: Tensor
    rest_hidden_bias: Tensor
    rest_out: Tensor
    rest_out_bias: Tensor


class Between(NamedTuple):
    """What lies between, and is needed to go back."""

    value: Tensor
    op: Tensor
    sentence: Tensor
    slots: Tensor
    offered: Tensor
    offers: Tensor
    rest: Tensor


def heads_of(layers: Layers) -> Heads:
    """The weights of a policy's value and heads."""
    found: dict[str, Tensor] = {}
    for name in Heads._fields:
        layer = name.removesuffix("_bias")
        kind = "weight" if layer == name else "bias"
        found[name] = layers[layer]._parameters[kind]  # faster than an attribute
    return Heads(**found)


def score(
    own: Heads,
    seen: Encoded,
    actions: Int64[Tensor, "row head"],
    sizes: tuple[int, ...],
) -> tuple[Float[Tensor, "row head choice"], Float[Tensor, " row"]]:
    """Logits, 0 on padding, and values in units of their statistics.

    Args:
        own: The weights.
        seen: What is read, after memory; differentiable.
        actions: The choices, on which the logits of later heads depend.
        sizes: How many choices each head has.
    """
    return _apply(actions, sizes, *seen, *own)


def forward(
    own: Heads, seen: Encoded, actions: Tensor, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor, Between]:
    """Logits, values, and what lay between."""
    rows, width = seen.core.shape
    _, places, kinds, offer_width = seen.offers.shape
    slot_width = seen.slots.shape[2]
    logits = seen.core.new_zeros(rows, NUM_HEADS, max(sizes))
    value = linear(seen.core, own.value_hidden, own.value_hidden_bias).relu_()
    values = linear(value, own.value_out, own.value_out_bias).view(rows)
    op = linear(seen.core, own.op_hidden, own.op_hidden_bias).relu_()
    ops = linear(op, own.op_out, own.op_out_bias)

    sentence = seen.core.new_empty(rows, width + slot_width + offer_width)
    offered = seen.core.new_empty(rows, kinds, offer_width)
    _compose(*arrays(*seen, own.op_embedding, actions, sentence, offered))
    query = linear(sentence[:, :width], own.slot_query, own.slot_query_bias)
    slots = mm(seen.slots.reshape(rows * places, -1), own.slot_key.t())
    slots = slots.view(rows, places, -1)
    scoring = own.slot_score, own.slot_score_bias
    _answer(*arrays(query, slots, *scoring, logits), SLOT)
    query = linear(
        sentence[:, : width + slot_width], own.offer_query, own.offer_query_bias
    )
    offers = mm(offered.view(rows * kinds, -1), own.offer_key.t())
    offers = offers.view(rows, kinds, -1)
    scoring = own.offer_score, own.offer_score_bias
    _answer(*arrays(query, offers, *scoring, logits), BLUEPRINT)

    rest = linear(sentence, own.rest_hidden, own.rest_hidden_bias).relu_()
    others = linear(rest, own.rest_out, own.rest_out_bias)
    _place(*arrays(ops, others, logits), sizes)
    return logits, values, Between(value, op, sentence, slots, offered, offers, rest)


def backward(
    own: Heads,
    seen: Encoded,
    actions: Tensor,
    sizes: tuple[int, ...],
    kept: Between,
    slopes: Tensor,
    pull: Tensor,
) -> tuple[Encoded, Heads]:
    """Gradients of what was read and of the weights."""
    rows, width = seen.core.shape
    places, slot_width = seen.slots.shape[1:]
    kinds = seen.offers.shape[2]
    far = width + slot_width
    ops = slopes.new_empty(rows, sizes[OP])
    others = slopes.new_empty(rows, own.rest_out.shape[0])
    slopes = slopes.contiguous()
    _take(*arrays(slopes, ops, others), sizes)
    rest, rest_bias = cut_back(mm(others, own.rest_out), kept.rest)
    sentence = mm(rest, own.rest_hidden)

    offers, asked, offer_score, offer_bias = _answered(
        slopes, kept.offers, own.offer_score, BLUEPRINT
    )
    sentence[:, :far].addmm_(asked, own.offer_query)
    offered = mm(offers, own.offer_key).view(rows, kinds, -1)
    slots, sought, slot_score, slot_bias = _answered(
        slopes, kept.slots, own.slot_score, SLOT
    )
    sentence[:, :width].addmm_(sought, own.slot_query)
    to_slots = mm(slots, own.slot_key).view(rows, places, -1)
    to_offers = torch.zeros_like(seen.offers)
    core, meaning = torch.empty_like(seen.core), torch.zeros_like(own.op_embedding)
    _decompose(
        *arrays(sentence, kept.sentence, offered, actions),
        *arrays(core, to_slots, to_offers, meaning),
    )
    op, op_bias = cut_back(mm(ops, own.op_out), kept.op)
    core.addmm_(op, own.op_hidden)
    pull = pull.reshape(rows, 1)
    value, value_bias = cut_back(mm(pull, own.value_out), kept.value)
    core.addmm_(value, own.value_hidden)
    return Encoded(core, to_slots, to_offers), Heads(
        value_hidden=mm(value.t(), seen.core),
        value_hidden_bias=value_bias,
        value_out=mm(pull.t(), kept.value),
        value_out_bias=pull.sum(dim=0),
        op_hidden=mm(op.t(), seen.core),
        op_hidden_bias=op_bias,
        op_out=mm(ops.t(), kept.op),
        op_out_bias=ops.sum(dim=0),
        op_embedding=meaning,
        slot_query=mm(sought.t(), kept.sentence[:, :width]),
        slot_query_bias=sought.sum(dim=0),
        slot_key=mm(slots.t(), seen.slots.reshape(rows * places, -1)),
        slot_score=slot_score,
        slot_score_bias=slot_bias,
        offer_query=mm(asked.t(), kept.sentence[:, :far]),
        offer_query_bias=asked.sum(dim=0),
        offer_key=mm(offers.t(), kept.offered.view(rows * kinds, -1)),
        offer_score=offer_score,
        offer_score_bias=offer_bias,
        rest_hidden=mm(rest.t(), kept.sentence),
        rest_hidden_bias=rest_bias,
        rest_out=mm(others.t(), kept.rest),
        rest_out_bias=others.sum(dim=0),
    )


def _answered(
    slopes: Tensor, hidden: Tensor, weight: Tensor, head: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of keys, queries, score and its bias."""
    keys, query = torch.empty_like(hidden), hidden.new_empty(hidden[:, 0].shape)
    score, bias = torch.zeros_like(weight), hidden.new_zeros(1)
    _answer_back(*arrays(slopes, hidden, weight, keys, query, score, bias), head)
    return keys.view(-1, hidden.shape[2]), query, score, bias


class _Score(torch.autograd.Function):
    """Logits and values of rows."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        actions: Tensor,
        sizes: tuple[int, ...],
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Score."""
        seen, own = Encoded(*inputs[:3]), Heads(*inputs[3:])
        logits, values, kept = forward(own, seen, actions, sizes)
        ctx.sizes = sizes
        ctx.save_for_backward(actions, *inputs, *kept)
        return logits, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of what was read and of the weights."""
        actions, *kept = ctx.saved_tensors
        seen, own = Encoded(*kept[:3]), Heads(*kept[3 : 3 + len(Heads._fields)])
        between = Between(*kept[3 + len(Heads._fields) :])
        back, weights = backward(own, seen, actions, ctx.sizes, between, *grads)
        return None, None, *back, *weights


_apply: Final[Callable[..., tuple[Tensor, Tensor]]] = _Score.apply


@fused
def _compose(core, slots, offers, embedding, actions, sentence, offered):
    """Write what the sentences say, and the offers of their slots."""
    zero = core.dtype.type(0)
    width, far = core.shape[1], core.shape[1] + slots.shape[2]
    for row in range(core.shape[0]):
        meaning, own, out = embedding[actions[row, OP]], core[row], sentence[row]
        slot = actions[row, SLOT]
        for i in range(width):
            both = own[i] + meaning[i]
            out[i] = zero if both <= zero else both
        out[width:far] = slots[row, slot]
        out[far:] = offers[row, slot, actions[row, BLUEPRINT]]
        offered[row] = offers[row, slot]


@fused
def _decompose(grad, said, offered, actions, core, slots, offers, meaning):
    """The way back: write the core's gradient, add to those of slots and offers."""
    zero = core.dtype.type(0)
    width, far = core.shape[1], core.shape[1] + slots.shape[2]
    for row in range(core.shape[0]):
        op, slot, kind = actions[row, OP], actions[row, SLOT], actions[row, BLUEPRINT]
        given, own, out, sums = grad[row], said[row], core[row], meaning[op]
        for i in range(width):
            kept = zero if own[i] <= zero else given[i]
            out[i] = kept
            sums[i] += kept
        slots[row, slot] += given[width:far]
        offers[row, slot] = offered[row]
        offers[row, slot, kind] += given[far:]


@summed
def _answer(query, keys, score, bias, logits, head):
    """How well each key answers its row's query; keys become what lies between."""
    zero = keys.dtype.type(0)
    weights = score[0]
    for row in range(keys.shape[0]):
        asked = query[row]
        for choice in range(keys.shape[1]):
            own, total = keys[row, choice], zero
            for i in range(len(own)):
                both = asked[i] + own[i]
                kept = zero if both <= zero else both
                own[i] = kept
                total += weights[i] * kept
            logits[row, head, choice] = total + bias[0]


@fused
def _answer_back(slopes, hidden, score, keys, query, weights, bias, head):
    """The way back, from the slopes of one head."""
    zero = keys.dtype.type(0)
    scores, learnt = score[0], weights[0]
    query[:] = zero
    for row in range(keys.shape[0]):
        asked = query[row]
        for choice in range(keys.shape[1]):
            slope = slopes[row, head, choice]
            own, out = hidden[row, choice], keys[row, choice]
            if slope == zero:  # most rows: a head that its op does not use
                out[:] = zero
                continue
            bias[0] += slope
            for i in range(len(own)):
                back = zero if own[i] <= zero else slope * scores[i]
                out[i] = back
                asked[i] += back
                learnt[i] += slope * own[i]


@fused
def _place(ops, others, logits, sizes):
    """Write the logits of ops and of the heads after the blueprint."""
    for row in range(ops.shape[0]):
        logits[row, OP, : sizes[OP]] = ops[row]
        at = 0
        for head in range(BLUEPRINT + 1, len(sizes)):
            logits[row, head, : sizes[head]] = others[row, at : at + sizes[head]]
            at += sizes[head]


@fused
def _take(slopes, ops, others, sizes):
    """The way back."""
    for row in range(ops.shape[0]):
        ops[row] = slopes[row, OP, : sizes[OP]]
        at = 0
        for head in range(BLUEPRINT + 1, len(sizes)):
            others[row, at : at + sizes[head]] = slopes[row, head, : sizes[head]]
            at += sizes[head]
