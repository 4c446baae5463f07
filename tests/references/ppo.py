"""PPO's terms in plain float64 Python: sums over legal choices, steps and heads.

Nothing here is masked or padded: callers hand over only what is legal and real.
"""

import math
from dataclasses import dataclass


def log_softmax(logits: list[float]) -> list[float]:
    """Log-probabilities of the legal choices."""
    largest = max(logits)
    total = math.fsum(math.exp(logit - largest) for logit in logits)
    return [logit - largest - math.log(total) for logit in logits]


def entropy(log_probs: list[float]) -> float:
    """Of the legal choices, in nats."""
    return -math.fsum(math.exp(value) * value for value in log_probs)


def kl(old: list[float], new: list[float]) -> float:
    """KL(old || new) over the legal choices."""
    pairs = zip(old, new, strict=True)
    return math.fsum(math.exp(was) * (was - now) for was, now in pairs)


def clipped_gain(ratio: float, advantage: float, clip: float) -> float:
    """What PPO credits one ratio with."""
    nearest = min(max(ratio, 1.0 - clip), 1.0 + clip)
    return min(ratio * advantage, nearest * advantage)


def gain(ratios: list[float], advantage: float, clip: float, mode: str) -> float:
    """The clipped gain of one step that took one choice per ratio."""
    joint = clipped_gain(math.prod(ratios), advantage, clip)
    if mode == "joint":
        return joint
    moved = [clipped_gain(ratio, advantage, clip) - advantage for ratio in ratios]
    separate = advantage + math.fsum(moved)
    return separate if mode == "per_head" else (joint + separate) / 2.0


def value_error(value: float, target: float, old: float, clip: float | None) -> float:
    """Half the squared error, or the worse of clipped and unclipped."""
    errors = [(value - target) ** 2]
    if clip is not None:
        near = min(max(value, old - clip), old + clip)
        errors.append((near - target) ** 2)
    return max(errors) / 2.0


@dataclass
class Choice:
    """One head on one step: its legal choices, and which of them was taken."""

    head: int
    new_logits: list[float]
    old_log_probs: list[float]
    taken: int


@dataclass
class Step:
    """One real step: the heads that had a choice, and what came of it."""

    choices: list[Choice]
    advantage: float
    value: float
    target: float
    old_value: float


@dataclass
class Expected:
    """What the objective and its report must be."""

    loss: float
    policy_loss: float
    value_loss: float
    clip_fraction: float
    kl: list[float]
    entropy: list[float]
    openness: list[float]


def objective(
    steps: list[Step],
    *,
    heads: int,
    clip: float,
    mode: str,
    value_clip: float | None,
    value_weight: float,
    entropy_weights: list[float],
    exploration_weights: list[float],
) -> Expected:
    """The whole objective over real steps, one step and one head at a time."""
    gains, errors, outside = [], [], []
    head_kl = [0.0] * heads
    shares: list[list[float]] = [[] for _ in range(heads)]
    logs: list[list[float]] = [[] for _ in range(heads)]
    for step in steps:
        ratios = []
        for choice in step.choices:
            new = log_softmax(choice.new_logits)
            was, now = choice.old_log_probs[choice.taken], new[choice.taken]
            ratios.append(math.exp(now - was))
            head_kl[choice.head] += kl(choice.old_log_probs, new)
            shares[choice.head].append(entropy(new) / math.log(len(new)))
            logs[choice.head].append(math.fsum(new) / len(new))
        gains.append(gain(ratios, step.advantage, clip, mode))
        outside.append(abs(math.prod(ratios) - 1.0) > clip)
        errors.append(value_error(step.value, step.target, step.old_value, value_clip))

    count = max(len(steps), 1)
    policy_loss = -math.fsum(gains) / count
    value_loss = math.fsum(errors) / count
    bonus = math.fsum(
        weight * math.fsum(share) / count
        for weights, of in ((entropy_weights, shares), (exploration_weights, logs))
        for weight, share in zip(weights, of, strict=True)
    )
    return Expected(
        loss=policy_loss + value_weight * value_loss - bonus,
        policy_loss=policy_loss,
        value_loss=value_loss,
        clip_fraction=sum(outside) / count,
        kl=[value / count for value in head_kl],
        entropy=[math.fsum(share) / max(len(share), 1) for share in shares],
        openness=[len(share) / count for share in shares],
    )
