from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from esper.contracts.errors import InvalidInputError
from esper.contracts.state import Stateful, load, save


@dataclass(frozen=True)
class Pair:
    one: Tensor
    two: Tensor


class Inner(Stateful):
    STATE = ("numbers", "count")

    def __init__(self, start):
        self.numbers = np.arange(4) + start
        self.count = start


class Outer(Stateful):
    STATE = ("inner", "pair", "chance", "parts", "net", "optimizer", "share", "flag")
    DERIVED = ("total",)

    def __init__(self, start):
        self.inner = Inner(start)
        self.pair = Pair(torch.full((2,), float(start)), torch.tensor([start]))
        self.chance = Generator().manual_seed(start)
        self.parts = [torch.ones(2) * start, torch.zeros(3) - start]
        with torch.random.fork_rng():
            torch.manual_seed(start)
            self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.net.parameters(), fused=True)
        self.net(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.share, self.flag = start / 10, bool(start % 2)
        self.name = "never changes"
        self.loaded()

    def loaded(self):
        self.total = float(self.pair.one.sum())


def test_what_was_saved_is_there_after_loading_to_the_bit():
    one, other = Outer(3), Outer(8)
    saved = save(one)
    load(other, saved)
    again = save(other)
    assert saved.keys() == again.keys()
    for name, value in saved.items():
        assert torch.equal(value, again[name]), name
    assert type(other.inner.count) is int
    assert (other.share, other.flag, other.total) == (0.3, True, 6.0)
    assert torch.equal(
        torch.rand(3, generator=one.chance), torch.rand(3, generator=other.chance)
    )


def test_names_are_paths_and_what_is_saved_does_not_change_with_the_object():
    outer = Outer(2)
    saved = save(outer)
    paths = "inner/numbers pair/two parts/1 net/weight optimizer/0/exp_avg chance flag"
    assert {*paths.split()} <= saved.keys()
    outer.pair.one.add_(1)
    outer.inner.numbers[:] = 0
    outer.net.weight.data.zero_()
    assert float(saved["pair/one"][0]) == 2.0
    assert saved["inner/numbers"].tolist() == [2, 3, 4, 5]
    assert saved["net/weight"].any()


def test_an_optimiser_still_moves_the_weights_it_was_made_for():
    outer = Outer(5)
    load(outer, save(Outer(6)))
    before = outer.net.weight.detach().clone()
    outer.net(torch.ones(1, 2)).sum().backward()
    outer.optimizer.step()
    assert not torch.equal(before, outer.net.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("chance"), "chance is missing"),
        (lambda s: s.update(more=torch.ones(1)), "more is unknown"),
        (
            lambda s: s.update({"pair/one": torch.ones(3)}),
            r"pair/one is float32\[3\], expected float32\[2\]",
        ),
        (
            lambda s: s.update({"inner/count": torch.tensor(1.0)}),
            r"inner/count is float32\[\], expected int64\[\]",
        ),
    ],
    ids=["missing", "unknown", "shape", "kind"],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(change, words):
    outer = Outer(4)
    saved, before = save(Outer(7)), save(outer)
    change(saved)
    with pytest.raises(InvalidInputError, match=words):
        load(outer, saved)
    after = save(outer)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_only_the_first_three_differences_are_listed():
    with pytest.raises(
        InvalidInputError, match=r"missing; .*missing; .*missing and \d+ more"
    ):
        load(Outer(4), {})


def test_what_is_no_number_cannot_be_saved():
    outer = Outer(1)
    outer.share = "a third"
    with pytest.raises(InvalidInputError, match="share is str, which cannot be saved"):
        save(outer)
