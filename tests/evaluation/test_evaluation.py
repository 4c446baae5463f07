"""EvalConfig: everybody grows the same hosts, and each host counts once."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from esper.contracts.actions import HEAD, Op
from esper.contracts.errors import InvalidInputError
from esper.evaluation.evaluation import (
    evaluate_controller,
    evaluate_plain,
    evaluate_static,
    evaluation_world,
    times_as_wide,
)
from esper.runs.records import EvalResult
from esper.runs.train_config import World
from esper.tamiyo.rule_based import Never
from esper.tamiyo.schedule import EARLY, Scheduled
from esper.tasks.data import Data, Splits, split
from esper.tasks.hosts import MlpHost
from esper.tasks.task import Task

HOSTS, HORIZON = 3, 4


def clouds(rng_seed: int) -> Splits:
    """Three clouds of points."""
    chance = np.random.default_rng(0)
    labels = np.arange(300) % 3
    points = chance.normal(size=(300, 4)) + np.eye(4)[labels]
    data = Data("tiny", torch.from_numpy(points), torch.from_numpy(labels), 3)
    return split(data, rng_seed)


def tiny() -> Task:
    return Task(
        name="tiny",
        description="three clouds",
        data=clouds,
        host=MlpHost((4, 6, 3)),
        batch=8,
        decision_every=2,
        horizon=HORIZON,
    )


def often_too_large(rng_seed: int) -> Splits:
    """The clouds, in half of all cases far too large for 32 bits to train on."""
    size = 8e37 if rng_seed % 2 else 1.0
    parts = clouds(rng_seed)
    return Splits(*(replace(part, features=part.features * size) for part in parts))


def missing(rng_seed: int) -> Splits:
    raise InvalidInputError("expected a package; pip install something[extra]")


def lost() -> Task:
    return replace(tiny(), name="lost", data=missing)


class Recorder:
    """Another controller, with the scores it saw and the ops it chose."""

    def __init__(self, controller):
        self.controller, self.scores, self.ops = controller, [], []

    def decide(self, observation, masks, state, generator):
        self.scores.append(observation.host.score.clone())
        said = self.controller.decide(observation, masks, state, generator)
        self.ops.append(said[0][:, HEAD["op"]])
        return said


def assert_same(one: EvalResult, other: EvalResult) -> None:
    """All but the time that it took."""
    for field in fields(EvalResult):
        if field.name in ("seconds", "stops"):
            continue
        assert_array_equal(getattr(one, field.name), getattr(other, field.name))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("random", "random"),
        (Never(), "never"),
        (lambda spec: Scheduled(spec, EARLY), "early"),
    ],
)
def test_a_controller_its_maker_and_its_name_do_the_same_to_the_bit(one, other):
    assert_same(
        evaluate_controller(one, tiny(), HOSTS, 0),
        evaluate_controller(other, tiny(), HOSTS, 0),
    )


def test_controllers_are_paired_until_one_of_them_grows():
    task = replace(tiny(), decision_every=40, learning_rate=0.03)
    world = evaluation_world(task, HOSTS, 0)
    never, early = Recorder(Never()), Recorder(Scheduled(world.spec, EARLY))
    apart = (
        evaluate_controller(never, task, HOSTS, 0),
        evaluate_controller(early, task, HOSTS, 0),
    )
    assert torch.equal(never.scores[0], early.scores[0])
    assert (torch.stack(early.ops) != Op.WAIT).any()
    assert not np.array_equal(apart[0].returns, apart[1].returns)


def test_waiting_adds_nothing_and_returns_the_score_that_was_gained():
    recorder = Recorder(Never())
    result = evaluate_controller(recorder, tiny(), HOSTS, 0)
    world = evaluation_world(tiny(), HOSTS, 0)
    world.reset()
    for _ in range(HORIZON):
        last = world.step(torch.zeros(HOSTS, len(HEAD), dtype=torch.int64)).report
    gained = last.score - recorder.scores[0]
    assert np.abs(result.returns - gained.numpy()).max() < 1e-6
    assert_array_equal(result.test, last.test.double())
    assert_array_equal(result.added, np.zeros(HOSTS))
    assert_array_equal(result.macs, np.ones(HOSTS))
    assert not result.panicked.any()


def test_a_host_that_panics_counts_once_though_the_world_goes_on():
    """Some hosts have rows that no host survives; the next episode may have too.

    It must not count even if it ends in the same step as another host's first.
    """
    task = replace(tiny(), data=often_too_large, varied=True, batch=128, horizon=2)
    recorder = Recorder(Never())
    result = evaluate_controller(recorder, task, 8, 0)
    world = evaluation_world(task, 8, 0)
    world.reset()
    first: dict[int, tuple[float, bool]] = {}
    again = []
    for step in range(2):
        report = world.step(torch.zeros(8, len(HEAD), dtype=torch.int64)).report
        for place, env in enumerate(report.env.tolist()):
            if env in first:
                again.append((step, float(report.test[place]) != first[env][0]))
            values = float(report.test[place]), bool(report.panicked[place])
            first.setdefault(env, values)
    assert len(first) == 8
    assert (1, True) in again
    assert {panicked for _, panicked in first.values()} == {True, False}
    assert result.test.tolist() == [first[env][0] for env in range(8)]
    assert result.panicked.tolist() == [first[env][1] for env in range(8)]
    fell = result.panicked
    expected = -1.0 - recorder.scores[0].numpy()
    assert np.abs(result.returns - expected)[fell].max() < 1e-6
    assert_array_equal(result.area[fell], 0.0)
    assert (result.area[~fell] > 0.0).all()
    assert result.seconds.shape == (8,)
    assert (result.seconds > 0.0).all()


def test_the_area_is_the_mean_of_the_scores_after_every_decision():
    task = replace(tiny(), decision_every=10, learning_rate=0.03)
    recorder = Recorder(Never())
    result = evaluate_controller(recorder, task, HOSTS, 0)
    # What was seen before a decision is the score after the one before.
    after = [*recorder.scores[1:], torch.from_numpy(result.score)]
    expected = torch.stack([one.double() for one in after]).mean(dim=0)
    assert np.abs(result.area - expected.numpy()).max() < 1e-12
    assert np.ptp(torch.stack(recorder.scores).numpy()) > 0.1


def test_a_run_is_evaluated_on_its_own_terms():
    settings = World(horizon=2, rent=0.5, budget=1.0, blueprints=("widen_8",))
    recorder = Recorder(Never())
    evaluate_controller(recorder, tiny(), HOSTS, 0, settings)
    assert len(recorder.scores) == 2
    dear, cheap = (
        evaluate_controller("early", tiny(), HOSTS, 0, World(rent=rent))
        for rent in (0.5, 0.0)
    )
    assert dear.added.min() > 0
    assert np.abs(cheap.returns - dear.returns - 0.5 * dear.added).max() < 1e-6


@pytest.mark.parametrize(("rng_seed", "stage"), [(1, "test"), (0, "validation")])
def test_another_number_or_stage_is_other_hosts(rng_seed, stage):
    first, second = Recorder(Never()), Recorder(Never())
    evaluate_controller(first, tiny(), HOSTS, 0)
    evaluate_controller(second, tiny(), HOSTS, rng_seed, stage=stage)
    assert not torch.equal(first.scores[0], second.scores[0])


def test_relative_returns_are_the_errors_of_the_same_host_that_are_removed():
    task, relative = tiny(), World(relative=True, rent=0.02)
    raw = replace(relative, relative=False)
    never = evaluate_controller(Never(), task, HOSTS, 0, raw)
    errors = 1 - never.score
    reference = evaluate_controller("early", task, HOSTS, 0, raw)
    arms = [
        lambda world: evaluate_controller("early", task, HOSTS, 0, world),
        lambda world: evaluate_plain(
            times_as_wide(task.host, 4), task, HOSTS, 0, world
        ),
        lambda world: evaluate_static("longer", task, HOSTS, 0, reference, world),
    ]
    for arm in arms:
        share, points = arm(relative), arm(raw)
        ahead = (points.returns - never.returns) / errors
        assert_allclose(share.returns, ahead, rtol=1e-5, atol=1e-6)
        assert_allclose(share.stops.worth, points.stops.worth / errors, rtol=1e-6)
        total = share.stops.weights @ share.stops.worth - share.stops.first
        own = points.stops.weights @ points.stops.worth - points.stops.first
        assert_allclose(total, (own - never.returns) / errors, rtol=1e-5, atol=1e-6)
        assert_array_equal(share.test, points.test)
