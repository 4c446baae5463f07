"""Adam with gradient clipping and little overhead.

The results are those of `clip_grad_norm_` and `torch.optim.Adam`, which take longer to
find out what to do for a small network than to do it.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

EPSILON: Final = 1e-5
SMALLEST_NORM: Final = 1e-6  # as in clip_grad_norm_


class ClippingAdam(torch.optim.Adam):
    """Fused Adam that clips gradients and can skip a step without a device read.

    Its state is loaded in place, not by `load_state_dict`. A parameter without a
    gradient keeps its value and its state.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr, eps=EPSILON, fused=True)
        # One vector holds all step counts, so that one operation adds to them.
        self._counts = torch.zeros(len(parameters), device=parameters[0].device)
        for parameter, step in zip(parameters, self._counts.unbind(), strict=True):
            self.state[parameter] = {  # now, so that the state can always be saved
                "step": step,
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._has_grad: list[bool] = []
        self._used: list[Any] = []
        self._states: list[list[Tensor]] = []
        self._one = torch.ones_like(self._counts)

    def gradient_norm(self) -> Float[Tensor, ""]:
        """Return the norm of all gradients."""
        has_grad = [p.grad is not None for p in self.param_groups[0]["params"]]
        if has_grad != self._has_grad:  # others were frozen before
            self._use(has_grad)
        norms = torch._foreach_norm([parameter.grad for parameter in self._used])
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm.float()  # parameters may be float64

    def _use(self, has_grad: list[bool]) -> None:
        """Collect the parameters that have a gradient, and their state."""
        pairs = zip(self.param_groups[0]["params"], has_grad, strict=True)
        self._has_grad, self._used = has_grad, [p for p, used in pairs if used]
        self._states = [
            [self.state[parameter][name] for parameter in self._used]
            for name in ("exp_avg", "exp_avg_sq", "step")
        ]
        self._one = self._counts.new_tensor(has_grad)

    def move(
        self, norm: Float[Tensor, ""], max_norm: float, taken: Bool[Tensor, ""]
    ) -> None:
        """Scale gradients of `gradient_norm` to at most `max_norm`; step if `taken`.

        Call it under `torch.no_grad`.
        """
        count = taken.to(self._counts.dtype)
        self._counts.addcmul_(self._one, count)
        group, (means, squares, steps) = self.param_groups[0], self._states
        beta1, beta2 = group["betas"]
        torch._fused_adam_(
            self._used,
            [parameter.grad for parameter in self._used],
            means,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=((norm + SMALLEST_NORM) / max_norm).clamp(min=1.0),
            found_inf=1.0 - count,
        )
