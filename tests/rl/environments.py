"""Small environments with masks, several heads and all kinds of episode ends."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

SIZES = (3, 2, 5)
"""Sizes of the heads of `Chance`, all different."""
STARTS = (0, 3, 5)


def legal(observation: np.ndarray) -> np.ndarray:
    """A mask that is a hash of the observation; first choices are often illegal."""
    bits = (np.abs(observation).sum() * 1000).astype(np.int64) >> np.arange(10)
    mask = (bits & 1).astype(bool)
    for start, size in zip(STARTS, SIZES, strict=True):
        if not mask[start : start + size].any():
            mask[start + size - 1] = True
    return mask


class Chance(gymnasium.Env):
    """Random observations, rewards and ends, which do not depend on the actions.

    It has three heads and a mask that depends on the observation. Episodes terminate,
    are truncated, or both. An illegal action raises.
    """

    action_space = spaces.MultiDiscrete(SIZES)

    def __init__(self, masks: str = "info") -> None:
        self.masks = masks
        vector = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.observation_space = vector
        if masks == "observation":
            mask = spaces.MultiBinary(sum(SIZES))
            self.observation_space = spaces.Dict(action_mask=mask, seen=vector)
        if masks == "method":
            self.action_masks = lambda: legal(self.seen)

    def _show(self):
        self.seen = self.np_random.standard_normal(4).astype(np.float32)
        if self.masks == "observation":
            mask = legal(self.seen).astype(np.int8)
            return {"action_mask": mask, "seen": self.seen}, {}
        info = {"action_mask": legal(self.seen)} if self.masks == "info" else {}
        return self.seen, info

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        return self._show()

    def step(self, action):
        if self.masks != "none":
            assert legal(self.seen)[np.add(action, STARTS)].all(), "illegal"
        reward = float(self.np_random.standard_normal())
        ends = self.np_random.random(2) < 0.15
        observation, info = self._show()
        return observation, reward, bool(ends[0]), bool(ends[1]), info


def table_of(seen):
    """Legal choices given each choice of the first head, which rotates the mask."""
    rows = np.stack([np.roll(legal(seen), op) for op in range(SIZES[0])])
    rows[:, [STARTS[1], STARTS[2]]] = True
    rows[:, :3] = False
    rows[[0, 1, 2], [0, 1, 2]] = legal(seen)[:3]
    return rows


class Tabled(Chance):
    """Legal choices of the second and third head depend on the first."""

    def _show(self):
        observation, _ = super()._show()
        return observation, {"action_mask": table_of(observation)}

    def step(self, action):
        assert table_of(self.seen)[action[0], np.add(action, STARTS)].all(), "illegal"
        self.masks = "none"
        return super().step(action)


def vector(make, envs: int, mode: AutoresetMode) -> SyncVectorEnv:
    return SyncVectorEnv([make] * envs, autoreset_mode=mode)


class Native(VectorEnv):
    """A vector environment of its own class, with autoreset in the same step."""

    def __init__(self, make, envs: int) -> None:
        self.inner = [make() for _ in range(envs)]
        self.num_envs = envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = self.inner[0].observation_space
        self.single_action_space = self.inner[0].action_space
        self.observation_space = batch_space(self.single_observation_space, envs)
        self.action_space = batch_space(self.single_action_space, envs)

    def _batch(self, rows):
        space = self.single_observation_space
        return concatenate(space, rows, create_empty_array(space, self.num_envs))

    def reset(self, *, seed=None, options=None):
        found = [env.reset(seed=seed + i) for i, env in enumerate(self.inner)]
        return self._batch([o for o, _ in found]), self._info([i for _, i in found])

    def _info(self, infos):
        if "action_mask" not in infos[0]:
            return {}
        return {"action_mask": np.stack([info["action_mask"] for info in infos])}

    def step(self, actions):
        found = [env.step(a) for env, a in zip(self.inner, actions, strict=True)]
        shown, rewards, *ends, infos = map(list, zip(*found, strict=True))
        terminated, truncated = map(np.array, ends)
        finals = list(shown)
        for i, env in enumerate(self.inner):
            if terminated[i] or truncated[i]:
                shown[i], infos[i] = env.reset()
        info = self._info(infos)
        if (terminated | truncated).any():
            info["final_obs"] = self._batch(finals)
        return self._batch(shown), np.array(rewards), terminated, truncated, info


class Probe(gymnasium.Env):
    """Base class: an observation of two numbers and a fixed horizon."""

    observation_space = spaces.Box(-5.0, 5.0, (2,), np.float32)
    action_space: gymnasium.Space = spaces.Discrete(2)
    horizon = 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.goal = int(self.np_random.integers(2))
        return self.show(), self.info()

    def step(self, action):
        reward = self.reward(action)
        self.time += 1
        done = self.time >= self.horizon
        return self.show(), float(reward), done, False, self.info()

    def show(self):
        return np.array([self.time, self.goal], np.float32)

    def reward(self, action):
        return 1.0

    def info(self):
        return {}


class Late(Probe):
    """The reward follows the second step."""

    horizon = 2

    def reward(self, action):
        return float(self.time == 1)


class Seen(Probe):
    """The observation contains the right action."""

    def reward(self, action):
        return float(action == self.goal)


class Remembered(Probe):
    """The observation three steps earlier contained the right action."""

    horizon = 4

    def show(self):
        shown = self.goal if self.time == 0 else 0.5
        return np.array([self.time, shown], np.float32)

    def reward(self, action):
        return float(self.time == 3 and action == self.goal)


class Masked(Probe):
    """The best of four actions is illegal in half of the episodes."""

    action_space = spaces.Discrete(4)

    def reward(self, action):
        return float(action) / 3

    def info(self):
        return {"action_mask": np.array([True, True, True, self.goal == 1])}


class Endless(Probe):
    """Reward 1 per step, truncated at random: the value is 1 / (1 - gamma)."""

    horizon = 10**9

    def step(self, action):
        *rest, _, info = super().step(action)
        self.time = 0
        return (*rest, bool(self.np_random.random() < 0.2), info)

    def show(self):
        return np.array([0.0, 1.0], np.float32)


class Aim(Probe):
    """A continuous action must hit a target that the observation determines."""

    action_space = spaces.Box(-10.0, 30.0, (1,), np.float32)

    def reward(self, action):
        goal = 5.0 if self.goal else 20.0
        return -(((float(action[0]) - goal) / 20.0) ** 2)


class Factored(gymnasium.Env):
    """Choose one of three tools; two of them have a setting of their own.

    The observation contains the right tool and the right setting. A tool other than 0
    is illegal in the step after its use.
    """

    observation_space = spaces.Dict(
        need=spaces.Discrete(3), digit=spaces.Discrete(4), worn=spaces.Discrete(3)
    )
    action_space = spaces.Dict(
        tool=spaces.Discrete(3),
        first=spaces.Discrete(4),
        second=spaces.Discrete(4),
    )
    HEADS = ("first", "second", "tool")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.worn = 0, 0
        return self._show()

    def _show(self):
        usable = [tool for tool in range(3) if tool == 0 or tool != self.worn]
        self.need = int(self.np_random.choice(usable))
        self.digit = int(self.np_random.integers(4))
        seen = {"need": self.need, "digit": self.digit, "worn": self.worn}
        mask = {
            "tool": np.array([tool in usable for tool in range(3)]),
            "first": np.ones(4, bool),
            "second": np.ones(4, bool),
        }
        return seen, {"action_mask": mask}

    def step(self, action):
        tool = int(action["tool"])
        assert tool == 0 or tool != self.worn, "worn"
        right = tool == self.need
        if right and tool:
            right = int(action["first" if tool == 1 else "second"]) == self.digit
        self.worn, self.time = tool, self.time + 1
        observation, info = self._show()
        return observation, float(right), False, self.time >= 16, info
