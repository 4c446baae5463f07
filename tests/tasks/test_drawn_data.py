"""Curves and teachers follow their description, and numbers alone decide them."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter1d
from torch import Generator, nn

from esper.tasks.hosts import MlpHost
from esper.tasks.mnist1d import Distortion, mnist1d, templates
from esper.tasks.teacher import Teacher, drawn, teacher
from tests.references.mnist1d import curve, ramp, resampled

STILL = Distortion(
    padding=(60, 60), shifts=1, scale=0.0, smooth_noise=0.0, white_noise=0.0, shear=0.0
)
NOISELESS = Distortion(smooth_noise=0.0, white_noise=0.0)


def test_the_number_alone_decides_the_rows():
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for draw in (mnist1d, lambda seed: teacher(seed).train):
        first, again, other = (draw(seed) for seed in (7, 7, 8))
        assert first.features.equal(again.features)
        assert first.labels.equal(again.labels)
        assert not first.features.equal(other.features)
        assert not first.labels.equal(other.labels)
    assert states[0].equal(torch.get_rng_state())
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002


def test_shapes_are_those_of_the_paper_and_digits_come_equally_often():
    data = mnist1d()
    assert data.features.shape == (5000, 40)
    assert (data.features.dtype, data.classes) == (torch.float32, 10)
    assert len(data.labels[:100].unique()) == 10
    for rows in (10, 57, 5000):
        counts = mnist1d(rows=rows).labels.bincount(minlength=10)
        assert counts.sum() == rows
        assert counts.max() - counts.min() <= 1


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


def labels(splits):
    return torch.cat([part.labels for part in splits])


@settings(max_examples=20)
@given(rng_seed=st.integers(0, 2**40))
def test_every_teacher_has_the_same_shapes_and_no_rare_class(rng_seed):
    splits = teacher(rng_seed)
    assert [tuple(part.features.shape) for part in splits] == [
        (3600, 16),
        (1200, 16),
        (1200, 16),
    ]
    assert all(part.classes == 8 for part in splits)
    shares = labels(splits).bincount(minlength=8) / 6000
    assert shares.min() > 0.02
    assert shares.max() < 0.3


@pytest.mark.parametrize("rng_seed", range(5))
@pytest.mark.parametrize("depth", [1, 3])
def test_the_narrowest_teachers_know_every_class(depth, rng_seed):
    splits = teacher(rng_seed, kind=Teacher(width=4, depth=depth, noise=0.0))
    assert labels(splits).bincount(minlength=8).min() > 0.02 * 6000


def test_the_kinds_fill_their_ranges():
    kinds = [drawn(rng_seed) for rng_seed in range(1000)]
    widths = [kind.width for kind in kinds]
    assert (min(widths), max(widths)) == (4, 48)
    assert sorted({kind.depth for kind in kinds}) == [1, 2, 3]
    noise = torch.tensor([kind.noise for kind in kinds])
    assert 0 <= noise.min() < 0.01
    assert 0.19 < noise.max() <= 0.2


def test_noise_is_the_share_of_labels_that_change():
    clean, noisy = (
        labels(teacher(4, 40_000, kind=Teacher(width=16, depth=2, noise=noise)))
        for noise in (0.0, 0.2)
    )
    assert (clean != noisy).double().mean() == pytest.approx(0.2, abs=0.01)
    moved = (noisy - clean)[clean != noisy] % 8
    shares = moved.bincount(minlength=8) / len(moved)
    assert shares[1:].min() > 0.1


def test_hidden_layers_make_it_hard_for_a_linear_student_but_not_for_a_wide_one():
    easy, hard = (
        teacher(0, kind=Teacher(width=16, depth=depth, noise=0.0)) for depth in (0, 1)
    )
    assert score(nn.Linear(16, 8), easy) > 0.9
    wide = MlpHost((16, 64, 64, 8)).build(Generator().manual_seed(0))
    assert score(nn.Linear(16, 8), hard) < score(wide, hard) - 0.04


def score(network, splits):
    """Share of the test rows that a network guesses right after 300 batches."""
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    order = Generator().manual_seed(0)
    train, test = splits.train, splits.test
    for _ in range(300):
        rows = torch.randint(len(train), (128,), generator=order)
        loss = nn.functional.cross_entropy(
            network(train.features[rows]), train.labels[rows]
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.inference_mode():
        return (network(test.features).argmax(1) == test.labels).double().mean()
