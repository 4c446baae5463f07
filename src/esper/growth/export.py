"""A grown model as a plain module, independent of the growing one.

    plain = export(growing)

Seeds that are linear in the right way are merged into the host's own layers: if all
are, the result has the host's own class and no trace of growing. The others stay
branches of an `ExportedModel`. Either way the result computes what the growing model
does now, which is tried on the example: where merging breaks a host, branches stay.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from esper.contracts.errors import BadInput, CallOrder
from esper.growth.blueprints.registry import first_line
from esper.growth.hooks import ADD
from esper.growth.merge import ActiveSeed, merge_into, plan
from esper.growth.model import GrowingModel
from esper.growth.slots import InsertionPoint
from esper.growth.tracing import Example, eval_outputs, first_tensor

TOLERANCE: Final = 1e-3
"""Difference to the growing model's output, relative to its largest number, from which
a merge is undone; a thousandth of it in float64."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What became of the seeds, by slot."""

    merged: tuple[str, ...]
    """Slots whose seeds are in the host's own layers."""
    branches: tuple[str, ...]
    """Slots whose seeds are beside them, as "slot: why"."""
    left_out: tuple[str, ...]
    """Slots whose seeds do not change the output, as "slot: why"."""


def export(model: GrowingModel, *, merge: bool = True) -> nn.Module:
    """A copy of the grown host that computes the same; the model is unchanged.

    Args:
        model: A host with seeds. Those in TRAINING are left out.
        merge: Whether seeds are folded into the host's layers where they can be.
    """
    module, _ = export_with_report(model, merge=merge)
    return module


def export_with_report(
    model: GrowingModel, *, merge: bool = True
) -> tuple[nn.Module, ExportReport]:
    """The same as `export`, and what became of the seeds."""
    active, left_out = _active_seeds(model)
    work = _Work(model, active)
    places = {one.place.site.name: "merging was switched off" for one in active}
    refused: dict[str, str] = {} if merge else places
    module, reasons, trouble = work.attempt(refused)
    if trouble and not all(reasons.values()):
        refused = dict.fromkeys(places, trouble)
        for name in places:
            fewer = {other: why for other, why in refused.items() if other != name}
            *_, trouble = work.attempt(fewer)
            refused = {**fewer, name: trouble} if trouble else fewer
        module, reasons, trouble = work.attempt(refused)
    if trouble or module is None:
        raise BadInput(
            f"a copy of the host does not answer like the host ({trouble}); its "
            "modules must find each other as attributes, never from outside."
        )
    report = ExportReport(
        merged=tuple(one.name for one in active if not reasons[one.slot]),
        branches=tuple(
            f"{one.name}: {reasons[one.slot]}" for one in active if reasons[one.slot]
        ),
        left_out=left_out,
    )
    return module, report


class ExportedModel(nn.Module):
    """A copied host with the seeds that could not be merged, as frozen branches.

    It is trained, saved, copied and moved like any module. A layer that other seeds
    have widened has more channels than a seed was built for: the seed reads the first
    ones and adds nothing to the others.
    """

    def __init__(self, host: nn.Module, places: Sequence["BranchHooks"]) -> None:
        super().__init__()
        self.host = host
        self.places = [*places]
        branches = [branch for place in places for branch in place.branches]
        self.seeds = nn.ModuleDict({name: seed for name, seed, *_ in branches})
        self.training = self.seeds.training = host.training
        # Loaded in another process, the youngest handle keeps torch from giving the
        # numbers of these hooks to others.
        self.youngest = RemovableHandle(self._forward_hooks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The host's output, its seeds included."""
        try:
            return self.host(*args, **kwargs)
        finally:
            for place in self.places:
                place.given = None


class BranchHooks:
    """The hooks of one place of an exported model."""

    def __init__(self, place: InsertionPoint) -> None:
        at = place.geometry
        self.residual = place.site.residual
        self.reads = at.inlet_width
        self.reads_along = -1 - at.inlet_layout.axes_behind
        self.writes_along = -1 - at.outlet_layout.axes_behind
        self.branches: list[tuple[str, nn.Module, float, int]] = []
        """Name, seed, alpha and style."""
        self.given: Tensor | None = None

    def read(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Keep the inlet's input."""
        self.given = first_tensor((*args, *kwargs.values()))

    def write(self, module: nn.Module, args: Any, answer: Tensor) -> Tensor:  # noqa: ANN401
        """Add the seeds' outputs to the outlet's."""
        given = answer if self.residual else self.given
        self.given = None
        if given is None:
            return answer
        if given.shape[self.reads_along] != self.reads:
            given = given.narrow(self.reads_along, 0, self.reads)
        for _, seed, alpha, style in self.branches:
            if seed.training != module.training:
                seed.train(module.training)
            delta = alpha * seed(given)
            more = answer.shape[self.writes_along] - delta.shape[self.writes_along]
            if more:
                delta = F.pad(delta, (0, 0) * (-1 - self.writes_along) + (0, more))
            answer = answer + delta if style == ADD else answer * (1 + delta)
        return answer


class _Work:
    """A model to be exported, and its output on its example."""

    def __init__(self, model: GrowingModel, active: Sequence[ActiveSeed]) -> None:
        self.model, self.active = model, active
        self.names = {module: name for name, module in model.host.named_modules()}
        self.example = _suited(model.example, model.host)
        self.expected = eval_outputs(model, self.example)

    def attempt(
        self, refused: Mapping[str, str]
    ) -> tuple[nn.Module | None, dict[int, str], str]:
        """A module, why each slot is a branch of it, and what is wrong with it."""
        reasons = plan(self.active, self.names, refused)
        rest = [one for one in self.active if reasons[one.slot]]
        host, places = copy_host(self.model, rest)
        module: nn.Module | None = None
        try:
            folding = [one for one in self.active if not reasons[one.slot]]
            merge_into(host, self.names, folding)
            module = ExportedModel(host, places) if rest else host
            with self._watched():
                found = eval_outputs(module, self.example)
        except Exception as error:  # whatever it cannot do is the answer
            return module, reasons, f"it would fail, {first_line(error)}"
        return module, reasons, _difference(self.expected, found)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Refuse calls of the growing model's own modules in the block."""
        own = {*self.model.modules()}

        def refuse(module: nn.Module, args: object) -> None:
            if module in own:
                raise RuntimeError(f"it calls the original {self.names.get(module)!r}")

        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()


def copy_host(
    model: GrowingModel, branches: Sequence[ActiveSeed]
) -> tuple[nn.Module, list[BranchHooks]]:
    """A copy of the host with the branches' hooks where those of their places were."""
    # Copying stops at what the memo knows, so that hooks come out bound to these.
    memo: dict[int, Any] = {
        id(hooks): BranchHooks(hooks.place) for hooks in model.hooks
    }
    places: list[BranchHooks] = [*memo.values()]
    for hooks, place in zip(model.hooks, places, strict=True):
        place.branches = [
            (f"slot_{one.slot}", deepcopy(one.seed), one.branch.alpha, one.branch.style)
            for one in branches
            if one.place is hooks.place
        ]
    try:
        host = deepcopy(model.host, memo)
    except Exception as error:
        raise BadInput(f"the host cannot be copied: {first_line(error)}.") from error
    for module in host.modules():
        for found, marks in (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        ):
            for key, hook in [*found.items()]:
                owner = getattr(hook, "__self__", None)
                if isinstance(owner, BranchHooks) and owner.branches:
                    found[key] = getattr(owner, hook.__name__)  # in the same order
                elif isinstance(owner, BranchHooks):
                    del found[key]
                    marks.pop(key, None)
    return host, places


def _active_seeds(model: GrowingModel) -> tuple[list[ActiveSeed], tuple[str, ...]]:
    """Seeds that change the output, in the order they are applied, and the others."""
    active: list[ActiveSeed] = []
    left_out: list[str] = []
    for hooks in model.hooks:
        for slot, branch in hooks.branches.items():
            name = model.slots[slot]
            if branch.shadow:
                left_out.append(f"{name}: it is still in training")
            elif branch.alpha == 0.0:
                left_out.append(f"{name}: its alpha is 0")
            elif hooks.write not in hooks.place.outlet._forward_hooks.values():
                raise CallOrder(
                    f"the hooks of slot {name!r} were taken off the host; export "
                    "before detach()."
                )
            else:
                seed = ActiveSeed(slot, name, hooks.place, branch)
                active.append(seed)
    return active, tuple(left_out)


def _suited(example: Example, host: nn.Module) -> Example:
    """The example where the host lies now, and as exact as it is."""
    like = next(p for p in host.parameters() if p.is_floating_point())

    def moved(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor):
            return leaf
        kind = like.dtype if leaf.is_floating_point() else leaf.dtype
        return leaf.to(device=like.device, dtype=kind)

    suited: Example = tree_map(moved, example)
    return suited


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """In words, how two answers differ; empty if they agree."""
    shapes = [[tuple(tensor.shape) for tensor in one] for one in (expected, found)]
    if shapes[0] != shapes[1]:
        return f"it would answer with shapes {shapes[1]} instead of {shapes[0]}"
    for one, other in zip(expected, found, strict=True):
        eps = torch.finfo(one.dtype).eps
        exact = one.dtype == torch.float64
        limit = TOLERANCE / 1000 if exact else max(TOLERANCE, 8 * eps)
        size = one.nan_to_num().abs().max() if one.numel() else 0.0
        if not torch.allclose(
            one, other, rtol=0, atol=float(size) * limit, equal_nan=True
        ):
            gap = (one - other).abs().max() / size
            return f"it would answer differently, by {float(gap):.1g} of the largest"
    return ""
