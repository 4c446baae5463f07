"""Tasks that are drawn: within bounds, the same for the same number, and learnable."""

import pickle

import pytest
import torch

from esper.tasks.family import CADENCES, HORIZONS, KINDS, WIDTHS, drawn_task

HELD_OUT = {"letter", "satimage", "penbased", "optdigits", "texture", "text", "mnist5k"}


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_a_drawn_task_lies_within_its_bounds_and_has_rows(number):
    task = drawn_task(3, number)
    assert task.name == f"family-{number + 1}"
    assert HORIZONS[0] <= task.horizon <= HORIZONS[1]
    assert CADENCES[0] <= task.decision_every <= CADENCES[1]
    hidden = task.host.widths[1:-1]
    assert len(hidden) in (1, 2)
    assert all(WIDTHS[0] <= units <= WIDTHS[1] for units in hidden)
    assert len(task.splits(5).train) > task.batch


def test_numbers_decide_what_is_drawn():
    assert str(drawn_task(3, 1)) == str(drawn_task(3, 1))
    assert len({str(drawn_task(seed, 1)) for seed in range(8)}) == 8
    assert len({drawn_task(seed, 2).host for seed in range(8)}) > 3
    assert {len(drawn_task(seed, 0).host.widths) for seed in range(24)} == {3, 4}


def test_curves_of_two_families_are_distorted_differently():
    one, other = (drawn_task(seed, 1).splits(0).train.features for seed in (1, 2))
    assert not torch.equal(one, other)


def test_nothing_is_drawn_that_others_are_judged_on():
    assert not HELD_OUT & set(KINDS)


def test_a_drawn_task_can_be_sent_to_another_process():
    task = drawn_task(3, 1)
    again = pickle.loads(pickle.dumps(task))
    assert torch.equal(task.splits(0).test.features, again.splits(0).test.features)
