"""Choices among static sizes are what their definitions say, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from esper.contracts.errors import InvalidInputError
from esper.environment.clock import Clock
from esper.environment.settings import WorldSettings
from esper.evaluation.evaluation import Job, results_of
from esper.evaluation.sizes import (
    HALVING,
    best_sizes,
    check_halving,
    halved,
    size_baseline,
    survivors,
)
from esper.runs.records import EvalResult, StopFigures
from esper.workers.jobs import workers
from tests.evaluation.test_evaluation import tiny

STOPS = 7
TIMES = 64 * 2.0 ** np.arange(STOPS)
WORLD = WorldSettings(clock="compute", stop="anytime", first=4.0, horizon=22)


def arm(worth, *, start=0.1, cost=1.0, test=0.5):
    """A static size of two hosts with this worth on decision rows at the stops."""
    both = np.stack([worth, worth], axis=1).astype(float)
    weights = np.full(len(worth), 1 / len(worth))
    hosts = np.full(2, 1.0)
    stops = StopFigures(
        times=TIMES[: len(worth)],
        weights=weights,
        first=0 * hosts,
        worth=both,
        score=both + 0.01,
        test=both + test,
        spent=cost * np.outer(TIMES[: len(worth)], hosts),
    )
    return EvalResult(
        returns=weights @ both - start,
        score=stops.score[-1],
        test=stops.test[-1],
        area=hosts,
        added=cost * hosts,
        macs=cost * hosts,
        training_macs=stops.spent[-1],
        seconds=hosts,
        panicked=hosts > 1,
        stops=stops,
    )


FAST = arm([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], cost=1.0)
SLOW = arm([0.1, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9], cost=2.0)
WORST = arm([0.0, 0.0, 0.1, 0.1, 0.1, 0.9, 1.0], cost=3.0)


def test_the_best_size_in_hindsight_is_the_arm_with_the_best_return():
    assert size_baseline("best-size", [FAST, SLOW, WORST]) is SLOW


def test_the_envelope_takes_the_best_size_at_every_stop():
    found = size_baseline("envelope", [FAST, SLOW, WORST])
    best = [0.5, 0.5, 0.5, 0.6, 0.7, 0.9, 1.0]
    np.testing.assert_allclose(found.returns, np.mean(best) - 0.1)
    np.testing.assert_array_equal(found.test, WORST.test)  # best at the last
    assert np.isnan(found.area).all()
    worth = np.stack([one.stops.worth for one in (FAST, SLOW, WORST)])
    assert best_sizes(worth).tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_halving_drops_what_does_worst_and_ends_within_the_compute():
    ladder = [FAST, SLOW, WORST]
    worth = np.stack([one.stops.worth for one in ladder])
    assert survivors(worth, 0) == [[0, 1, 2], [0, 1], [1]]
    found = size_baseline("halving", ladder)
    # WORST would have been the best in the end, but was dropped at the third stop.
    np.testing.assert_allclose(found.score, [0.81, 0.81])
    np.testing.assert_allclose(found.test, [1.3, 1.3])
    np.testing.assert_array_equal(halved(worth, worth), [0.8, 0.8])
    third, fifth, sixth = TIMES[[2, 4, 5]]
    spent = 3.0 * third + 1.0 * fifth + 2.0 * sixth
    np.testing.assert_allclose(found.training_macs, [spent, spent])
    np.testing.assert_array_equal(found.added, [2.0, 2.0])


def test_five_sizes_cost_at_most_what_one_does_that_runs_to_the_end():
    before, total = 0.0, 0.0
    for sizes, until in HALVING:
        total += sizes * (TIMES[until] - before)
        before = TIMES[until]
    assert 0.9 * TIMES[-1] < total <= TIMES[-1]


def test_the_return_of_halving_counts_the_compute_of_all_sizes():
    same = [arm([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]) for _ in range(4)]
    found = size_baseline("halving", same)
    grid = np.log2(1 + np.array([0.0, *TIMES]))
    values = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    # Four sizes share the compute until each has that of the third stop, then two
    # until each has that of the fifth, then one until the sixth.
    ends = [TIMES[2], TIMES[4], TIMES[5]]
    each = []
    for total in TIMES:
        if total < 4 * ends[0]:
            each.append(total / 4)
        elif total < 4 * ends[0] + 2 * (ends[1] - ends[0]):
            each.append(ends[0] + (total - 4 * ends[0]) / 2)
        else:
            spent = 4 * ends[0] + 2 * (ends[1] - ends[0])
            each.append(min(ends[1] + total - spent, ends[2]))
    course = [np.interp(np.log2(1 + at), grid, values) for at in each]
    np.testing.assert_allclose(found.returns, np.mean(course) - 0.1)


@pytest.mark.parametrize(
    "clock",
    [
        Clock("batches", 40, 4.0, stop="anytime"),
        Clock("compute", 40, 4.0, stop="end"),
        Clock("compute", 9, 4.0, stop="anytime"),
        Clock("compute", 18, 4.0, stop="anytime"),  # six stops: twice the compute
    ],
    ids=["batches", "a known end", "too short", "a stop too few"],
)
def test_halving_is_refused_where_sizes_cannot_end_at_equal_compute(clock):
    with pytest.raises(InvalidInputError, match=r"Set world\.clock to compute"):
        check_halving(clock)


@pytest.mark.parametrize("count", [0, 2])
def test_controls_follow_when_all_sizes_of_their_task_are_evaluated(count):
    check_halving(WORLD.clock_of(WORLD.applied_to(tiny())))
    arms = ("halving", "static-x1", "envelope", "never", "static-x4", "best-size")
    jobs = [Job(name, tiny(), 2, 0, WORLD) for name in arms]
    with workers(count) as pool:
        order = [(job.arm, result) for job, result in results_of(jobs, pool)]
    found = dict(order)
    assert len(order) == len(arms)
    ladder = [found["static-x1"], found["static-x4"]]
    best = max(ladder, key=lambda one: one.returns.mean())
    assert found["best-size"] is best
    assert (found["envelope"].returns.mean() >= best.returns.mean() - 1e-9).all()
    stops = ladder[1].stops
    np.testing.assert_allclose(
        stops.weights @ stops.worth, stops.first + world_return()
    )
    np.testing.assert_array_equal(stops.test[-1], ladder[1].test)
    np.testing.assert_allclose(stops.spent[-1], ladder[1].training_macs)


def world_return():
    """Of the network that is four times as wide, from its own start."""
    from esper.evaluation.evaluation import (
        evaluate_episode,
        evaluation_world,
        times_as_wide,
    )
    from esper.tamiyo.rule_based import Never

    task = tiny()
    wide = replace(task, host=times_as_wide(task.host, 4), unit_host=task.unit)
    terms = replace(WORLD, charge_eval=False)
    return evaluate_episode(evaluation_world(wide, 2, 0, terms), Never(), 0).returns
