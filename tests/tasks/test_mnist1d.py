"""Rows follow their description, and a small network finds them hard."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter1d

from esper.contracts.errors import BadInput
from esper.tasks.mnist1d import Distortion, mnist1d, templates
from tests.references.mnist1d import curve, ramp, resampled

STILL = Distortion(
    padding=(60, 60), shifts=1, scale=0.0, smooth_noise=0.0, white_noise=0.0, shear=0.0
)
NOISELESS = Distortion(smooth_noise=0.0, white_noise=0.0)


def test_shapes_are_those_of_the_paper_and_the_number_alone_decides_the_rows():
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = (mnist1d(seed) for seed in (7, 7, 8))
    assert states[0].equal(torch.get_rng_state())
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert first.features.shape == (5000, 40)
    assert (first.features.dtype, first.classes) == (torch.float32, 10)
    assert first.features.equal(again.features)
    assert not first.features.equal(other.features)
    assert not first.labels.equal(other.labels)
    assert len(first.labels[:100].unique()) == 10
    for rows in (10, 57, 5000):
        counts = mnist1d(rows=rows).labels.bincount(minlength=10)
        assert counts.sum() == rows
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((partial(mnist1d, rows=n), f"at least 10; got {n}") for n in (9, 0, -5)),
        *(
            (partial(Distortion, **wrong), r"expected 0 <= least .* got padding")
            for wrong in (
                {"padding": (60, 36)},
                {"padding": (-1, 60)},
                {"shifts": 0},
                {"shifts": 73},
            )
        ),
    ],
)
def test_curves_that_cannot_be_drawn_are_refused(call, words):
    with pytest.raises(BadInput, match=words):
        call()


def test_every_template_starts_and_ends_at_zero_with_one_deviation():
    curves = templates()
    assert curves.shape == (10, 12)
    assert (curves[:, [0, -1]] == 0).all()
    np.testing.assert_allclose(curves.std(axis=1), 1 / 6, rtol=1e-12)


def test_without_distortion_every_row_is_its_template():
    data = mnist1d(0, 30, distortion=STILL)
    for row, label in zip(data.features.numpy(), data.labels.tolist(), strict=True):
        expected = resampled(curve(label, 60, 0), 40)
        np.testing.assert_allclose(row, expected, atol=1e-6)


def test_without_noise_template_place_scale_and_shear_are_recovered():
    """Among all digits, widths and places only the right digit fits exactly."""
    data = mnist1d(0, 60, distortion=NOISELESS)
    keys = list(product(range(10), range(36, 61), range(48)))
    shapes = np.stack([resampled(curve(*key), 40) for key in keys])
    found = []
    for row, label in zip(data.features.double(), data.labels.tolist(), strict=True):
        error, scale, shear = fits(row.numpy(), shapes, resampled(ramp(), 40))
        best = np.where(scale > 0, error, np.inf).argmin()  # some are others inverted
        digit, padding, shift = keys[best]
        assert digit == label
        assert error[best] < 1e-10
        found.append((padding, shift, scale[best], shear[best]))
    paddings, shifts, scales, shears = map(set, zip(*found, strict=True))
    assert len(paddings) > 15
    assert len(shifts) > 25
    assert 0.8 <= min(scales) < 0.85
    assert 1.15 < max(scales) <= 1.2
    assert -0.375 <= min(shears) < -0.3
    assert 0.3 < max(shears) <= 0.375


def fits(row, shapes, slope):
    """Squared error, scale and shear of each best `scale * shape - shear * slope`."""
    a, b, d = (shapes**2).sum(1), shapes @ slope, slope @ slope
    u, v = shapes @ row, slope @ row
    scale, tilt = (d * u - b * v) / (a * d - b * b), (a * v - b * u) / (a * d - b * b)
    rest = row - scale[:, None] * shapes - tilt[:, None] * slope
    return (rest**2).sum(1), scale, -tilt


@pytest.mark.parametrize(("smooth", "white"), [(0.25, 0.0), (0.0, 0.5), (0.25, 0.02)])
def test_noise_deviates_as_described(smooth, white):
    """Smooth noise off the curve, white noise everywhere; both sampled at 40 points."""
    how = Distortion(
        padding=(60, 60),
        shifts=1,
        scale=0.0,
        shear=0.0,
        smooth_noise=smooth,
        white_noise=white,
    )
    noisy = mnist1d(0, 5000, distortion=how)
    plain = np.stack([resampled(curve(digit, 60, 0), 40) for digit in range(10)])
    noise = noisy.features.double().numpy() - plain[noisy.labels.numpy()]

    sampled = np.stack([resampled(row, 40) for row in np.eye(72)])
    off_curve = np.arange(72) >= 12
    smoothed = gaussian_filter1d(np.eye(72), 2.0, axis=1) * off_curve
    parts = np.concatenate([smooth * smoothed @ sampled, white * sampled])
    expected = parts.T @ parts
    tolerance = 0.08 * expected.diagonal().max()
    np.testing.assert_allclose(noise.T @ noise / 5000, expected, atol=tolerance)
