"""What `esper.PPO` must learn, with its default settings, through the public door."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from esper import PPO
from tests.rl.environments import (
    Endless,
    Late,
    Masked,
    Probe,
    Remembered,
    Seen,
)

pytestmark = pytest.mark.learns


def learnt(env, steps=8_000, **options) -> PPO:
    options = {"num_envs": 16, "rollout_steps": 64, "seed": 0} | options
    return PPO(env, **options).learn(steps)


def value(agent, *rows):
    """V of first observations."""
    batch = np.array(rows, np.float32)
    normal = torch.from_numpy(agent.observations.moments.normalize(batch))
    first = torch.ones(len(rows), dtype=torch.bool)
    state = agent.policy.initial_state(len(rows))
    return agent.policy.value({"vector": normal}, first, state).numpy()


def test_the_value_of_a_constant_reward():
    agent = learnt(Probe)
    np.testing.assert_allclose(value(agent, (0, 0), (0, 1)), 1.0, atol=0.05)


def test_the_value_depends_on_what_is_seen():
    class Pays(Probe):
        def reward(self, action):
            return float(self.goal)

    np.testing.assert_allclose(value(learnt(Pays), (0, 0), (0, 1)), [0, 1], atol=0.1)


def test_a_choice_is_learnt():
    class Pays(Probe):
        def reward(self, action):
            return float(action == 1)

    assert learnt(Pays).evaluate(64).mean == 1.0


def test_t12_a_head_that_matters_on_few_steps_is_learnt():
    """Of two heads, the second is asked for in one episode of thirty."""

    class Rare(Probe):
        action_space = spaces.MultiDiscrete([2, 3])

        def reset(self, **options):
            super().reset(**options)
            self.goal = float(self.np_random.random() < 1 / 30)
            return self.show(), self.info()

        def info(self):
            asked = bool(self.goal)
            return {"action_mask": np.array([True, True, True, asked, asked])}

        def reward(self, action):
            return float(action[1] == 2) if self.goal else float(action[0] == 1)

    agent = learnt(Rare, 24_000)
    mask = np.ones((1, 5), bool)
    seen = np.array([[0.0, 1.0]], np.float32)
    assert agent.predict(seen, action_masks=mask)[0][0, 1] == 2


def test_a_late_reward_is_discounted_once():
    agent = learnt(Late, gamma=0.5)
    early, late = value(agent, (0, 0), (1, 0))
    assert late == pytest.approx(1.0, abs=0.1)
    assert early == pytest.approx(0.5, abs=0.1)


def test_t27_a_truncated_episode_is_worth_what_would_have_come():
    agent = learnt(Endless, 16_000, gamma=0.9, gae_lambda=0.9)
    assert value(agent, (0, 1))[0] == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize("env", [Seen, Masked])
def test_the_best_legal_action(env):
    agent = learnt(env)
    best = 1.0 if env is Seen else (2 / 3 + 1.0) / 2
    assert agent.evaluate(64).mean == pytest.approx(best, abs=0.1)


def test_what_was_shown_three_steps_ago():
    agent = learnt(Remembered, 24_000, memory="mingru")
    assert agent.evaluate(64).mean > 0.95


def test_without_memory_it_cannot_be_known():
    assert learnt(Remembered).evaluate(256).mean < 0.75


def test_the_size_of_rewards_does_not_matter():
    class Large(Seen):
        def reward(self, action):
            return 1000.0 * super().reward(action)

    assert learnt(Large).evaluate(64).mean > 950
