"""How a new seed is initialised, from samples of activations at its place.

    zero_out   as built, with a last map of zero; hidden units as large as the host's
    gradmax    outgoing weights that give the incoming ones the largest gradient
               (Evci et al. 2022, https://arxiv.org/abs/2201.05125)
    tiny       both, along the best linear map from inputs to the negative gradient
               (Verbockhaven et al. 2024, https://arxiv.org/abs/2405.19816)

A start that a place or a form cannot have becomes zero_out, and the note says why. With
an activation in between a direction takes two units, of opposite signs, whose sum is
linear for ReLU, GELU and SiLU alike.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from esper.contracts.blueprints import Form
from esper.contracts.errors import unknown
from esper.growth.blueprints.seed import FormSeed
from esper.growth.hooks import Sample
from esper.growth.promise import (
    Statistics,
    directions,
    statistics,
    top_singular,
    trained_on,
    view,
)
from esper.growth.slots import InsertionPoint, is_layer
from esper.growth.tracing import NORMS, isolated

Initialiser = Callable[[nn.Module, InsertionPoint, list[Sample]], str]

INCOMING_SCALE: Final = 1e-3
"""Factor of the incoming weights under gradmax: enough to tell units apart."""
OUTPUT_SCALE: Final = 0.1
"""RMS of a tiny seed's output at birth, relative to its outlet."""
CANCELLED: Final = 1e-3
"""An output below this part of what half of its units give is rounding, not signal."""
DROPOUT: Final = nn.modules.dropout._DropoutNd
LINEAR: Final = (nn.Identity, nn.Flatten, nn.Sequential, DROPOUT, *NORMS)
"""Modules between two maps that keep their product linear."""


def start(
    seed: nn.Module,
    place: InsertionPoint,
    samples: Iterable[Sample],
    initialiser: str,
) -> str:
    """Initialise a seed, as built, in place; returns in words what was done."""
    with torch.no_grad():
        return find_initialiser(initialiser)(seed, place, [*samples])


def find_initialiser(name: str) -> Initialiser:
    """The initialiser of this name."""
    if name not in INITIALISERS:
        raise unknown("there is no initialiser", name, INITIALISERS)
    return INITIALISERS[name]


def zero_out(seed: nn.Module, place: InsertionPoint, samples: list[Sample]) -> str:
    """As built, but with new hidden units scaled like the host's own."""
    del samples
    if isinstance(seed, FormSeed) and seed.blueprint.form is Form.WIDEN:
        own = _spread(place.inlet.get_parameter("weight"))
        built = _spread(seed.weights["first"])
        if math.isfinite(own) and own > 0.0 and built > 0.0:
            seed.weights["first"].mul_(own / built)
    return "zero_out"


def gradmax(seed: nn.Module, place: InsertionPoint, samples: list[Sample]) -> str:
    """Outgoing weights along the largest singular vectors of gradient times input."""
    zero_out(seed, place, samples)
    known, problem = _statistics(seed, place, samples)
    if known is None or not isinstance(seed, FormSeed):
        return f"zero_out (gradmax {problem})"
    size = seed.blueprint.size
    given = known.features[:, :-1] if known.view.bias else known.features
    outgoing, strengths, _ = top_singular(known.wishes.T @ given, size)
    outgoing = outgoing[:, _in_rank(strengths, known, samples)]
    count = outgoing.shape[1]
    if count == 0:
        return "zero_out (gradmax found no gradient)"
    incoming = INCOMING_SCALE * _incoming(seed)[:, :count]
    _put_incoming(seed, incoming, bias=torch.zeros(count))
    _put_outgoing(seed, outgoing * _column_norm(place.outlet, size))
    return f"gradmax: {count} directions"


def tiny(seed: nn.Module, place: InsertionPoint, samples: list[Sample]) -> str:
    """Both maps along the best directions, at a small share of the outlet's size."""
    zero_out(seed, place, samples)
    known, problem = _statistics(seed, place, samples)
    if known is None or not isinstance(seed, FormSeed):
        return f"zero_out (tiny {problem})"
    size = seed.blueprint.size
    paired = seed.blueprint.form is Form.RESIDUAL_MLP or _is_nonlinear(seed.middle)
    best = directions(known, max(1, size // 2) if paired else size)
    kept = _in_rank(best.sizes, known, samples)
    strength = best.sizes[kept].sqrt()
    incoming, outgoing = (
        weights[:, kept] * strength for weights in (best.incoming, best.outgoing)
    )
    if paired:
        incoming, outgoing = (
            torch.stack([weights, -weights], dim=2).flatten(1)[:, :size]
            for weights in (incoming, outgoing)
        )
    given = torch.cat([sample.inputs.cpu().float() for sample in trained_on(samples)])
    if not _put_at_scale(seed, given, incoming, outgoing, known):
        return "zero_out (tiny found no direction to go)"
    return f"tiny: {len(strength)} directions"


INITIALISERS: Final[Mapping[str, Initialiser]] = MappingProxyType(
    {"zero_out": zero_out, "gradmax": gradmax, "tiny": tiny}
)
"""All starts by name."""


def _statistics(
    seed: nn.Module, place: InsertionPoint, samples: list[Sample]
) -> tuple[Statistics | None, str]:
    """Statistics of the place for this seed's form, or why there are none."""
    served = (Form.WIDEN, Form.LOW_RANK, Form.RESIDUAL_MLP)
    if not isinstance(seed, FormSeed) or seed.blueprint.form not in served:
        return None, "serves seeds of two maps only"
    seen = view(place.geometry, seed.blueprint.form)
    if seen is None:
        return None, "cannot look through pooling or flattening"
    if not trained_on(samples):
        return None, "needs a batch that was trained on"
    known = statistics(samples, place.geometry, seen)
    return known, "" if known else "met values that are not finite"


def _put_at_scale(
    seed: FormSeed,
    given: Float[Tensor, "..."],
    incoming: Float[Tensor, "feature unit"],
    outgoing: Float[Tensor, "wish unit"],
    known: Statistics,
) -> bool:
    """Scale units to an output of the wanted size; False, and no change, if none can.

    The two maps share the factor; where something between them does not scale, such
    as a norm, the second makes up for it.
    """
    before = {name: value.clone() for name, value in seed.weights.items()}
    wanted = OUTPUT_SCALE * known.outlet_rms
    for shares in ((0.5, 0.5), (0.0, 1.0)):
        weights = incoming[:-1] if known.view.bias else incoming
        bias = incoming[-1] if known.view.bias else None
        _put_incoming(seed, weights / known.feature_rms, bias)
        _put_outgoing(seed, outgoing)
        size = _output_rms(seed, given)
        # Opposite units that cancel leave a rounding error, which must not be scaled.
        _put_outgoing(seed, outgoing * (torch.arange(outgoing.shape[1]) % 2 == 0))
        half = _output_rms(seed, given)
        _put_outgoing(seed, outgoing)
        factor = wanted / size if size > CANCELLED * half else 0.0
        if not (math.isfinite(factor) and factor > 0.0):
            for name, value in before.items():
                seed.weights[name].copy_(value)
            return False
        incoming, outgoing = (
            incoming * factor ** shares[0],
            outgoing * factor ** shares[1],
        )
    _put_outgoing(seed, outgoing)
    return True


def _output_rms(seed: FormSeed, given: Float[Tensor, "..."]) -> float:
    """Root mean square of a seed's output in training mode, without dropout."""
    with isolated(seed, training=True):
        for module in seed.modules():
            if isinstance(module, DROPOUT):
                module.eval()
        return float(seed(given).double().square().mean().sqrt())


def _incoming(seed: FormSeed) -> Float[Tensor, "feature unit"]:
    """The first map's weights, one column per unit."""
    weight: Tensor = seed.weights["first"]
    return weight.clone() if weight.dim() == 2 else weight.flatten(1).T.clone()


def _put_incoming(
    seed: FormSeed,
    weights: Float[Tensor, "feature unit"],
    bias: Float[Tensor, " unit"] | None,
) -> None:
    """Set what the first units read."""
    weight, count = seed.weights["first"], weights.shape[1]
    if weight.dim() == 2:
        weight[:, :count] = weights.to(weight)
    else:
        weight[:count] = weights.T.reshape(count, *weight.shape[1:]).to(weight)
    if bias is not None and "first_bias" in seed.weights:
        seed.weights["first_bias"][:count] = bias.to(weight)


def _put_outgoing(seed: FormSeed, weights: Float[Tensor, "wish unit"]) -> None:
    """Set where the first units write."""
    weight, count = seed.weights["last"], weights.shape[1]
    if weight.dim() == 2:
        weight[:count] = weights.T.to(weight)
    else:
        taps = weights.unflatten(0, (weight.shape[0], *weight.shape[2:]))
        weight[:, :count] = taps.movedim(-1, 1).to(weight)


def _column_norm(outlet: nn.Module, size: int) -> float:
    """Mean length of what one input of a layer writes; 1/sqrt(size) without a layer."""
    if is_layer(outlet):
        columns = outlet.get_parameter("weight").double().transpose(0, 1).flatten(1)
        norm = float(columns.square().sum(1).sqrt().mean())
        if math.isfinite(norm) and norm > 0.0:
            return norm
    return 1.0 / math.sqrt(size)


def _in_rank(
    sizes: Float[Tensor, " direction"], known: Statistics, samples: list[Sample]
) -> Bool[Tensor, " direction"]:
    """Which singular values exceed the rounding of the samples' dtype.

    The tolerance is that of `numpy.linalg.matrix_rank`, at most 1e-3.
    """
    widest = max(known.features.shape[1], known.wishes.shape[1])
    eps = torch.finfo(samples[-1].inputs.dtype).eps
    return sizes > min(1e-3, widest * eps) * sizes.max()


def _is_nonlinear(middle: nn.Module) -> bool:
    """Whether there is, or may be, an activation between the two maps."""
    leaves = [module for module in middle.modules() if not [*module.children()]]
    return not all(isinstance(leaf, LINEAR) for leaf in leaves)


def _spread(weight: Tensor) -> float:
    """Standard deviation of weights."""
    return float(weight.double().std(correction=0))
