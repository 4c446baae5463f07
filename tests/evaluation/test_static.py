"""Static controls have the size and the cost that they are said to have."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

from esper.environment.settings import LOOKED_ROWS, SCORED_ROWS
from esper.evaluation.evaluation import (
    Job,
    evaluate_controller,
    evaluate_static,
    evaluation_world,
    results_of,
    widened,
)
from esper.runs.records import reference_of
from esper.runs.train_config import World
from esper.tasks.catalogue import task as find_task
from esper.tasks.hosts import CnnHost, MlpHost
from esper.workers.jobs import Workers
from tests.evaluation.test_evaluation import HOSTS, often_too_large, tiny

TASK = replace(tiny(), decision_every=8, learning_rate=0.02)


@pytest.fixture(scope="module")
def early():
    return evaluate_controller("early", TASK, HOSTS, 0)


def cost(host, decisions):
    """Multiply-adds of an episode with its looks: the last is at all scored rows."""
    scored = min(SCORED_ROWS, len(TASK.splits(0).val))
    trained = TASK.decision_every * TASK.batch
    looked = min(LOOKED_ROWS, scored) * (decisions - 1) + scored
    return (trained * 3 * decisions + looked) * host.macs


def assert_cost(found, macs):
    np.testing.assert_allclose(found.training_macs, [macs] * HOSTS, rtol=1e-12)


hidden = st.lists(st.integers(1, 20), min_size=1, max_size=3)


@given(hidden, st.floats(0.0, 20.0))
def test_no_wider_host_would_do(widths, more):
    host = MlpHost((5, *widths, 4))
    target = host.parameters * (1 + more)
    found = widened(host, target)
    assert host.parameters <= found.parameters <= target
    least = min(widths)
    grown = min(found.widths[1:-1]) + 1
    wider = MlpHost((5, *(n * grown // least for n in widths), 4))
    assert wider.parameters > target


def test_every_hidden_layer_is_wider_in_proportion():
    assert widened(MlpHost((40, 12, 24, 10)), 5_000).widths == (40, 36, 72, 10)
    images = CnnHost((1, 28, 28), (4, 8), 10)
    found = widened(images, 4.0 * images.parameters)
    assert found.channels == (13, 26)
    assert (found.image, found.num_outputs) == (images.image, images.num_outputs)


def test_static_really_has_the_parameters_of_the_reference(early):
    found = evaluate_static("static", TASK, HOSTS, 0, early)
    host = TASK.host
    wide = widened(host, host.parameters * (1 + early.added.mean()))
    network = wide.build(Generator())
    size = sum(p.numel() for p in network.parameters())
    assert size == pytest.approx(host.parameters * (1 + found.added[0]))
    assert 1 < 1 + found.added[0] <= 1 + early.added.mean()
    assert found.macs.tolist() == [wide.macs / host.macs] * HOSTS
    assert_cost(found, cost(wide, TASK.horizon))


def test_static_pays_rent_and_begins_with_the_worth_of_the_plain_host(early):
    rent = 0.3
    found = evaluate_static("static", TASK, HOSTS, 0, early, World(rent=rent))
    start = evaluation_world(TASK, HOSTS, 0).reset().host.score.double().numpy()
    expected = found.score - start - rent * found.added
    assert np.abs(found.returns - expected).max() < 1e-6


def test_static_without_anything_more_is_the_host_itself(early):
    nothing = replace(early, added=np.zeros(HOSTS))
    found = evaluate_static("static", TASK, HOSTS, 0, nothing)
    never = evaluate_controller("never", TASK, HOSTS, 0)
    np.testing.assert_array_equal(found.test, never.test)
    assert np.abs(found.returns - never.returns).max() < 1e-6
    np.testing.assert_array_equal(found.area, never.area)


def test_longer_costs_what_the_reference_cost(early):
    found = evaluate_static("longer", TASK, HOSTS, 0, early)
    gap = found.training_macs - early.training_macs.mean()
    assert np.abs(gap).max() <= (cost(TASK.host, 2) - cost(TASK.host, 1)) / 2
    assert (found.training_macs > cost(TASK.host, TASK.horizon)).all()
    assert found.added.tolist() == [0.0] * HOSTS
    never = evaluate_controller("never", TASK, HOSTS, 0)
    assert not np.array_equal(found.score, never.score)


def test_plain_networks_do_not_pay_for_looks_that_nobody_takes(early):
    world = World(clock="compute", stop="anytime", horizon=12)
    free = replace(world, charge_eval=False)
    charged, uncharged, expected = (
        evaluate_static("static", TASK, HOSTS, 0, early, world),
        evaluate_static("static", TASK, HOSTS, 0, early, free),
        evaluate_controller("never", TASK, HOSTS, 0, free),
    )
    np.testing.assert_array_equal(charged.returns, uncharged.returns)
    nothing = replace(early, added=np.zeros(HOSTS))
    found = evaluate_static("static", TASK, HOSTS, 0, nothing, world)
    np.testing.assert_array_equal(found.test, expected.test)
    # It trains for all the compute there is, up to a batch.
    whole = world.clock_of(world.applied_to(TASK)).times()[-1]
    batch = TASK.batch * 3 * TASK.host.macs
    assert np.abs(found.training_macs / batch - float(whole)).max() <= 1


def test_longer_is_never_shorter(early):
    cheap = replace(early, training_macs=np.ones(HOSTS))
    found = evaluate_static("longer", TASK, HOSTS, 0, cheap, World(horizon=2))
    assert_cost(found, cost(TASK.host, 2))


def test_data_and_order_of_batches_are_the_reference_s(early):
    plain = evaluation_world(TASK, HOSTS, 0)
    wide = evaluation_world(replace(TASK, host=MlpHost((4, 9, 3))), HOSTS, 0)
    longer = evaluation_world(TASK, HOSTS, 0, World(horizon=2 * TASK.horizon))
    for world in (plain, wide, longer):
        world.reset()
    steps = TASK.horizon * TASK.decision_every
    count = torch.full((HOSTS,), steps)
    mine = plain._episodes
    drawn = mine.minibatches(count, steps)
    for world in (wide, longer):
        theirs = world._episodes
        assert torch.equal(theirs.minibatches(count, steps), drawn)
        assert (mine.rows[0][0] == theirs.rows[0][0]).all()


def test_a_static_host_that_panics_is_worth_what_any_is(early):
    task = replace(tiny(), data=often_too_large, varied=True, batch=128, horizon=2)
    reference = replace(early, added=np.full(HOSTS, 2.0))
    found = evaluate_static("static", task, 8, 0, reference)
    start = evaluation_world(task, 8, 0).reset().host.score.double().numpy()
    assert found.panicked.any()
    gap = found.returns - (-1.0 - start)
    assert np.abs(gap[found.panicked]).max() < 1e-6


def test_who_static_arms_are_measured_by():
    assert reference_of(["never", "early", "static"]) == "early"
    assert reference_of(["early", "quiet-fern", "calm-reed"]) == "calm-reed"
    assert reference_of(["never", "random"]) is None


@pytest.mark.parametrize("name", ["mnist5k", "text", "letter", "teacher"])
def test_hosts_of_every_kind_can_be_widened(name):
    host = find_task(name).host
    assert 2 * host.parameters < widened(host, 3 * host.parameters).parameters


def test_a_ladder_of_sizes_is_evaluated_with_others():
    arms = ("never", "static-x1", "static-x4")
    jobs = [Job(arm, TASK, HOSTS, 0, World()) for arm in arms]
    found = {job.arm: result for job, result in results_of(jobs, Workers())}
    for name in ("returns", "score", "test", "training_macs"):
        same = (getattr(found[arm], name) for arm in ("never", "static-x1"))
        np.testing.assert_array_equal(*same)
    inputs, *hidden, classes = TASK.host.widths
    wide = MlpHost((inputs, *(4 * units for units in hidden), classes))
    more = wide.parameters / TASK.host.parameters - 1
    np.testing.assert_allclose(found["static-x4"].added, [more] * HOSTS, rtol=1e-6)
