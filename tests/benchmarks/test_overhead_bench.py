"""What is slow must show, and where it is: on a clock that only slow calls move."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from benchmarks import overhead, round
from esper.runs.checkpoint import CheckpointFolder
from esper.runs.store import Store
from esper.simic.agent.ppo import PPOAgent

CONFIG = round.SMALL


@contextmanager
def slow(pauses):
    """These calls take so many seconds each, and nothing else takes any."""
    now = 0.0

    def pausing(call, seconds):
        def after_a_pause(*what, **more):
            nonlocal now
            now += seconds
            return call(*what, **more)

        return after_a_pause

    with ExitStack() as stack:
        for module in (round, overhead):
            stack.enter_context(patch.object(module, "perf_counter", lambda: now))
        for (owner, name), seconds in pauses.items():
            call = pausing(getattr(owner, name), seconds)
            stack.enter_context(patch.object(owner, name, call))
        yield


def test_every_part_of_a_round_is_on_the_watch():
    found = round.measure(CONFIG)
    listed = [part for parts in round.ROWS.values() for part in parts]
    assert sorted(found.seconds) == sorted(listed)
    assert found.count == 2
    assert found.computed > 0


def test_what_is_slow_in_a_round_shows_in_its_row():
    pauses = {
        (PPOAgent, "update"): 1.0,
        (Store, "add_round"): 2.0,
        (CheckpointFolder, "publish"): 7.0,
    }
    with slow(pauses):
        found = round.measure(CONFIG)
    assert found.total == 20.0
    took = {row: found.took(row) for row in round.ROWS if found.took(row)}
    assert took == {"update": 2.0, "store": 4.0, "checkpoint": 14.0}
    parts, bars = round.reports(CONFIG, found)
    assert parts.rows[-1] == ("together", 1e4, 100.0)
    assert bars.rows[0] == ("control + update + store", pytest.approx(30.0), 10.0)


def test_what_keeping_a_run_costs_is_split():
    pauses = {
        (PPOAgent, "update"): 10.0,
        (Store, "add_round"): 1.0,
        (CheckpointFolder, "publish"): 4.0,
    }
    with slow(pauses):
        found = overhead.measure(CONFIG)
    assert found.kept == [15.0, 15.0]
    assert found.bare == [10.0, 10.0]
    assert found.parts == {"rest": 20.0, "store": 2.0, "checkpoint": 8.0}
    rows = {what: cells for what, *cells in overhead.as_report(CONFIG, found).rows}
    assert rows["store and checkpoints"] == [5e3, pytest.approx(100 / 3)]
    assert rows["the run less the training alone"] == rows["store and checkpoints"]
    assert rows["the run"] == [15e3, 100.0]


def test_trainings_that_are_not_the_same_are_not_compared():
    mixture_for = overhead.mixture_for

    def others(config):
        return mixture_for(replace(config, rng_seed=1))

    with (
        patch.object(overhead, "mixture_for", others),
        pytest.raises(RuntimeError, match="round 1 is not the same in both"),
    ):
        overhead.measure(CONFIG)
