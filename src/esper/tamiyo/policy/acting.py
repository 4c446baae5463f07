"""One decision of all environments on the CPU, without gradients and with few calls.

The arithmetic of `TamiyoPolicy.act` in the same order: its matrix products are torch's,
what lies between them runs in compiled loops. For some tens of environments the time
goes to calls rather than to numbers, and here are a fifth as many.
"""

import math
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import linear

from esper.contracts.actions import HEAD_NAMES, NUM_HEADS, ActionSpec
from esper.contracts.errors import NoLegalAction
from esper.contracts.masks import ActionMasks
from esper.kernels import fused_with
from esper.tamiyo.policy import choosing, gating
from esper.tamiyo.policy.choosing import (
    ZERO,
    Sentences,
    choose_blueprint,
    choose_op,
    choose_rest,
    choose_slot,
)
from esper.tamiyo.policy.encoding import Encoded, Layers

ONE: Final = np.float32(1.0)
TWO: Final = np.float32(2.0)
LEAST: Final = np.float32(gating.LEAST)

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


class Spoken(NamedTuple):
    """A sentence for every environment; as the fields of `Decision`."""

    actions: Int64[Tensor, "env head"]
    log_probs: Float[Tensor, "env head"]
    rows: Bool[Tensor, "env head choice"]
    distribution: Float[Tensor, "env head choice"]


def remember(
    memory: Any,  # noqa: ANN401
    core: Float[Tensor, "env core"],
    first: Bool[Tensor, " env"],
    state: Float[Tensor, "env layer state"],
) -> Float[Tensor, "env layer state"]:
    """Add what is remembered to `core`, in place; return what to remember next."""
    if "gates" not in memory._modules:
        return torch.zeros_like(state)
    after = state.clone(memory_format=torch.contiguous_format)
    fresh, held, known = first.numpy(), after.numpy(), core.numpy()
    for layer, gates in enumerate(memory.gates):
        _remember(_through(gates, core).numpy(), fresh, held[:, layer], known)
    return after


def value(layers: Layers, core: Float[Tensor, "env core"]) -> Float[Tensor, " env"]:
    """The value in units of its statistics."""
    hidden = _through(layers["value_hidden"], core).relu_()
    return _through(layers["value_out"], hidden).view(-1)


def speak(
    layers: Layers,
    seen: Encoded,
    masks: ActionMasks,
    spec: ActionSpec,
    draws: Float[Tensor, "env head"] | None,
    *,
    causal: bool,
) -> Spoken:
    """Choose a sentence for every environment; the likeliest without draws."""
    envs, width = seen.core.shape
    slot_width = seen.slots.shape[2]
    kinds, offer_width = seen.offers.shape[2:]
    if draws is None:
        draws = seen.core.new_full((envs, NUM_HEADS), -1.0)
    shape = (envs, NUM_HEADS, spec.width)
    spoken = Spoken(
        torch.empty(shape[:2], dtype=torch.int64),
        seen.core.new_empty(shape[:2]),
        torch.zeros(shape, dtype=torch.bool),
        seen.core.new_zeros(shape),
    )
    said = Sentences(*(tensor.numpy() for tensor in (*spoken, draws)))
    fixed, tables = masks.fixed.numpy(), masks.slot.contiguous().numpy()

    sentence = seen.core.new_empty(envs, width + slot_width + offer_width)
    core = sentence[:, :width]
    core.copy_(seen.core)
    hidden = _through(layers["op_hidden"], seen.core).relu_()
    logits = _through(layers["op_out"], hidden)
    embedding = layers["op_embedding"].weight.detach().numpy()
    table = masks.op.contiguous().numpy()
    _require(choose_op(said, table, logits.numpy(), core.numpy(), embedding), 0)

    query = _through(layers["slot_query"], core)
    keys = _through(layers["slot_key"], seen.slots)
    offered = seen.core.new_empty(envs, kinds, offer_width)
    arrays = (query, keys, *_scoring(layers["slot_score"]), seen.slots, seen.offers)
    stuck = choose_slot(
        said, tables, fixed, causal, *(tensor.numpy() for tensor in arrays),
        sentence.numpy(), offered.numpy(),
    )  # fmt: skip
    _require(stuck, 1)

    query = _through(layers["offer_query"], sentence[:, : width + slot_width])
    keys = _through(layers["offer_key"], offered)
    arrays = (query, keys, *_scoring(layers["offer_score"]), offered, sentence)
    tables = masks.blueprint.contiguous().numpy()
    stuck = choose_blueprint(
        said, tables, fixed, causal, *(tensor.numpy() for tensor in arrays)
    )
    _require(stuck, 2)

    hidden = _through(layers["rest_hidden"], sentence).relu_()
    logits = _through(layers["rest_out"], hidden)
    _require(choose_rest(said, fixed, causal, logits.numpy(), spec.sizes), 3)
    return spoken


def _through(layer: Any, inputs: Tensor) -> Tensor:  # noqa: ANN401
    own = layer._parameters  # a module finds them more slowly
    return linear(inputs, own["weight"], own["bias"])


def _scoring(layer: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    return layer.weight.detach(), layer.bias.detach()


def _require(stuck: int, head: int) -> None:
    """Refuse an environment in which a head has nothing to choose."""
    if stuck >= 0:
        raise NoLegalAction(
            f"head {HEAD_NAMES[head]!r} of environment {stuck} has no legal choice; "
            "WAIT must always be legal and an op needs a slot: check the masks."
        )


@fused_with(choosing, gating)
def _remember(gates, first, state, core):
    """One step of a layer of minimal gated recurrent units; see `memory`."""
    width = core.shape[1]
    for env in range(core.shape[0]):
        for i in range(width):
            update = ONE / (ONE + math.exp(-gates[env, i]))
            size = update * (TWO - update)
            write = math.sqrt(LEAST if size < LEAST else size) * gates[env, width + i]
            decay = ONE - update
            # Selected, not multiplied: a stale state may hold anything.
            if not (first[env] or decay == ZERO):
                write += decay * state[env, i]
            state[env, i] = write
            core[env, i] += write
