"""The whole contract of a blueprint: alone, and in a host.

    esper.check_blueprint("my_block")
    esper.check_blueprint("my_block", model, ["fc1->fc2"], example)

First the seed by itself (`blueprints.kit`), then in every place of a host that it fits:
a small host of every layout, or the user's own, which is copied and left alone.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Final

import torch
from torch import Tensor, nn

from esper.contracts.errors import BadInput
from esper.growth.blueprints import kit
from esper.growth.blueprints.registry import find, lent_random_state
from esper.growth.blueprints.seed import misfit
from esper.growth.export import export
from esper.growth.hooks import shadow_gradients
from esper.growth.model import GrowingModel
from esper.growth.tracing import Example, call, isolated, tensors_of

STEPS: Final = 5
TOLERANCE: Final = 1e-6
"""Relative difference of an exported model in float64."""


def check_blueprint(
    name: str,
    model: nn.Module | None = None,
    slots: Sequence[str] = (),
    example: Example | None = None,
) -> None:
    """Raise the first clause that a blueprint breaks; silence means it keeps them all.

    Args:
        name: Of a built-in or registered blueprint.
        model: A host of one's own to try it in; small ones of every layout if None.
        slots: Places of that host.
        example: What that host is called with.
    """
    if (model is None) != (example is None) or (model is None) == bool(slots):
        raise BadInput("pass model, slots and example together, or none of them.")
    kit.check_blueprint(name)
    hosts = (
        [(model, tuple(slots), example)]
        if model is not None and example is not None
        else [(make(), places, inputs) for make, places, inputs in _HOSTS]
    )
    tried = 0
    with lent_random_state(torch.Generator().manual_seed(0)):
        for host, places, inputs in hosts:
            for place in places:
                tried += _try(name, host, place, inputs)
    if not tried:
        raise BadInput(f"blueprint {name!r} fits none of the places; try others.")


def _try(name: str, host: nn.Module, place: str, example: Example) -> int:
    """Try every clause in one place; 0 if the blueprint does not fit there."""
    for words, clause in CLAUSES.items():
        grown = GrowingModel(
            deepcopy(host).double(), [place], _double(example), blueprints=[name]
        )
        if misfit(find(name), grown.place(0).geometry):
            return 0
        if problem := clause(grown, grown.slots[0], name):
            raise BadInput(
                f"blueprint {name!r} must {words}; {problem} (in {place!r} of "
                f"{type(host).__name__})."
            )
    return 1


def plants_unfelt(model: GrowingModel, slot: str, name: str) -> str:
    """Planting changes no bit of the host's answer and gradients."""
    before = _answer_and_gradients(model)
    model.plant(slot, name)
    return "" if _equal(before, _answer_and_gradients(model)) else "the host felt it"


def trains_unfelt(model: GrowingModel, slot: str, name: str) -> str:
    """The shadow loss falls and the host does not change."""
    model.plant(slot, name)
    before = [t.clone() for t in model.host.state_dict().values()]
    losses = _train(model)
    if not _equal(before, [*model.host.state_dict().values()]):
        return "the host changed while it trained"
    return "" if min(losses[1:]) < losses[0] else "its shadow loss did not fall"


def prunes_clean(model: GrowingModel, slot: str, name: str) -> str:
    """After pruning nothing of it is left."""
    before = model.answer()
    model.plant(slot, name)
    _train(model)
    model.tick()
    model.prune(slot)
    model.tick()
    left = len(model.seeds) > 0 or not _equal(before, model.answer())
    return "something is left after pruning" if left else ""


def keeps_its_function(model: GrowingModel, slot: str, name: str) -> str:
    """Fossilising changes no bit, and an exported model agrees."""
    model.plant(slot, name, tempo="FAST", alpha_target="MOST")
    _train(model)
    for op in (model.tick, lambda: model.advance(slot), model.tick):
        op()
    model.advance(slot)
    model.tick()
    before = model.answer()
    model.keep(slot)
    model.tick()
    if not _equal(before, model.answer()):
        return "fossilising changed the answer"
    with torch.no_grad():
        exported = tensors_of(call(export(model).eval(), model.example))
    apart = max(
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
        for a, b in zip(before, exported, strict=True)
    )
    return "" if apart <= TOLERANCE else f"the exported model differs by {apart:.2g}"


Clause = Callable[[GrowingModel, str, str], str]
CLAUSES: Final[dict[str, Clause]] = {
    "be planted without being felt": plants_unfelt,
    "train without being felt": trains_unfelt,
    "be pruned without a trace": prunes_clean,
    "keep its function when fossilised and exported": keeps_its_function,
}


def _train(model: GrowingModel) -> list[float]:
    """A few shadow steps towards a target of the model's own size."""
    model.host.eval()
    learning = model.training_parameters()
    optimizer = torch.optim.Adam(learning, 3e-3)
    target = [answer.roll(1, 0) + 0.1 for answer in model.answer()]

    def closure() -> Tensor:
        answers = tensors_of(call(model.host, model.example))
        apart = [(a - t).square().mean() for a, t in zip(answers, target, strict=True)]
        return torch.stack(apart).sum()

    losses = []
    for _ in range(STEPS):
        loss, found = shadow_gradients(closure, model.flow, model, learning)
        for parameter, gradient in zip(learning, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(float(loss))
    return losses


def _answer_and_gradients(model: GrowingModel) -> list[Tensor]:
    with isolated(model, training=True), torch.enable_grad():
        torch.manual_seed(0)
        answers = tensors_of(call(model.host, model.example))
        total = torch.stack([answer.square().sum() for answer in answers]).sum()
        trained = [p for p in model.host.parameters() if p.requires_grad]
        found = torch.autograd.grad(total, trained, allow_unused=True)
    return [*(a.detach() for a in answers), *(g for g in found if g is not None)]


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def _double(example: Example) -> Example:
    if isinstance(example, Tensor):
        return example.double() if example.is_floating_point() else example
    if isinstance(example, tuple):
        return tuple(_double(value) for value in example)
    return {key: _double(value) for key, value in example.items()}


def _vectors() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.1)
    )


def _sequences() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)
    )


def _signals() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(8, 8, 3, padding=1),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Conv1d(8, 8, 3, padding=1),
    )


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
    )


def _like(*shape: int) -> Tensor:
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))


_HOSTS: Final = (
    (_vectors, ("0->3", "3->3", "3"), _like(8)),
    (_sequences, ("0->2", "2->2", "2"), _like(5, 8)),
    (_signals, ("0->3", "3->3", "3"), _like(8, 10)),
    (_images, ("0->3", "3->3", "3"), _like(8, 6, 6)),
)
"""A small host of every layout: a span, a place beside a layer and a residual one."""
