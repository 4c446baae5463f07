"""PPO for recurrent policies with masked, multi-head actions.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, on whole sequences, with
minibatches of environments. Before each step the exact KL(old || new), averaged over
the epoch so far, is compared with `target_kl`. After a KL stop or a non-finite gradient
the optimiser changes nothing, and the device is read only once per update.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn

from esper.contracts.devices import keep_freed_memory
from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.contracts.state import Stateful, leaves, load
from esper.simic.agent.adam import ClippingAdam
from esper.simic.agent.distribution import Policy, evaluate_choices, family_of
from esper.simic.agent.losses import (
    PPOConfig,
    Targets,
    loss_weights,
    masked_mean,
    normalize_advantages,
    ppo_terms,
    subtract_group_baseline,
)
from esper.simic.agent.metrics import UpdateRecord, read_record, step_row
from esper.simic.agent.rollout_buffer import SequenceBatch, TamiyoRolloutBuffer

__all__ = ["Guard", "PPOAgent", "PPOConfig", "ReturnMoments", "explained_variance"]

SMALLEST_SCALE: Final = 1e-4  # constant returns are not scaled up to unit noise
SMALLEST_CLIP: Final = 1e-8  # a clip range is positive; its schedule may end at 0
OUTLIER_LIMIT: Final = 10.0
"""Deviations from the median at which a return is clipped in the statistics."""
FIRST_OUTLIER_LIMIT: Final = 100.0
"""The same in the first update, where sparse returns look like outliers."""
MAD_TO_DEVIATION: Final = 1.4826  # for a normal distribution


class Guard:
    """Decides on the device whether each optimiser step is taken."""

    def __init__(self, target_kl: float, device: torch.device) -> None:
        self._target = target_kl
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        self.any_taken = torch.zeros((), dtype=torch.bool, device=device)
        self.start_epoch()

    def start_epoch(self) -> None:
        """Start a new running mean of the KL."""
        self._excess = torch.zeros((), device=self._stopped.device)

    def check(
        self, kl: Tensor, steps: Tensor, loss: Tensor, grad_norm: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return whether the step is taken, the update stopped, everything finite.

        `kl` is the sum over steps. The loss is checked too, because clamping can hide
        NaN from the gradient. Before the first step a non-finite KL means bad data and
        is left out of the mean; later it means that the policy changed too much.
        """
        known, *others = torch.isfinite(torch.stack((kl, loss, grad_norm))).unbind()
        # The mean KL is over its target if the sum of excesses is positive.
        excess = torch.where(known, kl - self._target * steps, 0.0)
        self._excess = self._excess + excess
        finite = known & others[0] & others[1]
        over = (self._excess > 0) | (self.any_taken & ~known)
        self._stopped = self._stopped | over
        taken = finite & ~self._stopped
        self.any_taken = self.any_taken | taken
        return taken, self._stopped, finite

    def known_stopped(self) -> bool:
        """Whether the update is stopped; False where this would need a device read."""
        return self._stopped.device.type == "cpu" and bool(self._stopped.numpy())


@dataclass(frozen=True, slots=True)
class ReturnMoments:
    """Exponentially weighted mean and variance of the returns.

    The critic predicts normalised returns. The variance itself is stored, because mean
    square minus squared mean loses precision for large returns that differ little.
    """

    weight: Float[Tensor, ""]
    mean: Float[Tensor, ""]
    variance: Float[Tensor, ""]

    @classmethod
    def none(cls, device: torch.device) -> "ReturnMoments":
        """Return the moments before the first rollout."""
        return cls(*(torch.zeros((), device=device) for _ in range(3)))

    def with_returns(
        self,
        returns: Float[Tensor, "env time"],
        valid: Bool[Tensor, "env time"],
        decay: float,
    ) -> "ReturnMoments":
        """Return the moments after one more rollout; unchanged without valid steps."""
        valid = valid & returns.isfinite()
        returns = self._clip_outliers(returns, valid)
        count = valid.sum().clamp(min=1)
        mean = torch.where(valid, returns, 0.0).sum() / count
        spread = torch.where(valid, returns - mean, 0.0).square().sum() / count
        weight = decay * self.weight + 1.0
        rate = 1.0 / weight
        gap = mean - self.mean
        kept = (1.0 - rate) * (self.variance + rate * gap.square())
        new = ReturnMoments(weight, self.mean + rate * gap, kept + rate * spread)
        usable = valid.any() & new.mean.isfinite() & new.variance.isfinite()
        return new.where(usable, self)

    def _clip_outliers(
        self, returns: Float[Tensor, "env time"], valid: Bool[Tensor, "env time"]
    ) -> Float[Tensor, "env time"]:
        """Clip returns to some deviations around their median.

        Otherwise one extreme reward would dominate the variance for many updates. The
        deviation is the larger one of all returns so far and of this rollout (robust
        estimate), so a common change of scale is not clipped.
        """
        known = self.weight > 0
        median = torch.where(valid, returns, torch.nan).nanmedian()
        distance = torch.where(valid, (returns - median).abs(), torch.nan).nanmedian()
        limit = torch.where(known, OUTLIER_LIMIT, FIRST_OUTLIER_LIMIT)
        deviation = (MAD_TO_DEVIATION * distance).maximum(self.variance.sqrt())
        reach = torch.where(deviation > 0, limit * deviation, torch.inf)
        return returns.clamp(median - reach, median + reach)

    def scale(self) -> Float[Tensor, ""]:
        """Return the standard deviation of the returns; 1 before the first rollout."""
        floor = SMALLEST_SCALE * (1.0 + self.mean.abs())
        return torch.where(self.weight > 0, self.variance.sqrt().maximum(floor), 1.0)

    def where(self, condition: Tensor, other: "ReturnMoments") -> "ReturnMoments":
        """Return these moments where `condition` holds, else the other ones."""
        pairs = ((getattr(self, n), getattr(other, n)) for n in self.__slots__)
        return ReturnMoments(*(torch.where(condition, *pair) for pair in pairs))


class PPOAgent(Stateful):
    """Trains a policy on the rollout in its buffer.

    Args:
        policy: The policy to train.
        buffer: The buffer that `update` reads.
        config: Settings of the update; the defaults if None.
        rng_seed: Seed of the order of minibatches.
        single_steps: Draw minibatches from all steps instead of whole sequences. Only
            for policies without memory.
    """

    STATE = ("policy", "optimizer", "generator", "moments", "version")
    DERIVED = ("buffer", "_weights", "_annealed")  # set again in every round

    def __init__(
        self,
        policy: Policy,
        buffer: TamiyoRolloutBuffer,
        config: PPOConfig | None = None,
        *,
        rng_seed: int = 0,
        single_steps: bool = False,
    ) -> None:
        self.policy = policy
        self.buffer = buffer
        self._single_steps = single_steps
        self.config = config = config or PPOConfig()
        _require_match(policy, buffer)
        heads, numeric = policy.spec.head_names, policy.spec.numeric
        self._family = family_of(numeric)
        config.require_heads(*heads)
        if config.minibatches > buffer.num_envs and not single_steps:
            raise InvalidInputError(
                f"minibatches is {config.minibatches} but the buffer has "
                f"{buffer.num_envs} environments. Use at most one per environment."
            )
        self.device = policy.value_mean.device
        keep_freed_memory()
        # Frozen parameters too, because they may be unfrozen later.
        self.parameters = [*policy.parameters()]
        self.optimizer = ClippingAdam(self.parameters, config.learning_rate)
        self.generator = Generator().manual_seed(rng_seed)
        self.moments = ReturnMoments.none(self.device)
        self.version = 0
        self._full_entropy = torch.tensor(
            [
                config.entropy_of(name, is_number=is_number)
                for name, is_number in zip(heads, numeric, strict=True)
            ],
            device=self.device,
        )
        is_choice = ~torch.tensor(numeric, device=self.device)
        self._full_exploration = config.exploration_coef * is_choice.float()
        self.anneal(1.0)

    def anneal(self, factor: float, clip_factor: float = 1.0) -> None:
        """Scale learning rate and bonuses, and the clip range."""
        for number in (factor, clip_factor):
            if not 0.0 <= number < math.inf:
                raise InvalidInputError(
                    f"factor must be finite and not negative, got {number}."
                )
        clip = max(clip_factor * self.config.clip_range, SMALLEST_CLIP)
        self._annealed = replace(self.config, clip_range=clip)
        for group in self.optimizer.param_groups:
            group["lr"] = factor * self.config.learning_rate
        self._weights = loss_weights(
            self.config, factor * self._full_entropy, factor**2 * self._full_exploration
        )

    def update(self) -> UpdateRecord:
        """Train the policy on the rollout, reset the buffer and return diagnostics.

        Parameters that do not require grad are not changed. If an exception is raised,
        agent and buffer are left as before, so the update can be repeated.
        """
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise InvalidStateError(
                "update() needs gradients, but they are disabled. Call it outside of "
                "torch.no_grad() and torch.inference_mode()."
            )
        kept = {path: tensor.clone() for path, tensor in leaves(self).items()}
        was_computed = self.buffer.is_computed
        try:
            record = self._improve()
        except BaseException:
            load(self, kept)
            self.buffer.is_computed = was_computed
            raise
        self.buffer.reset()
        return record

    def _improve(self) -> UpdateRecord:
        config = self.config
        batch = self._take_rollout()
        guard = Guard(config.target_kl, self.device)
        head, before = self.policy.value_out, self.moments
        units = (
            *(head.weight, head.bias),
            *(self.policy.value_mean, self.policy.value_scale),
        )
        old_units = [tensor.detach().clone() for tensor in units]
        self._adopt_statistics(batch)
        explained = explained_variance(batch)
        targets = self._targets(batch)
        rows: list[Tensor] = []
        for _ in range(config.epochs):
            guard.start_epoch()
            for part in targets.minibatches(config.minibatches, self.generator):
                rows.append(self.step(part, guard))
            del part  # it keeps a copy of the rollout
            if guard.known_stopped():
                break
        # If no step was taken, restore the old value normalisation bit for bit.
        taken = guard.any_taken
        self.moments = self.moments.where(taken, before)
        with torch.no_grad():
            for tensor, old in zip(units, old_units, strict=True):
                tensor.copy_(torch.where(taken, tensor, old))
        self.version += 1
        planned = config.epochs * config.minibatches
        return read_record(rows, explained, planned, self.policy.spec.head_names)

    def _take_rollout(self) -> SequenceBatch:
        if self.buffer.policy_version != self.version:
            raise InvalidStateError(
                f"the buffer holds steps of policy version "
                f"{self.buffer.policy_version}, but this policy is version "
                f"{self.version}. Collect again and pass policy_version=agent.version."
            )
        if not self.buffer.is_computed:  # the user may have changed computed ones
            self.buffer.compute_advantages_and_returns()
        batch = self.buffer.get_batched_sequences(self.device)
        advantages = subtract_group_baseline(
            batch.advantages, batch.valid_mask, batch.group_size
        )
        return replace(batch, advantages=advantages)

    def _targets(self, batch: SequenceBatch) -> Targets:
        """Normalise the numbers of a batch; split its rows into steps if wanted."""
        advantages = normalize_advantages(batch.advantages, batch.valid_mask)
        mean, scale = self.policy.value_mean, self.policy.value_scale
        batch = replace(
            batch,
            advantages=advantages,
            returns=(batch.returns - mean) / scale,
            values=(batch.values - mean) / scale,
            group_size=1,
        )
        return Targets.of(batch.single_steps() if self._single_steps else batch)

    def step(self, part: Targets, guard: Guard) -> Float[Tensor, " metric"]:
        """Take one optimiser step unless the guard rejects it; return its metrics."""
        batch = part.batch
        logits, values = self.policy.evaluate_actions(
            batch.features, batch.actions, batch.episode_start, batch.state
        )
        if logits.requires_grad:  # False if these parameters are frozen
            logits.retain_grad()
        new = evaluate_choices(logits, values, batch.masks, batch.actions, self._family)
        terms = ppo_terms(new, part, self._annealed, self._weights)
        if not terms.loss.requires_grad:
            raise InvalidStateError(
                "the loss does not require grad. Unfreeze some parameters."
            )
        self.optimizer.zero_grad()
        terms.loss.backward()
        with torch.no_grad():
            norm, steps = self.optimizer.gradient_norm(), terms.counts[0]
            flags = guard.check(terms.total_kl, steps, terms.loss, norm)
            self.optimizer.move(norm, self.config.max_grad_norm, flags[0])
            slopes = torch.zeros_like(logits) if logits.grad is None else logits.grad
            lengths = torch.linalg.vector_norm(slopes, dim=(0, 1, 3))
            return step_row(terms, norm, lengths, flags)

    def _adopt_statistics(self, batch: SequenceBatch) -> None:
        """Update the return statistics and rescale the value head to match."""
        policy, head = self.policy, self.policy.value_out
        known = (self.moments.weight > 0) | head.weight.ne(0).any()
        self.moments = self.moments.with_returns(
            batch.returns, batch.valid_mask, self.config.value_norm_decay
        )
        new = self.moments.mean, self.moments.scale()
        # A new value head has no prediction to preserve; it starts at the mean.
        old = (
            torch.where(known, policy.value_mean, new[0]),
            torch.where(known, policy.value_scale, new[1]),
        )
        rescale_head(head, old, new)
        policy.value_mean.copy_(new[0])
        policy.value_scale.copy_(new[1])


def rescale_head(
    head: nn.Linear, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]
) -> None:
    """Change mean and scale of the outputs without changing the predictions.

    PopArt, van Hasselt et al. 2016, https://arxiv.org/abs/1602.07714.
    """
    (old_mean, old_scale), (new_mean, new_scale) = old, new
    with torch.no_grad():
        head.weight.mul_(old_scale / new_scale)
        head.bias.mul_(old_scale).add_(old_mean - new_mean).div_(new_scale)


def _require_match(policy: Policy, buffer: TamiyoRolloutBuffer) -> None:
    """Check that policy and buffer have the same spec and memory shape."""
    if not isinstance(policy, Policy):
        raise InvalidInputError(
            f"policy must implement the Policy protocol, got {type(policy).__name__}."
        )
    if buffer.state_shape != tuple(policy.state_shape):
        raise InvalidInputError(
            f"the buffer has a state of {buffer.state_shape}, the policy's is "
            f"{tuple(policy.state_shape)}. Use TamiyoRolloutBuffer.for_policy()."
        )
    if buffer.spec != policy.spec:
        raise InvalidInputError(
            "buffer and policy have different action spaces. Use "
            "TamiyoRolloutBuffer.for_policy()."
        )


def explained_variance(batch: SequenceBatch) -> Float[Tensor, ""]:
    """Return 1 - Var(returns - values) / Var(returns); NaN if returns are constant."""
    valid = batch.valid_mask

    def variance(values: Tensor) -> Tensor:
        return masked_mean((values - masked_mean(values, valid)).square(), valid)

    total = variance(batch.returns)
    unexplained = variance(batch.returns - batch.values) / total
    return torch.where(total > 0.0, 1.0 - unexplained, torch.nan)
