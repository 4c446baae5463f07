r"""Eight masked choices as one tensor, exact to the last bit.

Logits, mask rows and log-probabilities of all heads are `[..., head, choice]`, padded
to the widest head; padding is illegal like any other illegal choice.

    log p_i = l_i - log sum_{j legal} exp l_j     where legal, 0 where illegal
    p_i     = exp(log p_i)                        where legal, exactly 0 where illegal

Illegal choices have probability and gradient exactly zero; a single legal choice has
log-probability 0, entropy 0 and no gradient. Zeroing log p *before* any product keeps
gradients finite: a product with the untaken -inf branch would be NaN.

A row is what a head may choose *given the heads before it*: the slot row belongs to the
op, the blueprint row to the slot. A head the op does not use is forced to choice 0,
so it cannot teach: that is how relevance enters log-prob, ratio, entropy and KL.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, NUM_HEADS, ActionSpec, Op
from esper.contracts.errors import BadInput, NoLegalAction
from esper.contracts.masks import ActionMasks
from esper.tamiyo.policy.records import Evaluation
from esper.tamiyo.policy.relevance import relevant

HEAD_GROUPS: tuple[tuple[int, ...], ...] = (
    (HEAD["op"],),
    (HEAD["slot"],),
    (HEAD["blueprint"],),
    tuple(range(HEAD["blueprint"] + 1, NUM_HEADS)),
)
"""The order of sampling: each group is drawn given the groups before it."""

# u < 1 still allows u * total == total after rounding; this keeps it strictly below.
_BELOW_ONE = 1.0 - 2.0**-22


def masked_log_softmax(
    logits: Float[Tensor, "*batch choice"], rows: Bool[Tensor, "*batch choice"]
) -> Float[Tensor, "*batch choice"]:
    """Log-probabilities in at least float32; 0 where illegal."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    lowest = torch.finfo(logits.dtype).min
    log_probs = torch.log_softmax(torch.where(rows, logits, lowest), dim=-1)
    return torch.where(rows, log_probs, 0.0)


def probabilities(
    log_probs: Float[Tensor, "*batch choice"], rows: Bool[Tensor, "*batch choice"]
) -> Float[Tensor, "*batch choice"]:
    """Probabilities; exactly 0 where illegal."""
    return torch.where(rows, log_probs.exp(), 0.0)


def entropy(
    log_probs: Float[Tensor, "*batch choice"], rows: Bool[Tensor, "*batch choice"]
) -> Float[Tensor, " *batch"]:
    """Entropy over the legal choices, in nats."""
    return -(probabilities(log_probs, rows) * log_probs).sum(dim=-1)


def kl_divergence(
    old: Float[Tensor, "*batch choice"],
    new: Float[Tensor, "*batch choice"],
    rows: Bool[Tensor, "*batch choice"],
) -> Float[Tensor, " *batch"]:
    """Exact KL(old || new) over the legal choices; both sides share the rows."""
    return (probabilities(old, rows) * (old - new)).sum(dim=-1)


def chosen(
    log_probs: Float[Tensor, "*batch choice"], actions: Int64[Tensor, " *batch"]
) -> Float[Tensor, " *batch"]:
    """Log-probability of the chosen action of every head."""
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def evaluation(
    logits: Float[Tensor, "env time head choice"],
    values: Float[Tensor, "env time"],
    rows: Bool[Tensor, "env time head choice"],
    actions: Int64[Tensor, "env time head"],
) -> Evaluation:
    """What scores mean, given the rows that choices were drawn from."""
    distribution = masked_log_softmax(logits, rows)
    return Evaluation(
        logits=logits,
        distribution=distribution,
        log_probs=chosen(distribution, actions),
        normalized_values=values,
    )


def sample(
    log_probs: Float[Tensor, "*batch choice"],
    rows: Bool[Tensor, "*batch choice"],
    generator: Generator | None,
) -> Int64[Tensor, " *batch"]:
    """Draw one legal choice per row; the likeliest one if `generator` is None."""
    if generator is None:
        return likeliest(log_probs, rows)
    draw = torch.rand(
        rows.shape[:-1],
        generator=generator,
        dtype=log_probs.dtype,
        device=generator.device,
    )
    return pick(log_probs, rows, draw.to(log_probs.device))


def likeliest(
    log_probs: Float[Tensor, "*batch choice"], rows: Bool[Tensor, "*batch choice"]
) -> Int64[Tensor, " *batch"]:
    """The likeliest legal choice of every row."""
    return torch.where(rows, log_probs, -torch.inf).argmax(dim=-1)


def pick(
    log_probs: Float[Tensor, "*batch choice"],
    rows: Bool[Tensor, "*batch choice"],
    draw: Float[Tensor, " *batch"],
) -> Int64[Tensor, " *batch"]:
    """The legal choice in whose share of the probability `draw` in [0, 1) falls.

    Illegal choices are taken out of the cumulative sum rather than trusted to add
    nothing: a parallel sum may round two equal prefixes differently.
    """
    cumulative = probabilities(log_probs, rows).cumsum(dim=-1)
    cumulative = torch.where(rows, cumulative, 0.0)
    total = cumulative.amax(dim=-1, keepdim=True)
    threshold = (draw * _BELOW_ONE).unsqueeze(-1) * total
    return (cumulative > threshold).to(torch.uint8).argmax(dim=-1)


def rows_of_group(
    masks: ActionMasks,
    group: int,
    actions: Int64[Tensor, "env head"],
    *,
    causal: bool = True,
) -> Bool[Tensor, "env group choice"]:
    """What the heads of a group may choose, given the actions of earlier groups.

    Args:
        masks: What is possible.
        group: Index into `HEAD_GROUPS`.
        actions: Choices so far; entries of this group and later are not read.
        causal: Force heads that the op does not use to choice 0. False is the
            ablation in which such heads are drawn, and counted, all the same.
    """
    heads = HEAD_GROUPS[group]
    envs, width = masks.op.shape[0], masks.fixed.shape[1]
    rows = masks.op.new_zeros(envs, len(heads), width)
    env = torch.arange(envs, device=rows.device)
    op, slot = actions[:, HEAD["op"]], actions[:, HEAD["slot"]]
    if group == 0:
        rows[:, 0, : len(Op)] = masks.op
        return rows
    if group == 1:
        table = masks.slot[env, op]
        rows[:, 0, : table.shape[-1]] = table
    elif group == 2:
        table = masks.blueprint[env, slot]
        rows[:, 0, : table.shape[-1]] = table
    else:
        rows[:] = masks.fixed[heads[0] : heads[-1] + 1]
    uses = relevant(actions)[:, heads[0] : heads[-1] + 1].unsqueeze(-1)
    unused = torch.zeros_like(rows[:1, :1])
    unused[..., 0] = True
    if not causal:
        unused = masks.fixed[heads[0] : heads[-1] + 1]
    return torch.where(uses, rows, unused)


def require_choice(
    rows: Bool[Tensor, "env group choice"], names: Sequence[str]
) -> None:
    """Refuse rows in which a head has nothing to choose (reads the device)."""
    empty = ~rows.any(dim=-1)
    if bool(empty.any()):
        env, head = (int(index) for index in empty.nonzero()[0])
        raise NoLegalAction(
            f"head {names[head]!r} of environment {env} has no legal choice; WAIT must "
            "always be legal and an op needs a slot: check the masks."
        )


def require_masks(masks: ActionMasks, envs: int, spec: ActionSpec) -> None:
    """Refuse masks of another type or shape, even if they would broadcast."""
    ops, slots, kinds = len(Op), spec.slots.max_slots, len(spec.blueprints)
    shapes = {
        "op": (envs, ops),
        "slot": (envs, ops, slots),
        "blueprint": (envs, slots, kinds),
        "fixed": (NUM_HEADS, spec.width),
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
