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

Where environments of a group have the same random streams, what happens to all of them
at the same step is not due to the action:

    A_i <- A_i - mean of A_j over the others j != i of the group.

What the others do does not depend on what i chose, so this is a baseline: it removes
the variance of host, data and batches and leaves the policy gradient where it was.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Final, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import quoted
from esper.simic.agent.distribution import Evaluation, family_of
from esper.simic.agent.metrics import Terms
from esper.simic.agent.rollout_buffer import SequenceBatch

LARGEST_LOG_RATIO: Final = 20.0  # exp stays finite in float32; clamped ones are counted
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
    target_kl: float = 0.03
    """Stop the update when KL(old || new) exceeds this; inf disables the check."""
    entropy_coef: float = 0.01
    """Entropy coefficient of each head. Entropies are scaled to a maximum of 1."""
    head_entropy: Mapping[str, float] = field(default_factory=dict)
    """Entropy coefficients of single heads, which override entropy_coef."""
    value_coef: float = 0.5
    """Value loss coefficient."""
    value_clip: float | None = None
    """Clip range of the value, in standard deviations of returns. none: no clipping."""
    value_norm_decay: float = 0.95
    """Decay per update of the running mean and variance of returns."""
    max_grad_norm: float = 0.5
    """Maximum norm of the gradient; larger gradients are scaled down."""

    def __post_init__(self) -> None:
        """Refuse values that PPO cannot mean."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is float and not isinstance(value, Real):
                raise InvalidInputError(
                    f"{item.name} must be a number, got {quoted(value)}."
                )
        weights = self.head_entropy.values()
        near = math.inf if self.value_clip is None else self.value_clip
        for name, fine, rule in (
            ("learning_rate", 0.0 < self.learning_rate <= 1e4, "be in (0, 1e4]"),
            ("epochs", _counts(self.epochs), "be a whole number from 1"),
            ("minibatches", _counts(self.minibatches), "be a whole number from 1"),
            ("clip_range", self.clip_range > 0.0, "be positive"),
            ("clip_mode", self.clip_mode in CLIP_MODES, f"be one of {CLIP_MODES}"),
            ("target_kl", self.target_kl > 0.0, "be positive"),
            (
                "entropy_coef",
                0.0 <= self.entropy_coef < math.inf,
                "be finite, not negative",
            ),
            (
                "head_entropy",
                all(0.0 <= weight < math.inf for weight in weights),
                "be finite, not negative",
            ),
            (
                "value_coef",
                0.0 <= self.value_coef < math.inf,
                "be finite, not negative",
            ),
            ("value_clip", near > 0.0, "be positive, or None: off"),
            ("value_norm_decay", 0.0 <= self.value_norm_decay <= 1.0, "lie in [0, 1]"),
            ("max_grad_norm", self.max_grad_norm > 0.0, "be positive"),
        ):
            if not fine:
                raise InvalidInputError(
                    f"{name} must {rule}, got {getattr(self, name)!r}."
                )

    def require_heads(self, *heads: str) -> None:
        """Refuse weights of heads that there are not."""
        if not self.head_entropy.keys() <= {*heads}:
            raise InvalidInputError(
                f"head_entropy must name heads of {heads}, got "
                f"{dict(self.head_entropy)!r}."
            )


def _counts(value: object) -> bool:
    return isinstance(value, int) and value >= 1


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
    legal = batch.masks.sum(dim=-1)
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
    loss = policy_loss + config.value_coef * value_loss - bonus

    with torch.no_grad():
        open_steps = is_open.sum(dim=(0, 1))
        kl = family.kl(batch.distribution, new.distribution, batch.masks)
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
    outside = ((joint_ratio - 1.0).abs() > config.clip_range).to(joint_ratio.dtype)
    whole = _clipped_gain(joint_ratio, advantages, config.clip_range)
    if config.clip_mode == "joint":
        return whole, outside
    # The gain of a head at ratio one is a constant; without it, one head is the joint.
    parts = _clipped_gain(log_ratio.exp(), advantages.unsqueeze(-1), config.clip_range)
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
