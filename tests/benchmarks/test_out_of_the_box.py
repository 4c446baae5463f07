"""The benchmark of the shipped Tamiyo counts as it says it does."""

import pytest
import torch

from benchmarks import out_of_the_box as it


def pair(never, grown, rows=400):
    return it.Pair(never=never, grown=grown, rows=rows, planted=1, times=1.5)


@pytest.mark.parametrize(
    ("grown", "worse"), [(0.9, False), (0.8, False), (0.761, False), (0.759, True)]
)
def test_worse_is_worse_by_more_than_noise(grown, worse):
    assert pair(0.8, grown).worse is worse  # noise is 2 sqrt(0.16 / 400) = 0.04


def test_failures_are_counted_and_listed():
    report = it.as_report("letters", {0: pair(0.8, 0.85), 1: pair(0.8, 0.7)})
    assert report.notes[0].endswith("noise: 1 of 2; worse: random seed 1.")
    assert report.notes[1] == "Mean difference -0.0250."
    assert [row[3] for row in report.rows] == ["+0.0500", "-0.1000"]
    good = it.as_report("bert", {0: pair(0.8, 0.85)})
    assert good.notes[0].endswith("noise: 1 of 1.")


def tiny(seed):
    """A loop that is over at once."""
    torch.manual_seed(seed)
    model, x = it.Letters(), torch.randn(96, 16)
    rows = x, torch.randint(26, (96,))
    return it.Loop(model, model, ("fc1->fc2",), x[:8], rows, rows, rows, 32, 3, 1e-2)


def test_both_are_trained_on_the_same_things(monkeypatch):
    monkeypatch.setattr(it, "LOOPS", {"tiny": tiny})
    found = it.compare("tiny", 3)
    assert (found.rows, found.times >= 1.0) == (96, True)
    assert found.never == it.train(tiny(3), "never", 3)[0]
    order = [
        torch.cat([*it.batches(10, 4, torch.Generator().manual_seed(7))])
        for _ in range(2)
    ]
    assert torch.equal(*order)
    assert len(order[0].unique()) == 8
