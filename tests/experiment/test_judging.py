"""Judging: everybody grows the same hosts, and each host counts once."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from rich.console import Console

from esper.contracts.actions import HEAD, Op
from esper.contracts.errors import BadInput
from esper.experiment.evaluate import EvaluateConfig, as_data, evaluate, print_arms
from esper.experiment.judging import Judged, judge, judged_world
from esper.tamiyo.controls import Early, Never
from esper.tasks import catalogue
from esper.tasks.catalogue import register_task
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
    raise BadInput("expected a package; pip install something[extra]")


def lost() -> Task:
    return replace(tiny(), name="lost", data=missing)


@pytest.fixture
def _few_tasks():
    """A catalogue of one task that can be judged and one that cannot."""
    before = dict(catalogue._BUILDERS)
    catalogue._BUILDERS.clear()
    register_task("tiny")(tiny)
    register_task("lost")(lost)
    yield
    catalogue._BUILDERS.clear()
    catalogue._BUILDERS.update(before)


class Watched:
    """Another controller, and what it saw and said."""

    def __init__(self, controller):
        self.controller, self.scores, self.ops = controller, [], []

    def decide(self, observation, masks, state, generator):
        self.scores.append(observation.host.score.clone())
        said = self.controller.decide(observation, masks, state, generator)
        self.ops.append(said[0][:, HEAD["op"]])
        return said


def assert_same(one: Judged, other: Judged) -> None:
    for field in fields(Judged):
        assert_array_equal(getattr(one, field.name), getattr(other, field.name))


def test_a_controller_judged_twice_does_the_same_to_the_bit():
    assert_same(judge("random", tiny(), HOSTS, 0), judge("random", tiny(), HOSTS, 0))


def test_a_controller_and_its_name_are_the_same():
    assert_same(judge(Never(), tiny(), HOSTS, 0), judge("never", tiny(), HOSTS, 0))


def test_controllers_are_paired_until_one_of_them_grows():
    task = replace(tiny(), decision_every=40, learning_rate=0.03)
    world = judged_world(task, HOSTS, 0)
    never, early = Watched(Never()), Watched(Early(world.spec))
    apart = judge(never, task, HOSTS, 0), judge(early, task, HOSTS, 0)
    assert torch.equal(never.scores[0], early.scores[0])
    assert (torch.stack(early.ops) != Op.WAIT).any()
    assert not np.array_equal(apart[0].returns, apart[1].returns)


def test_another_number_is_other_hosts():
    first, second = Watched(Never()), Watched(Never())
    judge(first, tiny(), HOSTS, 0)
    judge(second, tiny(), HOSTS, 1)
    assert not torch.equal(first.scores[0], second.scores[0])


def test_waiting_adds_nothing_and_returns_the_score_that_was_gained():
    watched = Watched(Never())
    judged = judge(watched, tiny(), HOSTS, 0)
    world = judged_world(tiny(), HOSTS, 0)
    world.reset()
    for _ in range(HORIZON):
        world.step(torch.zeros(HOSTS, len(HEAD), dtype=torch.int64))
    gained = world.ended.score - watched.scores[0]
    assert np.abs(judged.returns - gained.numpy()).max() < 1e-6
    assert_array_equal(judged.test, world.ended.test.double())
    assert_array_equal(judged.added, np.zeros(HOSTS))
    assert_array_equal(judged.macs, np.ones(HOSTS))
    assert not judged.panicked.any()


def test_a_host_that_panics_counts_once_though_the_world_goes_on():
    """Some hosts have rows that no host survives; the next episode may have too.

    It must not count even if it ends in the same step as another host's first.
    """
    task = replace(tiny(), data=often_too_large, varied=True, batch=128, horizon=2)
    watched = Watched(Never())
    judged = judge(watched, task, 8, 0)
    world = judged_world(task, 8, 0)
    world.reset()
    first: dict[int, tuple[float, bool]] = {}
    again = []
    for step in range(2):
        world.step(torch.zeros(8, len(HEAD), dtype=torch.int64))
        report = world.ended
        for place, env in enumerate(report.env.tolist()):
            if env in first:
                again.append((step, float(report.test[place]) != first[env][0]))
            values = float(report.test[place]), bool(report.panicked[place])
            first.setdefault(env, values)
    assert len(first) == 8
    assert (1, True) in again
    assert {panicked for _, panicked in first.values()} == {True, False}
    assert judged.test.tolist() == [first[env][0] for env in range(8)]
    assert judged.panicked.tolist() == [first[env][1] for env in range(8)]
    fell = judged.panicked
    expected = -1.0 - watched.scores[0].numpy()
    assert np.abs(judged.returns - expected)[fell].max() < 1e-6


@pytest.mark.usefixtures("_few_tasks")
def test_processes_find_what_one_process_finds():
    """The task is not in the catalogue of the other processes; it is sent to them."""
    config = EvaluateConfig(controllers=("random", "early"), hosts=2, rng_seed=3)
    together = evaluate(config)
    alone = evaluate(replace(config, processes=1))
    assert [*together.judged] == ["tiny"]
    assert [*together.judged["tiny"]] == ["random", "early"]
    for name, judged in alone.judged["tiny"].items():
        assert_same(together.judged["tiny"][name], judged)
    assert together.skipped.keys() == {"lost"}


@pytest.mark.usefixtures("_few_tasks")
def test_data_are_the_judged_figures_and_absolute_sizes():
    config = EvaluateConfig(tasks=("tiny", "tiny"), controllers=("early",), hosts=2)
    evaluation = evaluate(config)
    arm, data = evaluation.judged["tiny"]["early"], as_data(evaluation)["tasks"]["tiny"]
    assert (data["parameters"], data["macs"]) == (4 * 6 + 6 + 6 * 3 + 3, 4 * 6 + 6 * 3)
    told = data["controllers"]["early"]
    assert arm.added.mean() > 0
    assert told["parameters"] == pytest.approx(51 * (1 + arm.added.mean()))
    assert told["macs"] == pytest.approx(42 * arm.macs.mean())
    assert told["per_host"]["return"] == arm.returns.tolist()
    assert told["return"]["low"] <= told["return"]["estimate"]


@pytest.mark.usefixtures("_few_tasks")
def test_nothing_left_to_judge_is_an_error_with_the_reasons():
    del catalogue._BUILDERS["tiny"]
    with pytest.raises(BadInput, match="lost: expected a package; pip install"):
        evaluate(EvaluateConfig())


def test_a_table_says_how_far_each_is_above_never_host_by_host():
    def arm(returns):
        nothing = np.zeros(len(returns))
        return Judged(
            returns=np.array(returns),
            test=nothing,
            added=nothing,
            macs=nothing + 1,
            panicked=nothing > 0,
        )

    def shown(arms):
        console = Console(record=True, width=160)
        print_arms(console, tiny(), arms)
        return console.export_text()

    noisy = {"never": arm([0.1, 0.5, 0.9]), "early": arm([0.2, 0.6, 1.0])}
    assert "+0.1000 [+0.1000, +0.1000]" in shown(noisy)
    alone = shown({"never": arm([0.3]), "early": arm([0.4])})
    assert "+0.1000" in alone
    assert "0.4000 [" not in alone
