"""Teachers differ, their classes are balanced, and their labels can be learnt."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, nn

from esper.contracts.errors import BadInput
from esper.tasks.hosts import MlpHost
from esper.tasks.teacher import Teacher, drawn, teacher


def labels(splits):
    return torch.cat([part.labels for part in splits])


@settings(max_examples=40)
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


def test_the_number_alone_decides_everything():
    state = torch.get_rng_state()
    first, again, other = (teacher(seed).train for seed in (1, 1, 2))
    assert first.features.equal(again.features)
    assert first.labels.equal(again.labels)
    assert not first.labels.equal(other.labels)
    assert state.equal(torch.get_rng_state())


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


def kind(width=4, depth=1, noise=0.0):
    return Teacher(width=width, depth=depth, noise=noise)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kind(width=0), "expected width >= 1.*got width 0"),
        (lambda: kind(depth=-1), "depth -1"),
        (lambda: kind(noise=-0.1), r"noise -0\.1"),
        (lambda: kind(noise=0.9), r"noise 0\.9"),
        (lambda: teacher(0, kind=kind(width=1)), "width=1.*make it wider"),
        (lambda: teacher(0, 79), "at least 80; got 79"),
    ],
)
def test_teachers_that_cannot_be_meant_are_refused(call, words):
    with pytest.raises(BadInput, match=words):
        call()
