"""Drawn tasks: every kind can be drawn, drawn again and learnt, and is allowed."""

import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator

from esper.contracts.errors import InvalidInputError
from esper.environment.growing import GrowingWorld
from esper.environment.settings import WorldSettings
from esper.tamiyo.registry import make_controller
from esper.tamiyo.rollout import play
from esper.tasks import datasets, family, variants
from esper.tasks.data import log_uniform_int, random_source
from esper.tasks.family import (
    ALL_KINDS,
    BATCHES,
    CADENCES,
    CHANNELS,
    COMPUTE,
    HELD_OUT_KINDS,
    HORIZONS,
    KINDS,
    LONG_WORK,
    WIDTHS,
    drawn_task,
)
from esper.tasks.generated import as_data, binned, classified, lifted
from esper.tasks.hosts import CnnHost, MlpHost
from esper.tasks.mnist1d import PUBLISHED
from tests.tasks.test_catalogue import HELD_OUT

HARD = {"markov", "curves-noisy", "periodic"}
"""Kinds whose drawn tasks may be close to chance."""


def random(number=0):
    return random_source(number, "test")


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_draws_legal_tasks(kind):
    for number in range(3):
        made = drawn_task(5, number, (kind,))
        assert made.description == kind
        assert made.name == f"family-{number + 1}"
        assert HORIZONS[0] <= made.horizon <= HORIZONS[1]
        assert 1 <= made.decision_every <= CADENCES[1]
        assert COMPUTE[0] <= made.compute <= COMPUTE[1]
        assert made.batch in BATCHES
        assert 1e-3 < made.learning_rate < 0.2
        assert made.decision_every * made.horizon >= 150
        hidden = [layer.outputs for layer in made.host.layers[:-1]]
        least, most = WIDTHS if made.host.kind == "mlp" else CHANNELS
        assert least <= hidden[0] <= most
        assert len(hidden) in (1, 2)
        splits = made.splits(7)
        sizes = [len(part) for part in splits]
        assert made.batch <= sizes[0] <= 15_000
        assert all(50 <= size <= 5_000 for size in sizes[1:])
        labels = splits.train.labels
        if made.loss == "regression":
            assert labels.dtype == torch.float32
            assert float(labels.double().mean()) == pytest.approx(0, abs=1e-5)
            assert float(labels.double().std()) == pytest.approx(1, abs=1e-2)
        else:
            assert labels.unique().numel() == made.classes >= 2


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_numbers_alone_decide_what_is_drawn(kind):
    made, again = (drawn_task(3, 2, (kind,)) for _ in range(2))
    assert str(made) == str(again)
    rows = made.splits(0)
    family._rows.cache_clear()
    for sent in (again, pickle.loads(pickle.dumps(made))):
        for part, other in zip(rows, sent.splits(0), strict=True):
            assert torch.equal(part.features, other.features)
            assert torch.equal(part.labels, other.labels)
    other = drawn_task(4, 2, (kind,)).splits(0).train.features
    assert other.shape != rows.train.features.shape or not torch.equal(
        other, rows.train.features
    )


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_no_row_is_in_two_splits_or_comes_twice(kind):
    data = family._rows(kind, 0, 1)
    numbered = as_data(np.arange(len(data))[:, None], data.labels.numpy(), data.classes)
    parts = [part.features for part in family.split(numbered, 3)]
    rows = torch.cat(parts).flatten()
    assert len(rows.unique()) == len(data)
    # Tables repeat rows of their own, and words are few.
    if kind not in variants.VARIANTS and kind != "markov":
        assert len(data.features.flatten(1).unique(dim=0)) == len(data)


@pytest.mark.parametrize("kind", sorted({*ALL_KINDS} - HARD))
def test_a_small_network_learns_more_than_guessing(kind):
    assert any(gain(drawn_task(1, number, (kind,))) > 0.1 for number in range(2))


def gain(made):
    """Share of what guessing leaves that a network of some size gets right."""
    outputs = made.classes
    host = (
        MlpHost((*made.host.shape, 48, outputs))
        if made.host.kind == "mlp"
        else CnnHost(made.host.shape, (8,), outputs)
    )
    made = replace(made, host=host, batch=64, learning_rate=1e-2)
    world = GrowingWorld(replace(made, decision_every=100, horizon=3), 1)
    play(world, make_controller("never", world.spec), Generator())
    score, labels = float(world.last_test), made.splits(0).test.labels
    if made.loss == "regression":
        return score
    common = float(labels.bincount().max() / len(labels))
    return (score - common) / (1 - common)


def test_there_are_many_kinds_and_every_kind_comes_once_in_a_turn():
    assert len(KINDS) >= 40
    for turn in range(2):
        numbers = range(turn * len(KINDS), (turn + 1) * len(KINDS))
        drawn = [drawn_task(9, number).description for number in numbers]
        assert sorted(drawn) == sorted(KINDS)
    orders = [[drawn_task(seed, n).description for n in range(5)] for seed in range(4)]
    assert len({*map(tuple, orders)}) == 4


def made(kinds, number):
    return drawn_task(0, number, kinds)


def test_held_out_kinds_come_by_name_only():
    assert {made(HELD_OUT_KINDS, n).host.kind for n in range(3)} == {"mlp", "cnn"}
    assert {made(HELD_OUT_KINDS, n).loss for n in range(3)} == {
        "classification",
        "regression",
    }
    assert {*HELD_OUT_KINDS} <= {*ALL_KINDS}
    assert not {*HELD_OUT_KINDS} & {*KINDS}
    drawn = {drawn_task(0, number, HELD_OUT_KINDS).description for number in range(3)}
    assert drawn == {*HELD_OUT_KINDS}
    with pytest.raises(InvalidInputError, match="'paritty'; did you mean 'parity'"):
        drawn_task(0, 0, ("paritty",))


def test_evaluation_data_sets_are_never_read(monkeypatch):
    read, distortions = set(), []
    monkeypatch.setattr(
        variants, "stored", lambda name: read.add(name) or datasets.stored(name)
    )
    curves = variants.mnist1d
    monkeypatch.setattr(
        variants,
        "mnist1d",
        lambda *given, distortion: (
            distortions.append(distortion) or curves(*given, distortion=distortion)
        ),
    )
    variants.table.cache_clear()
    family._rows.cache_clear()
    for kind in (*variants.VARIANTS, "digit-images"):
        for number in range(6):
            drawn_task(8, number, (kind,))
    assert {*variants.SOURCES} >= read > {"spambase"}
    assert not {*variants.SOURCES, *KINDS} & HELD_OUT
    assert distortions
    assert PUBLISHED not in distortions
    family._rows.cache_clear()


def test_hosts_fill_their_range_and_are_sometimes_deep_or_convolutional():
    tasks = [drawn_task(seed, n) for seed in range(3) for n in range(len(KINDS))]
    flat = [made.host for made in tasks if isinstance(made.host, MlpHost)]
    images = [made.host for made in tasks if isinstance(made.host, CnnHost)]
    widths = [host.widths[1] for host in flat]
    assert min(widths) < 6
    assert max(widths) > 100
    depths = Counter(len(host.widths) for host in flat)
    assert depths[3] > depths[4] > 10
    assert images
    compute = [made.compute for made in tasks]
    assert min(compute) < 130
    assert max(compute) > 2_000
    macs = [made.compute * made.host.macs * made.batch for made in tasks]
    assert max(macs) > 50 * min(macs)
    assert max(macs) < LONG_WORK


def test_a_world_by_compute_ends_at_the_tasks_own():
    made = drawn_task(0, 0, ("parity",))
    settings = WorldSettings(clock="compute", first=8.0)
    world = GrowingWorld(made, 1, settings=settings)
    end = float(world.clock.times()[-1])
    assert made.compute / settings.ratio < end <= made.compute * (1 + 1e-9)
    own = WorldSettings(clock="compute", horizon=5)
    assert GrowingWorld(made, 1, settings=own).task.horizon == 5
    by_batches = GrowingWorld(made, 1)
    assert by_batches.task.horizon == made.horizon


def test_bins_are_equal_and_follow_the_score():
    score = random().standard_normal(1001)
    labels = binned(score, 4)
    assert np.bincount(labels).tolist() == [251, 250, 250, 250]
    assert all(np.diff(labels[np.argsort(score)]) >= 0)


def test_lifting_keeps_the_signal():
    signal = random(1).standard_normal((400, 3)) * (1, 10, 100)
    for number in range(6):
        lifted_rows = lifted(random(number), signal, 8)
        weights, *_ = np.linalg.lstsq(lifted_rows, signal - signal.mean(0), rcond=None)
        np.testing.assert_allclose(
            lifted_rows @ weights, signal - signal.mean(0), atol=1e-6
        )


def test_wrong_labels_are_as_many_as_drawn_and_never_right():
    labels = np.zeros(20_000, np.int64)
    noisy = classified(random(), np.zeros((20_000, 1)), labels, 5, 0.5).labels
    share = random_source(0, "test")
    share.random(20_000)
    expected = share.uniform(0, 0.5)
    assert (noisy > 0).double().mean() == pytest.approx(expected, abs=0.02)
    assert noisy.bincount()[1:].min() > 0.2 * (noisy > 0).sum()


def test_whole_numbers_are_drawn_evenly_on_a_log_scale():
    chance = random()
    drawn = Counter(log_uniform_int(chance, 1, 3) for _ in range(4_000))
    assert sorted(drawn) == [1, 2, 3]
    assert drawn[1] / 4_000 == pytest.approx(0.5, abs=0.04)
    assert drawn[3] / 4_000 == pytest.approx(np.log(4 / 3) / np.log(4), abs=0.04)


def test_formulas_that_give_one_class_nearly_all_rows_are_drawn_again() -> None:
    # This one's first rules hold for no row at all.
    labels = drawn_task(0, 100).splits(0).train.labels
    assert labels.unique(return_counts=True)[1].max() < 0.95 * len(labels)


def test_no_batch_is_larger_than_the_rows_of_a_task():
    # Two classes of a small table: 180 rows.
    for number in range(60):
        made = drawn_task(9, number, ("table-classes",))
        assert made.batch <= len(made.splits(0).train) // 2
