r"""Masked categorical distributions over several heads, as one padded tensor.

Logits, mask rows and log-probabilities of all heads are `[..., head, choice]`, padded
to the widest head; padding is illegal like any other illegal choice.

    log p_i = l_i - log sum_{j legal} exp l_j     where legal, 0 where illegal
    p_i     = exp(log p_i)                        where legal, exactly 0 where illegal

Illegal choices have probability and gradient exactly zero; a single legal choice has
log-probability 0, entropy 0 and no gradient. Zeroing log p *before* any product keeps
gradients finite: a product with the untaken -inf branch would be NaN.

A row is what a head may choose *given the heads before it*: the slot row belongs to the
op, the blueprint row to the slot. A head the op does not use is forced to choice 0, so
its log-ratio, entropy, KL and gradient are 0.
"""

from collections.abc import Generator as Coroutine
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor, nn

from esper.contracts.actions import (
    HEAD,
    HEAD_NAMES,
    NUM_HEADS,
    RELEVANT,
    ActionMasks,
    ActionSpec,
    Op,
)
from esper.contracts.errors import BadInput, NoLegalAction
from esper.contracts.features import Features

HEAD_GROUPS: tuple[tuple[int, ...], ...] = (
    (HEAD["op"],),
    (HEAD["slot"],),
    (HEAD["blueprint"],),
    tuple(range(HEAD["blueprint"] + 1, NUM_HEADS)),
)
"""The order of sampling: each group is drawn given the groups before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was chosen, and everything needed to learn from it."""

    actions: Int64[Tensor, "env head"]
    log_probs: Float[Tensor, "env head"]
    """Log-probability of each choice given the heads before it."""
    rows: Bool[Tensor, "env head choice"]
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
    rows: Bool[Tensor, "env time head choice"],
    actions: Int64[Tensor, "env time head"],
) -> Evaluation:
    """The masked distribution of some logits and what it says of stored choices."""
    distribution = masked_log_softmax(logits, rows)
    return Evaluation(
        logits=logits,
        distribution=distribution,
        log_probs=chosen(distribution, actions),
        normalized_values=values,
    )


@runtime_checkable
class Policy(Protocol):
    """A recurrent, masked policy over several heads, with a normalised value."""

    spec: ActionSpec
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
        features: Features,
        masks: ActionMasks,
        first: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
        generator: Generator | None,
    ) -> Decision:
        """Decide for every environment; greedily without a generator."""
        ...

    def scores(
        self,
        features: Features,
        actions: Int64[Tensor, "env time head"],
        first: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time head choice"], Float[Tensor, "env time"]]:
        """Logits of every head given the stored choices, and normalised values."""
        ...

    def value(
        self,
        features: Features,
        first: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
    ) -> Float[Tensor, " env"]:
        """V(s) of one more observation; memory is read, not advanced."""
        ...


def masked_log_softmax(
    logits: Float[Tensor, "*batch choice"], rows: Bool[Tensor, "*batch choice"]
) -> Float[Tensor, "*batch choice"]:
    """Log-probabilities in at least float32; 0 where illegal."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    lowest = torch.finfo(logits.dtype).min
    log_probs = torch.log_softmax(torch.where(rows, logits, lowest), dim=-1)
    return torch.where(rows, log_probs, 0.0)


def entropy(log_probs: Float[Tensor, "*batch choice"]) -> Float[Tensor, " *batch"]:
    """Entropy over the legal choices, in nats; log_probs are 0 where illegal."""
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def kl_divergence(
    old: Float[Tensor, "*batch choice"], new: Float[Tensor, "*batch choice"]
) -> Float[Tensor, " *batch"]:
    """Exact KL(old || new); both are 0 at the same illegal choices."""
    return (old.exp() * (old - new)).sum(dim=-1)


def chosen(
    log_probs: Float[Tensor, "*batch choice"], actions: Int64[Tensor, " *batch"]
) -> Float[Tensor, " *batch"]:
    """Log-probability of the chosen action of every head."""
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def sample(
    logits: Float[Tensor, "*batch choice"],
    rows: Bool[Tensor, "*batch choice"],
    generator: Generator | None,
) -> Int64[Tensor, " *batch"]:
    """Draw one legal choice per row; the likeliest one if `generator` is None."""
    noise = None
    if generator is not None:
        noise = gumbel(rows.shape, generator).to(logits.device)
    return choose(logits, rows, noise)


def choose(
    logits: Float[Tensor, "*batch choice"],
    rows: Bool[Tensor, "*batch choice"],
    noise: Float[Tensor, "*batch choice"] | None,
) -> Int64[Tensor, " *batch"]:
    """The legal choice of the largest noisy logit: with Gumbel noise, a fair draw."""
    noisy = logits if noise is None else logits + noise
    # Even a legal logit of -inf stays above what is illegal; NaN counts as largest.
    noisy = noisy.clamp(min=torch.finfo(noisy.dtype).min)
    return torch.where(rows, noisy, -torch.inf).argmax(dim=-1)


def gumbel(shape: Sequence[int], generator: Generator) -> Float[Tensor, "*shape"]:
    """Standard Gumbel noise on the generator's device."""
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    # Zero is drawn once in 2^24: half of the next number keeps its noise finite.
    return uniform.clamp_(min=2.0**-25).log_().neg_().log_().neg_()


def relevant(actions: Int64[Tensor, "*batch head"]) -> Bool[Tensor, "*batch head"]:
    """Whether the chosen op uses each head; the op itself always counts."""
    ops = actions[..., HEAD["op"]]
    return (
        _relevant_on(actions.device).index_select(0, ops.reshape(-1)).view_as(actions)
    )


@cache
def _relevant_on(device: torch.device) -> Tensor:
    # One copy per device, usable with gradients even if inference asks for it first.
    with torch.inference_mode(False):
        return RELEVANT.to(device)


def rows_by_group(
    masks: ActionMasks, *, causal: bool = True
) -> Coroutine[Tensor, Any, None]:
    """What one group of heads after the other may choose, given the choices before.

    A coroutine: it yields the rows of op, slot and blueprint `[env, choice]` and is
    sent their choices `[env]`; last it yields the rows of all other heads
    `[env, head, choice]`.

    Args:
        masks: What is possible.
        causal: Force heads that the op does not use to choice 0. False is the
            ablation in which such heads are drawn, and counted, all the same.
    """
    fixed, unused = masks.fixed, masks.fixed
    if causal:
        unused = _first_choice(fixed.shape[2], fixed.device).expand_as(fixed)
    op = yield masks.op
    uses = _relevant_on(op.device).index_select(0, op).unsqueeze(2)
    one, two = HEAD["slot"], HEAD["blueprint"]
    rows = _of_choice(masks.slot, op)
    slot = yield torch.where(uses[:, one], rows, unused[:, one, : rows.shape[1]])
    rows = _of_choice(masks.blueprint, slot)
    yield torch.where(uses[:, two], rows, unused[:, two, : rows.shape[1]])
    rest = slice(two + 1, None)
    yield torch.where(uses[:, rest], fixed[:, rest], unused[:, rest])


def _of_choice(
    table: Bool[Tensor, "env option choice"], option: Int64[Tensor, " env"]
) -> Bool[Tensor, "env choice"]:
    """The row of each environment's option."""
    index = option.view(-1, 1, 1).expand(-1, 1, table.shape[2])
    return table.gather(1, index).squeeze(1)


def join_groups(groups: Sequence[Tensor], width: int) -> Tensor:
    """Rows or logits of all groups as `[row, head, choice]`, padded with 0."""
    *single, rest = groups
    blank = rest.new_zeros(rest.shape[0], width)
    padded = [part for row in single for part in (row, blank[:, row.shape[1] :])]
    flat = torch.cat((*padded, rest.flatten(1)), dim=1)
    return flat.view(rest.shape[0], -1, width)


def legal_rows(
    masks: ActionMasks, actions: Int64[Tensor, "env head"], *, causal: bool = True
) -> Bool[Tensor, "env head choice"]:
    """What every head may choose, given the choices of the heads before it."""
    groups = rows_by_group(masks, causal=causal)
    rows = [next(groups), *(groups.send(actions[:, head]) for head in range(3))]
    return join_groups(rows, masks.fixed.shape[2])


@cache
def _first_choice(width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(width, device=device) == 0


def require_choice(rows: Bool[Tensor, "env head choice"]) -> None:
    """Refuse rows in which a head has nothing to choose (reads the device)."""
    possible = rows.any(dim=-1)
    if not bool(possible.all()):
        env, head = (int(index) for index in (~possible).nonzero()[0])
        raise NoLegalAction(
            f"head {HEAD_NAMES[head]!r} of environment {env} has no legal choice; WAIT "
            "must always be legal and an op needs a slot: check the masks."
        )


def require_masks(masks: ActionMasks, envs: int, spec: ActionSpec) -> None:
    """Refuse masks of another type or shape, even if they would broadcast."""
    ops, slots, kinds = len(Op), spec.slots.max_slots, len(spec.blueprints)
    shapes = {
        "op": (envs, ops),
        "slot": (envs, ops, slots),
        "blueprint": (envs, slots, kinds),
        "fixed": (envs, NUM_HEADS, spec.width),
    }
    for name, shape in shapes.items():
        mask = getattr(masks, name)
        if mask.dtype != torch.bool:
            raise BadInput(f"mask {name!r} must be bool, got {mask.dtype}.")
        if mask.shape != shape:
            raise BadInput(
                f"mask {name!r} must be {list(shape)} for this action space, got "
                f"{list(mask.shape)}."
            )
