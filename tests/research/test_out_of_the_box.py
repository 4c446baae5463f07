"""The benchmark of the shipped Tamiyo counts as it says it does."""

from dataclasses import replace

import pytest
import torch

from research import out_of_the_box as it

NEVER = it.Trained(score=0.8, rows=400, parameters=100, compute=1.0, seconds=1.0)


@pytest.mark.parametrize(
    ("grown", "worse"), [(0.9, False), (0.8, False), (0.761, False), (0.759, True)]
)
def test_worse_is_worse_by_more_than_noise(grown, worse):
    # noise is 2 sqrt(0.16 / 400) = 0.04
    assert it.worse(replace(NEVER, score=grown), NEVER) is worse


def test_failures_are_counted():
    seeds = [
        {arm: replace(NEVER, score=score, compute=2.0) for arm in it.ARMS}
        | {it.NEVER: NEVER}
        for score in (0.85, 0.7)
    ]
    report = it.as_report("letters", seeds)
    never, *others = report.rows
    assert never[1:4] == ("0.8000", None, None)
    for row in others:
        assert row[2].startswith("-0.0250 [")
        assert row[3:6] == ("1 of 2", 100, "2.00x")


def tiny(seed, width):
    """A loop that is over at once."""
    torch.manual_seed(seed)
    model, x = it.Letters(width), torch.randn(96, 16)
    rows = x, torch.randint(26, (96,))
    return it.Loop(model, model, ("fc1->fc2",), x[:8], rows, rows, rows, 32, 3, 1e-2)


def test_all_arms_are_trained_on_the_same_things(monkeypatch):
    monkeypatch.setattr(it, "LOOPS", {"tiny": (tiny, 12)})
    found = it.compare("tiny", 3)
    assert [*found] == [*it.ARMS]
    assert found["never"].score == it.train(tiny(3, 12), "never", 3).score
    assert found["never"].parameters == tiny(3, 12).parameters
    more = found[it.PLAIN].parameters
    assert found["tamiyo"].parameters <= more
    order = [
        torch.cat([*it.batches(10, 4, torch.Generator().manual_seed(7))])
        for _ in range(2)
    ]
    assert torch.equal(*order)
    assert len(order[0].unique()) == 8
