"""Nothing bad gets into the weights: every optimiser step is judged before it is taken.

A batch whose loss, gradients or buffers are not finite, or far off what is usual, is
refused: its gradients are dropped, so the step changes no bit, and the buffers go back
to what they were before the batch. If the model itself is damaged, or bad batches
follow each other, everything goes back to the last healthy snapshot together: weights,
buffers, the optimiser's state, and random streams. Learning rates stay: they belong to
the user's schedule. A snapshot is due after every decision and taken when a batch has
shown that all is well; what fails again from one goes on with fresh moments. One small
tensor is read from the device per step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.contracts.errors import BadInput, CallOrder
from esper.growth.governor import (
    Governor,
    GovernorConfig,
    Verdict,
    all_finite,
    describe,
    unlearnt,
)
from esper.growth.model import GrowingModel
from esper.growth.snapshots import Snapshot

LARGEST: Final = 1e30
"""A weight or buffer beyond this is as good as infinite: its square is."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that the guard did not let through."""

    verdict: Verdict
    reason: str
    rolled_back: bool


class Guard:
    """Judges every step of one optimiser over one growing model."""

    def __init__(
        self,
        model: GrowingModel,
        optimizer: Optimizer,
        config: GovernorConfig | None,
        report: Callable[[Incident], None],
        give_up: Callable[[str], None],
    ) -> None:
        """Guard an optimiser.

        Args:
            model: What is trained.
            optimizer: Whose steps are judged.
            config: The governor's limits.
            report: Called with everything that was not let through.
            give_up: Called with the reason when training seeds have to leave.
        """
        self._model, self._optimizer = model, optimizer
        self._report, self._give_up = report, give_up
        self._strikes = 0
        self.falls = 0
        """How often all went back to the present snapshot."""
        device = next(model.host.parameters()).device
        self.governor = Governor(1, config, device)
        self._record = self.governor.record
        self.snapshot = Snapshot()
        self._due = False
        self._loss: Tensor | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        # A mask of -inf is a constant, not a sign of trouble.
        self._constants = {id(b) for b in model.host.buffers() if not _sane([b])}
        for name, parameter in model.host.named_parameters():
            if not _sane([parameter]):
                raise BadInput(
                    f"{name!r} is not finite; a host must be healthy to be grown."
                )
        self.snapshot.take(model, optimizer)
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def detach(self) -> None:
        """Take the hook off the optimiser."""
        self._handle.remove()

    def take(self) -> bool:
        """Keep the present state if it is finite; else the last one stays."""
        healthy = self._is_sane()
        if healthy:
            self.snapshot.take(self._model, self._optimizer)
            self._record = self.governor.record
            self._due, self.falls = False, 0
        return healthy

    def follow(self) -> None:
        """The topology may have changed: a snapshot is due at the next good batch."""
        self.snapshot.follow(self._model, self._optimizer)
        self._due = True

    def before_batch(self) -> None:
        """Keep the buffers as they are before the first batch of a step."""
        if self._loss is not None:  # gradients are accumulated
            return
        live = [*self._model.buffers()]
        kept = [held for _, held in self._buffers]
        if len(live) != len(kept) or any(
            mine is not held[0] for mine, held in zip(live, self._buffers, strict=True)
        ):
            kept = [buffer.clone() for buffer in live]
        elif live:
            torch._foreach_copy_(kept, live)
        self._buffers = [*zip(live, kept, strict=True)]

    def after_batch(self, loss: Tensor) -> None:
        """Remember the worst loss of a step; it is judged with its gradients."""
        loss = loss.detach().reshape(1).float()
        self._loss = loss if self._loss is None else torch.maximum(self._loss, loss)

    def decision(self) -> bool:
        """Judge what was learnt so far; returns whether all went back."""
        verdict = Verdict(int(self.governor.decision()))
        sane = self._is_sane()
        if verdict is Verdict.HEALTHY and sane:
            return False
        reason = "a weight, buffer or moment of the model is not finite"
        if sane:
            reason = describe(verdict, self.governor.figures(0.0, 0.0))
        self._roll_back(verdict if sane else Verdict.NON_FINITE, reason)
        return True

    def broken_seeds(self) -> list[int]:
        """Slots of training seeds with a weight, buffer or moment beyond repair."""
        return [
            slot
            for slot, seed in self._model.training_seeds().items()
            if not _sane(
                [*seed.parameters(), *seed.buffers(), *self._moments(seed.parameters())]
            )
        ]

    def _before_step(self, _: object, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            raise CallOrder(
                "optimizer.step(closure) makes gradients after they are judged; call "
                "backward() before step(), or build the Grower with governor=None."
            )
        parameters = [p for g in self._optimizer.param_groups for p in g["params"]]
        shadow = self._unfelt()
        felt = [
            _dense(p.grad)
            for p in parameters
            if p.grad is not None and id(p) not in shadow
        ]
        beside = [p.grad for p in parameters if p.grad is not None and id(p) in shadow]
        if not felt and not beside:
            return
        # Seeds that the host does not feel have no say in its step.
        norm = torch.nn.utils.get_total_norm(felt).reshape(1).float()
        loss = norm.new_zeros(1)  # unknown without `grower.loss`
        if self._loss is not None:
            loss = self._loss.to(norm.device)
        skip = shadow | self._constants
        buffers = [buffer for buffer, _ in self._buffers if id(buffer) not in skip]
        sound = all_finite(buffers, LARGEST).to(loss.device).reshape(1)
        lost = unlearnt(loss, self.governor.record, self.governor.config)
        verdicts = self.governor.batch(loss, norm, sound)
        seeds_sound = all_finite(beside).to(loss.device).reshape(1)
        said = torch.cat([verdicts, seeds_sound.long(), lost.long()]).tolist()
        verdict, seeds_fine, behind = said
        self._loss = None
        if verdict != Verdict.HEALTHY:
            self._refuse(parameters, Verdict(verdict), loss, norm, sound)
            return
        if seeds_fine:
            self._strikes = 0
        else:
            self._drop_shadow(parameters, shadow)
        if self._due and not behind:
            self.take()

    def _refuse(
        self,
        parameters: list[Tensor],
        verdict: Verdict,
        loss: Tensor,
        norm: Tensor,
        sound: Tensor,
    ) -> None:
        """Let the step change nothing; go back if the model itself is damaged."""
        for parameter in parameters:
            parameter.grad = None
        figures = self.governor.figures(
            float(loss), float(norm), buffers_finite=bool(sound)
        )
        reason = describe(verdict, figures)
        with torch.no_grad():
            for buffer, held in self._buffers:
                buffer.copy_(held)
        for junction in self._model.junctions:  # what passed there tells nothing
            junction.samples.clear()
        if verdict is Verdict.DIVERGED or not _sane(self._felt()):
            self._roll_back(verdict, reason)
        else:
            self._report(Incident(verdict, reason, rolled_back=False))

    def _drop_shadow(self, parameters: list[Tensor], shadow: set[int]) -> None:
        """Training seeds whose gradients are broken do not move; soon they leave."""
        self._strikes += 1
        for parameter in parameters:
            if id(parameter) in shadow:
                parameter.grad = None
        with torch.no_grad():
            for buffer, held in self._buffers:
                if id(buffer) in shadow:
                    buffer.copy_(held)
        reason = "the gradients of a training seed are not finite"
        if self._strikes < self.governor.config.patience:
            verdict = Verdict.NON_FINITE
            reason = f"{reason}; only its step was refused"
            self._report(Incident(verdict, reason, rolled_back=False))
        else:
            self._strikes = 0
            self._give_up(reason)

    def _unfelt(self) -> set[int]:
        """Parameters and buffers of the seeds that the host does not feel, by id."""
        seeds = self._model.training_seeds().values()
        return {id(t) for s in seeds for t in (*s.parameters(), *s.buffers())}

    def _felt(self) -> list[Tensor]:
        """Parameters and buffers of the host and of every seed that it feels."""
        skip = self._unfelt() | self._constants
        everything = (*self._model.parameters(), *self._model.buffers())
        return [tensor for tensor in everything if id(tensor) not in skip]

    def _moments(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """What the optimiser remembers of some parameters."""
        state = self._optimizer.state
        return [
            value
            for parameter in parameters
            if parameter in state
            for value in state[parameter].values()
            if isinstance(value, Tensor)
        ]

    def _is_sane(self) -> bool:
        felt = self._felt()
        return _sane([*felt, *self._moments(felt)])

    def _roll_back(self, verdict: Verdict, reason: str) -> None:
        groups = self._optimizer.param_groups
        options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        self.snapshot.restore(self._model, self._optimizer)
        for group, kept in zip(groups, options, strict=True):
            group.update(kept)
        calm = torch.zeros_like(self._record.streak)
        self.governor.record = replace(self._record, streak=calm)
        self.falls += 1
        if self.falls > 1:
            # Healthy weights fail again: their moments are what is left to blame.
            for moment in self._moments([p for g in groups for p in g["params"]]):
                moment.zero_()
        self._report(Incident(verdict, reason, rolled_back=True))


def _sane(tensors: list[Tensor]) -> bool:
    return bool(all_finite(tensors, LARGEST))


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
