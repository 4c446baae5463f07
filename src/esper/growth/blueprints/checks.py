"""Checks of a blueprint, for custom ones before they are used.

    esper.check_blueprint("my_block")
    esper.check_blueprint("my_block", model, ["fc1->fc2"], example)

The blueprint is tested in small hosts of every layout, or in a copy of your own. First
`SEED_CHECKS` test the seed alone, then its lifecycle is tested in the host. The first
failure is raised.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from esper.contracts.blueprints import Form
from esper.contracts.errors import InvalidInputError
from esper.growth.analysis.macs import count_macs
from esper.growth.analysis.tracing import (
    Example,
    call,
    eval_outputs,
    isolated,
    tensors_of,
)
from esper.growth.blueprints.geometry import Geometry
from esper.growth.blueprints.registry import (
    UnsuitableError,
    find,
    seeded_random_state,
    try_gradients,
    try_out,
)
from esper.growth.blueprints.seed import Cost, build, misfit
from esper.growth.hooks import shadow_gradients
from esper.growth.model import GrowingModel
from esper.growth.saving.export import export
from esper.growth.saving.saved_topology import host_tensors
from esper.growth.seed_modules import host_parameters, seed_interlayer

SHADOW_STEPS: Final = 5
EXPORT_TOLERANCE: Final = 1e-6
"""Largest relative change of the output by an export in float64."""
LEARNING_STEPS: Final = 200
LEARNING_FACTOR: Final = 2.0
LEARNING_RATE: Final = 0.02
MACS_TOLERANCE: Final = 0.1
ELEMENTWISE: Final = frozenset({Form.SCALE_SHIFT, Form.SQUEEZE_EXCITE, Form.CUSTOM})
"""Forms with elementwise products, which a count of matrix products misses."""


def check_blueprint(
    name: str,
    model: nn.Module | None = None,
    slots: Sequence[str] = (),
    example: Example | None = None,
) -> None:
    """Raise an error for the first check that a blueprint fails.

    Args:
        name: Name of a built-in or registered blueprint.
        model: Host to test in; by default, small hosts of every layout.
        slots: Slots of that host.
        example: Input of that host.
    """
    if (model is None) != (example is None) or (model is None) == bool(slots):
        raise InvalidInputError(
            "pass model, slots and example together, or none of them."
        )
    with seeded_random_state(torch.Generator().manual_seed(0)):
        hosts: Sequence[tuple[nn.Module, Sequence[str], Example]] = _hosts()
        if model is not None and example is not None:
            hosts = [(model, slots, example)]
        misfits = [
            _check_place(name, host, place, inputs)
            for host, places, inputs in hosts
            for place in places
        ]
    if all(misfits):
        raise InvalidInputError(
            f"blueprint {name!r} fits none of the slots: {misfits[0]}"
        )


def _check_place(name: str, host: nn.Module, slot: str, example: Example) -> str:
    """Run every check in one slot; returns why the blueprint does not fit there."""
    exact = tree_map(_double, example)
    model = GrowingModel(deepcopy(host).double(), [slot], exact, blueprints=[name])
    blueprint, place = find(name), model.place(0)
    try:
        if reason := misfit(blueprint, place.geometry):
            return f"it {reason}."
        declared = model.cost(0, blueprint)
        blueprint = model.seeds.sized(0, blueprint)
    except InvalidInputError as error:  # a custom one without a complete `fits`
        return str(error)

    def make(rng_seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(rng_seed)
        interlayer = seed_interlayer(place, blueprint)
        return build(blueprint, place.geometry, generator, interlayer).float()

    counted = blueprint.form not in ELEMENTWISE
    trial = SeedTrial(make, place.geometry, declared, counted)
    try:
        for check in SEED_CHECKS:
            check(trial)
        check_in_host(model, name)
    except UnsuitableError as error:
        where = f"(in {slot!r} of {type(host).__name__})"
        raise InvalidInputError(f"blueprint {name!r} {error} {where}.") from error
    return ""


@dataclass(frozen=True, slots=True)
class SeedTrial:
    """A blueprint at a geometry, with what the checks need."""

    make: Callable[[int], nn.Module]
    """Returns a new seed in float32 for an RNG seed."""
    geometry: Geometry
    declared: Cost
    counted: bool
    """Whether all multiply-adds are matrix products and convolutions."""

    def inputs(self, batch: int) -> Tensor:
        """Fixed random inputs."""
        return _normal((batch, *self.geometry.inlet_shape), 0)

    def perturbed(self) -> nn.Module:
        """A new seed with noise added to its weights."""
        seed = self.make(1)
        with torch.no_grad():
            for index, parameter in enumerate(seed.parameters()):
                parameter.add_(0.3 * _normal(parameter.shape, 100 + index))
        return seed


def zero_at_birth(trial: SeedTrial) -> None:
    """Refuse a new seed with outputs other than zero, in either mode."""
    seed = trial.make(0)
    for training in (True, False):
        largest = float(seed.train(training)(trial.inputs(3)).detach().abs().max())
        problem = f"must be zero at birth; its largest output is {largest:g}"
        _require(largest == 0.0, problem)


def live_gradients(trial: SeedTrial) -> None:
    """Refuse a new seed whose gradients are all zero or not finite."""
    try_gradients(trial.make(0), trial.geometry)


def sound_outputs(trial: SeedTrial) -> None:
    """Refuse wrong outputs for some batch size, input scale or image size."""
    seed, at = trial.perturbed(), trial.geometry
    places = [at]
    if at.inlet_layout.channels_first and at.keeps_shape:
        longer = (at.inlet_width, *(n + 3 for n in at.inlet_shape[1:]))
        places.append(replace(at, inlet_shape=longer, outlet_shape=longer))
    with torch.no_grad():
        for place in places:
            for scale in (0.0, 1e-3, 1.0, 1e3):
                try_out(seed, place, training=False, scale=scale)


def costs_what_it_declares(trial: SeedTrial) -> None:
    """Refuse declared parameters and multiply-adds that are wrong."""
    seed, macs = trial.make(0).eval(), trial.declared.macs
    actual = sum(parameter.numel() for parameter in seed.parameters())
    declared = trial.declared.parameters
    _require(actual == declared, f"declares {declared} parameters and has {actual}")
    counted = count_macs(lambda: seed(torch.zeros(1, *trial.geometry.inlet_shape)))
    correct = macs > 0 and macs >= (1.0 - MACS_TOLERANCE) * counted
    if trial.counted:
        correct = correct and macs <= (1.0 + MACS_TOLERANCE) * counted
    _require(correct, f"declares {macs} multiply-adds and does {counted}")


def learns(trial: SeedTrial) -> None:
    """Refuse a seed that cannot halve its loss to another seed with Adam."""
    inputs = trial.inputs(16)
    target = trial.perturbed()(inputs).detach()
    seed = trial.make(0)
    optimizer = torch.optim.Adam(seed.parameters(), lr=LEARNING_RATE)
    first = float(F.mse_loss(seed(inputs).detach(), target))
    _require(first != 0.0, "must learn; its output is zero with any weights")
    for _ in range(LEARNING_STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(seed(inputs), target)
        if float(loss.detach()) * LEARNING_FACTOR <= first:
            return
        loss.backward()
        optimizer.step()
    raise UnsuitableError(
        f"must learn; its loss went from {first:g} to {float(loss.detach()):g} in "
        f"{LEARNING_STEPS} steps"
    )


SEED_CHECKS: Final[tuple[Callable[[SeedTrial], None], ...]] = (
    zero_at_birth,
    live_gradients,
    sound_outputs,
    costs_what_it_declares,
    learns,
)


def check_in_host(model: GrowingModel, name: str) -> None:
    """Refuse a seed that changes the host when it should not."""
    slot, other = model.slots[:2]
    bare, before = model.example_outputs(), _outputs_and_gradients(model)
    model.plant(slot, name, tempo="SLOW", alpha_target="MOST")
    model.plant(other, name, tempo="SLOW")
    after = _outputs_and_gradients(model)
    _require(_equal(before, after), "changes the host's output or gradients at birth")
    weights = [t.clone() for t in host_tensors(model.host).values()]
    losses = _train(model)
    kept = _equal(weights, [*host_tensors(model.host).values()])
    _require(kept, "changes the host while it trains")
    _require(min(losses[1:]) < losses[0], "does not lower its shadow loss")
    model.tick()
    model.prune(other)
    clean = len(model.seeds) == 1 and _equal(bare, model.example_outputs())
    _require(clean, "changes the output when it is pruned")
    model.tick(8)
    before = model.example_outputs()
    model.keep(slot)
    model.tick()
    kept = _equal(before, model.example_outputs())
    _require(kept, "changes the output when it is kept")
    exported = eval_outputs(export(model), model.example)
    apart = max(
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
        for a, b in zip(before, exported, strict=True)
    )
    moved = f"changes the output by {apart:.2g} when it is exported"
    _require(apart <= EXPORT_TOLERANCE, moved)


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise UnsuitableError(problem)


def _train(model: GrowingModel) -> list[float]:
    """Losses of a few shadow steps towards a shifted copy of the outputs."""
    model.host.eval()
    learning = model.training_parameters()
    optimizer = torch.optim.Adam(learning, 3e-4)
    target = [answer.roll(1, 0) + 0.1 for answer in model.example_outputs()]

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
        own = host_parameters(model.host).values()
        trained = [p for p in own if p.requires_grad]
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


def _normal(shape: tuple[int, ...], rng_seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng_seed))


def _hosts() -> list[tuple[nn.Module, Sequence[str], Example]]:
    """A host of every layout, with span, parallel and residual slots."""

    def convolutions(conv: type[nn.Module], norm: nn.Module) -> list[nn.Module]:
        first, second = (conv(8, 8, 3, padding=1) for _ in range(2))
        return [first, norm, nn.ReLU(), second]

    vectors = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)]
    sequences = [nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)]
    images = convolutions(nn.Conv2d, nn.BatchNorm2d(8))
    images += [nn.Flatten(), nn.Linear(8 * 36, 4)]
    places = ["0->3", "3->3", "3"]
    return [
        (nn.Sequential(*vectors, nn.Dropout(0.1)), places, _normal((4, 8), 0)),
        (nn.Sequential(*sequences, nn.Dropout(0.1)), places, _normal((4, 5, 8), 0)),
        (
            nn.Sequential(*convolutions(nn.Conv1d, nn.BatchNorm1d(8))),
            places,
            _normal((4, 8, 10), 0),
        ),
        (nn.Sequential(*images), [*places, "3->5"], _normal((4, 8, 6, 6), 0)),
    ]
