"""Environments that are given, and environments in a few processes."""

import pickle
from functools import partial

import gymnasium
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from esper import PPO
from esper.contracts.errors import (
    EsperWarning,
    InvalidInputError,
    InvalidStateError,
    WorkersError,
)
from esper.rl.callbacks import EvalCallback
from esper.rl.vector import Vector
from tests.hostile_envs import Tame
from tests.rl.environments import Chance, Seen, vector
from tests.rl.test_ppo import assert_same_agents, chance

SMALL = {"width": 8, "rollout_steps": 12}


def test_an_environment_can_be_given_itself(tmp_path):
    env = gymnasium.make("CartPole-v1")
    agent = PPO(env, seed=3, **SMALL).learn(48)
    assert (agent.settings.num_envs, agent.env_steps) == (1, 48)
    by_id = PPO("CartPole-v1", num_envs=1, seed=3, **SMALL).learn(48)
    assert_same_agents(agent, by_id)
    standing = env.unwrapped.state
    assert agent.evaluate(3).mean == by_id.evaluate(3).mean
    assert env.unwrapped.state is standing  # it played in an environment of its own
    agent.save(tmp_path / "agent")
    loaded = PPO.load(tmp_path / "agent", env=env)
    assert (loaded.learn(12).settings.num_envs, loaded.env_steps) == (1, 60)
    assert loaded.evaluate(2, env=gymnasium.make("CartPole-v1")).lengths.sum() > 2
    agent.close()


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (
            Seen,
            {"num_envs": 4},
            "num_envs must be 1, .* got 4. For more, pass an id or",
        ),
        (
            lambda: vector(Seen, 2, AutoresetMode.NEXT_STEP),
            {"num_envs": 3},
            "num_envs must be 2, the number of environments in env, got 3",
        ),
        (
            Seen,
            {"vectorization": "async"},
            "'async' makes new environments. Pass an id",
        ),
        (
            lambda: partial(lambda env: env, Seen()),
            {"num_envs": 2},
            "the function returned the same environment twice. Make a new one",
        ),
    ],
)
def test_what_a_given_environment_cannot_do_is_refused(make, options, words):
    with pytest.raises(InvalidInputError, match=words):
        PPO(make(), **options)


class Plural(Seen):
    """Has its mask under the name of SB3's method."""

    def info(self):
        return {"action_masks": [1, 1]}


def test_a_mask_under_another_name_is_a_warning():
    with pytest.warns(EsperWarning, match="is not read. Name it 'action_mask'"):
        PPO(Plural, num_envs=1, **SMALL).learn(12)


def test_an_environment_without_a_spec_is_evaluated_elsewhere():
    class Plain(gymnasium.Wrapper):
        """Does not record its arguments, so that it cannot be made again."""

    for env in (Seen(), Plain(gymnasium.make("CartPole-v1"))):
        agent = PPO(env, **SMALL).learn(12)
        with pytest.raises(InvalidInputError, match=r"cannot be copied; give evaluate"):
            agent.evaluate(2)
        with pytest.raises(InvalidInputError, match=r"cannot be copied; give evaluate"):
            agent.learn(12, callback=EvalCallback())
        assert len(agent.evaluate(2, env=env).returns) == 2
        assert agent.learn(12).rounds == 2


@pytest.mark.parametrize("masks", ["info", "observation", "method", "none"])
def test_a_few_processes_give_the_same_to_the_bit(masks):
    ours = {"num_envs": 5, "seed": 3, **SMALL}
    here = PPO(chance(masks), **ours).learn(120)
    there = PPO(chance(masks), vectorization="async", num_workers=2, **ours).learn(120)
    assert len(there.world.env.processes) == 2
    assert_same_agents(here, there)
    there.close()


class Nested(Chance):
    """Several parts and a text, seen and done."""

    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,))))

    def __init__(self):
        super().__init__("none")
        seen = self.observation_space
        self.observation_space = spaces.Dict(seen=seen, time=spaces.Discrete(2))

    def _show(self):
        seen, info = super()._show()
        return {"seen": seen, "time": int(seen[0] > 0)}, info


def test_nested_actions_reach_the_right_process():
    ours = {"num_envs": 3, "seed": 3, **SMALL}
    here = PPO(Nested, **ours).learn(72)
    there = PPO(Nested, vectorization="async", num_workers=2, **ours).learn(72)
    assert_same_agents(here, there)
    there.close()


def test_processes_are_as_many_as_cores_and_at_most_as_environments(monkeypatch):
    monkeypatch.setattr("esper.rl.vector.available_cores", lambda: 3)
    for envs, workers, expected in ((5, None, 3), (2, None, 2), (2, 4, 2), (5, 1, 1)):
        found = Vector(Tame, envs, "async", num_workers=workers)
        assert len(found.env.processes) == expected
        assert found.reset().features["vector"].shape[0] == envs
        found.close()
        assert not any(process.is_alive() for process in found.env.processes)


class Third(Tame):
    """The third environment of a process raises, or ends its process."""

    made = 0
    harm = staticmethod(lambda: 1 / 0)

    def __init__(self):
        type(self).made += 1
        self.index = self.made

    def step(self, action):
        return type(self).harm() if self.index == 3 else super().step(action)


class Dies(Third):
    harm = staticmethod(lambda: __import__("os")._exit(1))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (Third, InvalidInputError, r"in step\(\) at step 0 of environment 2: ZeroDiv"),
        (Dies, WorkersError, r"the process of environment 2 of Dies died in step\(\)"),
    ],
)
def test_an_error_names_the_environment_within_its_process(make, error, words):
    made = Vector(make, 4, "async", num_workers=1)
    made.reset()
    with pytest.raises(error, match=words):
        made.step(torch.zeros(4, 1, dtype=torch.int64))
    assert not any(process.is_alive() for process in made.env.processes)


def half(progress):
    return 1.0 - progress / 2


def test_settings_can_be_pickled():
    for given in ({}, {"schedule": half, "head_entropy": {"action": 0.1}}):
        agent = PPO(Seen, num_envs=2, **given, **SMALL)
        again = pickle.loads(pickle.dumps(agent.settings))
        assert again == agent.settings
        assert again.factors(0.5) == agent.settings.factors(0.5)
        with pytest.raises(InvalidStateError, match="Use save and PPO"):
            pickle.dumps(agent)


def test_an_agent_says_what_it_is(tmp_path):
    agent = PPO("CartPole-v1", num_envs=2, memory="gru", **SMALL).learn(24)
    rest = "memory='gru', width=8, env_steps=24"
    assert repr(agent) == f"PPO(CartPole-v1 x 2, vector [4] -> action, {rest})"
    agent.save(tmp_path / "agent")
    assert repr(PPO.load(tmp_path / "agent")).startswith(
        "PPO(no environment, vector [4] ->"
    )
    several = repr(PPO(Nested, num_envs=2, **SMALL))
    assert "Nested x 2, vector [6] -> 0, 1.0, 1.1, memory='none'" in several
