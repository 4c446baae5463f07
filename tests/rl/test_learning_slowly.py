"""What `esper.PPO` must learn, with its default settings, in minutes."""

import pytest
from gymnasium.vector import AutoresetMode

from benchmarks.rl_tasks import HiddenVelocity, Tools
from esper import PPO
from tests.rl.environments import Aim, Endless, Remembered, vector
from tests.rl.test_learning import learnt, value

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("memory", ["gru", "lstm"])
def test_what_was_shown_three_steps_ago(memory):
    agent = learnt(Remembered, 24_000, memory=memory)
    assert agent.evaluate(64).mean > 0.95


def test_cartpole():
    agent = PPO("CartPole-v1", seed=0).learn(100_000)
    assert agent.evaluate(20).mean > 475


def test_cartpole_with_hidden_velocities():
    agent = PPO(HiddenVelocity, memory="mingru", seed=0).learn(200_000)
    assert agent.evaluate(20).mean > 450


@pytest.mark.parametrize("mode", [*AutoresetMode])
def test_t27_a_truncated_episode_is_worth_what_would_have_come(mode):
    env = vector(Endless, 16, mode)
    agent = learnt(env, 16_000, gamma=0.9, gae_lambda=0.9)
    assert value(agent, (0, 1))[0] == pytest.approx(10.0, rel=0.1)


def test_a_number_in_the_units_of_its_space():
    agent = learnt(Aim, 60_000)
    assert agent.evaluate(64).mean > -0.02


def test_a_factored_causal_masked_action():
    """The op is the first head; each tool reads one setting, resting reads none."""

    agent = learnt(Tools, 60_000, head_relevance=Tools.RELEVANT)
    assert agent.evaluate(32).mean > 15
