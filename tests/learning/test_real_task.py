"""On a real task the return rises, and the run says so only if it did."""

import numpy as np
import pytest

from esper.environment.growing import GrowingWorld
from esper.evaluation.evaluation import evaluate_controller
from esper.evaluation.summary import FEW_ROUNDS, return_trend
from esper.runs.progress import sparkline
from esper.runs.train_config import Budget, Learner, TrainConfig
from esper.simic.agent.ppo import PPOConfig
from esper.tasks.hosts import MlpHost
from esper.tasks.task import Task
from esper.tasks.teacher import Teacher, teacher
from esper.training.controller_ppo import controller_loop
from esper.training.loop import OnRoundEnd
from tests.rollouts import GreedyPolicy

ROUNDS = 5 * FEW_ROUNDS
BOLD = PPOConfig(
    learning_rate=3e-3,
    minibatches=2,
    max_grad_norm=1.0,
    entropy_coef=0.01,
    head_entropy={"op": 0.03, "blueprint": 0.02},
)
"""Settings for a task on which growing pays at once."""


def wide_teacher(rng_seed):
    """Rows that three hidden units cannot tell apart and sixteen can."""
    return teacher(rng_seed, 1_200, kind=Teacher(width=16, depth=1, noise=0.0))


TOO_NARROW = Task(
    name="too narrow",
    description="a host that must grow",
    data=wide_teacher,
    host=MlpHost((16, 3, 8)),
    batch=32,
    decision_every=8,
    horizon=8,
    learning_rate=2e-2,
)


@pytest.mark.learns
def test_the_return_rises_where_growing_pays():
    returns = []
    world = GrowingWorld(TOO_NARROW, 16, rng_seed=1)
    config = TrainConfig(budget=Budget(rounds=ROUNDS), learner=Learner(ppo=BOLD))
    callback = OnRoundEnd(lambda record: returns.append(record.mean_return))
    trainer = controller_loop(world, config, TOO_NARROW.horizon, [callback])
    trainer.run()
    assert np.mean(returns[-FEW_ROUNDS:]) > np.mean(returns[:FEW_ROUNDS]) + 0.06
    assert return_trend(returns).startswith("The return rose:")
    never, chance, tamiyo = (
        evaluate_controller(controller, TOO_NARROW, 16, 0).returns.mean()
        for controller in ("never", "random", GreedyPolicy(trainer.algorithm.policy))
    )
    assert tamiyo > max(never, chance) + 0.1


def noisy(start, end, rounds=ROUNDS):
    """A course of returns with noise that does not depend on its ends."""
    noise = np.random.default_rng(0).normal(scale=0.01, size=rounds)
    return (np.linspace(start, end, rounds) + noise).tolist()


def test_the_verdict_names_both_fifths_and_their_difference():
    returns = [0.25] * FEW_ROUNDS + [0.0] * (3 * FEW_ROUNDS) + [0.75] * FEW_ROUNDS
    assert return_trend(returns) == (
        "The return rose: 0.2500 in the first 8 rounds, 0.7500 in the last 8, by "
        "+0.5000 [+0.5000, +0.5000] (95 % over rounds)."
    )


def test_the_interval_holds_no_change_in_about_95_of_100_runs():
    """Percentile bootstrap of eight rounds is a little too narrow: at least 85."""
    chance = np.random.default_rng(1)
    runs = chance.normal(size=(200, ROUNDS))
    held = ["did not change" in return_trend(run.tolist()) for run in runs]
    assert 0.85 < np.mean(held) < 0.99


def test_rounds_without_an_ended_episode_do_not_count():
    known = noisy(0.7, 0.8)
    assert return_trend([np.nan, *known, np.nan]) == return_trend(known)
    assert sparkline([np.nan, 0.0, 1.0]) == "▁█"
    assert sparkline([np.nan]) == ""


@pytest.mark.parametrize(
    ("end", "rounds", "words"),
    [
        (0.8, ROUNDS, "The return rose: "),
        (0.6, ROUNDS, "The return fell: "),
        (0.7, ROUNDS, "The return did not change clearly: "),
        (
            0.8,
            ROUNDS - 1,
            "Too few rounds to see a trend in the return: 39",
        ),
    ],
)
def test_the_verdict_follows_the_returns(end, rounds, words):
    assert return_trend(noisy(0.7, end, rounds)).startswith(words)


def test_a_sparkline_goes_from_the_least_to_the_largest():
    assert sparkline([0.0, 1.0, 2.0, 7.0, 3.5]) == "▁▂▃█▅"
    assert len(sparkline([float(number) for number in range(1_000)])) == 60
    assert sparkline([0.3, 0.3, 0.3]) == "▁▁▁"
