"""Rows are dealt out once each, and only training rows are measured."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

from esper.tasks import catalogue
from esper.tasks.catalogue import TASKS
from esper.tasks.data import Data, check_data, split


def numbered(rows, columns=3):
    """Every row is known by its label; the columns have different statistics."""
    labels = torch.arange(rows)
    features = torch.randn(rows, columns) * torch.tensor([1.0, 4.0, 2.0])[:columns]
    return Data("numbered", features + 7, labels, rows)


@given(rows=st.integers(10, 300), rng_seed=st.integers(0, 2**64))
def test_every_row_is_in_exactly_one_part(rows, rng_seed):
    dealt = [part.labels for part in split(numbered(rows), rng_seed)]
    assert torch.cat(dealt).sort().values.tolist() == list(range(rows))
    for rows_of, share in zip(dealt, (0.6, 0.2, 0.2), strict=True):
        assert abs(len(rows_of) - share * rows) <= 1


def test_features_stay_with_their_labels():
    data = numbered(200)
    splits = split(data, 3)
    train = data.features[splits.train.labels]
    mean, deviation = train.mean(0), train.std(0, correction=0)
    for part in splits:
        restored = part.features * deviation + mean
        expected = data.features[part.labels]
        torch.testing.assert_close(restored, expected, atol=1e-5, rtol=1e-5)


def test_other_rows_do_not_change_the_statistics():
    data = numbered(100)
    before = split(data, 5)
    loud = data.features.clone()
    loud[before.test.labels] *= 1000
    after = split(Data("loud", loud, data.labels, 100), 5)
    torch.testing.assert_close(after.train.features, before.train.features)
    torch.testing.assert_close(after.val.features, before.val.features)


def test_a_nearly_constant_column_stays_small():
    data = numbered(1000)
    features = data.features.clone()
    features[:, 1] = 0
    rare = split(data, 0).train.labels[0]
    features[rare, 1] = 0.5  # a deviation of 0.02, where others have 1 and 2
    features[split(data, 0).test.labels[0], 1] = 0.5
    for part in split(Data("rare", features, data.labels, 1000), 0):
        assert part.features[:, 1].abs().max() < 5


def test_columns_of_different_units_are_each_measured_by_themselves():
    data = numbered(1000)
    features = data.features * torch.tensor([1e4, 1.0, 1e-4])
    features = torch.cat([features, torch.full((1000, 1), 7.0)], dim=1)
    own = Data("units", features, data.labels, 1000)
    train = split(own, 0, least_deviation=0.0).train.features.double()
    expected = torch.tensor([1.0, 1, 1, 0]).double()  # a constant column becomes zero
    torch.testing.assert_close(train.std(0, correction=0), expected, atol=1e-5, rtol=0)


def test_the_number_alone_decides_the_split():
    data, state = numbered(100), torch.get_rng_state()
    first, again, *others = (
        split(data, seed).train.labels for seed in (1, 1, 2, 1 + 2**32)
    )
    assert first.equal(again)
    assert not any(first.equal(other) for other in others)
    assert state.equal(torch.get_rng_state())


def test_images_keep_their_shape_until_they_are_flattened():
    images = Data("images", torch.rand(20, 1, 8, 8), torch.arange(20), 20)
    assert split(images, 0).test.features.shape == (4, 1, 8, 8)
    assert images.flat().features[7].equal(images.features[7].flatten())
    assert images.flat().labels.equal(images.labels)


def test_the_smallest_data_that_can_be_used():
    assert [len(part) for part in split(numbered(4), 0)] == [2, 1, 1]
    data = numbered(64)
    assert check_data(data, batch=64) is data
    gap = Data("gap", torch.rand(80, 2), torch.tensor([0, 2] * 40), 3)
    assert check_data(split(gap, 0).train, batch=32).classes == 3


PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"


@pytest.mark.learns
@pytest.mark.usefixtures("own_names")
def test_the_examples_of_the_page_run_as_they_stand(capsys):
    text = PAGE.read_text(encoding="utf-8")
    for example in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(example, "docs/tasks.md", "exec"), {})
    never, early = (
        int(number)
        for number in re.findall(
            r"^\w+ +(\d+)%$", capsys.readouterr().out, re.MULTILINE
        )
    )
    assert early > never + 10
    printed = [
        int(number) for number in re.findall(r"^\w+ +(\d+)%$", text, re.MULTILINE)
    ]
    assert printed == pytest.approx([never, early], abs=5)


def test_the_page_lists_the_tasks_as_they_are():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("|---|---:|---:|---:|---|---:|---:|") + 1
    listed = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[start : start + len(TASKS)]
    ]
    columns = ("name", "rows", "inputs", "classes", "host", "parameters", "macs")
    for cells, row in zip(listed, catalogue.table(), strict=True):
        expected = [f"{row[c]:,}" if type(row[c]) is int else row[c] for c in columns]
        if row["missing"]:
            cells[1] = expected[1] = ""
        assert cells == expected


def test_targets_are_standardised_by_the_training_rows_and_keep_their_row():
    chance = Generator().manual_seed(0)
    targets = 50 + 7 * torch.randn(500, generator=chance)
    splits = split(Data("targets", targets[:, None].clone(), targets, 1), 3)
    assert splits.train.loss == "regression"
    deviation, mean = torch.std_mean(splits.train.labels.double(), correction=0)
    assert float(mean) == pytest.approx(0, abs=1e-5)
    assert float(deviation) == pytest.approx(1, abs=1e-5)
    for part in splits:
        torch.testing.assert_close(part.labels, part.features[:, 0], atol=1e-4, rtol=0)
