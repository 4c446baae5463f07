"""Checks of a blueprint, to be run on one's own before it is grown.

    esper.check_blueprint("my_block")
    esper.check_blueprint("my_block", model, ["fc1->fc2"], example)

First `SEED_CHECKS` of a seed by itself, at every standard geometry that it fits;
learning is tried on a target of its own kind. Then `HOST_CHECKS` in every place that it
fits of a small host of every layout, or of a copy of the user's own. The first failure
is raised in one line.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.errors import BadInput
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from esper.growth.blueprints.registry import find, first_line, lent_random_state
from esper.growth.blueprints.seed import Cost, build, cost, count_macs, misfit
from esper.growth.export import export
from esper.growth.hooks import shadow_gradients
from esper.growth.model import GrowingModel
from esper.growth.tracing import Example, call, eval_outputs, isolated, tensors_of

SHADOW_STEPS: Final = 5
EXPORT_TOLERANCE: Final = 1e-6
"""Relative difference of an exported model in float64."""
LEARNING_STEPS: Final = 200
LEARNING_FACTOR: Final = 2.0
LEARNING_RATE: Final = 0.02
MACS_TOLERANCE: Final = 0.1
ELEMENTWISE: Final = frozenset({Form.SCALE_SHIFT, Form.SQUEEZE_EXCITE, Form.CUSTOM})
"""Forms that may multiply in ways that a count of matrix products does not see."""


def check_blueprint(
    name: str,
    model: nn.Module | None = None,
    slots: Sequence[str] = (),
    example: Example | None = None,
) -> None:
    """Raise the first check that a blueprint fails; silence means it passes all.

    Args:
        name: Of a built-in or registered blueprint.
        model: A host of one's own to try it in; small ones of every layout if None.
        slots: Places of that host.
        example: What that host is called with.
    """
    if (model is None) != (example is None) or (model is None) == bool(slots):
        raise BadInput("pass model, slots and example together, or none of them.")
    check_seed(name)
    hosts: list[tuple[nn.Module, tuple[str, ...], Example]] = [
        (make(), places, inputs) for make, places, inputs in _HOSTS
    ]
    if model is not None and example is not None:
        hosts = [(model, tuple(slots), example)]
    with lent_random_state(torch.Generator().manual_seed(0)):
        tried = [
            _check_in_host(name, host, place, inputs)
            for host, places, inputs in hosts
            for place in places
        ]
    if not any(tried):
        raise BadInput(f"blueprint {name!r} fits none of the places; try others.")


def check_seed(name: str, geometry: Geometry | None = None) -> None:
    """Raise the first check that a seed by itself fails.

    Args:
        name: Of a built-in or registered blueprint.
        geometry: The one place to try; all standard places that it fits if None.
    """
    blueprint = find(name)
    places = STANDARD if geometry is None else (geometry,)
    reasons = {place: misfit(blueprint, place) for place in places}
    fitting = [place for place, reason in reasons.items() if not reason]
    if not fitting:
        raise BadInput(
            f"Blueprint {name!r} fits none of {len(places)} places: "
            f"{reasons[places[0]]}. Pass a geometry that it fits."
        )
    with lent_random_state(torch.Generator().manual_seed(0)):
        for place in fitting:
            trial = _trial(blueprint, place)
            for requirement, check in SEED_CHECKS.items():
                if problem := check(trial):
                    raise BadInput(
                        f"Blueprint {name!r} must {requirement}; {problem} "
                        f"({_describe(place)})."
                    )


@dataclass(frozen=True, slots=True)
class SeedTrial:
    """A kind of seed at a place, as the checks try it."""

    make: Callable[[int], nn.Module]
    """A new seed from a random seed."""
    geometry: Geometry
    declared: Cost
    counted: bool
    """Whether all its multiply-adds are in products of matrices and convolutions."""

    def inputs(self, batch: int) -> Tensor:
        """The same random inputs every time."""
        return _normal((batch, *self.geometry.inlet_shape), 0)

    def perturbed(self) -> nn.Module:
        """Another seed, with noise added to its weights."""
        seed = self.make(1)
        with torch.no_grad():
            for index, parameter in enumerate(seed.parameters()):
                parameter.add_(0.3 * _normal(parameter.shape, 100 + index))
        return seed


def zero_at_birth(trial: SeedTrial) -> str:
    """Not one output differs from zero, in training or evaluation."""
    seed = trial.make(0)
    inputs = trial.inputs(3)
    for training in (True, False):
        largest = float(seed.train(training)(inputs).detach().abs().max())
        if largest != 0.0:
            return f"its largest output is {largest:g}"
    return ""


def live_gradients(trial: SeedTrial) -> str:
    """Some gradients at birth are not zero, and all are finite."""
    seed = trial.make(0)
    outputs = seed(trial.inputs(3))
    (outputs * _normal(outputs.shape, 1)).sum().backward()
    gradients = [p.grad for p in seed.parameters() if p.grad is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        return "some of its gradients are not finite"
    if not any(bool(gradient.count_nonzero()) for gradient in gradients):
        return "all its gradients are zero"
    return ""


def keeps_shape(trial: SeedTrial) -> str:
    """Outputs are shaped like the outlet for every batch and every size of image."""
    seed = trial.perturbed()
    geometry = trial.geometry
    wanted = [
        (batch, geometry.inlet_shape, geometry.outlet_shape) for batch in (1, 2, 3)
    ]
    if geometry.inlet_layout.channels_first and geometry.keeps_shape:
        longer = (geometry.inlet_width, *(n + 3 for n in geometry.inlet_shape[1:]))
        wanted.append((2, longer, longer))
    for batch, inlet, outlet in wanted:
        try:
            outputs = seed(_normal((batch, *inlet), 2))
        except Exception as error:
            return f"it failed on {(batch, *inlet)}: {first_line(error)}"
        if outputs.shape != (batch, *outlet):
            return f"it gave {tuple(outputs.shape)} for {(batch, *inlet)}"
    return ""


def stays_finite(trial: SeedTrial) -> str:
    """Small, usual and large inputs give finite outputs."""
    seed = trial.perturbed()
    for scale in (0.0, 1e-3, 1.0, 1e3):
        if not bool(seed(scale * trial.inputs(2)).isfinite().all()):
            return f"inputs of size {scale:g} gave values that are not finite"
    return ""


def is_independent_of_other_samples(trial: SeedTrial) -> str:
    """Other samples in the batch do not change a sample's output."""
    seed = trial.perturbed().eval()
    one = trial.inputs(3)
    other = torch.cat([one[:1], 5 * _normal((2, *trial.geometry.inlet_shape), 4)])
    if not torch.equal(seed(one)[0], seed(other)[0]):
        return "other samples changed its output"
    return ""


def costs_what_it_declares(trial: SeedTrial) -> str:
    """Declared parameters and multiply-adds are the real ones."""
    seed, declared = trial.make(0).eval(), trial.declared
    parameters = sum(parameter.numel() for parameter in seed.parameters())
    if parameters != declared.parameters:
        return f"it declares {declared.parameters} parameters and has {parameters}"
    if declared.macs <= 0:
        return f"it declares {declared.macs} multiply-adds"
    counted = count_macs(seed, trial.geometry)
    honest = declared.macs >= (1.0 - MACS_TOLERANCE) * counted
    if trial.counted:
        honest = honest and declared.macs <= (1.0 + MACS_TOLERANCE) * counted
    if not honest:
        return f"it declares {declared.macs} multiply-adds and does {counted}"
    return ""


def learns(trial: SeedTrial) -> str:
    """A seed halves its distance to another one within a few steps of Adam."""
    inputs = trial.inputs(16)
    target = trial.perturbed()(inputs).detach()
    seed = trial.make(0)
    optimizer = torch.optim.Adam(seed.parameters(), lr=LEARNING_RATE)
    first = float(F.mse_loss(seed(inputs).detach(), target))
    if first == 0.0:
        return "it gives zero with any weights"
    for _ in range(LEARNING_STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(seed(inputs), target)
        if float(loss.detach()) * LEARNING_FACTOR <= first:
            return ""
        loss.backward()
        optimizer.step()
    return (
        f"its loss went from {first:g} to {float(loss.detach()):g} in {LEARNING_STEPS} "
        f"steps, less than {LEARNING_FACTOR:g}-fold"
    )


SEED_CHECKS: Final[dict[str, Callable[[SeedTrial], str]]] = {
    "be zero at birth": zero_at_birth,
    "have live gradients at birth": live_gradients,
    "keep the outlet's shape": keeps_shape,
    "stay finite": stays_finite,
    "treat samples independently": is_independent_of_other_samples,
    "cost what it declares": costs_what_it_declares,
    "learn": learns,
}


def _check_in_host(name: str, host: nn.Module, place: str, example: Example) -> bool:
    """Run every check in one place; False if the blueprint does not fit there."""
    exact = tree_map(_double, example)
    for requirement, check in HOST_CHECKS.items():
        model = GrowingModel(deepcopy(host).double(), [place], exact, blueprints=[name])
        if misfit(find(name), model.place(0).geometry):
            return False
        if problem := check(model, model.slots[0], name):
            raise BadInput(
                f"blueprint {name!r} must {requirement}; {problem} (in {place!r} of "
                f"{type(host).__name__})."
            )
    return True


def plants_unchanged(model: GrowingModel, slot: str, name: str) -> str:
    """Planting changes no bit of the host's output and gradients."""
    before = _outputs_and_gradients(model)
    model.plant(slot, name)
    same = _equal(before, _outputs_and_gradients(model))
    return "" if same else "output or gradients changed"


def trains_unchanged(model: GrowingModel, slot: str, name: str) -> str:
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
    exported = eval_outputs(export(model), model.example)
    apart = max(
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
        for a, b in zip(before, exported, strict=True)
    )
    return (
        ""
        if apart <= EXPORT_TOLERANCE
        else f"the exported model differs by {apart:.2g}"
    )


HOST_CHECKS: Final[dict[str, Callable[[GrowingModel, str, str], str]]] = {
    "leave the host unchanged when planted": plants_unchanged,
    "leave the host unchanged while it trains": trains_unchanged,
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
    for _ in range(SHADOW_STEPS):
        loss, found = shadow_gradients(closure, model.flow, model, learning)
        for parameter, gradient in zip(learning, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(float(loss))
    return losses


def _outputs_and_gradients(model: GrowingModel) -> list[Tensor]:
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


def _double(leaf: object) -> object:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.double()
    return leaf


class SpanMiddle(nn.Module):
    """A plain middle for any span: an activation, shaped for the second layer."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry

    def forward(self, h: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Activate, pool to the positions of the span and flatten if it does."""
        geometry, h = self.geometry, F.gelu(h)
        if geometry.inlet_kernel is None:
            return h
        if geometry.outlet_kernel is None:
            line = h.flatten(2)
            return F.adaptive_avg_pool1d(line, geometry.unit_inputs).flatten(1)
        positions = geometry.hidden_shape[1:]
        if geometry.keeps_shape or tuple(h.shape[2:]) == positions:
            return h
        if len(positions) == 1:
            return F.adaptive_avg_pool1d(h, positions[0])
        return F.adaptive_avg_pool2d(h, (positions[0], positions[1]))


def _trial(blueprint: Blueprint, geometry: Geometry) -> SeedTrial:
    def make(rng_seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(rng_seed)
        seed = build(blueprint, geometry, generator, SpanMiddle(geometry))
        return seed.to(torch.get_default_dtype())

    counted = blueprint.form not in ELEMENTWISE
    return SeedTrial(make, geometry, cost(blueprint, geometry), counted)


def _normal(shape: tuple[int, ...], rng_seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng_seed))


def _describe(geometry: Geometry) -> str:
    inlet, outlet = geometry.inlet_layout.name, geometry.outlet_layout.name
    ends = f"{geometry.inlet_shape} to {outlet.lower()} {geometry.outlet_shape}"
    return f"{inlet.lower()} {ends}"


def _place(
    layout: Layout,
    inlet: tuple[int, ...],
    outlet: tuple[int, ...] | None = None,
    *,
    outlet_layout: Layout | None = None,
    kernels: tuple[Kernel | None, Kernel | None] = (None, None),
    hidden: tuple[int, ...] = (),
    unit_inputs: int = 1,
) -> Geometry:
    """Residual without an outlet, a span with a hidden shape, else beside a layer."""
    return Geometry(
        inlet_layout=layout,
        outlet_layout=layout if outlet_layout is None else outlet_layout,
        inlet_shape=inlet,
        outlet_shape=outlet or inlet,
        residual=outlet is None,
        inlet_kernel=kernels[0],
        outlet_kernel=kernels[1],
        beside=outlet is not None and not hidden,
        spans=bool(hidden),
        hidden_shape=hidden,
        unit_inputs=unit_inputs,
    )


_LINE, _SQUARE = Kernel.same(3, 1), Kernel.same(3, 2)
_LINE_BY_TWO = Kernel((3,), (2,), (1,), (1,))
_SQUARE_BY_TWO = Kernel((3, 3), (2, 2), (1, 1), (1, 1))

STANDARD: Final[tuple[Geometry, ...]] = (
    _place(Layout.VECTOR, (12,)),
    _place(Layout.VECTOR, (12,), (7,)),
    _place(Layout.VECTOR, (12,), (7,), hidden=(20,)),
    _place(Layout.SEQUENCE, (6, 12)),
    _place(Layout.SEQUENCE, (6, 12), (6, 7)),
    _place(Layout.SEQUENCE, (6, 12), (6, 12), hidden=(6, 20)),
    _place(Layout.SIGNAL, (8, 10)),
    _place(Layout.SIGNAL, (4, 10), (6, 5), kernels=(_LINE_BY_TWO, _LINE_BY_TWO)),
    _place(Layout.SIGNAL, (4, 10), (6, 5), kernels=(_LINE, _LINE), hidden=(5, 5)),
    _place(Layout.IMAGE, (8, 6, 6)),
    _place(
        Layout.IMAGE, (4, 6, 6), (6, 3, 3), kernels=(_SQUARE_BY_TWO, _SQUARE_BY_TWO)
    ),
    _place(
        Layout.IMAGE, (4, 6, 6), (4, 6, 6), kernels=(_SQUARE, _SQUARE), hidden=(5, 6, 6)
    ),
    _place(
        Layout.IMAGE,
        (4, 6, 6),
        (7,),
        outlet_layout=Layout.VECTOR,
        kernels=(_SQUARE, None),
        hidden=(45,),
        unit_inputs=9,
    ),
)
"""One place of every kind: residual, beside a layer and spanning two, by layout."""


def _vectors() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.1)
    )


def _sequences() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)
    )


def _convolutions(conv: type[nn.Module], norm: type[nn.Module]) -> nn.Module:
    layers = (conv(8, 8, 3, padding=1), conv(8, 8, 3, padding=1))
    return nn.Sequential(layers[0], norm(8), nn.ReLU(), layers[1])


def _signals() -> nn.Module:
    return _convolutions(nn.Conv1d, nn.BatchNorm1d)


def _images() -> nn.Module:
    return _convolutions(nn.Conv2d, nn.BatchNorm2d)


_HOSTS: Final = (
    (_vectors, ("0->3", "3->3", "3"), _normal((4, 8), 0)),
    (_sequences, ("0->2", "2->2", "2"), _normal((4, 5, 8), 0)),
    (_signals, ("0->3", "3->3", "3"), _normal((4, 8, 10), 0)),
    (_images, ("0->3", "3->3", "3"), _normal((4, 8, 6, 6), 0)),
)
"""A small host of every layout: a span, a place beside a layer and a residual one."""
