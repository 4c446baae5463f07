"""Regressions on recordings: targets by hand, and decisions that are legal."""

import numpy as np
import torch
from torch import Generator

from esper.contracts.actions import HEAD, Op
from esper.environment.settings import WorldSettings
from esper.evaluation.evaluation import evaluation_world
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tasks.family import drawn_task
from research.regression import COLUMNS, BestForetold, Tree, columns_of
from tests.rollouts import require_legal

# Scripts: wait, wait; wait, act; act, wait; act, act. Column 0 tells them apart.
ACTS = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=bool)
WORTH = np.array([0.0, 0.3, 0.2, -0.4])


def tree():
    columns = np.zeros((4, 2, 1))
    columns[:, :, 0] = [[0, 0], [0, 1], [2, 0], [2, 3]]
    agree = ACTS[:, None] == ACTS[None]
    begins = np.ones((4, 4, 1), dtype=bool)
    same = np.concatenate((begins, agree), axis=2).cumprod(axis=2).astype(bool)
    return Tree(columns, ACTS, same, WORTH)


def foretold(first, second):
    """Worth of acting at the first decision, and at the second after waiting."""
    table = {1.0: second, 2.0: first, 3.0: -1.0}
    return lambda rows: np.array([table[row[0]] for row in rows])


def test_the_tree_is_followed_to_the_leaf_that_is_foretold_best():
    for first, second, worth in (
        (-1, -1, 0.0),
        (-1, 0.1, 0.3),
        (0.1, -1, 0.2),
        (0.2, 0.1, 0.2),
    ):
        nodes, _ = tree().followed(foretold(first, second))
        assert nodes[0, 0] == worth


def test_a_choice_is_worth_what_follows_it_less_what_follows_waiting():
    counted, gains = tree().gains(foretold(-1, -1))
    assert counted.tolist() == [
        [False, False],
        [False, True],
        [True, False],
        [False, True],
    ]
    assert np.allclose(gains, [0.3, 0.2, -0.6])
    # If acting later is foretold to pay, waiting is worth more.
    _, gains = tree().gains(foretold(-1, 1))
    assert np.allclose(gains, [0.3, 0.2 - 0.3, -0.6])


def test_the_best_foretold_choice_is_taken_if_it_beats_waiting():
    world = evaluation_world(
        drawn_task(0, 1), 3, 0, WorldSettings(at_once=True, slots=6)
    )
    seen = world.reset()
    masks = compute_masks(seen, world.spec)
    cost = COLUMNS.index("cost")

    def decided(predict):
        actions, _ = BestForetold(predict).decide(seen, masks, None, Generator())
        require_legal(seen, world.spec, actions)
        return actions

    largest = decided(lambda rows: rows[:, cost])
    assert (largest[:, HEAD["op"]] == Op.GERMINATE).all()
    chosen = columns_of(seen)[:, : len(world.spec.blueprints), cost].argmax(dim=1)
    assert torch.equal(largest[:, HEAD["blueprint"]], chosen)
    assert (decided(lambda rows: -rows[:, cost])[:, HEAD["op"]] == Op.WAIT).all()
    world.step(largest)
    seen = world.step(torch.zeros_like(largest)).observation
    masks = compute_masks(seen, world.spec)
    fewer = decided(lambda rows: -rows[:, cost])
    assert (fewer[:, HEAD["op"]] == Op.PRUNE).all()
