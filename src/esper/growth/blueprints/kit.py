"""The contract of a blueprint, to be run on one's own before it is grown.

    check_blueprint("tiny_mlp")

A seed of it is built at every standard place that it fits, or at a given one, and each
clause of `CLAUSES` is tried in turn. The first that is broken is raised in one line.
Learning is tried on a target of its own kind: another seed with other weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.errors import BadInput
from esper.growth.blueprints.geometry import Geometry, Kernel, Layout
from esper.growth.blueprints.registry import find, first_line, lent_random_state
from esper.growth.blueprints.seed import Cost, build, cost, count_macs, misfit


@dataclass(frozen=True, slots=True)
class Trial:
    """A kind of seed at a place, as the clauses try it."""

    make: Callable[[int], nn.Module]
    """A newborn seed from a random seed."""
    geometry: Geometry
    declared: Cost
    counted: bool
    """Whether all its multiply-adds are in products of matrices and convolutions."""

    def inputs(self, batch: int) -> Tensor:
        """The same random inputs every time."""
        return _normal((batch, *self.geometry.inlet_shape), 0)

    def woken(self) -> nn.Module:
        """Another seed, whose weights have left zero."""
        seed = self.make(1)
        with torch.no_grad():
            for index, parameter in enumerate(seed.parameters()):
                parameter.add_(0.3 * _normal(parameter.shape, 100 + index))
        return seed


Clause = Callable[[Trial], str]

LEARNING_STEPS: Final = 200
LEARNING_FACTOR: Final = 2.0
LEARNING_RATE: Final = 0.02
MACS_TOLERANCE: Final = 0.1
ELEMENTWISE: Final = frozenset({Form.SCALE_SHIFT, Form.SQUEEZE_EXCITE, Form.CUSTOM})
"""Forms that may multiply in ways that a count of matrix products does not see."""


def check_blueprint(name: str, geometry: Geometry | None = None) -> None:
    """Raise the first clause that a blueprint breaks; silence means it keeps them all.

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
            for words, clause in CLAUSES.items():
                if problem := clause(trial):
                    raise BadInput(
                        f"Blueprint {name!r} must {words}; {problem} ({_say(place)})."
                    )


def zero_at_birth(trial: Trial) -> str:
    """Not one output differs from zero, in training or evaluation."""
    seed = trial.make(0)
    inputs = trial.inputs(3)
    for training in (True, False):
        largest = float(seed.train(training)(inputs).detach().abs().max())
        if largest != 0.0:
            return f"its largest output is {largest:g}"
    return ""


def live_gradients(trial: Trial) -> str:
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


def keeps_shape(trial: Trial) -> str:
    """Outputs are shaped like the outlet for every batch and every size of image."""
    seed = trial.woken()
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


def stays_finite(trial: Trial) -> str:
    """Small, usual and large inputs give finite outputs."""
    seed = trial.woken()
    for scale in (0.0, 1e-3, 1.0, 1e3):
        if not bool(seed(scale * trial.inputs(2)).isfinite().all()):
            return f"inputs of size {scale:g} gave values that are not finite"
    return ""


def minds_its_own_sample(trial: Trial) -> str:
    """Other samples in the batch do not change a sample's output."""
    seed = trial.woken().eval()
    one = trial.inputs(3)
    other = torch.cat([one[:1], 5 * _normal((2, *trial.geometry.inlet_shape), 4)])
    if not torch.equal(seed(one)[0], seed(other)[0]):
        return "other samples changed its output"
    return ""


def costs_what_it_declares(trial: Trial) -> str:
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


def learns(trial: Trial) -> str:
    """A seed halves its distance to another one within a few steps of Adam."""
    inputs = trial.inputs(16)
    target = trial.woken()(inputs).detach()
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


CLAUSES: Final[dict[str, Clause]] = {
    "be zero at birth": zero_at_birth,
    "have live gradients at birth": live_gradients,
    "keep the outlet's shape": keeps_shape,
    "stay finite": stays_finite,
    "mind its own sample": minds_its_own_sample,
    "cost what it declares": costs_what_it_declares,
    "learn": learns,
}


class Between(nn.Module):
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


def _trial(blueprint: Blueprint, geometry: Geometry) -> Trial:
    def make(rng_seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(rng_seed)
        seed = build(blueprint, geometry, generator, Between(geometry))
        return seed.to(torch.get_default_dtype())

    counted = blueprint.form not in ELEMENTWISE
    return Trial(make, geometry, cost(blueprint, geometry), counted)


def _normal(shape: tuple[int, ...], rng_seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng_seed))


def _say(geometry: Geometry) -> str:
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
