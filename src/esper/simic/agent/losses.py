r"""Settings and objective of PPO on padded sequences with masked, factored actions.

    d_h   = log π(a_h | a_<h, s) - log π_old(a_h | a_<h, s)     per head
    ratio = exp(Σ_h d_h)                                        joint (default)
    gain  = min(ratio · A, clip(ratio, 1 - ε, 1 + ε) · A)

A head is *open* on a step if its mask allows more than one choice; only open heads
contribute. Every term is a sum over steps divided by the number of valid steps, so the
balance of a head's entropy (divided by the log of its legal choices) and advantage does
not depend on how often it is open. Padding is masked before any arithmetic. The entropy
of a number is divided by log 2, so it is in bits: twice the deviation is 1 more, as are
two equal choices instead of one. It has no bounds, so by default it earns nothing.

The gradient of the entropy vanishes with the probability of a choice, so it does not
bring back a choice that became improbable where nothing could be gained yet. The
gradient of the exploration bonus, the mean log-probability of the legal choices
(-KL(uniform || π) but for a constant), does not vanish.

If the environments of a group share random numbers, the mean advantage of the others in
the group is subtracted from each advantage. It does not depend on the environment's own
action, so it is a baseline.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Annotated, Final, Literal, get_args

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Generator, Tensor
from torch.nn.functional import hardtanh

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import quoted
from esper.simic.agent.distribution import Evaluation
from esper.simic.agent.metrics import SHARED_TERMS, Terms
from esper.simic.agent.rollout_buffer import SequenceBatch, shuffled

MAX_LOG_RATIO: Final = 20.0  # exp stays finite in float32; clamped ones are counted
SMALLEST_DEVIATION: Final = 1e-5  # of advantages
CHOICE_ENTROPY: Final = 0.01
"""Entropy coefficient of choices by default."""
ClipMode = Literal["joint", "per_head", "mixed"]
CLIP_MODES: Final = get_args(ClipMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Hyperparameters of the PPO update."""

    learning_rate: float = 1e-3
    """Adam learning rate."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 4
    """Minibatches per pass. Each has whole sequences of some environments."""
    clip_range: float = 0.2
    """Clip range of the probability ratio."""
    clip_mode: ClipMode = "joint"
    """Ratio to clip: joint (of all heads), per_head, or mixed (mean of both losses)."""
    target_kl: Annotated[float, Field(allow_inf_nan=True)] = 0.03
    """Stop the update when KL(old || new) exceeds this; inf disables the check."""
    entropy_coef: float | None = None
    """Entropy coefficient of each head. Entropies of choices are scaled to a maximum of
    1, those of numbers are in bits. none: 0.01 for choices, 0 for numbers."""
    head_entropy: Mapping[str, float] = field(default_factory=dict)
    """Entropy coefficients of single heads, which override entropy_coef."""
    exploration_coef: float = 0.0
    """Coefficient of -KL(uniform || policy) of choices, which keeps all choices
    possible. It falls with the square of the schedule."""
    value_coef: float = 0.5
    """Value loss coefficient."""
    value_clip: float | None = None
    """Clip range of the value, in standard deviations of returns. none: no clipping."""
    value_norm_decay: float = 0.95
    """Decay per update of the running mean and variance of returns."""
    max_grad_norm: float = 0.5
    """Maximum norm of the gradient; larger gradients are scaled down."""

    def __post_init__(self) -> None:
        """Check all values."""
        for item in fields(PPOConfig):
            value = getattr(self, item.name)
            kinds = (Real, type(None)) if item.default is None else Real
            if isinstance(item.default, float | None) and not isinstance(value, kinds):
                raise InvalidInputError(
                    f"{item.name} must be a number, got {quoted(value)}."
                )

        weights, clip = self.head_entropy.values(), self.value_clip
        count = "an integer from 1 to "
        entropy = CHOICE_ENTROPY if self.entropy_coef is None else self.entropy_coef
        for name, valid, rule in (
            ("learning_rate", 0.0 < self.learning_rate <= 1.0, "in (0, 1]"),
            ("epochs", _is_count(self.epochs, 1_000), count + "1000"),
            ("minibatches", _is_count(self.minibatches, 65_536), count + "65536"),
            ("clip_range", self.clip_range > 0.0, "positive"),
            ("clip_mode", self.clip_mode in CLIP_MODES, f"one of {CLIP_MODES}"),
            ("target_kl", self.target_kl > 0.0, "positive"),
            ("entropy_coef", _are_weights(entropy), "finite, not negative"),
            ("head_entropy", _are_weights(*weights), "finite, not negative"),
            ("exploration_coef", _are_weights(self.exploration_coef), "finite, from 0"),
            ("value_coef", _are_weights(self.value_coef), "finite, not negative"),
            ("value_clip", clip is None or clip > 0.0, "positive or None"),
            ("value_norm_decay", 0.0 <= self.value_norm_decay <= 1.0, "in [0, 1]"),
            ("max_grad_norm", self.max_grad_norm > 0.0, "positive"),
        ):
            if not valid:
                value = getattr(self, name)
                raise InvalidInputError(f"{name} must be {rule}, got {value!r}.")

    def require_heads(self, *heads: str) -> None:
        """Check that `head_entropy` names only these heads."""
        if not self.head_entropy.keys() <= {*heads}:
            raise InvalidInputError(
                f"head_entropy must name heads of {heads}, got "
                f"{dict(self.head_entropy)!r}."
            )

    def entropy_of(self, head: str, *, is_number: bool) -> float:
        """Return the entropy coefficient of a head."""
        usual = self.entropy_coef
        if usual is None:
            usual = 0.0 if is_number else CHOICE_ENTROPY
        return self.head_entropy.get(head, usual)


def _are_weights(*values: float) -> bool:
    return all(0.0 <= value < math.inf for value in values)


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and 1 <= value <= most


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the objective compares a policy with: the same in a whole update."""

    batch: SequenceBatch
    """Its advantages, returns and values are normalised."""
    is_open: Bool[Tensor, "env time head"]
    entropy_scale: Float[Tensor, "env time head"]
    """1 over the log of the legal choices of an open head."""
    share: Float[Tensor, "env time head"]
    """1 over the legal choices."""
    counted: Bool[Tensor, "env time term"]
    """Steps that each term is summed over."""

    @classmethod
    def of(cls, batch: SequenceBatch) -> "Targets":
        """Return the targets of a batch whose numbers are normalised."""
        legal, valid = batch.masks.sum(dim=-1), batch.valid_mask.unsqueeze(-1)
        is_open = (legal > 1) & valid
        shared = valid.expand(*valid.shape[:2], len(SHARED_TERMS))
        return cls(
            batch=batch,
            is_open=is_open,
            entropy_scale=1.0 / legal.clamp(min=2).log(),
            share=1.0 / legal.clamp(min=1),
            counted=torch.cat((shared, is_open, is_open, is_open), dim=-1),
        )

    def minibatches(self, count: int, generator: Generator) -> Iterator["Targets"]:
        """Split the rows at random, as `SequenceBatch.minibatches` does."""
        return shuffled(self, self.batch.valid_mask, count, generator)


def ppo_terms(
    new: Evaluation,
    targets: Targets,
    config: PPOConfig,
    weights: Float[Tensor, " term"],
) -> Terms:
    """Return the PPO loss on a minibatch and its diagnostics.

    Terms are columns of one matrix, which is masked and summed once, because most of
    the time goes into the number of operations. `weights` are those of `loss_weights`.
    """
    batch = targets.batch
    raw = torch.where(targets.is_open, new.log_probs - batch.log_probs, 0.0)
    log_ratio = hardtanh(raw, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    whole = log_ratio.sum(dim=-1)
    joint = hardtanh(whole, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = joint.exp()
    gain = surrogate(log_ratio, ratio, batch.advantages, config)
    values = new.normalized_values
    error = value_error(values, batch.returns, batch.values, config.value_clip)
    entropy = new.family.entropy(new.distribution) * targets.entropy_scale
    spread = new.distribution.sum(dim=-1) * targets.share  # 0 where illegal
    with torch.no_grad():
        outside = (ratio - 1.0).abs() > config.clip_range
        clamped = (log_ratio != raw).any(dim=-1) | (joint != whole)
        kl = new.family.kl(batch.distribution, new.distribution, batch.masks)
    shared = torch.stack((gain, error, outside, clamped), dim=-1)
    terms = torch.cat((shared, kl, entropy, spread), dim=-1)
    # Select, do not multiply: terms of padding may be NaN.
    sums = torch.where(targets.counted, terms, 0.0).sum(dim=(0, 1))
    counts = targets.counted.sum(dim=(0, 1))
    loss = torch.dot(weights.to(sums.dtype), sums) / counts[0].clamp(min=1)
    return Terms(loss=loss, sums=sums.detach(), counts=counts)


def loss_weights(
    config: PPOConfig,
    entropy: Float[Tensor, " head"],
    exploration: Float[Tensor, " head"],
) -> Float[Tensor, " term"]:
    """Return the weight of each term in the loss, given those of the two bonuses."""
    shared = dict.fromkeys(SHARED_TERMS, 0.0)
    shared |= {"gain": -1.0, "value_error": config.value_coef}
    first = entropy.new_tensor([*shared.values()])
    return torch.cat((first, torch.zeros_like(entropy), -entropy, -exploration))


def surrogate(
    log_ratio: Float[Tensor, "env time head"],
    joint_ratio: Float[Tensor, "env time"],
    advantages: Float[Tensor, "env time"],
    config: PPOConfig,
) -> Float[Tensor, "env time"]:
    """Return the clipped objective of every step."""
    whole = _clipped_gain(joint_ratio, advantages, config.clip_range)
    if config.clip_mode == "joint":
        return whole
    # Subtract the gain at ratio 1, so that one open head equals the joint objective.
    constant = advantages.unsqueeze(-1)
    parts = _clipped_gain(log_ratio.exp(), constant, config.clip_range)
    per_head = (parts - constant).sum(dim=-1) + advantages
    return per_head if config.clip_mode == "per_head" else 0.5 * (whole + per_head)


def value_error(
    values: Float[Tensor, "env time"],
    targets: Float[Tensor, "env time"],
    old_values: Float[Tensor, "env time"],
    clip: float | None,
) -> Float[Tensor, "env time"]:
    """Return half the squared error; with a clip, the larger of clipped and plain."""
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
    """Subtract the mean advantage of the other environments of the group at each step.

    A group is `group_size` consecutive environments. Padding is left out of the means.
    """
    if group_size == 1:
        return advantages
    known = torch.where(valid, advantages, 0.0).unflatten(0, (-1, group_size))
    count = valid.unflatten(0, (-1, group_size)).sum(dim=1, keepdim=True)
    others = (known.sum(dim=1, keepdim=True) - known) / (count - 1).clamp(min=1)
    return torch.where(valid, (known - others).flatten(0, 1), advantages)


def normalize_advantages(
    advantages: Float[Tensor, "env time"], valid: Bool[Tensor, "env time"]
) -> Float[Tensor, "env time"]:
    """Normalise to mean 0 and standard deviation 1 over valid steps; 0 on padding.

    They are divided by no less than `SMALLEST_DEVIATION`, so equal ones become 0.
    """
    count = valid.sum().clamp(min=1)
    centred = torch.where(valid, advantages, 0.0)
    # The second pass removes the rounding error of the first.
    for _ in range(2):
        centred = torch.where(valid, centred - centred.sum() / count, 0.0)
    deviation = (centred.square().sum() / count).sqrt()
    return centred / deviation.clamp(min=SMALLEST_DEVIATION)


def masked_mean(
    values: Float[Tensor, "env time"], valid: Bool[Tensor, "env time"]
) -> Float[Tensor, ""]:
    """Return the mean over valid steps; 0 if there are none."""
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp(min=1)


def _clipped_gain(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return min(ratio · A, clip(ratio) · A), which is min(ratio · A, A + ε |A|)."""
    most = torch.add(advantages, advantages.abs(), alpha=clip)
    return (ratio * advantages).clamp(max=most)
