"""Checks of a blueprint, for custom ones before they are used.

    esper.check_blueprint("my_block")
    esper.check_blueprint("my_block", model, ["fc1->fc2"], example)

The blueprint is tested in small hosts of every layout, or in a copy of your own: first
the seed alone, then its life in the host. The first failure is raised. Building a seed
tests zero output and live gradients (`growth.blueprints.registry`).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.contracts.errors import InvalidInputError
from esper.growth.analysis.tracing import (
    Example,
    call,
    eval_outputs,
    example_like,
    isolated,
    tensors_of,
)
from esper.growth.blueprints.geometry import Geometry
from esper.growth.blueprints.registry import (
    UnsuitableError,
    build,
    find,
    misfit,
    seeded_random_state,
    try_out,
)
from esper.growth.model import GrowingModel
from esper.growth.saving.export import export
from esper.growth.seed_modules import host_parameters, seed_interlayer

EXPORT_TOLERANCE: Final = 1e-6
"""Largest relative change of the output by an export in float64."""
LEARNING_STEPS: Final = 200
LEARNING_FACTOR: Final = 2.0
LEARNING_RATE: Final = 0.02


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
    host = deepcopy(host).double()
    exact = example_like(example, next(host.parameters()))
    model = GrowingModel(host, [slot], exact, blueprints=[name])
    blueprint, place = find(name), model.seeds.place(0)
    try:
        if reason := misfit(blueprint, place.geometry):
            return f"it {reason}."
        parameters = model.cost(0, blueprint).parameters
        blueprint = model.seeds.sized(0, blueprint)
    except InvalidInputError as error:  # a custom one without a complete `fits`
        return str(error)

    def make(rng_seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(rng_seed)
        interlayer = seed_interlayer(place, blueprint)
        return build(blueprint, place.geometry, generator, interlayer).float()

    try:
        actual = sum(parameter.numel() for parameter in make(0).parameters())
        declared = f"declares {parameters} parameters and has {actual}"
        _require(actual == parameters, declared)
        sound_outputs(_perturbed(make(1)), place.geometry)
        learns(make, _normal((16, *place.geometry.inlet_shape), 0))
        _check_in_host(model, name)
    except UnsuitableError as error:
        where = f"(in {slot!r} of {type(host).__name__})"
        raise InvalidInputError(f"blueprint {name!r} {error} {where}.") from error
    return ""


def sound_outputs(seed: nn.Module, at: Geometry) -> None:
    """Refuse wrong outputs for some batch size, input scale or image size."""
    places = [at]
    if at.inlet_layout.channels_first and at.keeps_shape:
        longer = (at.inlet_width, *(n + 3 for n in at.inlet_shape[1:]))
        places.append(replace(at, inlet_shape=longer, outlet_shape=longer))
    with torch.no_grad():
        for place in places:
            for scale in (0.0, 1e-3, 1.0, 1e3):
                try_out(seed, place, training=False, scale=scale)


def learns(make: Callable[[int], nn.Module], inputs: Tensor) -> None:
    """Refuse a seed that cannot halve its loss to another seed with Adam."""
    target = _perturbed(make(1))(inputs).detach()
    seed = make(0)
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


def _check_in_host(model: GrowingModel, name: str) -> None:
    """Refuse a seed that changes the host when it should not."""
    slot, other = model.slots[:2]
    before = _outputs_and_gradients(model)
    model.plant(slot, name, alpha_target="MOST")
    model.plant(other, name)
    after = _outputs_and_gradients(model)
    _require(_equal(before, after), "changes the host's output or gradients at birth")
    _perturbed(model.seeds)
    model.tick(8)
    before = model.example_outputs()
    model.keep(slot)
    model.tick()
    exported = eval_outputs(export(model), model.example)
    for how, after in (("kept", model.example_outputs()), ("exported", exported)):
        apart = max(
            float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
            for a, b in zip(before, after, strict=True)
        )
        moved = f"changes the output by {apart:.2g} when it is {how}"
        _require(apart <= EXPORT_TOLERANCE, moved)


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise UnsuitableError(problem)


def _perturbed(seed: nn.Module) -> nn.Module:
    """Add noise to the weights of a seed; returns the seed."""
    with torch.no_grad():
        for index, parameter in enumerate(seed.parameters()):
            parameter.add_(0.3 * _normal(parameter.shape, 100 + index))
    return seed


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
