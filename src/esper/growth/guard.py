"""Nothing bad gets into the weights: every optimiser step is judged before it is taken.

A batch whose loss, gradients or buffers are not finite, or far off what is usual, is
refused: its gradients are dropped, so the step changes no bit, and the buffers go back
to what they were before the batch. If the model itself is damaged, or bad batches
follow each other, everything goes back to the last healthy snapshot together: weights,
buffers, the optimiser's state, and random streams. Learning rates stay: they belong to
the user's schedule. One number is read from the device per step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.growth.governor import (
    Governor,
    GovernorConfig,
    Verdict,
    all_finite,
    describe,
)
from esper.growth.model import GrowingModel
from esper.growth.snapshots import Snapshot


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
        device = next(model.host.parameters()).device
        self.governor = Governor(1, config, device)
        self.snapshot = Snapshot()
        self._loss: Tensor | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        optimizer.register_step_pre_hook(self._before_step)
        self.take()

    def take(self) -> bool:
        """Keep the present state if it is healthy; else the last one stays."""
        healthy = bool(all_finite(self._felt()))
        if healthy:
            self.snapshot.take(self._model, self._optimizer)
        return healthy

    def before_batch(self) -> None:
        """Keep the buffers as they are before a batch."""
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
        """Remember the loss; it is judged with the gradients it leads to."""
        self._loss = loss.detach()

    def decision(self) -> bool:
        """Judge what was learnt so far; returns whether all went back."""
        verdict = Verdict(int(self.governor.decision()))
        finite = bool(all_finite(self._felt()))
        if verdict is Verdict.HEALTHY and finite:
            return False
        if not finite:
            reason = "a weight or buffer of the model is not finite"
            verdict = Verdict.NON_FINITE
        else:
            reason = describe(verdict, self.governor.figures(0.0, 0.0))
        self._roll_back(verdict, reason)
        return True

    def _before_step(self, *_: object) -> None:
        parameters = [p for g in self._optimizer.param_groups for p in g["params"]]
        shadow = {id(p) for p in self._model.training_parameters()}
        felt = [
            p.grad for p in parameters if p.grad is not None and id(p) not in shadow
        ]
        beside = [p.grad for p in parameters if p.grad is not None and id(p) in shadow]
        if not felt and not beside:
            return
        # Seeds that the host does not feel have no say in its step.
        norm = torch.nn.utils.get_total_norm(felt).reshape(1).float()
        loss = norm.new_zeros(1)  # unknown without `grower.loss`
        if self._loss is not None:
            loss = self._loss.reshape(1).float()
        sound = all_finite([buffer for buffer, _ in self._buffers]).to(loss.device)
        verdicts = self.governor.batch(loss, norm, sound.reshape(1))
        seeds_sound = all_finite(beside).to(loss.device).reshape(1)
        verdict, seeds_fine = torch.cat([verdicts, seeds_sound.long()]).tolist()
        self._loss = None
        if not seeds_fine:
            self._drop_shadow(parameters, shadow)
        else:
            self._strikes = 0
        if verdict != Verdict.HEALTHY:
            self._refuse(parameters, Verdict(verdict), loss, norm, sound)

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
        if verdict is Verdict.DIVERGED or not bool(all_finite(self._felt())):
            self._roll_back(verdict, reason)
        else:
            self._report(Incident(verdict, reason, rolled_back=False))

    def _drop_shadow(self, parameters: list[Tensor], shadow: set[int]) -> None:
        """Training seeds whose gradients are broken do not move; soon they leave."""
        self._strikes += 1
        for parameter in parameters:
            if id(parameter) in shadow:
                parameter.grad = None
        if self._strikes >= self.governor.config.patience:
            self._strikes = 0
            self._give_up("the gradients of a training seed are not finite")

    def _felt(self) -> list[Tensor]:
        """Parameters and buffers of the host and of every seed that it feels."""
        unfelt = [
            branch.seed
            for junction in self._model.junctions
            for branch in junction.branches.values()
            if branch.shadow
        ]
        skip = {id(t) for seed in unfelt for t in (*seed.parameters(), *seed.buffers())}
        everything = (*self._model.parameters(), *self._model.buffers())
        return [tensor for tensor in everything if id(tensor) not in skip]

    def _roll_back(self, verdict: Verdict, reason: str) -> None:
        groups = self._optimizer.param_groups
        options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        self.snapshot.restore(self._model, self._optimizer)
        for group, kept in zip(groups, options, strict=True):
            group.update(kept)
        self.governor.forgive(torch.ones(1, dtype=torch.bool))
        self._report(Incident(verdict, reason, rolled_back=True))
