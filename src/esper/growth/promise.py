r"""What a place promises: how much a seed there could lower the loss, to first order.

Rows H of what a place is given and the changes G = -dL/dz that the loss asks of its
outlet give S = H'H/n + ridge = LL', N = H'G/n and L^-1 N = U D V'. The best map of rank
k is W_k = L^-T U_k D_k V_k' (Verbockhaven et al. 2024, https://arxiv.org/abs/2405.19816).
It is fitted on every other example and judged on the rest, so noise promises nothing:

    gain_k = mean <H W_k, G> / rms(H W_k)        promise_k = gain_k * rms(z) / loss

the part of the loss that goes per relative change of the outlet. Between convolutions H
is unfolded by the first and G spread back over the hidden positions by the second.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from esper.contracts.blueprints import Blueprint, Form
from esper.growth.blueprints.forms import adapted_kernel
from esper.growth.blueprints.geometry import (
    Geometry,
    Kernel,
    Layout,
    convolved,
    spatial_shape,
)
from esper.growth.blueprints.seed import misfit
from esper.growth.hooks import Sample

LEAST_ROWS: Final = 32
"""Rows on either side of the split that make a promise known."""
RIDGE: Final = 0.1
"""Of the features' mean square: few rows say little about the small directions."""
DENSE: Final = 256
"""Largest smaller side of a matrix whose singular vectors are all computed."""
SPARE: Final = 8
"""Directions searched for beyond those asked for, which makes them accurate."""
ROUNDS: Final = 6
"""Rounds of the search for the largest singular vectors of a large matrix."""


@dataclass(frozen=True, slots=True)
class View:
    """What one hidden unit of a form reads, and where it writes."""

    reads: Kernel | None
    """The window it reads; None for one position."""
    writes: Kernel | None
    """The window through which the outlet reads it; None for one position."""
    bias: bool


@dataclass(frozen=True, slots=True)
class Statistics:
    """Rows of a place in float64; those of one example lie together."""

    features: Float[Tensor, "row feature"]
    """In units of their root mean square; the last is 1 if there is a bias."""
    wishes: Float[Tensor, "row wish"]
    """Desired changes, such that the mean over rows is one of the loss."""
    feature_rms: float
    outlet_rms: float
    positions: tuple[int, ...]
    """Of one example; their product is its number of rows."""
    view: View

    def half(self, first: int) -> "Statistics":
        """Every other example."""
        count = math.prod(self.positions)
        features, wishes = (
            rows.unflatten(0, (-1, count))[first::2].flatten(0, 1)
            for rows in (self.features, self.wishes)
        )
        return replace(self, features=features, wishes=wishes)


@dataclass(frozen=True, slots=True)
class Directions:
    """The best maps of low rank: the sum of `incoming_i size_i outgoing_i'`."""

    incoming: Float[Tensor, "feature direction"]
    sizes: Float[Tensor, " direction"]
    outgoing: Float[Tensor, "wish direction"]


def promises(
    samples: Iterable[Sample],
    geometry: Geometry,
    blueprints: Sequence[Blueprint],
    loss: float,
) -> list[float | None]:
    """What blueprints promise at a place, in [0, 1]; None where that is unknown.

    Args:
        samples: Rows that passed the place, with the gradient of a mean loss.
        geometry: The place.
        blueprints: Those asked about; forms that are no two maps stay unknown.
        loss: The loss that the gradients are of; a promise is a part of it.
    """
    samples = [*samples]
    found: list[float | None] = [None] * len(blueprints)
    if not (math.isfinite(loss) and loss > 0.0):
        return found
    views: dict[View, list[int]] = {}
    for index, blueprint in enumerate(blueprints):
        seen = view(geometry, blueprint.form)
        if seen is not None and not misfit(blueprint, geometry):
            views.setdefault(seen, []).append(index)
    for seen, asked in views.items():
        known = statistics(samples, geometry, seen)
        if known is None or known.outlet_rms == 0.0:
            continue
        if len(known.half(1).features) < LEAST_ROWS:
            continue
        gained = gains(known, [blueprints[index].size for index in asked])
        for index, gain in zip(asked, gained.tolist(), strict=True):
            part = gain * known.outlet_rms / loss
            found[index] = min(1.0, part) if math.isfinite(part) else None
    return found


def view(geometry: Geometry, form: Form) -> View | None:
    """How a form's hidden units see a place; None if its rows do not show.

    Pooling or flattening between the layers of a span hides which positions of the
    outlet a unit's position reaches.
    """
    if form is Form.LOW_RANK:
        return View(adapted_kernel(geometry), None, bias=False)
    if form in (Form.RESIDUAL_MLP, Form.BOTTLENECK):
        return View(None, None, bias=True)
    if form is not Form.WIDEN or not geometry.spans:
        return None
    reads, writes = geometry.inlet_kernel, geometry.outlet_kernel
    given = spatial_shape(geometry.inlet_shape, geometry.inlet_layout)
    hidden = spatial_shape(geometry.hidden_shape, geometry.inlet_layout)
    if reads is None and writes is None:
        reached = spatial_shape(geometry.outlet_shape, geometry.outlet_layout)
        return View(None, None, bias=True) if given == hidden == reached else None
    if reads is None or writes is None or convolved(given, reads) != hidden:
        return None
    return View(reads, writes, bias=True)


def statistics(
    samples: Iterable[Sample], geometry: Geometry, seen: View
) -> Statistics | None:
    """The rows of a place that came back with a gradient; None if there are none.

    None as well if a value among them is not finite.
    """
    used = trained_on(samples)
    if not used:
        return None
    given = _float64([s.inputs for s in used])
    answer = _float64([s.outputs for s in used])
    back = [(s.rows, s.gradient) for s in used if s.gradient is not None]
    asked = torch.cat([-rows * _float64([gradient]) for rows, gradient in back])
    if not all(bool(t.isfinite().all()) for t in (given, answer, asked)):
        return None
    features, positions = _read(given, geometry.inlet_layout, seen.reads)
    wishes = _spread(asked, geometry.outlet_layout, seen.writes, positions)
    if len(features) != len(wishes):
        return None
    size = _rms(features) or 1.0
    features = features / size
    if seen.bias:
        features = F.pad(features, (0, 1), value=1.0)
    return Statistics(
        features=features,
        wishes=wishes * math.prod(positions),
        feature_rms=size,
        outlet_rms=_rms(answer),
        positions=positions,
        view=seen,
    )


def trained_on(samples: Iterable[Sample]) -> list[Sample]:
    """Those that came back with a gradient, with positions like the latest's."""
    back = [sample for sample in samples if sample.gradient is not None]
    return [s for s in back if s.inputs.shape[1:] == back[-1].inputs.shape[1:]]


def gains(known: Statistics, sizes: Sequence[int]) -> Float[Tensor, " size"]:
    """Drop of the loss per change of the outlet along the best map of each rank.

    Fitted on one half of the examples and measured on the other; never negative.
    """
    fitted, judge = known.half(0), known.half(1)
    best = directions(fitted, max(sizes))
    units = judge.features @ best.incoming * best.sizes  # [row, direction]
    asked = judge.wishes @ best.outgoing
    drop = (units * asked).mean(0).cumsum(0)
    change = _change(units, best.outgoing, judge)
    gained = torch.where(change > 0.0, drop / change, 0.0).clamp_min(0.0)
    # A larger seed can be what a smaller one would be.
    gained = gained.cummax(0).values
    last = len(gained) - 1
    return gained[[min(size - 1, last) for size in sizes]]


def directions(known: Statistics, count: int) -> Directions:
    """The best map of rank `count` (or less, if there is no more) from rows to wishes.

    With more features than rows the map reads nothing outside the rows' own span, so
    it is computed inside that.
    """
    features, wishes = known.features, known.wishes
    rows, width = features.shape
    turn = None
    if width > rows:
        turn, upper = torch.linalg.qr(features.T)
        features = upper.T
    ridge = RIDGE * (float(features.square().sum()) / (rows * width) or 1.0)
    square = features.T @ features / rows
    square.diagonal().add_(ridge)
    lower = torch.linalg.cholesky(square)
    product = features.T @ wishes / rows
    white = torch.linalg.solve_triangular(lower, product, upper=False)
    left, sizes, outgoing = top_singular(white, count)
    incoming = torch.linalg.solve_triangular(lower.T, left, upper=True)
    return Directions(incoming if turn is None else turn @ incoming, sizes, outgoing)


def top_singular(
    matrix: Float[Tensor, "row column"], count: int
) -> tuple[
    Float[Tensor, "row direction"],
    Float[Tensor, " direction"],
    Float[Tensor, "column direction"],
]:
    """The largest singular values with their vectors as columns.

    Large matrices are searched by subspace iteration from a fixed start.
    """
    smaller = min(matrix.shape)
    count = min(count, smaller)
    if smaller <= DENSE or count + SPARE >= smaller:
        left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        chance = torch.Generator().manual_seed(0)
        basis = torch.randn(
            matrix.shape[1], count + SPARE, generator=chance, dtype=matrix.dtype
        )
        for _ in range(ROUNDS):
            span, _ = torch.linalg.qr(matrix @ basis)
            basis, _ = torch.linalg.qr(matrix.T @ span)
        within, sizes, turned = torch.linalg.svd(matrix @ basis, full_matrices=False)
        left, right = within, turned @ basis.T
    return left[:, :count], sizes[:count], right[:count].T


def _change(
    units: Float[Tensor, "row direction"],
    outgoing: Float[Tensor, "wish direction"],
    judge: Statistics,
) -> Float[Tensor, " direction"]:
    """Root mean square at the outlet of the first, first two, ... units together."""
    kernel, count = judge.view.writes, units.shape[1]
    if kernel is None:
        return (units.square().mean(0).cumsum(0) / len(outgoing)).sqrt()
    hidden = units.unflatten(0, (-1, math.prod(judge.positions))).transpose(1, 2)
    hidden = hidden.unflatten(2, _flat(judge.positions, 1))
    size, stride, padding, dilation = _flat_kernel(kernel)
    weight = outgoing.T.reshape(-1, 1, *size)
    output = F.conv2d(hidden, weight, None, stride, padding, dilation, count)
    parts = output.unflatten(1, (count, -1)).flatten(2)  # [example, direction, outlet]
    together: Tensor = parts.cumsum(1).square().mean((0, 2))
    return together.sqrt()


def _read(
    given: Float[Tensor, "example ..."], layout: Layout, kernel: Kernel | None
) -> tuple[Float[Tensor, "row feature"], tuple[int, ...]]:
    """What a unit reads at each of its positions, and the positions of an example."""
    places = spatial_shape(tuple(given.shape[1:]), layout)
    if kernel is None:
        return _rows(given, layout), places
    size, stride, padding, dilation = _flat_kernel(kernel)
    windows = F.unfold(
        given.reshape(*given.shape[:2], *_flat(places, 1)),
        size,
        dilation,
        padding,
        stride,
    )
    return windows.transpose(1, 2).flatten(0, 1), convolved(places, kernel)


def _spread(
    asked: Float[Tensor, "example ..."],
    layout: Layout,
    kernel: Kernel | None,
    hidden: tuple[int, ...],
) -> Float[Tensor, "row wish"]:
    """What is asked of each position of a unit, through each tap of its window."""
    if kernel is None:
        return _rows(asked, layout)
    size, stride, padding, dilation = _flat_kernel(kernel)
    taps, channels = math.prod(size), asked.shape[1]
    each = torch.eye(taps, dtype=asked.dtype).reshape(1, taps, *size)
    there = _flat(spatial_shape(tuple(asked.shape[1:]), layout), 1)
    axes = zip(there, _flat(hidden, 1), size, stride, padding, dilation, strict=True)
    missing = tuple(
        wanted - ((length - 1) * step - 2 * pad + apart * (window - 1) + 1)
        for length, wanted, window, step, pad, apart in axes
    )
    spread = F.conv_transpose2d(
        asked.reshape(*asked.shape[:2], *there),
        each.expand(channels, -1, -1, -1),
        None,
        stride,
        padding,
        missing,
        channels,
        dilation,
    )
    return spread.flatten(2).transpose(1, 2).flatten(0, 1)


def _rows(tensor: Float[Tensor, "..."], layout: Layout) -> Float[Tensor, "row channel"]:
    """One row of channels per position."""
    if layout.channels_first:
        tensor = tensor.flatten(2).transpose(1, 2)
    return tensor.flatten(0, -2)


def _flat(numbers: tuple[int, ...], filling: int) -> tuple[int, int]:
    """Numbers of one or two spatial axes as those of two."""
    return (filling, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _flat_kernel(kernel: Kernel) -> tuple[tuple[int, int], ...]:
    """Size, stride, padding and dilation over two axes."""
    return (
        _flat(kernel.size, 1),
        _flat(kernel.stride, 1),
        _flat(kernel.padding, 0),
        _flat(kernel.dilation, 1),
    )


def _float64(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.to("cpu", torch.float64) for part in parts])


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())
