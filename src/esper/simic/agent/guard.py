"""Whether a step may be taken, decided on the device and never read back.

A stopped update and a non-finite gradient refuse the step: weights, moments and
statistics keep every bit.
"""

import torch
from torch import Tensor

from esper.simic.agent.normalization import ReturnMoments
from esper.simic.agent.policy import Policy


class Guard:
    """Decides on the device whether each step may be taken."""

    def __init__(self, target_kl: float, device: torch.device) -> None:
        self._target = target_kl
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        self.any_taken = torch.zeros((), dtype=torch.bool, device=device)
        self.start_epoch()

    def start_epoch(self) -> None:
        """Begin a new running mean of the KL."""
        self._kl = torch.zeros((), device=self._stopped.device)
        self._steps = torch.zeros((), device=self._stopped.device)

    def judge(
        self, kl: Tensor, steps: Tensor, loss: Tensor, grad_norm: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whether the step is taken, the update is stopped, everything is finite.

        A loss can be NaN without its gradient being so: clamping swallows NaN.
        A KL that is not finite is broken data as long as no step was taken: it must
        not blind the mean. Afterwards it is a policy that went too far.
        """
        known = torch.isfinite(kl)
        self._kl = self._kl + torch.where(known, kl * steps, 0.0)
        self._steps = self._steps + torch.where(known, steps, 0)
        over = self._kl > self._target * self._steps.clamp(min=1)
        finite = known & torch.isfinite(loss) & torch.isfinite(grad_norm)
        self._stopped = self._stopped | over | (self.any_taken & ~known)
        taken = finite & ~self._stopped
        self.any_taken = self.any_taken | taken
        return taken, self._stopped, finite

    def known_stopped(self) -> bool:
        """Whether the rest can be skipped, where knowing costs no device read."""
        return self._stopped.device.type == "cpu" and bool(self._stopped.numpy())


class ValueBackup:
    """A copy of value statistics and value head, to restore if no step was taken."""

    def __init__(self, policy: Policy, moments: ReturnMoments) -> None:
        self.moments = moments
        head = policy.value_out
        tensors = (head.weight, head.bias, policy.value_mean, policy.value_scale)
        self._copies = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore_unless(self, taken: Tensor, moments: ReturnMoments) -> ReturnMoments:
        """Put back every bit unless `taken`; return the moments to go on with."""
        with torch.no_grad():
            for tensor, before in self._copies:
                tensor.copy_(torch.where(taken, tensor, before))
        return moments.where(taken, self.moments)
