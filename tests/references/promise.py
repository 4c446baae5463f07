"""What a place promises, spelled out: one example, position and tap at a time."""

from itertools import product

import numpy as np


def promise(given, answer, gradient, rows, loss, size, kernels, bias, ridge):
    """`given`, `answer` and `gradient` are [n, C, *positions]; no positions: a vector.

    Args:
        kernels: (reads, writes), each (size, stride, padding, dilation) or None.
    """
    reads, writes = kernels
    features, wishes = [], []  # one array [position, ...] per example
    for h, g in zip(given, gradient, strict=True):
        places, windows = look(h, reads)
        features.append(windows)
        wishes.append(asked(-rows * g, writes, places) * len(places))
    features, wishes = np.array(features), np.array(wishes)
    scale = np.sqrt((features**2).mean())
    if bias:
        ones = np.full((*features.shape[:2], 1), scale)
        features = np.concatenate([features, ones], axis=2)
    fit_h, fit_g = flat(features[0::2]), flat(wishes[0::2])
    map_of_rank = fitted(fit_h, fit_g, ridge * (fit_h**2).mean())
    best = 0.0
    for rank in range(1, size + 1):
        weight = map_of_rank(rank)
        drops, changes = [], []
        for h, g in zip(features[1::2], wishes[1::2], strict=True):
            output = h @ weight
            drops.append((output * g).sum(1).mean())
            changes.append(lay(output, answer.shape[1:], writes, places))
        change = np.sqrt(np.mean(np.square(changes)))
        best = max(best, np.mean(drops) / change)
    return min(1.0, best * np.sqrt((answer**2).mean()) / loss)


def fitted(h, g, ridge):
    """The best map of each rank in the sense of least squares with a ridge."""
    square = h.T @ h / len(h) + ridge * np.eye(h.shape[1])
    values, vectors = np.linalg.eigh(square)
    root = vectors @ np.diag(values**0.5) @ vectors.T
    full = np.linalg.solve(square, h.T @ g / len(h))
    left, sizes, right = np.linalg.svd(root @ full, full_matrices=False)

    def of_rank(rank):
        near = left[:, :rank] @ np.diag(sizes[:rank]) @ right[:rank]
        return np.linalg.solve(root, near)

    return of_rank


def flat(blocks):
    return blocks.reshape(-1, blocks.shape[-1])


def look(h, kernel):
    """Positions of a unit and what it reads at each of them."""
    if kernel is None:
        places = [*product(*map(range, h.shape[1:]))]
        return places, np.array([h[(slice(None), *place)] for place in places])
    size, stride, padding, dilation = kernel
    axes = range(len(size))
    lengths = [
        (h.shape[1 + a] + 2 * padding[a] - dilation[a] * (size[a] - 1) - 1) // stride[a]
        + 1
        for a in axes
    ]
    places = [*product(*map(range, lengths))]
    windows = []
    for place in places:
        window = []
        for channel in h:
            for tap in product(*map(range, size)):
                where = source(place, tap, kernel)
                window.append(channel[where] if inside(where, channel.shape) else 0.0)
        windows.append(window)
    return places, np.array(windows)


def source(place, tap, kernel):
    """The input position that a tap of a convolution reads for an output position."""
    _, stride, padding, dilation = kernel
    return tuple(
        p * s + t * d - pad
        for p, t, s, pad, d in zip(place, tap, stride, padding, dilation, strict=True)
    )


def inside(where, shape):
    return all(0 <= w < length for w, length in zip(where, shape, strict=True))


def asked(g, kernel, places):
    """What the outlet asks of every unit position, per channel and tap."""
    if kernel is None:
        return np.array([g[(slice(None), *place)] for place in places])
    taps = [*product(*map(range, kernel[0]))]
    total = {place: np.zeros((len(g), len(taps))) for place in places}
    for to in product(*map(range, g.shape[1:])):
        for index, tap in enumerate(taps):
            where = source(to, tap, kernel)
            if where in total:
                total[where][:, index] += g[(slice(None), *to)]
    return np.array([total[place].ravel() for place in places])


def lay(output, outlet_shape, kernel, places):
    """What the units' outputs add to the outlet, flattened."""
    if kernel is None:
        return output.ravel()
    taps = [*product(*map(range, kernel[0]))]
    at = dict(zip(places, output.reshape(len(places), -1, len(taps)), strict=True))
    outlet = np.zeros(outlet_shape)
    for to in product(*map(range, outlet_shape[1:])):
        for index, tap in enumerate(taps):
            where = source(to, tap, kernel)
            if where in at:
                outlet[(slice(None), *to)] += at[where][:, index]
    return outlet.ravel()
