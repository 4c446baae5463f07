"""Growing a network that is trained by `DistributedDataParallel`.

All ranks must hold the same seeds and weights and take the same decisions. The wrapper
reduces the host's gradients; those of seeds, which it does not know, are averaged here
at the end of the same backward pass. Decisions depend on values that all ranks share:
the worst of all, or that of the first rank. One process communicates nothing.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel

from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.growth.analysis.slots import check_host
from esper.growth.saving.saved_topology import NAME


class DistributedContext:
    """The ranks of a `DistributedDataParallel` wrapper, or one rank without it."""

    def __init__(self, wrapper: DistributedDataParallel | None = None) -> None:
        self.wrapper = wrapper
        self.group: Any = wrapper.process_group if wrapper is not None else None
        self.size = dist.get_world_size(self.group) if wrapper is not None else 1
        self.many = self.size > 1
        self.is_first = not self.many or dist.get_rank(self.group) == 0
        self._reduced = False

    def worst(self, values: Tensor) -> Tensor:
        """Elementwise maximum over all ranks; NaN counts as infinite."""
        if not self.many:
            return values
        values = torch.where(values.isnan(), torch.inf, values)
        dist.all_reduce(values, dist.ReduceOp.MAX, self.group)
        return values

    def all_agree(self, fine: bool) -> bool:
        """Whether `fine` is true on every rank."""
        if not self.many:
            return fine
        return not bool(self.worst(self._tensor([0.0 if fine else 1.0])))

    def mean(self, total: float, count: float) -> float:
        """Sum of totals over ranks, divided by the sum of counts."""
        pair = self._tensor([total, count])
        if self.many:
            dist.all_reduce(pair, dist.ReduceOp.SUM, self.group)
        return float(pair[0] / pair[1])

    def from_first(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors from the first rank."""
        if not self.many:
            return
        source = dist.get_global_rank(self.group, 0)
        with torch.no_grad():
            for tensor in tensors:
                held = tensor.detach().contiguous()
                dist.broadcast(held, source, self.group)
                tensor.detach().copy_(held)

    def value_of_first(
        self, measure: Callable[[], float], what: str = "the metric"
    ) -> float:
        """Value of the first rank; raises on all ranks if it raises there.

        All ranks call `measure`, since it may communicate.
        """
        if not self.many:
            return measure()
        problem: Exception | None = None
        answer = self._tensor([0.0, 0.0])
        try:
            answer = self._tensor([1.0, measure()])
        except Exception as error:
            problem = error
        self.from_first([answer])
        if not bool(answer[0]):
            if self.is_first and problem is not None:
                raise problem
            raise InvalidStateError(
                f"{what} failed on the first rank. See the error of that rank."
            )
        return float(answer[1])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not synchronise passes through the wrapper in the block."""
        if self.wrapper is None:
            yield
            return
        names = ("require_backward_grad_sync", "require_forward_param_sync")
        before = {name: getattr(self.wrapper, name) for name in names}
        for name in names:
            setattr(self.wrapper, name, False)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.wrapper, name, value)

    def reducing(self, loss: Tensor, seeds: nn.Module) -> Tensor:
        """The same loss; its backward also averages the gradients of seeds."""
        if not self.many:
            return loss

        def reduce() -> None:
            assert self.wrapper is not None
            if self.wrapper.require_backward_grad_sync:  # not while accumulating
                self._average(seeds)

        result: Tensor = _AfterBackward.apply(loss, reduce)  # type: ignore[no-untyped-call]
        return result

    def before_step(self, seeds: nn.Module) -> None:
        """Average the gradients of seeds unless `reducing` has done so."""
        if self.many and not self._reduced:
            self._average(seeds)
        self._reduced = False

    def _average(self, seeds: nn.Module) -> None:
        parameters = [*seeds.parameters()]
        self._reduced = True
        if not parameters:
            return
        # A rank without a gradient of a seed contributes zeros.
        given = [p.grad for p in parameters]
        double = any(p.dtype == torch.float64 for p in parameters)
        exact = torch.float64 if double else torch.float32
        parts = [
            (torch.zeros_like(p) if g is None else g).flatten().to(exact)
            for p, g in zip(parameters, given, strict=True)
        ]
        there = self._tensor([float(g is not None) for g in given])
        flat = torch.cat([*parts, there.to(exact)])
        dist.all_reduce(flat, dist.ReduceOp.SUM, self.group)
        *means, there = flat.split([*(part.numel() for part in parts), len(there)])
        for parameter, mean, ranks in zip(
            parameters, means, there.tolist(), strict=True
        ):
            if ranks:
                grad = (mean / self.size).view_as(parameter).to(parameter.dtype)
                parameter.grad = grad
        self.from_first(b for b in seeds.buffers() if b.is_floating_point())

    def refuse_different(self, model: nn.Module) -> None:
        """Raise if the ranks hold different weights."""
        if not self.many:
            return
        mine = torch.tensor([digest(model)], device=self._device)
        found = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, self.group)
        if len({int(one) for one in found}) > 1:
            raise InvalidStateError(
                "the ranks hold different weights. Build the same model on all ranks, "
                "call the DistributedDataParallel model in the loss, and call plant() "
                "on all ranks."
            )

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    @property
    def _device(self) -> torch.device:
        if self.wrapper is None:
            return torch.device("cpu")
        first: Tensor = next(self.wrapper.parameters())
        return first.device


def digest(model: nn.Module) -> int:
    """Hash of the names and bits of all parameters."""
    found = hashlib.blake2b(digest_size=7)
    for name, parameter in model.named_parameters():
        found.update(name.encode())
        flat = parameter.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest(), "big")


def unwrapped(
    model: Any,  # noqa: ANN401
    wrapper: DistributedDataParallel | None = None,
) -> tuple[nn.Module, DistributedContext]:
    """Host and ranks of a model, which may be a wrapper or a part of its module."""
    if isinstance(model, DistributedDataParallel):
        model, wrapper = model.module, model
    ranks = DistributedContext(wrapper)
    if wrapper is None:
        check_host(model)
        here = dist.is_available() and dist.is_initialized()
        if here and dist.get_world_size() > 1:
            raise InvalidInputError(
                f"{dist.get_world_size()} ranks train together. Pass the "
                "DistributedDataParallel model itself, so that all grow the same seeds."
            )
    elif ranks.many:
        seeds = f"{NAME}."
        named = [name for name, _ in wrapper.module.named_parameters()]
        known = {*named} - {*wrapper.parameters_to_ignore}
        if any(name.startswith(seeds) or f".{seeds}" in name for name in known):
            raise InvalidInputError(
                "the network in DistributedDataParallel has seeds already. Wrap the "
                "plain host and load the state after building the Grower."
            )
    return model, ranks


class _AfterBackward(torch.autograd.Function):
    """Identity of a loss that calls a function at the end of the backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, call: Callable[[], None]) -> Tensor:  # noqa: ANN401
        ctx.call = call
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        Variable._execution_engine.queue_callback(ctx.call)
        return grads[0], None
