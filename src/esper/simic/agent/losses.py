r"""PPO's settings and objective over padded sequences and masked, factored actions.

    d_h   = log π(a_h | a_<h, s) - log π_old(a_h | a_<h, s)     per head
    ratio = exp(Σ_h d_h)                                        joint (default)
    gain  = min(ratio · A, clip(ratio, 1 - ε, 1 + ε) · A)

A head is *open* on a step when its stored row left more than one choice. A head that
the op does not use was forced to one choice, so open implies relevant, and a head that
is not open has log-ratio, entropy, KL and gradient exactly 0.

Normalisers: every term is a sum over steps divided by the number of valid steps. So KL
is Σ_heads Σ_steps kl / Σ_steps 1, and an open head weighs its entropy (in units of the
log of the legal count) against its advantage in the same way whether it is open
always or on one step in a thousand: rare heads neither shout nor fall silent.
Padding is selected away before any arithmetic: NaN times 0 is NaN.

`ppo_objective` computes all of it. On the CPU it is one compiled loop over the steps,
gradient included, since some 150 operations on small tensors take most of the time of
an update; elsewhere, and for numbers instead of choices, it is `ppo_terms`.

Where environments of a group have the same random streams, what happens to all of them
at the same step is not due to the action:

    A_i <- A_i - mean of A_j over the others j != i of the group.

What the others do does not depend on what i chose, so this is a baseline: it removes
the variance of host, data and batches and leaves the policy gradient where it was.
Where a group of n shares out its first choices (`Spread`), others do less often what i
did: between two choices the gradient keeps its direction and is up to n / (n - 1) as
long.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.contracts.errors import BadInput
from esper.contracts.messages import quoted
from esper.kernels import kernel
from esper.simic.agent.distribution import Evaluation, evaluate_choices, family_of
from esper.simic.agent.metrics import Terms
from esper.simic.agent.rollout_buffer import SequenceBatch

Array = NDArray[Any]
LARGEST_LOG_RATIO: Final = 20.0  # exp stays finite in float32; clamped ones are counted
CLIP_MODES: Final = ("joint", "per_head", "mixed")
JOINT_SHARES: Final = dict(zip(CLIP_MODES, (1.0, 0.0, 0.5), strict=True))
"""Weight of the joint ratio's gain; the rest is that of the heads' ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """How the policy is improved from one rollout."""

    learning_rate: float = 1e-3
    """Step size of Adam."""
    epochs: int = 4
    """Passes over one rollout."""
    minibatches: int = 4
    """Parts the environments are split into per pass; sequences stay whole."""
    clip: float = 0.2
    """Largest change of a probability ratio that still earns gain."""
    clip_mode: str = "joint"
    """Clip the joint ratio, each head's (per_head), or the mean of both (mixed)."""
    target_kl: float = 0.03
    """Stop the update when KL(old || new) passes this; inf never stops."""
    entropy: float = 0.01
    """Weight of each head's normalised entropy."""
    head_entropy: Mapping[str, float] = field(default_factory=dict)
    """For some heads, another weight."""
    value: float = 0.5
    """Weight of the value loss."""
    value_clip: float | None = None
    """Range of the value clip in normalised units; off by default."""
    value_fading: float = 0.95
    """Share of the return statistics that is kept at each update."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are shortened to it."""

    def __post_init__(self) -> None:
        """Refuse values that PPO cannot mean."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is float and not isinstance(value, Real):
                raise BadInput(f"{item.name} must be a number, got {quoted(value)}.")
        weights = self.head_entropy.values()
        near = math.inf if self.value_clip is None else self.value_clip
        for name, fine, rule in (
            ("learning_rate", 0.0 < self.learning_rate <= 1e4, "be in (0, 1e4]"),
            ("epochs", _counts(self.epochs), "be a whole number from 1"),
            ("minibatches", _counts(self.minibatches), "be a whole number from 1"),
            ("clip", self.clip > 0.0, "be positive"),
            ("clip_mode", self.clip_mode in CLIP_MODES, f"be one of {CLIP_MODES}"),
            ("target_kl", self.target_kl > 0.0, "be positive"),
            ("entropy", 0.0 <= self.entropy < math.inf, "be finite, not negative"),
            (
                "head_entropy",
                all(0.0 <= weight < math.inf for weight in weights),
                "be finite, not negative",
            ),
            ("value", 0.0 <= self.value < math.inf, "be finite, not negative"),
            ("value_clip", near > 0.0, "be positive, or None: off"),
            ("value_fading", 0.0 <= self.value_fading <= 1.0, "lie in [0, 1]"),
            ("max_grad_norm", self.max_grad_norm > 0.0, "be positive"),
        ):
            if not fine:
                raise BadInput(f"{name} must {rule}, got {getattr(self, name)!r}.")

    def require_heads(self, *heads: str) -> None:
        """Refuse weights of heads that there are not."""
        if not self.head_entropy.keys() <= {*heads}:
            raise BadInput(
                f"head_entropy must name heads of {heads}, got "
                f"{dict(self.head_entropy)!r}."
            )


def _counts(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def ppo_objective(
    logits: Float[Tensor, "env time head choice"],
    values: Float[Tensor, "env time"],
    batch: SequenceBatch,
    targets: Float[Tensor, "env time"],
    old_values: Float[Tensor, "env time"],
    config: PPOConfig,
    entropy_weights: Float[Tensor, " head"],
) -> Terms:
    """`ppo_terms` of a policy with these logits and normalised values."""
    is_plain = logits.device.type == "cpu" and logits.dtype == torch.float32
    if batch.actions.is_floating_point() or not is_plain:
        new = evaluate_choices(logits, values, batch.rows, batch.actions)
        return ppo_terms(new, batch, targets, old_values, config, entropy_weights)
    stored = (
        *(batch.rows, batch.actions, batch.log_probs),
        *(batch.distribution, batch.distribution.exp()),
        *(targets, old_values, batch.advantages, batch.valid_mask),
    )
    loss, figures, heads = _run_objective(
        logits, values, stored, config, entropy_weights
    )
    policy_loss, value_loss, clip_fraction, clamped = figures.unbind()
    kl, entropy, openness = heads.unbind()
    return Terms(
        loss=loss,
        policy_loss=policy_loss,
        value_loss=value_loss,
        clip_fraction=clip_fraction,
        clamped=clamped,
        kl=kl,
        entropy=entropy,
        openness=openness,
    )


def ppo_terms(
    new: Evaluation,
    batch: SequenceBatch,
    targets: Float[Tensor, "env time"],
    old_values: Float[Tensor, "env time"],
    config: PPOConfig,
    entropy_weights: Float[Tensor, " head"],
) -> Terms:
    """PPO's objective of `new` on `batch`.

    Args:
        new: The current policy on the stored observations and choices.
        batch: What was collected; its advantages are normalised already.
        targets: Returns in the units of the value statistics.
        old_values: Values at collection in the same units, for value clipping.
        config: Clips and the weight of the value loss.
        entropy_weights: Of each head.
    """
    valid = batch.valid_mask
    legal = batch.rows.sum(dim=-1)
    is_open = (legal > 1) & valid.unsqueeze(-1)
    raw = torch.where(is_open, new.log_probs - batch.log_probs, 0.0)
    log_ratio = raw.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)

    gain, clipped = surrogate(log_ratio, batch.advantages, config)
    policy_loss = -masked_mean(gain, valid)
    value_loss = masked_mean(
        value_error(new.normalized_values, targets, old_values, config.value_clip),
        valid,
    )
    family = family_of(batch.actions.dtype)
    nats = family.entropy(new.distribution)
    share = torch.where(is_open, nats / legal.clamp(min=2).log(), 0.0)
    steps = valid.sum().clamp(min=1)
    bonus = (entropy_weights * share.sum(dim=(0, 1))).sum() / steps
    loss = policy_loss + config.value * value_loss - bonus

    with torch.no_grad():
        open_steps = is_open.sum(dim=(0, 1))
        kl = family.kl(batch.distribution, new.distribution)
        return Terms(
            loss=loss,
            policy_loss=policy_loss.detach(),
            value_loss=value_loss.detach(),
            clip_fraction=masked_mean(clipped, valid),
            clamped=_is_extreme(raw).sum().to(loss.dtype),
            kl=torch.where(is_open, kl, 0.0).sum(dim=(0, 1)) / steps,
            entropy=share.sum(dim=(0, 1)) / open_steps.clamp(min=1),
            openness=open_steps / steps,
        )


def surrogate(
    log_ratio: Float[Tensor, "env time head"],
    advantages: Float[Tensor, "env time"],
    config: PPOConfig,
) -> tuple[Float[Tensor, "env time"], Float[Tensor, "env time"]]:
    """Clipped gain of every step, and whether its (joint) ratio left the range."""
    joint = log_ratio.sum(dim=-1).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    joint_ratio = joint.exp()
    outside = ((joint_ratio - 1.0).abs() > config.clip).to(joint_ratio.dtype)
    whole = _clipped_gain(joint_ratio, advantages, config.clip)
    if config.clip_mode == "joint":
        return whole, outside
    # The gain of a head at ratio one is a constant; without it, one head is the joint.
    parts = _clipped_gain(log_ratio.exp(), advantages.unsqueeze(-1), config.clip)
    constant = advantages.unsqueeze(-1)
    per_head = (parts - constant).sum(dim=-1) + advantages
    if config.clip_mode == "per_head":
        return per_head, outside
    return 0.5 * (whole + per_head), outside


def value_error(
    values: Float[Tensor, "env time"],
    targets: Float[Tensor, "env time"],
    old_values: Float[Tensor, "env time"],
    clip: float | None,
) -> Float[Tensor, "env time"]:
    """Half the squared error; with a clip, the worse of clipped and unclipped."""
    error = (values - targets).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = error.maximum((near - targets).square())
    return 0.5 * error


def subtract_group_baseline(
    advantages: Float[Tensor, "env time"],
    valid: Bool[Tensor, "env time"],
    group_size: int,
) -> Float[Tensor, "env time"]:
    """Advantages less the mean of the rest of an environment's group at each step.

    Padding is left out of the means; `group_size` environments in a row form a group.
    """
    if group_size == 1:
        return advantages
    known = torch.where(valid, advantages, 0.0).unflatten(0, (-1, group_size))
    count = valid.unflatten(0, (-1, group_size)).sum(dim=1, keepdim=True)
    others = (known.sum(dim=1, keepdim=True) - known) / (count - 1).clamp(min=1)
    return torch.where(valid, (known - others).flatten(0, 1), advantages)


def normalize_advantages(
    advantages: Float[Tensor, "env time"],
    valid: Bool[Tensor, "env time"],
    floor: float = 1e-5,
) -> Float[Tensor, "env time"]:
    """Advantages with mean 0 and deviation 1 over valid steps; 0 on padding.

    One valid step, or none, gives zeros; spreads below `floor` are divided by it.
    """
    count = valid.sum().clamp(min=1)
    centred = torch.where(valid, advantages, 0.0)
    # Once for the mean, once more for what rounding left of it.
    for _ in range(2):
        centred = torch.where(valid, centred - centred.sum() / count, 0.0)
    # The floor: advantages that are all equal become 0, not amplified rounding.
    deviation = (centred.square().sum() / count).sqrt()
    return centred / deviation.clamp(min=floor)


def masked_mean(
    values: Float[Tensor, "env time"], valid: Bool[Tensor, "env time"]
) -> Float[Tensor, ""]:
    """Mean over valid steps; 0 if there are none."""
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp(min=1)


def _is_extreme(log_ratio: Tensor) -> Tensor:
    """Whether a head's log-ratio, or their sum, had to be clamped on a step."""
    one = (log_ratio.abs() > LARGEST_LOG_RATIO).any(dim=-1)
    return one | (log_ratio.sum(dim=-1).abs() > LARGEST_LOG_RATIO)


def _clipped_gain(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip)
    return (ratio * advantages).minimum(clipped * advantages)


class _Objective(torch.autograd.Function):
    """PPO's objective over choices in float32 on the CPU, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Float[Tensor, "env time head choice"],
        values: Float[Tensor, "env time"],
        stored: tuple[Tensor, ...],
        config: PPOConfig,
        entropy_weights: Float[Tensor, " head"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss and, as in `Terms`, four scalars and three rows of heads."""
        grads = torch.empty(logits.shape), torch.empty(values.shape)
        figures, heads = torch.empty(5), torch.empty(3, logits.shape[2])
        by_step = (
            x.detach().contiguous().flatten(0, 1).numpy()
            for x in (logits, values, *stored, *grads)
        )
        _objective(
            *by_step,
            entropy_weights.numpy(),
            config.clip,
            JOINT_SHARES[config.clip_mode],
            config.value,
            math.inf if config.value_clip is None else config.value_clip,
            figures.numpy(),
            heads.numpy(),
        )
        ctx.save_for_backward(*grads)
        loss, scalars = figures[4], figures[:4]
        ctx.mark_non_differentiable(scalars, heads)
        ctx.set_materialize_grads(False)
        return loss, scalars, heads

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
        *_: None,
    ) -> tuple[Tensor, Tensor, None, None, None]:
        """Gradients of logits and values."""
        logits, values = ctx.saved_tensors
        return grad * logits, grad * values, None, None, None


_run_objective: Final[Callable[..., tuple[Tensor, Tensor, Tensor]]] = _Objective.apply


@kernel
def _objective(
    logits: Array,
    values: Array,
    rows: Array,
    actions: Array,
    old_log_probs: Array,
    old_distribution: Array,
    old_probs: Array,
    targets: Array,
    old_values: Array,
    advantages: Array,
    valid: Array,
    grad_logits: Array,
    grad_values: Array,
    entropy_weights: Array,
    clip: float,
    joint_share: float,
    value_weight: float,
    value_clip: float,
    figures: Array,
    heads: Array,
) -> None:
    """`ppo_terms` and its gradient on `[step, ...]`; sums are in float64."""
    _, count, choices = logits.shape
    kind = logits.dtype.type
    zero, one, limit = kind(0), kind(1), kind(LARGEST_LOG_RATIO)
    each = kind(1.0 / max(valid.sum(), 1))
    scales = one / np.log(np.maximum(np.arange(choices + 1), 2)).astype(logits.dtype)
    legal, nats = np.zeros(count, np.int64), np.zeros(count, logits.dtype)
    slopes, own_slopes = np.zeros(count, logits.dtype), np.zeros(count, logits.dtype)
    log_probs = np.zeros((count, choices), logits.dtype)
    gains = errors = outside = clamped = bonus = 0.0
    sums = np.zeros((3, count))
    # Probabilities wait where their gradient will be.
    shifts = np.empty(actions.shape, logits.dtype)
    _softmax(logits, rows, grad_logits, shifts)
    for step in range(len(values)):
        if not valid[step]:
            grad_logits[step], grad_values[step] = zero, zero
            continue
        advantage, summed, joint, is_extreme = advantages[step], zero, zero, False
        by_head = advantage
        for head in range(count):
            legal[head] = 0
            for choice in range(choices):
                legal[head] += rows[step, head, choice]
            if legal[head] < 2:
                continue
            entropy = kl = zero
            for choice in range(choices):
                log_prob = logits[step, head, choice] - shifts[step, head]
                log_prob = log_prob if rows[step, head, choice] else zero
                log_probs[head, choice] = log_prob
                entropy -= grad_logits[step, head, choice] * log_prob
                was = old_distribution[step, head, choice]
                kl += old_probs[step, head, choice] * (was - log_prob)
            nats[head] = entropy
            sums[0, head] += kl
            sums[1, head] += entropy * scales[legal[head]]
            sums[2, head] += 1.0
            action = actions[step, head]
            raw = log_probs[head, action] - old_log_probs[step, head]
            log_ratio, within = _clamped(raw, limit)
            is_extreme |= abs(raw) > limit
            summed, joint = summed + raw, joint + log_ratio
            slopes[head] = within
            if joint_share < 1.0:
                gain, slope = _gain(log_ratio, advantage, kind(clip))
                own_slopes[head] = slope
                by_head += gain - advantage
        clamped += is_extreme | (abs(summed) > limit)
        joint, within = _clamped(joint, limit)
        gain, slope = _gain(joint, advantage, kind(clip))
        outside += abs(np.exp(joint) - one) > kind(clip)
        gains += joint_share * gain + (1.0 - joint_share) * by_head
        for head in range(count):
            if legal[head] < 2:
                grad_logits[step, head] = zero
                continue
            whole = kind(joint_share) * (within * slope)
            whole += kind(1.0 - joint_share) * own_slopes[head]
            whole *= -each * slopes[head]
            weight = each * entropy_weights[head] * scales[legal[head]]
            for choice in range(choices):
                slope_here = weight * (log_probs[head, choice] + nats[head]) - whole
                grad_logits[step, head, choice] *= slope_here
            grad_logits[step, head, actions[step, head]] += whole
        error, slope = _value_error(
            values[step], targets[step], old_values[step], kind(value_clip)
        )
        errors += error
        grad_values[step] = each * kind(value_weight) * slope
    for head in range(count):
        bonus += entropy_weights[head] * sums[1, head]
        heads[0, head] = sums[0, head] * each
        heads[1, head] = sums[1, head] / max(sums[2, head], 1.0)
        heads[2, head] = sums[2, head] * each
    figures[0], figures[1] = -gains * each, errors * each
    figures[2], figures[3] = outside * each, clamped
    figures[4] = each * (value_weight * errors - gains - bonus)


@kernel
def _softmax(logits: Array, rows: Array, probs: Array, shifts: Array) -> None:
    """Write probabilities, 0 where illegal, and the log-sums that normalise them.

    One thing at a time for all rows: exponentials after each other overlap. Masks are
    too irregular to branch on, so values are selected.
    """
    kind = logits.dtype.type
    steps, heads, choices = logits.shape
    for step in range(steps):
        for head in range(heads):
            largest = kind(-np.inf)
            for choice in range(choices):
                logit = logits[step, head, choice]
                logit = logit if rows[step, head, choice] else kind(-np.inf)
                probs[step, head, choice] = logit
                largest = largest if logit <= largest else logit
            shifts[step, head] = largest
            for choice in range(choices):
                probs[step, head, choice] -= largest
    flat = probs.reshape(-1)
    for index in range(len(flat)):
        flat[index] = np.exp(flat[index])
    for step in range(steps):
        for head in range(heads):
            total = kind(0)
            for choice in range(choices):
                total += probs[step, head, choice]
            shifts[step, head] += np.log(total)
            for choice in range(choices):
                probs[step, head, choice] *= kind(1) / total


@kernel
def _clamped(value: float, limit: float) -> tuple[float, float]:
    """The nearest number in [-limit, limit], and its derivative; NaN stays."""
    if value < -limit:
        return -limit, type(limit)(0)
    if value > limit:
        return limit, type(limit)(0)
    return value, type(limit)(1)


@kernel
def _gain(log_ratio: float, advantage: float, clip: float) -> tuple[float, float]:
    """The clipped gain, and its derivative by the log-ratio."""
    one = type(clip)(1)
    ratio = np.exp(log_ratio)
    whole, zero = ratio * advantage, one - one
    if ratio < one - clip and advantage < zero:
        return (one - clip) * advantage, zero
    if ratio > one + clip and advantage > zero:
        return (one + clip) * advantage, zero
    return whole, whole


@kernel
def _value_error(
    value: float, target: float, old: float, clip: float
) -> tuple[float, float]:
    """Half the larger squared error, and its derivative by the value."""
    half, error = type(clip)(0.5), (value - target) ** 2
    away, within = _clamped(value - old, clip)
    other = (old + away - target) ** 2
    if within or error > other:
        return half * error, value - target
    # Where both are equal each has half of the gradient, and the clipped one's is 0.
    slope = half * (value - target) if error == other else half - half
    return half * other, slope
