r"""Masked categorical distributions over several heads, as one padded tensor.

Logits, mask rows and log-probabilities of all heads are `[..., head, choice]`, padded
to the widest head; padding is illegal like any other illegal choice.

    log p_i = l_i - log sum_{j legal} exp l_j     where legal, 0 where illegal
    p_i     = exp(log p_i)                        where legal, exactly 0 where illegal

Illegal choices have probability and gradient exactly zero; a single legal choice has
log-probability 0, entropy 0 and no gradient. Zeroing log p *before* any product keeps
gradients finite: a product with the untaken -inf branch would be NaN.

A row is what a head may choose *given the heads before it*. A head that did not matter
is forced to choice 0, so its log-ratio, entropy, KL and gradient are 0.

Continuous actions use the same tensors: a head is one number, its two "choices" are
mean and log of the standard deviation of a normal distribution, both always legal.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Generator, Tensor, nn

from esper.contracts.errors import NoLegalActionError
from esper.contracts.features import Leaf


@runtime_checkable
class PolicySpec(Protocol):
    """What the learner must know of a policy's observations and actions."""

    @property
    def head_names(self) -> tuple[str, ...]:
        """What the heads are called."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each head has."""
        ...

    @property
    def width(self) -> int:
        """Length of a padded row: the choices of the largest head."""
        ...

    @property
    def action_dtype(self) -> torch.dtype:
        """int64 for choices; float32 for numbers drawn from normal distributions."""
        ...

    @property
    def observation(self) -> Mapping[str, Leaf]:
        """The tensors that a policy reads in one environment, by name."""
        ...

    @property
    def observation_type(self) -> type:
        """What they are put together as: a dataclass with these fields, or dict."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was chosen, and everything needed to learn from it."""

    actions: Shaped[Tensor, "env head"]
    log_probs: Float[Tensor, "env head"]
    """Log-probability of each choice given the heads before it."""
    masks: Bool[Tensor, "env head choice"]
    """The exact mask rows the choices were drawn from."""
    distribution: Float[Tensor, "env head choice"]
    """Log-probabilities of all choices; 0 where illegal."""
    values: Float[Tensor, " env"]
    state: Float[Tensor, "env layer state"]
    """Memory after this decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The current policy's view of choices made before."""

    logits: Float[Tensor, "env time head choice"]
    distribution: Float[Tensor, "env time head choice"]
    """Log-probabilities of all choices; 0 where illegal."""
    log_probs: Float[Tensor, "env time head"]
    normalized_values: Float[Tensor, "env time"]
    """V(s) in units of the value statistics."""


def evaluate_choices(
    logits: Float[Tensor, "env time head choice"],
    values: Float[Tensor, "env time"],
    masks: Bool[Tensor, "env time head choice"],
    actions: Shaped[Tensor, "env time head"],
) -> Evaluation:
    """The distribution of some logits and what it says of stored actions."""
    family = family_of(actions.dtype)
    distribution = family.distribution(logits, masks)
    return Evaluation(
        logits=logits,
        distribution=distribution,
        log_probs=family.log_probs(distribution, actions),
        normalized_values=values,
    )


@runtime_checkable
class Policy(Protocol):
    """A recurrent, masked policy over several heads, with a normalised value.

    `features` and `masks` are whatever the policy reads; the learner stores the first
    as `spec` describes them and never looks at the second, only at the rows of a
    decision.
    """

    @property
    def spec(self) -> PolicySpec:
        """Its observations and actions."""
        ...

    state_shape: tuple[int, int]
    """Layers and width of its memory."""
    value_out: nn.Linear
    """The last layer of the value, rescaled when the statistics move."""
    value_mean: Tensor
    value_scale: Tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained."""
        ...

    def initial_state(self, envs: int) -> Float[Tensor, "env layer state"]:
        """Empty memory."""
        ...

    def act(
        self,
        features: Any,  # noqa: ANN401
        masks: Any,  # noqa: ANN401
        episode_start: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
        generator: Generator | None,
    ) -> Decision:
        """Decide for every environment; greedily without a generator."""
        ...

    def evaluate_actions(
        self,
        features: Any,  # noqa: ANN401
        actions: Any,  # noqa: ANN401
        episode_start: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time head choice"], Float[Tensor, "env time"]]:
        """Logits of every head given the stored choices, and normalised values."""
        ...

    def value(
        self,
        features: Any,  # noqa: ANN401
        episode_start: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
    ) -> Float[Tensor, " env"]:
        """V(s) of one more observation; memory is read, not advanced."""
        ...


def masked_log_softmax(
    logits: Float[Tensor, "*batch choice"], masks: Bool[Tensor, "*batch choice"]
) -> Float[Tensor, "*batch choice"]:
    """Log-probabilities in at least float32; 0 where illegal."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    lowest = 0.5 * torch.finfo(logits.dtype).min
    # Choices are few: torch is seven times as fast along an outer axis.
    masks = masks.movedim(-1, 0).contiguous()
    legal = torch.where(masks, logits.movedim(-1, 0), lowest)
    outer = torch.log_softmax(legal.contiguous(), dim=0)
    return (outer * masks).movedim(0, -1)  # finite, so that 0 times one is 0


def entropy(log_probs: Float[Tensor, "*batch choice"]) -> Float[Tensor, " *batch"]:
    """Entropy over the legal choices, in nats; log_probs are 0 where illegal."""
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def kl_divergence(
    old: Float[Tensor, "*batch choice"],
    new: Float[Tensor, "*batch choice"],
    masks: Bool[Tensor, "*batch choice"],
) -> Float[Tensor, " *batch"]:
    """Exact KL(old || new) over the legal choices, whatever stands elsewhere."""
    return torch.where(masks, old.exp() * (old - new), 0.0).sum(dim=-1)


def chosen(
    log_probs: Float[Tensor, "*batch choice"], actions: Int64[Tensor, " *batch"]
) -> Float[Tensor, " *batch"]:
    """Log-probability of the chosen action of every head."""
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def normal_parameters(
    parameters: Float[Tensor, "*batch two"], masks: Bool[Tensor, "*batch two"]
) -> Float[Tensor, "*batch two"]:
    """Mean and log standard deviation as they are; nothing of them is masked."""
    return parameters


def normal_log_probs(
    distribution: Float[Tensor, "*batch two"], actions: Float[Tensor, " *batch"]
) -> Float[Tensor, " *batch"]:
    """Log-density of the numbers that were drawn."""
    mean, log_deviation = distribution.unbind(-1)
    distance = (actions - mean) * torch.exp(-log_deviation)
    return -0.5 * (distance.square() + LOG_TWO_PI) - log_deviation


def normal_entropy(
    distribution: Float[Tensor, "*batch two"],
) -> Float[Tensor, " *batch"]:
    """Differential entropy, in nats."""
    return distribution[..., 1] + 0.5 * (1.0 + LOG_TWO_PI)


def normal_kl(
    old: Float[Tensor, "*batch two"],
    new: Float[Tensor, "*batch two"],
    masks: Bool[Tensor, "*batch two"],
) -> Float[Tensor, " *batch"]:
    """Exact KL(old || new); nothing of it is masked."""
    (old_mean, old_log), (new_mean, new_log) = old.unbind(-1), new.unbind(-1)
    squares = (2.0 * old_log).exp() + (old_mean - new_mean).square()
    return new_log - old_log + 0.5 * (squares * (-2.0 * new_log).exp() - 1.0)


class Family(NamedTuple):
    """How what a policy puts out becomes a distribution, and what is asked of it."""

    distribution: Callable[[Tensor, Tensor], Tensor]
    """From outputs and rows."""
    log_probs: Callable[[Tensor, Tensor], Tensor]
    """Of some actions."""
    entropy: Callable[[Tensor], Tensor]
    kl: Callable[[Tensor, Tensor, Tensor], Tensor]
    """KL(old || new), given the rows that both were made with."""


SMALLEST_UNIFORM: Final = 2.0**-25
"""Zero is drawn once in 2^24: half of the next number keeps its noise finite."""
LOG_TWO_PI: Final = math.log(2.0 * math.pi)
CHOICES: Final = Family(masked_log_softmax, chosen, entropy, kl_divergence)
NUMBERS: Final = Family(normal_parameters, normal_log_probs, normal_entropy, normal_kl)


def family_of(dtype: torch.dtype) -> Family:
    """The family of distributions that actions of this dtype are drawn from."""
    return NUMBERS if dtype.is_floating_point else CHOICES


def sample(
    logits: Float[Tensor, "*batch choice"],
    masks: Bool[Tensor, "*batch choice"],
    generator: Generator | None,
) -> Int64[Tensor, " *batch"]:
    """Draw one legal choice per row; the likeliest one if `generator` is None."""
    noise = None
    if generator is not None:
        noise = gumbel(masks.shape, generator).to(logits.device)
    return choose(logits, masks, noise)


def choose(
    logits: Float[Tensor, "*batch choice"],
    masks: Bool[Tensor, "*batch choice"],
    noise: Float[Tensor, "*batch choice"] | None,
) -> Int64[Tensor, " *batch"]:
    """The legal choice of the largest noisy logit: with Gumbel noise, a fair draw."""
    noisy = logits if noise is None else logits + noise
    # Even a legal logit of -inf stays above what is illegal; NaN counts as largest.
    noisy = noisy.clamp(min=torch.finfo(noisy.dtype).min)
    return torch.where(masks, noisy, -torch.inf).argmax(dim=-1)


def gumbel(shape: Sequence[int], generator: Generator) -> Float[Tensor, "*shape"]:
    """Standard Gumbel noise on the generator's device."""
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    return uniform.clamp_(min=SMALLEST_UNIFORM).log_().neg_().log_().neg_()


def draw(
    logits: Float[Tensor, "*batch choice"],
    masks: Bool[Tensor, "*batch choice"],
    generator: Generator,
) -> tuple[
    Int64[Tensor, " *batch"],
    Float[Tensor, " *batch"],
    Float[Tensor, "*batch choice"],
]:
    """Draw one legal choice per row.

    Returns the choices, their log-probabilities, and those of all choices.
    """
    actions = sample(logits, masks, generator)
    distribution = masked_log_softmax(logits, masks)
    return actions, chosen(distribution, actions), distribution


@cache
def first_choice(width: int, device: torch.device) -> Bool[Tensor, " choice"]:
    """The row of a head that has nothing to choose: choice 0 alone is legal."""
    # One copy per device, usable with gradients even if inference asks for it first.
    with torch.inference_mode(False):
        return torch.arange(width, device=device) == 0


def require_choice(
    masks: Bool[Tensor, "env head choice"], names: Sequence[str], hint: str
) -> None:
    """Refuse rows in which a head has nothing to choose (reads the device)."""
    possible = masks.any(dim=-1)
    if not bool(possible.all()):
        env, head = (int(index) for index in (~possible).nonzero()[0])
        raise NoLegalActionError(
            f"head {names[head]!r} of environment {env} has no legal choice; {hint}"
        )
