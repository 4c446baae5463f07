r"""Measurements of hosts between decisions: contributions, promises, gradient shares.

A promise is the first-order gain of a seed (`growth.promise`) with a leading env axis:

    H'H + ridge = LL'        W = L^-1 H'G        the best units: L^-T W V in, V out

of features H and changes G that the loss asks for, where V are the eigenvectors of W'W.
With more changes than features the units are L^-T U and W'U, where U are those of WW',
and with more features than rows the same units come from HH'. Sums over rows stand for
means: they scale what goes in and what comes out alike. Rows are vectors, in float64:
of a span that pools or flattens `growth.promise` knows nothing, so nothing is unfolded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.stages import LIVING, Stage
from esper.environment.cohort import Cohort, PlaceSample, active_alpha
from esper.growth.lifecycle import SeedStates
from esper.growth.promise import LEAST_ROWS, RIDGE

TINY: Final = 1e-300
"""Ridge of features that are all zero, which then promise nothing."""

PerUnit = Float64[Tensor, "case direction"]


@dataclass(frozen=True, slots=True)
class PlaceStatistics:
    """Statistics of every place on one minibatch."""

    promise: Float[Tensor, "env place blueprint"]
    """First-order gain of each blueprint; NaN where it is unknown."""
    gradient_share: Float[Tensor, "env place"]
    """Share of gradient times activation that passes the place."""
    liveness: Float[Tensor, "env place"]
    """Share of the channels that respond to inputs."""


def place_statistics(
    places: Sequence[PlaceSample],
    losses: Float[Tensor, " env"],
    blueprints: Sequence[Blueprint],
) -> PlaceStatistics:
    """Statistics of every place on the last minibatch of a decision."""
    sizes = [blueprint.size for blueprint in blueprints]
    biased = [blueprint.form is not Form.LOW_RANK for blueprint in blueprints]
    found, flows, liveness = [], [], []
    for place in places:
        outputs, gradient = place.outputs.flatten(3), place.gradient.flatten(3)
        if place.dense:
            rows = (outputs.squeeze(3), gradient.squeeze(3))
            found.append(promises(place.inputs, *rows, losses, sizes, biased))
        else:
            found.append(losses.new_full((len(losses), len(sizes)), torch.nan))
        size = outputs.square().mean(dim=(1, 2, 3)).sqrt()
        flows.append(size * gradient.square().mean(dim=(1, 2, 3)).sqrt())
        spread = outputs.transpose(1, 2).flatten(2).std(dim=2)
        top = spread.amax(dim=1, keepdim=True)
        liveness.append((spread > 0.01 * top).float().mean(dim=1))
    flow = torch.stack(flows, dim=1)
    return PlaceStatistics(
        promise=torch.stack(found, dim=1),
        gradient_share=flow / flow.sum(dim=1, keepdim=True).clamp(min=1e-30),
        liveness=torch.stack(liveness, dim=1),
    )


def contributions(
    cohort: Cohort,
    lives: SeedStates,
    due: Bool[Tensor, " env"],
    x: Float[Tensor, "_ row input"],
    y: Int64[Tensor, "_ row"],
) -> tuple[Float[Tensor, "env slot"], Bool[Tensor, "env slot"]]:
    """Score lost without each living seed, and where that was measured.

    A seed in training is tried at alpha 1 instead of being left out. Only environments
    that are due and have a seed in the slot are measured.
    """
    stages = torch.tensor(LIVING, device=lives.stage.device)
    living = (lives.stage[..., None] == stages).any(dim=2) & due[:, None]
    training = lives.stage == Stage.TRAINING
    alpha, rows = active_alpha(lives), y.shape[1]
    base = cohort.count(x, y, alpha, living.any(dim=1))
    gain = torch.zeros_like(lives.alpha)
    for slot in torch.nonzero(living.any(dim=0)).flatten().tolist():
        turned = alpha.clone()
        turned[:, slot] = training[:, slot].to(alpha.dtype)
        other = cohort.count(x, y, turned, living[:, slot])
        lost = torch.where(training[:, slot], other - base, base - other)
        gain[:, slot] = lost / rows
    return gain, living


def promises(
    given: Float[Tensor, "env row feature"],
    answer: Float[Tensor, "env row wish"],
    gradient: Float[Tensor, "env row wish"],
    loss: Float[Tensor, " env"],
    sizes: Sequence[int],
    biased: Sequence[bool] | None = None,
) -> Float[Tensor, "env size"]:
    """Relative drop of the loss per relative change of the outlet, in [0, 1].

    NaN where it is unknown: too few rows, a number of the host that is not finite, an
    outlet that is all zero, no loss.

    Args:
        given: At the inlet of the place.
        answer: At its outlet.
        gradient: Of the mean loss of each host with respect to the answer.
        loss: Mean loss of each host.
        sizes: Ranks of the seeds.
        biased: Whether the units of each have a bias; all of them if None.
    """
    rows, width = given.shape[1:]
    if rows // 2 < LEAST_ROWS:
        return answer.new_full((answer.shape[0], len(sizes)), torch.nan)
    # The norm of numbers that are not all finite is not finite.
    input_norm, output_norm, gradient_norm = (
        torch.linalg.vector_norm(part, dim=(1, 2), dtype=torch.float64)
        for part in (given, answer, gradient)
    )
    known = (input_norm + output_norm + gradient_norm + loss).isfinite()
    known &= (output_norm > 0) & (loss > 0)
    scale = torch.where(input_norm > 0, input_norm / (rows * width) ** 0.5, 1.0)[
        :, None, None
    ]
    wanted = [True] * len(sizes) if biased is None else biased
    kinds = sorted({*wanted}, reverse=True)
    find = _by_features if width < rows // 2 else _by_rows
    drop, change = find(
        [given[:, first::2].double() / scale for first in (0, 1)],
        [gradient[:, first::2].double() for first in (0, 1)],
        known,
        kinds,
    )
    drop, change = drop.cumsum(dim=1), change.cumsum(dim=1).clamp(min=0.0).sqrt()
    gained = torch.where(change > 0, drop / change, 0.0).clamp(min=0.0)
    # A larger seed can be what a smaller one would be.
    gained = gained.cummax(dim=1).values.unflatten(0, (len(kinds), -1))
    last = gained.shape[2] - 1
    which = [kinds.index(bias) for bias in wanted]
    found = gained[which, :, [min(size - 1, last) for size in sizes]]  # [size, env]
    part = found * (output_norm / loss.double()) * (rows / (rows // 2)) ** 0.5
    return torch.where(known, part.clamp(max=1.0), torch.nan).mT.to(answer.dtype)


def _by_features(
    given: list[Float64[Tensor, "env _ feature"]],
    gradients: list[Float64[Tensor, "env _ wish"]],
    known: Bool[Tensor, " env"],
    kinds: Sequence[bool],
) -> tuple[PerUnit, PerUnit]:
    """Drop of the loss and square at the outlet of each of the best units.

    A case is a host with a bias or without; rows that fit come before rows that judge.
    """
    features = given[0].shape[2]
    inputs = [F.pad(part, (0, 1), value=1.0) for part in given]
    square, judged = (_cases(part.mT @ part, kinds) for part in inputs)
    product, tested = (
        _cases(part.mT @ wish, kinds)
        for part, wish in zip(inputs, gradients, strict=True)
    )
    if False in kinds:  # instead of the bias, a feature that is nothing
        plain = slice(-known.shape[0], None)
        square[plain, -1] = square[plain, :, -1] = product[plain, -1] = 0.0
    lower = _root(square, features, kinds)
    white = torch.linalg.solve_triangular(lower, product, upper=False)
    if white.shape[2] <= white.shape[1]:
        outgoing, _ = _eigen(white.mT @ white, known)
        incoming, sizes = white @ outgoing, None
    else:
        incoming, sizes = _eigen(white @ white.mT, known)
        outgoing = white.mT @ incoming
    incoming = torch.linalg.solve_triangular(lower.mT, incoming, upper=True)
    drop = (incoming * (tested @ outgoing)).sum(dim=1)
    change = (incoming * (judged @ incoming)).sum(dim=1)
    return drop, change if sizes is None else change * sizes


def _by_rows(
    given: list[Float64[Tensor, "env _ feature"]],
    gradients: list[Float64[Tensor, "env _ wish"]],
    known: Bool[Tensor, " env"],
    kinds: Sequence[bool],
) -> tuple[PerUnit, PerUnit]:
    """The same in fewer steps where there are more features than rows."""
    bias = known.new_tensor(kinds).repeat_interleave(len(known))[:, None, None]
    square, across = (_cases(part @ given[0].mT, kinds) + bias for part in given)
    wishes, tested = (_cases(part, kinds) for part in gradients)
    lower = _root(square.clone(), given[0].shape[2], kinds)
    best = torch.cholesky_solve(wishes, lower)
    outgoing, _ = _eigen(wishes.mT @ (square @ best), known)
    units = across @ (best @ outgoing)  # [case, row, direction]
    return (units * (tested @ outgoing)).sum(dim=1), units.square().sum(dim=1)


def _cases(
    hosts: Float64[Tensor, "env ..."], kinds: Sequence[bool]
) -> Float64[Tensor, "case ..."]:
    return hosts if len(kinds) == 1 else torch.cat([hosts] * len(kinds))


def _root(
    square: Float64[Tensor, "case side side"], features: int, kinds: Sequence[bool]
) -> Float64[Tensor, "case side side"]:
    """Cholesky factor of products with their ridge, which is added in place."""
    parts = square.new_tensor([RIDGE / (features + bias) for bias in kinds])
    diagonal = square.diagonal(dim1=1, dim2=2)
    hosts = square.shape[0] // len(kinds)
    ridge = diagonal.sum(dim=1) * parts.repeat_interleave(hosts)
    diagonal.add_(ridge.clamp(min=TINY).unsqueeze(1))
    # Of a broken host it is a broken factor, and no error.
    lower: Tensor = torch.linalg.cholesky_ex(square).L
    return lower


def _eigen(
    square: Float64[Tensor, "case side side"], known: Bool[Tensor, " env"]
) -> tuple[Float64[Tensor, "case side side"], PerUnit]:
    """Eigenvectors and eigenvalues, the largest first; of zero for broken hosts."""
    known = known.repeat(square.shape[0] // known.shape[0])[:, None, None]
    values, vectors = torch.linalg.eigh(torch.where(known, square, 0.0))
    return vectors.flip(2), values.flip(1)
