"""One row of MNIST-1D without noise, one step after another, as it is described."""

import numpy as np

HEIGHTS = {
    0: [5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5],
    1: [5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5],
    2: [5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5],
    3: [5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5],
    4: [5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5],
    5: [5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5],
    6: [5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5],
    7: [5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5],
    8: [5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5],
    9: [5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5],
}


def resampled(row, length):
    """Linear interpolation over the same stretch."""
    return np.interp(np.linspace(0, 1, length), np.linspace(0, 1, len(row)), row)


def curve(digit, padding, shift):
    """A digit's curve, padded, stretched to 72 samples and turned round."""
    heights = np.array(HEIGHTS[digit])
    heights = (heights - heights.mean()) / heights.std()
    heights = (heights - heights[0]) / 6
    padded = np.concatenate([heights, np.zeros(padding)])
    return np.roll(resampled(padded, 72), shift)


def ramp():
    """What shearing takes away, for a coefficient of one."""
    return np.linspace(-0.5, 0.5, 72)
