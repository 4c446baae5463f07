"""Forward hooks that run the seeds of a host, and shadow passes that train seeds.

    ADD     z + alpha * s
    SCALE   z * (1 + alpha * s)

The hook of the inlet keeps the tensor that seeds read, the hook of the outlet adds
their outputs. A host called in parts must call inlet and outlet in turn; other orders
raise. In a shadow pass the loss is computed with training seeds at alpha 1 and the host
frozen; buffers and random state are restored, so the host's own training is unchanged.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import takewhile
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError
from torch.utils.hooks import RemovableHandle

from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.contracts.messages import described
from esper.growth.analysis.slots import InsertionPoint
from esper.growth.analysis.tracing import first_tensor, kept_randomness, swapped_buffers
from esper.growth.blueprints.forms import FormSeed
from esper.growth.blueprints.geometry import Layout

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

ADD: Final = 0
SCALE: Final = 1
MARK: Final = "_esper_flow"
"""Attribute of an outlet module that holds the `Flow` of its seeds."""

Change = Callable[[], None]


@dataclass(slots=True)
class Branch:
    """One seed at its place."""

    seed: nn.Module
    alpha: float = 0.0
    style: int = ADD
    shadow: bool = True
    """Whether the seed is in TRAINING, so active in shadow passes only."""


@dataclass(slots=True)
class Flow:
    """Settings of the next forward pass, shared by all places of a host.

    `muted`, `shadow`, `left_out` and `tried` hold in one thread only.
    """

    muted: bool = False
    """Whether no seed is active."""
    shadow: bool = False
    """Whether TRAINING seeds are active, at alpha 1."""
    left_out: Collection[int] = ()
    """Slots whose seeds are inactive in this pass."""
    tried: int | None = None
    """A slot whose seed is active at alpha 1 in this pass."""
    failed: dict[int, str] = field(default_factory=dict)
    """Slots whose seeds raised, and the reason; these are inactive."""
    owner_ref: "ref[GrowingModel] | None" = None
    """The model that follows changes of the host; copies have none."""
    ran: bool = False
    """Whether any seed hook ran since this was last cleared."""
    thread: int = 0
    """The thread in which `using` holds."""
    changes: int = 0
    """Number of seeds that were added or removed, or began or ended training."""

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """State for copies and pickles, without the owner."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        return None, state | {"owner_ref": None}

    @property
    def owner(self) -> "GrowingModel | None":
        """The model that follows changes of the host, if it still exists."""
        return self.owner_ref() if self.owner_ref is not None else None

    @contextmanager
    def using(self, **changes: bool | int | Collection[int]) -> Iterator[None]:
        """Set fields for this thread's passes in the block."""
        changes["thread"] = get_ident()
        before = {name: getattr(self, name) for name in changes}
        for name, value in changes.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


@dataclass(slots=True)
class Hook:
    """A hook that can be switched off: any hook makes calls of a module slower."""

    handle: RemovableHandle
    held: dict[int, Callable[..., Any]]
    """All hooks of this kind on the module, in order of registration."""
    call: Callable[..., Any]
    ahead: Collection[int] = ()
    """Hooks that came before it when it was switched off."""

    def switch(self, *, on: bool) -> None:
        """Switch the hook on or off; its position among other hooks stays."""
        key = self.handle.id
        if on and key not in self.held:
            behind = [
                *takewhile(
                    lambda x: x > key and x not in self.ahead, [*self.held][::-1]
                )
            ]
            self.held[key] = self.call
            for other in reversed(behind):
                self.held[other] = self.held.pop(other)
        elif not on and key in self.held:
            self.ahead = {*takewhile(lambda other: other != key, self.held)}
            del self.held[key]


@dataclass(slots=True)
class SlotHooks:
    """The hooks of one place and its seeds."""

    place: InsertionPoint
    flow: Flow
    below: list["SlotHooks"] = field(default_factory=list)
    """Places whose inlet is this one's outlet: units of seeds feed units there."""
    above: dict[int, dict[int, tuple[FormSeed, Tensor]]] = field(default_factory=dict)
    """Units of the seeds above times alpha in the current pass, by thread and slot."""
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    """Input of the inlet, by thread."""
    _mixed: set[int] = field(default_factory=set)
    """Threads in which the inlet was called twice before the outlet."""
    _branches: dict[int, Branch] = field(default_factory=dict)
    _hooks: list["Hook"] = field(default_factory=list)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """State for copies, without tensors that a failed pass left."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        return None, state | {"_inputs": {}, "_mixed": set(), "above": {}}

    @property
    def branches(self) -> Mapping[int, Branch]:
        """Seeds by slot number, in the order of slots."""
        return self._branches

    @branches.setter
    def branches(self, branches: Mapping[int, Branch]) -> None:
        on = bool(branches)
        if on is not bool(self._branches) and "torch._dynamo" in sys.modules:
            # By default torch reuses code compiled for one layer for others of its
            # class that have other hooks.
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            torch.compiler.reset()
        self._branches = dict(sorted(branches.items()))
        self.flow.changes += 1
        for hook in self._hooks:
            hook.switch(on=on)

    def attach(self, host: nn.Module) -> None:
        """Register the hooks; they are switched on with the first seed."""
        outlet, place = self.place.outlet, self.place
        other = outlet.__dict__.get(MARK)
        if other is not None and other is not self.flow:
            raise InvalidInputError(
                f"{place.site.outlet!r} has slots of another Grower. Call its "
                "detach() first."
            )
        outlet.__dict__[MARK] = self.flow
        if not place.site.residual:
            handle = place.inlet.register_forward_pre_hook(self.read, with_kwargs=True)
            self._hooks.append(Hook(handle, place.inlet._forward_pre_hooks, self.read))
            handle = host.register_forward_pre_hook(self.begin)
            self._hooks.append(Hook(handle, host._forward_pre_hooks, self.begin))
        handle = outlet.register_forward_hook(self.write)
        self._hooks.append(Hook(handle, outlet._forward_hooks, self.write))
        self.branches = self._branches

    def detach(self) -> None:
        """Remove the hooks from the host."""
        for hook in self._hooks:
            hook.handle.remove()
        self._hooks.clear()
        if self.place.outlet.__dict__.get(MARK) is self.flow:
            del self.place.outlet.__dict__[MARK]
        # Drop tensors of a pass that did not reach the outlet.
        self._inputs.clear()
        self._mixed.clear()
        self.above.clear()

    def begin(self, *_: object) -> None:
        """Drop this thread's input of an earlier partial or failed call."""
        self._inputs.pop(get_ident(), None)
        self._mixed.discard(get_ident())

    def read(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Keep the inlet's input."""
        thread = get_ident()
        self.above.pop(thread, None)
        if thread in self._inputs and not _is_backward():
            self._mixed.add(thread)
        self._inputs[thread] = first_tensor((*args, *kwargs.values()))

    def write(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:  # noqa: ANN401
        """Add the seeds' outputs to the outlet's."""
        self.flow.ran = True
        thread = get_ident()
        kept = self._inputs.pop(thread, None)
        inputs = output if self.place.site.residual else kept
        if inputs is None or thread in self._mixed:
            self._mixed.discard(thread)
            self._refuse_order(inputs)
        result = output
        for slot, branch in self.branches.items():
            alpha = self._alpha(slot, branch)
            if alpha == 0.0 or inputs is None:
                continue
            if branch.seed.training != module.training:
                branch.seed.train(module.training)
            try:
                delta = self._run(slot, branch.seed, alpha, inputs, output)
            except _StopRecomputationError:  # how gradient checkpointing ends
                raise
            except Exception as error:  # a seed may be the user's code
                self._refuse_another_batch(inputs, output)
                owner = self.flow.owner
                if owner is None or owner.surgery is None:  # without a Grower
                    raise
                self.flow.failed[slot] = f"its forward failed ({described(error)})"
                continue
            result = result + delta if branch.style == ADD else result * (1 + delta)
        self.above.pop(thread, None)
        return result

    def _refuse_order(self, inputs: Tensor | None) -> None:
        """Raise if the inlet was not called exactly once before the outlet."""
        if not any(self._alpha(slot, branch) for slot, branch in self.branches.items()):
            return
        inlet, outlet = repr(self.place.site.inlet), repr(self.place.site.outlet)
        if inputs is not None:
            what = (
                f"{inlet} was called twice before {outlet}, and a seed between them "
                f"needs one input. Call {outlet} after each, or the whole host."
            )
        elif _is_backward():
            what = (
                f"{outlet} was computed again without {inlet}. Put both into one "
                "checkpointed segment."
            )
        else:
            what = (
                f"{outlet} was called without {inlet}, whose input a seed reads. Call "
                "both in turn, or the whole host."
            )
        raise InvalidStateError(what)

    def _refuse_another_batch(self, inputs: Tensor, output: Tensor) -> None:
        """Raise if input and output cannot be of one batch."""
        at = self.place.geometry
        sides = (at.inlet_shape, at.inlet_layout), (at.outlet_shape, at.outlet_layout)
        alike = len({_positions(*side) for side in sides}) == 1
        shapes = (inputs.shape, at.inlet_layout), (output.shape, at.outlet_layout)
        read, written = (_positions(*side) for side in shapes)
        if read[0] != written[0] or (alike and read != written):
            site = self.place.site
            raise InvalidStateError(
                f"{site.inlet!r} was given {[*inputs.shape]} and {site.outlet!r} gave "
                f"{[*output.shape]}, which are two batches. Call both in turn, or the "
                "whole host."
            )

    def _run(
        self, slot: int, seed: nn.Module, alpha: float, inputs: Tensor, output: Tensor
    ) -> Tensor:
        """Output of a seed times alpha; its units feed the places below."""
        at, units = self.place.geometry, list[Tensor]()
        # In an export, other seeds may have widened the inlet or the outlet.
        axis = -1 - at.inlet_layout.axes_behind
        if inputs.shape[axis] > at.inlet_width:
            inputs = inputs.narrow(axis, 0, at.inlet_width)
        if isinstance(seed, FormSeed) and seed.widens:
            thread = get_ident()
            fed = seed.feed(slot, self.above.get(thread, {}))
            delta: Tensor = seed(inputs, fed, units)
            for hidden in units:
                given = hidden if alpha == 1.0 else alpha * hidden
                for hooks in self.below:
                    hooks.above.setdefault(thread, {})[slot] = (seed, given)
        else:
            delta = seed(inputs)
        behind = at.outlet_layout.axes_behind
        more = output.shape[-1 - behind] - at.outlet_width
        if more:
            delta = F.pad(delta, (0, 0) * behind + (0, more))
        if delta.shape != output.shape:  # no silent broadcasting
            raise ValueError(f"it gave {[*delta.shape]} for {[*output.shape]}")
        return delta if alpha == 1.0 else alpha * delta

    def _alpha(self, slot: int, branch: Branch) -> float:
        flow = self.flow
        if slot in flow.failed:
            return 0.0
        if flow.thread == get_ident():
            if flow.muted or slot in flow.left_out:
                return 0.0
            if slot == flow.tried or (branch.shadow and flow.shadow):
                return 1.0
        return 0.0 if branch.shadow else branch.alpha


def _positions(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Shape without the channel axis."""
    axis = len(shape) - 1 - layout.axes_behind
    return (*shape[:axis], *shape[axis + 1 :])


def _is_backward() -> bool:
    """Whether gradient checkpointing recomputes a part during the backward pass."""
    return torch._C._current_graph_task_id() != -1


def shadow_gradients(
    closure: Callable[[], Tensor],
    flow: Flow,
    model: nn.Module,
    learning: Sequence[nn.Parameter],
    frozen: Sequence[nn.Module],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Loss with the training seeds at alpha 1, and its gradients to `learning`.

    No other tensor of the `frozen` modules changes.
    """
    mine = {id(p) for p in learning}
    others = [
        p
        for module in frozen
        for p in module._parameters.values()
        if p is not None and p.requires_grad and id(p) not in mine
    ]
    with (
        flow.using(shadow=True),
        swapped_buffers(frozen),
        kept_randomness(model),
        _without_gradients(others),
        torch.enable_grad(),
    ):
        loss = closure()
        found: Sequence[Tensor | None] = [None] * len(learning)
        if loss.requires_grad:  # not if the host skipped all places with seeds
            found = torch.autograd.grad(loss, [*learning], allow_unused=True)
    gradients = tuple(
        torch.zeros_like(p) if g is None else g
        for p, g in zip(learning, found, strict=True)
    )
    return loss.detach(), gradients


def attach_gradients(
    loss: Tensor, learning: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> Tensor:
    """The same loss; its backward also gives the scaled gradients to `learning`."""
    attached: Tensor = _AttachGradients.apply(  # type: ignore[no-untyped-call]
        loss, len(learning), *learning, *gradients
    )
    return attached


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class _AttachGradients(torch.autograd.Function):
    """Identity of a loss, with precomputed gradients for other inputs."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *rest: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(*rest[count:])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (grad,) = grads
        own = [(grad * g).to(g.dtype) for g in ctx.saved_tensors]
        return grad, None, *own, *(None for _ in own)
