"""Rollouts are equal to the bit with any workers, also if workers are killed."""

import os
import signal
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from esper.contracts.errors import InvalidInputError
from esper.contracts.state import leaves, load, save
from esper.training.controller_ppo import controller_loop, require_played
from esper.training.loop import Callback
from esper.training.worlds import mixture_for, steps_of
from esper.workers.jobs import Processes, Workers, workers
from tests.training.test_train import assert_equal
from tests.training.test_worlds import family
from tests.training.training_script import config

CONFIGS = {"kept": config("nowhere", "run"), "drawn": family()}


class Rows(Callback):
    """Remembers what a store would be given."""

    def __init__(self):
        self.seen = []

    def on_rollout(self, loop, rollout):
        for played in rollout:
            for table, columns in played.rows.items():
                listed = {
                    name: column.tolist() if hasattr(column, "tolist") else column
                    for name, column in columns.items()
                }
                self.seen.append(repr((table, listed)))


def trained(kind, pools, rounds=3):
    """State and rows after some rounds, each with the next workers, each resumed."""
    own, rows, kept = CONFIGS[kind], Rows(), None
    for _, pool in zip(range(rounds), cycle(pools), strict=False):
        mixture = mixture_for(own)
        loop = controller_loop(mixture, own, steps_of(own), [rows], workers=pool)
        if kept is not None:
            load(loop, kept)
        loop.play_round()
        kept = save(loop)
    return kept, rows.seen


def assert_same(one, other):
    assert_equal(one[0], other[0])
    assert one[1] == other[1]


@pytest.fixture(scope="module")
def alone():
    """What both trainings are without workers, saved and loaded after every round."""
    return {kind: trained(kind, [Workers()]) for kind in CONFIGS}


@pytest.fixture(scope="module")
def two():
    with workers(2) as pool:
        yield pool


@pytest.mark.parametrize("kind", CONFIGS)
def test_workers_play_the_same_training(kind, alone, two):
    assert_same(trained(kind, [two]), alone[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_training_may_go_on_with_another_number_of_workers(kind, alone, two):
    with workers(1) as one, workers(4) as four:
        for pools in ([one], [four], [Workers(), four, one], [two, Workers(), four]):
            assert_same(trained(kind, pools), alone[kind])


class Harmed(Processes):
    """Two workers, one of which gets a signal as soon as it has the third job."""

    def __init__(self, number, deadline):
        super().__init__(2, deadline)
        self._number, self.jobs = number, 0

    def _submit(self, function, shared, job):
        future, more = super()._submit(function, shared, job)
        self.jobs += 1
        if self.jobs == 3:
            os.kill(self._busy[future].process.pid, self._number)
        return future, more


def test_a_worker_that_is_killed_changes_nothing(alone):
    with Harmed(signal.SIGKILL, 300) as pool:
        assert_same(trained("kept", [pool]), alone["kept"])
        assert pool.jobs == 3 * 2 + 1


@pytest.mark.slow
def test_a_worker_that_is_stopped_changes_nothing(alone):
    with Harmed(signal.SIGSTOP, 60) as pool:
        assert_same(trained("kept", [pool]), alone["kept"])
        assert pool.jobs == 3 * 2 + 1


def test_what_cannot_be_a_rollout_is_refused():
    own = CONFIGS["kept"]
    loop = controller_loop(mixture_for(own), own, 2)
    jobs, played = loop.algorithm.jobs(), loop.algorithm.play_shards()
    buffer = loop.algorithm.agent.buffer
    require_played(jobs[0], buffer, played[0])
    good = played[0].columns
    for bad, words in (
        ({**good, "rewards": good["rewards"][:1]}, "rewards must be"),
        ({**good, "actions": good["actions"].float()}, "actions must be"),
        ({**good, "values": good["values"] * torch.nan}, "values .* contains NaN"),
        (
            {name: good[name] for name in good if name != "episode_start"},
            "unexpected columns",
        ),
    ):
        with pytest.raises(InvalidInputError, match=words):
            require_played(jobs[0], buffer, replace(played[0], columns=bad))
    with pytest.raises(InvalidInputError, match="expected a rollout, got int"):
        require_played(jobs[0], buffer, 7)


def test_another_round_and_another_rollback_are_other_choices():
    own = CONFIGS["kept"]
    loop = controller_loop(mixture_for(own), own, steps_of(own))
    actions = []
    for round, rollbacks in ((0, 0), (1, 0), (0, 1), (0, 0)):
        loop.algorithm.round, loop.algorithm.rollbacks = round, rollbacks
        parts = loop.algorithm.play_shards()
        actions.append(torch.cat([part.columns["actions"] for part in parts], dim=1))
    assert torch.equal(actions[0], actions[3])
    assert not torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[0], actions[2])
    assert leaves(loop)["algorithm/round"] == 0
