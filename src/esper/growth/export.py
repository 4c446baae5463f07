"""A grown model as a plain module, independent of the growing one.

    plain = export(growing)

Seeds that are linear in the right way disappear into the host's own layers: if all do,
the result has the host's own class and no trace of growing. The others stay branches
of a `Grown`. Either way the result answers as the growing model does now, which is
tried on the example: a place whose host does not stand being merged keeps branches.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map

from esper.contracts.errors import BadInput, CallOrder
from esper.growth.blueprints.registry import first_line
from esper.growth.calls import Example, call, shielded, tensors_of
from esper.growth.grown import Felt, Grown
from esper.growth.merge import merge_into, plan
from esper.growth.model import GrowingModel

TOLERANCE: Final = 1e-3
"""Difference to the growing model's answer, relative to its largest number, from which
a merge is undone; a thousandth of it in float64."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What became of the seeds, by slot."""

    merged: tuple[str, ...]
    """Slots whose seeds are in the host's own layers."""
    branches: tuple[str, ...]
    """Slots whose seeds are beside them, as "slot: why"."""
    left_out: tuple[str, ...]
    """Slots whose seeds the model does not feel, as "slot: why"."""


def export(model: GrowingModel, *, merge: bool = True) -> nn.Module:
    """A copy of the grown host that answers as it does now; the model is unchanged.

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
    felt, left_out = _felt(model)
    work = _Work(model, felt)
    places = {one.place.site.name: "merging was switched off" for one in felt}
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
        merged=tuple(one.name for one in felt if not reasons[one.slot]),
        branches=tuple(
            f"{one.name}: {reasons[one.slot]}" for one in felt if reasons[one.slot]
        ),
        left_out=left_out,
    )
    return module, report


class _Work:
    """A model to be exported, and what it answers to its example."""

    def __init__(self, model: GrowingModel, felt: Sequence[Felt]) -> None:
        self.model, self.felt = model, felt
        self.names = {module: name for name, module in model.host.named_modules()}
        self.example = _suited(model.example, model.host)
        self.expected = _answers(model, self.example)

    def attempt(
        self, refused: Mapping[str, str]
    ) -> tuple[nn.Module | None, dict[int, str], str]:
        """A module, why each slot is a branch of it, and what is wrong with it."""
        reasons = plan(self.felt, self.names, refused)
        host, late = copy_host(self.model)
        module: nn.Module | None = None
        try:
            folding = [one for one in self.felt if not reasons[one.slot]]
            merge_into(host, self.names, folding)
            rest = [one for one in self.felt if reasons[one.slot]]
            module = Grown(host, rest) if rest else host
            for hooks, key in late:
                hooks[key] = hooks.pop(key)  # to the end
            with self._watched():
                found = _answers(module, self.example)
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
    model: GrowingModel,
) -> tuple[nn.Module, list[tuple[dict[int, Any], int]]]:
    """The host without our hooks, and those of the user's own that came after them."""
    gone = object()
    # Copying stops at what the memo knows, so that hooks come out bound to nothing.
    memo: dict[int, Any] = {id(junction): gone for junction in model.junctions}
    try:
        host = deepcopy(model.host, memo)
    except Exception as error:
        raise BadInput(f"the host cannot be copied: {first_line(error)}.") from error
    late: list[tuple[dict[int, Any], int]] = []
    for module in host.modules():
        for hooks, marks in (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        ):
            ours = [k for k, h in hooks.items() if getattr(h, "__self__", h) is gone]
            order = [*hooks]
            after = order[order.index(ours[-1]) + 1 :] if ours else []
            late += [(hooks, key) for key in after]
            for key in ours:
                del hooks[key]
                marks.pop(key, None)
    return host, late


def _felt(model: GrowingModel) -> tuple[list[Felt], tuple[str, ...]]:
    """Seeds that the model feels, in the order in which they speak, and the others."""
    felt: list[Felt] = []
    left_out: list[str] = []
    for junction in model.junctions:
        for slot, branch in junction.branches.items():
            name = model.slots[slot]
            if branch.shadow:
                left_out.append(f"{name}: it is still in training")
            elif branch.alpha == 0.0:
                left_out.append(f"{name}: its alpha is 0")
            elif junction.write not in junction.place.outlet._forward_hooks.values():
                raise CallOrder(
                    f"the hooks of slot {name!r} were taken off the host; export "
                    "before detach()."
                )
            else:
                felt.append(
                    Felt(
                        slot,
                        name,
                        junction.place,
                        branch.seed,
                        branch.alpha,
                        branch.style,
                    )
                )
    return felt, tuple(left_out)


def _answers(module: nn.Module, example: Example) -> list[Tensor]:
    with shielded(module, training=False), torch.no_grad():
        return [tensor.clone() for tensor in tensors_of(call(module, example))]


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
