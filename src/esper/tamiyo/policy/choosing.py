r"""Sentences drawn head by head in compiled loops: `distribution`, on the CPU.

    log p_i = (l_i - max) - log sum_{j legal} exp(l_j - max)     legal
    choice  = first legal i with p_1 + ... + p_i > u (p_1 + ... + p_n)

A `Sentences` is filled in place: rows, log-probabilities, choices. Each loop draws the
next head of all environments and gathers what the head after it reads. It returns the
first environment that has nothing to choose, or -1.
"""

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.contracts import actions
from esper.contracts.actions import HEAD, RELEVANT
from esper.kernels import fused_with, summed_with

Floats = NDArray[np.float32]
Array = NDArray[Any]

SLOT: Final = HEAD["slot"]
BLUEPRINT: Final = HEAD["blueprint"]
USES: Final[Array] = RELEVANT.numpy()
ZERO: Final = np.float32(0.0)
# u < 1 still allows u * total == total after rounding; this keeps it strictly below.
BELOW_ONE: Final = np.float32(1.0 - 2.0**-22)
fused, fused_part = fused_with(actions), fused_with(actions, part=True)
summed_part = summed_with(actions, part=True)

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


class Sentences(NamedTuple):
    """Choices of all environments, while they are made."""

    actions: NDArray[np.int64]
    log_probs: Floats
    rows: NDArray[np.bool_]
    """False where nothing was written yet."""
    distribution: Floats
    """0 where nothing was written yet."""
    draws: Floats
    """Chance, in [0, 1), of every head; below 0 takes the likeliest choice."""


@fused
def choose_op(said, table, logits, core, embedding):
    """Draw the ops; add what each op means to the core of its environment."""
    for env in range(logits.shape[0]):
        said.rows[env, 0, : table.shape[1]] = table[env]
        if not _draw(said, env, 0, logits[env]):
            return env
        meaning = embedding[said.actions[env, 0]]
        for i in range(core.shape[1]):
            both = core[env, i] + meaning[i]
            core[env, i] = ZERO if both <= ZERO else both
    return -1


@fused
def choose_slot(said, table, fixed, causal, query, keys, score, bias, slots, offers,
                sentence, offered):  # fmt: skip
    """Draw the slots; gather the slot and its offers.

    Args:
        said: What is filled in.
        table: Slots legal for each op, `[env, op, slot]`.
        fixed: What the run ever allows, `[head, choice]`.
        causal: Whether a head that the op does not use is forced to choice 0.
        query: What is looked for, `[env, unit]`.
        keys: What every slot is, `[env, slot, unit]`.
        score: How much a unit of both counts.
        bias: Added to every score.
        slots: Encodings, `[env, slot, number]`.
        offers: Encodings, `[env, slot, blueprint, number]`.
        sentence: What is known so far; the slot is written from its second part on.
        offered: Where the offers of the slot are written, `[env, blueprint, number]`.
    """
    count, start = keys.shape[1], sentence.shape[1] - slots.shape[2] - offers.shape[3]
    logits = np.empty(count, np.float32)
    for env in range(query.shape[0]):
        op = said.actions[env, 0]
        _allow(said, env, SLOT, USES[op, SLOT], table[env, op], fixed, causal)
        _scores(query[env], keys[env], score, bias, logits)
        if not _draw(said, env, SLOT, logits):
            return env
        slot = said.actions[env, SLOT]
        sentence[env, start : start + slots.shape[2]] = slots[env, slot]
        offered[env] = offers[env, slot]
    return -1


@fused
def choose_blueprint(said, table, fixed, causal, query, keys, score, bias, offered,
                     sentence):  # fmt: skip
    """Draw the blueprints; gather the offer, which is the last part of the sentence."""
    count, start = keys.shape[1], sentence.shape[1] - offered.shape[2]
    logits = np.empty(count, np.float32)
    for env in range(query.shape[0]):
        uses = USES[said.actions[env, 0], BLUEPRINT]
        legal = table[env, said.actions[env, SLOT]]
        _allow(said, env, BLUEPRINT, uses, legal, fixed, causal)
        _scores(query[env], keys[env], score, bias, logits)
        if not _draw(said, env, BLUEPRINT, logits):
            return env
        sentence[env, start:] = offered[env, said.actions[env, BLUEPRINT]]
    return -1


@fused
def choose_rest(said, fixed, causal, logits, sizes):
    """Draw the heads after the blueprint; their logits stand behind each other."""
    for env in range(logits.shape[0]):
        op, at = said.actions[env, 0], 0
        for head in range(BLUEPRINT + 1, len(sizes)):
            uses = USES[op, head]
            _allow(said, env, head, uses, fixed[head], fixed, causal)
            if not _draw(said, env, head, logits[env, at : at + sizes[head]]):
                return env
            at += sizes[head]
    return -1


@fused_part
def _allow(said, env, head, uses, legal, fixed, causal):
    """Write the row of a head; one that its op does not use is forced."""
    row = said.rows[env, head]
    if uses:
        row[: len(legal)] = legal
    elif causal:
        row[0] = True
    else:
        row[:] = fixed[head]


@summed_part
def _scores(query, keys, score, bias, logits):
    """How well each key answers the query."""
    for choice in range(keys.shape[0]):
        total = bias[0]
        for i in range(len(query)):
            both = query[i] + keys[choice, i]
            total += score[0, i] * (ZERO if both <= ZERO else both)
        logits[choice] = total


@fused_part
def _draw(said, env, head, logits):
    """Draw one head of one environment; False if nothing is legal."""
    row, log_probs = said.rows[env, head], said.distribution[env, head]
    likeliest = -1
    for i in range(len(logits)):
        if row[i] and (likeliest < 0 or logits[i] > logits[likeliest]):
            likeliest = i
    if likeliest < 0:
        return False
    top, total = logits[likeliest], ZERO
    for i in range(len(logits)):
        if row[i]:
            total += math.exp(logits[i] - top)
    log_total, mass = math.log(total), ZERO
    for i in range(len(logits)):
        if row[i]:
            log_probs[i] = (logits[i] - top) - log_total
            mass += math.exp(log_probs[i])
    choice, draw = likeliest, said.draws[env, head]
    if draw >= ZERO:
        threshold, below = (draw * BELOW_ONE) * mass, ZERO
        for i in range(len(logits)):
            if row[i]:
                below += math.exp(log_probs[i])
                if below > threshold:
                    choice = i
                    break
    said.actions[env, head], said.log_probs[env, head] = choice, log_probs[choice]
    return True
