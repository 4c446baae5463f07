r"""PPO's objective and its gradient in one compiled loop over the steps of a minibatch.

What `losses.ppo_terms` says of logits and values, on the CPU: the same terms, with the
gradient written by hand where autograd would go through some four hundred operations.
With p the probabilities of an open head, a its choice, H its entropy, n its legal
choices and G the slope of the loss at log p_a:

    dL/dl_i = G (1[i = a] - p_i) + w_h / (steps log n) p_i (log p_i + H)     legal

It is exactly 0 where a choice is illegal, a head is closed or a step is padding; what
stands there is never read.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.contracts.actions import NUM_HEADS
from esper.kernels import fused_with
from esper.simic.agent import losses
from esper.simic.agent.losses import LARGEST_LOG_RATIO, LossWeights, Terms
from esper.simic.agent.sequence_batch import SequenceBatch

SHARES: Final = {"joint": (1.0, 0.0), "per_head": (0.0, 1.0), "mixed": (0.5, 0.5)}
"""How much the joint clip and the clip of each head weigh."""
SCALARS: Final = 4
PARTS: Final = (SCALARS, *(NUM_HEADS,) * 4, 1)
"""What is told: four numbers, four of each head, the loss."""
Array = NDArray[Any]
fused, fused_part = fused_with(losses), fused_with(losses, part=True)

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


def compiled_terms(
    logits: Float[Tensor, "env time head choice"],
    values: Float[Tensor, "env time"],
    batch: SequenceBatch,
    targets: Float[Tensor, "env time"],
    old_values: Float[Tensor, "env time"],
    weights: LossWeights,
) -> tuple[Terms, Float[Tensor, " head"]]:
    """PPO's objective on the CPU, and the length of its gradient at each head's logits.

    Args:
        logits: Of the current policy on the stored observations and choices.
        values: V(s) of the current policy in the units of the value statistics.
        batch: What was collected; its advantages are normalised already.
        targets: Returns in the units of the value statistics.
        old_values: Values at collection in the same units, for value clipping.
        weights: Clip range and weights of the terms.
    """
    stored = (
        batch.rows,
        batch.actions,
        batch.log_probs,
        batch.distribution,
        batch.advantages,
        targets,
        old_values,
        batch.valid_mask,
        weights.entropy,
    )
    arrays = [tensor.detach().contiguous().numpy() for tensor in stored]
    settings = (
        *SHARES[weights.clip_mode],
        weights.clip,
        weights.value,
        math.inf if weights.value_clip is None else weights.value_clip,
    )
    loss, told = _apply(logits, values, arrays, settings)
    scalars, kl, entropy, openness, lengths, _ = told.split(PARTS)
    policy_loss, value_loss, clip_fraction, clamped = scalars.unbind()
    terms = Terms(
        loss=loss,
        policy_loss=policy_loss,
        value_loss=value_loss,
        clip_fraction=clip_fraction,
        clamped=clamped,
        kl=kl,
        entropy=entropy,
        openness=openness,
    )
    return terms, lengths


class _Objective(torch.autograd.Function):
    """The loss, and beside it what is told of it."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        values: Tensor,
        arrays: list[Array],
        settings: tuple[float, ...],
    ) -> tuple[Tensor, Tensor]:
        """Compute loss and gradient."""
        slopes = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        pull = torch.zeros_like(values, memory_format=torch.contiguous_format)
        told = np.zeros(sum(PARTS))
        given = (tensor.detach().contiguous().numpy() for tensor in (logits, values))
        _differentiate(*given, *arrays, *settings, slopes.numpy(), pull.numpy(), told)
        ctx.save_for_backward(slopes, pull)
        result = torch.from_numpy(told).to(logits.dtype)
        ctx.mark_non_differentiable(result)
        return result[-1].clone(), result

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        slope: Tensor,
        _: Tensor,
    ) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of logits and values."""
        slopes, pull = ctx.saved_tensors
        return slopes * slope, pull * slope, None, None


_apply: Final[Callable[..., tuple[Tensor, Tensor]]] = _Objective.apply


@fused
def _differentiate(
    logits, values, rows, actions, old_log_probs, old, advantages, targets, old_values,
    valid, entropy, joint, single, clip, value_weight, value_clip, slopes, pull, told,
):  # fmt: skip
    """Fill `slopes`, `pull` and `told`, whose last number is the loss."""
    envs, time, heads, width = logits.shape
    real = logits.dtype.type
    count = 0
    for env in range(envs):
        for step in range(time):
            count += valid[env, step]
    steps = max(count, 1)
    log_probs, entropies = np.zeros((heads, width), logits.dtype), np.zeros(heads)
    legal, raw = np.zeros(heads, np.int64), np.zeros(heads)
    kl, share = np.zeros(heads), np.zeros(heads)
    opened, square = np.zeros(heads), np.zeros(heads)
    policy_loss = value_loss = clipped = clamped = 0.0
    for env in range(envs):
        for step in range(time):
            if not valid[env, step]:
                continue
            here = env, step
            total, inner, extreme = 0.0, 0.0, False
            for head in range(heads):
                row = rows[env, step, head]
                legal[head] = row.sum()
                if legal[head] < 2:
                    continue
                opened[head] += 1
                own = log_probs[head]
                _log_softmax(logits[env, step, head], row, own)
                nats = 0.0
                for i in range(width):
                    if row[i]:
                        before = old[env, step, head, i]
                        kl[head] += math.exp(before) * (before - own[i])
                        nats -= math.exp(own[i]) * own[i]
                entropies[head] = nats
                share[head] += nats / math.log(legal[head])
                move = own[actions[env, step, head]] - old_log_probs[env, step, head]
                raw[head] = move
                total += move
                extreme |= abs(move) > LARGEST_LOG_RATIO
                inner += _held(move, LARGEST_LOG_RATIO)
            extreme |= abs(total) > LARGEST_LOG_RATIO
            clamped += extreme
            advantage = advantages[here]
            gain, rise, outside = _clipped(inner, advantage, clip)
            clipped += outside
            gain, rise = joint * gain, joint * rise
            if single > 0.0:
                gain += single * advantage
            for head in range(heads):
                if legal[head] < 2:
                    continue
                slope = rise
                if single > 0.0:
                    alone, own_rise, _ = _clipped(raw[head], advantage, clip)
                    gain += single * (alone - advantage)
                    slope += single * own_rise
                if not abs(raw[head]) <= LARGEST_LOG_RATIO:
                    slope = 0.0
                slope = -slope / steps
                weight = entropy[head] / (steps * math.log(legal[head]))
                own, row = log_probs[head], rows[env, step, head]
                choice = actions[env, step, head]
                for i in range(width):
                    if row[i]:
                        chance = math.exp(own[i])
                        push = weight * chance * (own[i] + entropies[head])
                        push += slope * ((i == choice) - chance)
                        slopes[env, step, head, i] = real(push)
                        square[head] += push * push
            policy_loss -= gain
            error, tilt = _value_error(
                values[here], targets[here], old_values[here], value_clip
            )
            value_loss += error
            pull[here] = real(value_weight * tilt / steps)
    told[:SCALARS] = policy_loss, value_loss, clipped, clamped
    told[:3] /= steps
    bonus, at = 0.0, SCALARS
    for head in range(heads):
        bonus += entropy[head] * share[head]
        told[at + head] = kl[head] / steps
        told[at + heads + head] = share[head] / max(opened[head], 1.0)
        told[at + 2 * heads + head] = opened[head] / steps
        told[at + 3 * heads + head] = math.sqrt(square[head])
    told[-1] = (policy_loss + value_weight * value_loss - bonus) / steps


@fused_part
def _log_softmax(logits, row, out):
    """Log-probabilities of legal choices; the others are not written."""
    top = -math.inf
    for i in range(len(logits)):
        if row[i] and not logits[i] <= top:
            top = logits[i]
    total = logits.dtype.type(0)
    for i in range(len(logits)):
        if row[i]:
            total += math.exp(logits[i] - top)
    for i in range(len(logits)):
        if row[i]:
            out[i] = (logits[i] - top) - math.log(total)


@fused_part
def _held(value, most):
    """The value, at most so far from 0; NaN stays NaN."""
    if value > most:
        return most
    return -most if value < -most else value


@fused_part
def _clipped(log_ratio, advantage, clip):
    """The clipped gain, its slope in the log-ratio, and whether the range was left."""
    ratio = math.exp(_held(log_ratio, LARGEST_LOG_RATIO))
    bound = 1.0 + _held(ratio - 1.0, clip)
    outside = abs(ratio - 1.0) > clip
    free, held = ratio * advantage, (bound if outside else ratio) * advantage
    moves = not outside or free < held
    rise = free if moves and not abs(log_ratio) > LARGEST_LOG_RATIO else 0.0
    return (free if free < held else held), rise, outside


@fused_part
def _value_error(value, target, old, clip):
    """Half the squared error and its slope; with a clip, the worse of two errors."""
    miss = value - target
    error, tilt = 0.5 * miss * miss, miss
    if clip < math.inf:
        move = value - old
        held = old + _held(move, clip) - target
        other, own = 0.5 * held * held, (held if abs(move) <= clip else 0.0)
        if other > error:
            error, tilt = other, own
        elif other == error:
            tilt = 0.5 * (tilt + own)
    return error, tilt
