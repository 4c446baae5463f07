"""All seeds of all environments at one place, as one pair of matrices.

The two-matrix forms differ only in what lies between their maps, so the seeds in the S
slots of a place are S runs of K hidden units, and a blueprint is a number of units that
are in use. One product down and one up serve every slot of every environment, whatever
neighbours planted. Units that are not felt are removed by selection, never by a zero
factor: a broken seed cannot reach anybody.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from esper.contracts.blueprints import Blueprint, Form
from esper.environment.adamw import Moments
from esper.environment.units import DEAD, GELU, LINEAR, RELU, slope, speak

FORMS: Final = (Form.WIDEN, Form.LOW_RANK, Form.RESIDUAL_MLP)
"""What a bank can hold."""


@dataclass(frozen=True, slots=True)
class Felt:
    """How a pass feels the units of one place."""

    kind: Int8[Tensor, "env unit"]
    """What each unit does: relu, nothing, gelu; dead where it is not felt."""
    alpha: Float[Tensor, "env unit 1"]
    """Alpha of the unit's slot; 0 where it is not felt."""
    live: Bool[Tensor, "env unit 1"]
    biased: Bool[Tensor, "env 1 unit"] | None
    """Where there is a bias; None if everywhere: a low-rank seed has none."""
    slot_alpha: Float[Tensor, "env slot 1"] | None
    """Alpha of the slots that add a bias of their own; None if none does."""
    speaks: Bool[Tensor, "env slot 1"]


class Bank:
    """The seeds of all environments in the slots of one place.

    Args:
        envs: How many environments.
        slots: How many slots the place has.
        units: Hidden units of the largest blueprint.
        inputs: Width at the inlet.
        outputs: Width at the outlet.
        device: Where the tensors live.
        dtype: Of the weights.
    """

    def __init__(
        self,
        envs: int,
        slots: int,
        units: int,
        inputs: int,
        outputs: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.slots, self.units = slots, units
        shapes = {
            "first": (envs, inputs, slots, units),
            "first_bias": (envs, 1, slots, units),
            "last": (envs, 1, slots, units * outputs),
            "last_bias": (envs, 1, slots, outputs),
        }
        self.moments = {
            name: Moments(torch.zeros(shape, device=device, dtype=dtype))
            for name, shape in shapes.items()
        }
        every = slots * units
        views = {
            "first": (envs, inputs, every),
            "first_bias": (envs, 1, every),
            "last": (envs, every, outputs),
            "last_bias": (envs, slots, outputs),
        }
        self.leaves = {
            name: self.moments[name].value.view(shape).requires_grad_()
            for name, shape in views.items()
        }
        nobody = torch.zeros(envs, slots, units, dtype=torch.bool, device=device)
        self.used, self.linear, self.gelu = nobody, nobody.clone(), nobody.clone()
        """Units in use, those without an activation, and those with their own."""
        self._flags()

    def plant(
        self,
        env: int,
        slot: int,
        blueprint: Blueprint,
        first: Float[Tensor, "inputs size"],
        bias: Float[Tensor, " size"],
    ) -> None:
        """Put a newborn into a slot: its first map as given, its last map zero."""
        size = blueprint.size
        self.clear(env, slot)
        with torch.no_grad():
            self.moments["first"].value[env, :, slot, :size] = first
            self.moments["first_bias"].value[env, 0, slot, :size] = bias
        self.used[env, slot, :size] = True
        self.linear[env, slot, :size] = blueprint.form is Form.LOW_RANK
        self.gelu[env, slot, :size] = blueprint.form is Form.RESIDUAL_MLP
        self._flags()

    def clear(self, env: int, slot: int) -> None:
        """Leave nothing of a seed."""
        with torch.no_grad():
            for moments in self.moments.values():
                moments.value[env, :, slot] = 0.0
                moments.forget(env, slot)
        for flags in (self.used, self.linear, self.gelu):
            flags[env, slot] = False
        self._flags()

    def felt(
        self, alpha: Float[Tensor, "env slot"], live: Bool[Tensor, "env slot"]
    ) -> Felt:
        """What a pass feels, given alpha and liveness by slot."""
        alpha = alpha.to(self.leaves["first"].dtype).unsqueeze(2)
        used = self.used & live.unsqueeze(2)
        kind = torch.where(self.linear, LINEAR, RELU)
        kind = torch.where(self.gelu, GELU, kind)
        kind = torch.where(used, kind, DEAD).to(torch.int8)
        own = self.gelu.any(dim=2) & live
        return Felt(
            kind=kind.flatten(1),
            alpha=torch.where(used, alpha, 0.0).flatten(1).unsqueeze(2),
            live=used.flatten(1).unsqueeze(2),
            biased=(~self.linear).flatten(1).unsqueeze(1) if self.any_linear else None,
            slot_alpha=alpha if self.any_gelu else None,
            speaks=own.unsqueeze(2),
        )

    def say(
        self, h: Float[Tensor, "env row inputs"], felt: Felt
    ) -> Float[Tensor, "env row outputs"]:
        """What all felt seeds of the place add to its outlet."""
        bias = self.leaves["first_bias"]
        if felt.biased is not None:
            bias = torch.where(felt.biased, bias, 0.0)
        last = torch.where(felt.live, self.leaves["last"], 0.0) * felt.alpha
        said: Tensor = _TwoMaps.apply(  # type: ignore[no-untyped-call]
            h, self.leaves["first"], bias, last, felt.kind
        )
        if felt.slot_alpha is None:
            return said
        own = torch.where(felt.speaks, self.leaves["last_bias"], 0.0)
        return said + (own * felt.slot_alpha).sum(dim=1, keepdim=True)

    def parameters(self) -> Iterable[Tensor]:
        """The leaves, in the order of `moments`."""
        return self.leaves.values()

    def _flags(self) -> None:
        self.any_linear = bool(self.linear.any())
        self.any_gelu = bool(self.gelu.any())


class _TwoMaps(torch.autograd.Function):
    """`B act(A h + a)` of all environments, with its gradients written down."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        h: Tensor,
        first: Tensor,
        bias: Tensor,
        last: Tensor,
        kind: Tensor,
    ) -> Tensor:
        units = torch.baddbmm(bias, h, first)
        hidden = speak(units, kind)
        ctx.save_for_backward(h, first, last, kind, units, hidden)
        return torch.bmm(hidden, last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (given,) = grads
        h, first, last, kind, units, hidden = ctx.saved_tensors
        felt = slope(torch.bmm(given, last.mT), units, kind)
        back = None
        if ctx.needs_input_grad[0]:
            first = first.masked_fill((kind == DEAD).unsqueeze(1), 0.0)
            back = torch.bmm(felt, first.mT)
        return (
            back,
            torch.bmm(h.mT, felt),
            felt.sum(dim=1, keepdim=True),
            torch.bmm(hidden.mT, given),
            None,
        )
