"""The bandit learns from paired hosts which schedule suits which of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Generator

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.environment.growing import GrowingWorld
from esper.environment.settings import WorldSettings
from esper.experiment.rollout import play
from esper.tamiyo.schedule import Schedule
from esper.tasks.catalogue import task
from evidence.bandit import CONTEXT, LinearBandit
from evidence.contextual import (
    ARMS,
    as_json,
    fit_bandit,
    from_json,
    ridge,
)
from tests.worlds import ProbeWorld

WIDE = ActionSpec(slots=SlotConfig(max_slots=2), blueprints=BLUEPRINTS[5:8])
LENGTH, ENVS = 5, 50
FEW = (Schedule(count=0), Schedule(count=1), Schedule(count=3, every=0.0))


def suits(time, bit, actions):
    """Hosts that show a 1 gain by every seed, the others lose; both by little."""
    plants = actions[:, HEAD["op"]] == Op.GERMINATE
    return 100.0 * bit + torch.where(plants, 2.0 * bit - 1.0, 0.0)


def worlds(rng_seed):
    return [
        ProbeWorld(
            ENVS, suits, length=LENGTH, rng_seed=2 * rng_seed + number, spec=WIDE
        )
        for number in range(2)
    ]


def test_each_host_is_grown_as_suits_it():
    fitted = fit_bandit(worlds, 1_500, 0, arms=FEW, look=2)
    world = worlds(999)[0]
    returns = play(world, fitted(WIDE), Generator())
    gain = (returns > 100.0) * 503.0  # three seeds that gain one each, or none
    assert {*returns.tolist()} == {0.0, 503.0}
    assert torch.equal(returns, gain.float())


def test_weights_predict_by_how_much_an_arm_is_above_the_mean_of_all_arms():
    fitted = fit_bandit(worlds, 6_000, 0, arms=FEW, look=2)
    weights = np.array(fitted.weights)
    context = np.zeros((2, len(CONTEXT)))
    context[:, CONTEXT.index("score")] = [0.0, 1.0]
    context[:, CONTEXT.index("progress")] = 2 / LENGTH
    context[:, -1] = 1.0
    above = [[4 / 3, 1 / 3, -5 / 3], [-4 / 3, -1 / 3, 5 / 3]]
    assert_allclose(context @ weights.T, above, atol=0.05)  # shrunk by one in a hundred


def test_no_more_steps_are_spent_than_allowed_and_all_are_counted():
    made = []

    def counted(rng_seed):
        made.append(rng_seed)
        return worlds(rng_seed)

    price = 2 * ENVS * LENGTH
    fitted = fit_bandit(counted, price * 6 + 1, 0, arms=FEW, look=2)
    assert fitted.env_steps == len(made) * price == 6 * price
    assert fitted.hosts == 2 * 2 * ENVS
    assert len({*made}) == 2  # two groups of hosts, each grown by every arm


def test_a_fit_repeats_is_read_as_written_and_needs_steps_and_a_look():
    fitted = fit_bandit(worlds, 1_500, 0, arms=FEW, look=2)
    assert fitted == fit_bandit(worlds, 1_500, 0, arms=FEW, look=2)
    assert fitted == from_json(as_json(fitted))
    assert isinstance(from_json(as_json(fitted))(WIDE), LinearBandit)
    with pytest.raises(BadInput, match=r"one took 500, got 1499\."):
        fit_bandit(worlds, 1_499, 0, arms=FEW, look=2)
    with pytest.raises(BadInput, match="look must be before the end of every episode"):
        fit_bandit(worlds, 1_500, 0, arms=FEW, look=LENGTH)


@settings(max_examples=20)
@given(st.integers(2, 40), st.integers(0, 99), st.sampled_from([1e-6, 0.01, 1.0]))
def test_ridge_is_least_squares_with_rows_that_pull_to_zero(hosts, seed, penalty):
    random = np.random.default_rng(seed)
    context = random.normal(size=(hosts, 5)) * [1.0, 0.1, 3.0, 0.0, 0.0]
    context += [0.0, 2.0, 0.0, 0.7, 1.0]  # the last two are constant
    paid = random.normal(size=(hosts, 3))
    spread = context[:, :3].std(axis=0)
    pull = np.sqrt(hosts * penalty) * np.column_stack([np.diag(spread), np.zeros(3)])
    rows = np.vstack([np.delete(context, 3, axis=1), pull])
    targets = np.vstack([paid, np.zeros((3, 3))])
    expected = np.linalg.lstsq(rows, targets, rcond=None)[0]
    weights = ridge(context, paid, penalty)
    assert_allclose(np.delete(weights, 3, axis=0), expected, rtol=1e-6, atol=1e-8)
    assert_allclose(weights[3], 0.0)


def test_real_hosts_are_learnt_from():
    few = replace(task("digits"), horizon=4, decision_every=2)

    def real(rng_seed):
        names = ("widen_8", "widen_16")
        settings = WorldSettings(blueprints=names, measure_every=2)
        return [GrowingWorld(few, 3, rng_seed, settings=settings)]

    fitted = fit_bandit(real, 100, 0, look=2)
    assert len(fitted.weights) == len(ARMS)
    assert np.isfinite(fitted.weights).all()
    world = real(5)[0]
    assert play(world, fitted(world.spec), Generator()).isfinite().all()
