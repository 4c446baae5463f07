r"""Masked categorical distributions over several heads, as one padded tensor.

Logits, masks and log-probabilities of all heads are `[..., head, choice]`, padded to
the widest head; padding is illegal.

    log p_i = l_i - log sum_{j legal} exp l_j     where legal, 0 where illegal
    p_i     = exp(log p_i)                        where legal, exactly 0 where illegal

A mask row holds the legal choices of a head *given the heads before it*. A head that
the action does not use is forced to choice 0: its log-ratio, entropy, KL and gradient
are 0.

A head may also be a number with a normal distribution. The first two entries of its
row are then mean and log standard deviation, both "legal" where the head is used. If
only the first is, the number is 0 for certain, like choice 0 of an unused head. Actions
with such heads are float32, which holds choices exactly up to 2^24.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Generator, Tensor, nn

from esper.contracts.devices import to_device
from esper.contracts.errors import NoLegalActionError
from esper.contracts.features import Leaf

Rows = Float[Tensor, "*batch choice"]
Legal = Bool[Tensor, "*batch choice"]
Batch = Float[Tensor, " *batch"]
Normals = Float[Tensor, "*batch two"]
Used = Bool[Tensor, "*batch two"]


@runtime_checkable
class PolicySpec(Protocol):
    """Observation and action space of a policy."""

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the heads."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each head."""

    @property
    def width(self) -> int:
        """Number of choices of the largest head."""

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each head is a number; such a head has size 2."""

    @property
    def observation(self) -> Mapping[str, Leaf]:
        """Tensors of one environment's observation, by name."""

    @property
    def observation_type(self) -> type:
        """Dataclass with these fields, or dict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Actions of all environments and what the update needs to know about them."""

    actions: Shaped[Tensor, "env head"]
    log_probs: Float[Tensor, "env head"]
    """Log-probability of each action given the heads before it."""
    masks: Bool[Tensor, "env head choice"]
    """The masks that the actions were sampled with."""
    distribution: Float[Tensor, "env head choice"]
    """Log-probabilities of all choices, 0 where illegal; mean and log standard
    deviation of a number."""
    values: Float[Tensor, " env"]
    state: Float[Tensor, "env layer state"]
    """Memory after this step."""


@runtime_checkable
class Policy(Protocol):
    """A recurrent, masked policy with several heads and a normalised value.

    `spec` describes `features`. `masks` may be of any type that `act` accepts.
    """

    @property
    def spec(self) -> PolicySpec:
        """Observation and action space."""

    state_shape: tuple[int, int]
    """Layers and width of the memory."""
    value_out: nn.Linear
    """Last layer of the value; rescaled when the return statistics change."""
    value_mean: Tensor
    value_scale: Tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters."""

    def initial_state(self, envs: int) -> Float[Tensor, "env layer state"]:
        """Return empty memory."""

    def read(self, observation: Any) -> tuple[Any, Any]:
        """Features and masks of what a world shows."""
        ...

    def act(
        self,
        features: Any,
        masks: Any,
        episode_start: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
        generator: Generator | None,
    ) -> Decision:
        """Choose an action in every environment; the likeliest if generator is None."""

    def evaluate_actions(
        self,
        features: Any,
        actions: Any,
        episode_start: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time head choice"], Float[Tensor, "env time"]]:
        """Return logits of every head given the stored actions, and the values."""

    def value(
        self,
        features: Any,
        episode_start: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
    ) -> Float[Tensor, " env"]:
        """Return V(s) of an observation without changing the memory."""


def masked_log_softmax(logits: Rows, masks: Legal) -> Rows:
    """Return log-probabilities in at least float32; 0 where illegal."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    lowest = 0.5 * torch.finfo(logits.dtype).min
    # With few choices torch is seven times as fast along an outer axis.
    masks = masks.movedim(-1, 0).contiguous()
    legal = torch.where(masks, logits.movedim(-1, 0), lowest)
    outer = torch.log_softmax(legal.contiguous(), dim=0)
    return (outer * masks).movedim(0, -1)  # `outer` is finite, so this is 0


def entropy(log_probs: Rows) -> Batch:
    """Return the entropy in nats; log_probs are 0 where illegal."""
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def kl_divergence(old: Rows, new: Rows, masks: Legal) -> Batch:
    """Return KL(old || new) over the legal choices."""
    return torch.where(masks, old.exp() * (old - new), 0.0).sum(dim=-1)


def chosen(log_probs: Rows, actions: Shaped[Tensor, " *batch"]) -> Batch:
    """Return the log-probability of the action of every head."""
    return log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


def normal_parameters(parameters: Normals, masks: Used) -> Normals:
    """Return mean and log standard deviation unchanged; masks do not apply."""
    return parameters


def normal_log_probs(distribution: Normals, actions: Batch) -> Batch:
    """Return the log-density of the actions."""
    mean, log_deviation = distribution.unbind(-1)
    distance = (actions - mean) * torch.exp(-log_deviation)
    return -0.5 * (distance.square() + LOG_TWO_PI) - log_deviation


def normal_entropy(distribution: Normals) -> Batch:
    """Return the differential entropy in nats."""
    return distribution[..., 1] + 0.5 * (1.0 + LOG_TWO_PI)


def normal_kl(old: Normals, new: Normals, masks: Used) -> Batch:
    """Return KL(old || new); masks do not apply."""
    (old_mean, old_log), (new_mean, new_log) = old.unbind(-1), new.unbind(-1)
    squares = (2.0 * old_log).exp() + (old_mean - new_mean).square()
    return new_log - old_log + 0.5 * (squares * (-2.0 * new_log).exp() - 1.0)


def normal_draw(parameters: Normals, masks: Used, noise: Batch | None) -> Batch:
    """Return mean plus deviation times noise; masks do not apply."""
    mean, log_deviation = parameters.unbind(-1)
    return mean if noise is None else mean + log_deviation.exp() * noise


def optional_parameters(parameters: Normals, masks: Used) -> Normals:
    """Return mean and log deviation; where unused, constants with density 1 at 0."""
    is_used = masks[..., 1]
    mean = torch.where(is_used, parameters[..., 0], 0.0)
    log_deviation = torch.where(is_used, parameters[..., 1], -0.5 * LOG_TWO_PI)
    return torch.stack((mean, log_deviation), dim=-1)


def optional_draw(parameters: Normals, masks: Used, noise: Normals | None) -> Batch:
    """Return a drawn number, with the first entry of the noise; 0 where unused."""
    first = None if noise is None else noise[..., 0]
    return torch.where(masks[..., 1], normal_draw(parameters, masks, first), 0.0)


class Family(NamedTuple):
    """Functions of a family of distributions."""

    distribution: Callable[[Tensor, Tensor], Tensor]
    """Parameters from logits and masks."""
    log_probs: Callable[[Tensor, Tensor], Tensor]
    """Log-probabilities from parameters and actions."""
    entropy: Callable[[Tensor], Tensor]
    kl: Callable[[Tensor, Tensor, Tensor], Tensor]
    """KL(old || new) from old and new parameters and masks."""
    draw: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Actions from logits, masks and noise; the likeliest ones without noise."""


SMALLEST_UNIFORM: Final = 2.0**-25
"""torch.rand draws 0 once in 2^24; this keeps the Gumbel noise finite."""
LOG_TWO_PI: Final = math.log(2.0 * math.pi)


def sample(
    logits: Rows, masks: Legal, generator: Generator | None
) -> Int64[Tensor, " *batch"]:
    """Sample one legal choice per row; the likeliest one if `generator` is None."""
    noise = None
    if generator is not None:
        noise = gumbel(masks.shape, generator, logits.device)
    return choose(logits, masks, noise)


def choose(logits: Rows, masks: Legal, noise: Rows | None) -> Int64[Tensor, " *batch"]:
    """Return the legal choice with the largest logit plus noise (Gumbel-max trick)."""
    noisy = logits if noise is None else logits + noise
    # A legal logit of -inf stays above illegal ones; argmax takes NaN as largest.
    noisy = noisy.clamp(min=torch.finfo(noisy.dtype).min)
    return torch.where(masks, noisy, -torch.inf).argmax(dim=-1)


NORMAL: Final = normal_log_probs, normal_entropy, normal_kl
CHOICES: Final = Family(masked_log_softmax, chosen, entropy, kl_divergence, choose)
NUMBERS: Final = Family(normal_parameters, *NORMAL, normal_draw)
OPTIONAL_NUMBERS: Final = Family(optional_parameters, *NORMAL, optional_draw)
"""Numbers of an action that also has choices; some may not be used."""


def family_of(numeric: Sequence[bool]) -> Family:
    """Return the distributions of heads of which some are numbers."""
    if not any(numeric):
        return CHOICES
    return NUMBERS if all(numeric) else _mixed(numeric)


def _mixed(numeric: Sequence[bool]) -> Family:
    """Return a family that treats each run of equal heads by its kind."""
    runs = [(is_number, len([*heads])) for is_number, heads in groupby(numeric)]

    def by_run(name: str, rows: Tensor, *others: Tensor | None) -> Tensor:
        """Call a function on each run of `[..., head, choice]` and `[..., head]`."""
        axis, width, at, parts = rows.ndim - 2, rows.shape[-1], 0, []
        for is_number, count in runs:
            family, used = (OPTIONAL_NUMBERS, 2) if is_number else (CHOICES, width)
            given = [
                None if x is None else x.narrow(axis, at, count)
                for x in (rows, *others)
            ]
            given = [
                x if x is None or x.ndim < rows.ndim else x[..., :used] for x in given
            ]
            part = getattr(family, name)(*given)
            if part.ndim == rows.ndim:
                part = F.pad(part, (0, width - used))
            parts.append(part)
            at += count
        return torch.cat(parts, dim=axis)

    return Family(*(partial(by_run, name) for name in Family._fields))


def gumbel(
    shape: Sequence[int], generator: Generator, device: torch.device
) -> Float[Tensor, "*shape"]:
    """Return standard Gumbel noise; drawn on the generator's device and copied."""
    noise = torch.rand(shape, generator=generator, device=generator.device)
    noise = noise.clamp_(min=SMALLEST_UNIFORM).log_().neg_().log_().neg_()
    return to_device(noise, device)


@cache
def first_choice(width: int, device: torch.device) -> Bool[Tensor, " choice"]:
    """Return the mask of an unused head: only choice 0 is legal."""
    # The cached tensor must also work outside of inference mode.
    with torch.inference_mode(False):
        return torch.arange(width, device=device) == 0


def require_choice(
    masks: Bool[Tensor, "env head choice"], names: Sequence[str], hint: str
) -> None:
    """Check that every head has a legal choice; reads from the device."""
    possible = masks.any(dim=-1)
    if not bool(possible.all()):
        env, head = (int(index) for index in (~possible).nonzero()[0])
        raise NoLegalActionError(
            f"head {names[head]!r} of environment {env} has no legal choice. {hint}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Stored actions under the current policy."""

    logits: Float[Tensor, "env time head choice"]
    distribution: Float[Tensor, "env time head choice"]
    """As in `Decision`."""
    log_probs: Float[Tensor, "env time head"]
    normalized_values: Float[Tensor, "env time"]
    """V(s), normalised by the return statistics."""
    family: Family = CHOICES


def evaluate_choices(
    logits: Float[Tensor, "env time head choice"],
    values: Float[Tensor, "env time"],
    masks: Bool[Tensor, "env time head choice"],
    actions: Shaped[Tensor, "env time head"],
    family: Family = CHOICES,
) -> Evaluation:
    """Evaluate stored actions under the distribution that the logits define."""
    distribution = family.distribution(logits, masks)
    return Evaluation(
        logits=logits,
        distribution=distribution,
        log_probs=family.log_probs(distribution, actions),
        normalized_values=values,
        family=family,
    )
