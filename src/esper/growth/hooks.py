"""Where seeds attach to a host, and training seeds in a pass of their own.

Two hooks per place: the inlet's keeps the tensor that the seeds read, the outlet's adds
their outputs to the tensor there. They are on the host while the place has seeds. A
host whose parts are called one by one must call both in turn; other orders are refused.
New units of neighbouring places feed each other, times the first one's alpha; a seed
that is not active in a pass feeds nobody in it.
What a seed raises is raised, unless a Grower follows the host and removes the seed: it
is skipped from then on and recorded in `Flow.failed`. What a pass keeps between inlet
and outlet is kept by thread, so several threads may evaluate.

    ADD     z + alpha * s
    SCALE   z * (1 + alpha * s)

both are the identity at s = 0. In a shadow pass, before the host's own, the same loss
is computed with the training seeds at alpha 1, the host frozen and on copies of its
buffers, and random state restored: a host with a training seed equals the host without
it to the bit.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import takewhile
from threading import get_ident
from typing import Any, Final
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError
from torch.utils.hooks import RemovableHandle

from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.growth.analysis.slots import InsertionPoint
from esper.growth.analysis.tracing import first_tensor, kept_randomness, swapped_buffers
from esper.growth.blueprints.geometry import Layout
from esper.growth.blueprints.registry import first_line
from esper.growth.blueprints.seed import FormSeed

ADD: Final = 0
SCALE: Final = 1
MARK: Final = "_esper_flow"
"""Where a module says whose outlet it is."""

Change = Callable[[], None]


@dataclass(slots=True)
class Branch:
    """One seed at its place."""

    seed: nn.Module
    alpha: float = 0.0
    style: int = ADD
    shadow: bool = True
    """Whether the seed is in TRAINING: active in shadow passes only."""


class TopologyListener:
    """What must follow when a state is loaded into a host; here nothing."""

    removes_failed = False
    """Whether seeds whose code raises are removed and reported."""

    def follow(self, change: Change) -> None:
        """Carry out a change of topology, the optimiser included."""
        change()

    def loaded(self) -> None:
        """The weights have been loaded too."""

    def give_up(self, successor: "TopologyListener") -> None:
        """Another one follows the host from now on."""


@dataclass(slots=True)
class Flow:
    """How the next pass through a host treats its seeds; shared by all places.

    Other settings than the usual ones hold in the thread that has made them.
    """

    shadow: bool = False
    """Whether TRAINING seeds are active, at alpha 1."""
    left_out: int | None = None
    """A slot whose seed is inactive in this pass."""
    tried: int | None = None
    """A slot whose seed is active at alpha 1 in this pass."""
    failed: dict[int, str] = field(default_factory=dict)
    """Slots whose seeds raised, and how: they are inactive."""
    listener: "ref[TopologyListener] | None" = None
    """What follows changes of the host, such as a Grower; no copy has one."""
    ran: bool = False
    """Whether a place with seeds was passed since this was last cleared."""
    thread: int = 0
    """The thread whose passes are not the usual ones."""
    changes: int = 0
    """How often a seed has come or left, begun or ended to train."""

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """For copies and pickles, which nothing follows."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        return None, state | {"listener": None}

    @property
    def following(self) -> "TopologyListener":
        """What follows changes, if it still exists; else nothing does."""
        return (self.listener() if self.listener else None) or TopologyListener()

    @contextmanager
    def using(self, **changes: bool | int) -> Iterator[None]:
        """Other settings for this thread's passes in the block."""
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
    """A hook that is on a module only while it is needed.

    A module with any hook takes a slower path through torch, which a small host feels.
    """

    handle: RemovableHandle
    held: dict[int, Callable[..., Any]]
    """All hooks of its kind on the module, by the order in which they were made."""
    call: Callable[..., Any]

    def switch(self, *, on: bool) -> None:
        """Be called or not, in the order in which the module was given its hooks."""
        key = self.handle.id
        if on and key not in self.held:
            younger = [*takewhile(lambda other: other > key, reversed(self.held))]
            self.held[key] = self.call
            for other in reversed(younger):
                self.held[other] = self.held.pop(other)
        elif not on:
            self.held.pop(key, None)


@dataclass(slots=True)
class SlotHooks:
    """The hooks of one place and its seeds."""

    place: InsertionPoint
    flow: Flow
    below: list["SlotHooks"] = field(default_factory=list)
    """Places that begin with the layer where this one ends: units feed units there."""
    above: dict[int, dict[int, tuple[FormSeed, Tensor]]] = field(default_factory=dict)
    """Units of the seeds before, by thread and slot, in its present pass, times alpha.
    """
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    """What the inlet was given, by thread."""
    _mixed: set[int] = field(default_factory=set)
    """Threads in which the inlet was called again before the outlet."""
    _branches: dict[int, Branch] = field(default_factory=dict)
    _hooks: list["Hook"] = field(default_factory=list)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """For copies: without the tensors that a failed pass has left."""
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
            # Code that was compiled for one layer serves others of its kind, whatever
            # their hooks (BERT's blocks), unless guards for hooks are asked for.
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            torch.compiler.reset()
        self._branches = dict(sorted(branches.items()))
        self.flow.changes += 1
        for hook in self._hooks:
            hook.switch(on=on)

    def attach(self, host: nn.Module) -> None:
        """Take a place on the host; the hooks come with the first seed."""
        outlet, place = self.place.outlet, self.place
        other = outlet.__dict__.get(MARK)
        if other is not None and other is not self.flow:
            raise InvalidInputError(
                f"{place.site.outlet!r} has slots of another Grower; call its "
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
        """Take the hooks off the host."""
        for hook in self._hooks:
            hook.handle.remove()
        self._hooks.clear()
        if self.place.outlet.__dict__.get(MARK) is self.flow:
            del self.place.outlet.__dict__[MARK]
        self.clear()

    def clear(self) -> None:
        """Drop what a pass that did not reach the outlet has left."""
        self._inputs.clear()
        self._mixed.clear()
        self.above.clear()

    def begin(self, *_: object) -> None:
        """Drop what a call of a part of the host, or one that failed, has left."""
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
            except Exception as error:  # a seed is code of others
                self._refuse_another_batch(inputs, output)
                if not self.flow.following.removes_failed:
                    raise
                self.flow.failed[slot] = f"its forward failed ({first_line(error)})"
                continue
            result = result + delta if branch.style == ADD else result * (1 + delta)
        self.above.pop(thread, None)
        return result

    def _refuse_order(self, inputs: Tensor | None) -> None:
        """Refuse an outlet whose inlet was not called, or called more than once."""
        if not any(self._alpha(slot, branch) for slot, branch in self.branches.items()):
            return
        inlet, outlet = repr(self.place.site.inlet), repr(self.place.site.outlet)
        if inputs is not None:
            what = (
                f"{inlet} was called twice before {outlet}, and a seed between them "
                f"needs one input; call {outlet} after each, or the whole host."
            )
        elif _is_backward():
            what = (
                f"{outlet} was computed again without {inlet}; put both into one "
                "checkpointed segment."
            )
        else:
            what = (
                f"{outlet} was called without {inlet}, whose input a seed reads; call "
                "both in turn, or the whole host."
            )
        raise InvalidStateError(what)

    def _refuse_another_batch(self, inputs: Tensor, output: Tensor) -> None:
        """Refuse an inlet and an outlet that cannot be of one batch."""
        at = self.place.geometry
        sides = (at.inlet_shape, at.inlet_layout), (at.outlet_shape, at.outlet_layout)
        alike = len({_positions(*side) for side in sides}) == 1
        shapes = (inputs.shape, at.inlet_layout), (output.shape, at.outlet_layout)
        read, written = (_positions(*side) for side in shapes)
        if read[0] != written[0] or (alike and read != written):
            site = self.place.site
            raise InvalidStateError(
                f"{site.inlet!r} was given {[*inputs.shape]} and {site.outlet!r} gave "
                f"{[*output.shape]}, which are two batches; call both in turn, or the "
                "whole host."
            )

    def _run(
        self, slot: int, seed: nn.Module, alpha: float, inputs: Tensor, output: Tensor
    ) -> Tensor:
        """What a seed gives, times alpha; its units feed the places below."""
        at, units = self.place.geometry, list[Tensor]()
        # In an export other seeds may have widened what this one reads and writes.
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
        if delta.shape != output.shape:  # never broadcast by accident
            raise ValueError(f"it gave {[*delta.shape]} for {[*output.shape]}")
        return delta if alpha == 1.0 else alpha * delta

    def _alpha(self, slot: int, branch: Branch) -> float:
        flow = self.flow
        if slot in flow.failed:
            return 0.0
        if flow.thread == get_ident():
            if slot == flow.left_out:
                return 0.0
            if slot == flow.tried or (branch.shadow and flow.shadow):
                return 1.0
        return 0.0 if branch.shadow else branch.alpha


def _positions(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """A shape without its channels."""
    axis = len(shape) - 1 - layout.axes_behind
    return (*shape[:axis], *shape[axis + 1 :])


def _is_backward() -> bool:
    """Whether this is a pass of gradient checkpointing, which computes parts again."""
    return torch._C._current_graph_task_id() != -1


def shadow_gradients(
    closure: Callable[[], Tensor],
    flow: Flow,
    model: nn.Module,
    learning: Sequence[nn.Parameter],
    frozen: Sequence[nn.Module] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss with the training seeds at alpha 1, and its gradients to `learning`.

    Nothing else changes in the modules that are `frozen`, or in any if that is None.
    """
    modules = [*model.modules()] if frozen is None else frozen
    mine = {id(p) for p in learning}
    others = [
        p
        for module in modules
        for p in module._parameters.values()
        if p is not None and p.requires_grad and id(p) not in mine
    ]
    with (
        flow.using(shadow=True),
        swapped_buffers(modules),
        kept_randomness(model),
        _without_gradients(others),
        torch.enable_grad(),
    ):
        loss = closure()
        found: Sequence[Tensor | None] = [None] * len(learning)
        if loss.requires_grad:  # not if the host left the seeds' places out
            found = torch.autograd.grad(loss, [*learning], allow_unused=True)
    gradients = tuple(
        torch.zeros_like(p) if g is None else g
        for p, g in zip(learning, found, strict=True)
    )
    return loss.detach(), gradients


def attach_gradients(
    loss: Tensor, learning: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> Tensor:
    """The same loss, whose backward also gives these gradients to `learning`.

    They are scaled as the user scales the loss.
    """
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
    """The identity for a loss, with precomputed gradients for other inputs."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *rest: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(*rest[count:])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (grad,) = grads
        own = [(grad * g).to(g.dtype) for g in ctx.saved_tensors]
        return grad, None, *own, *(None for _ in own)
