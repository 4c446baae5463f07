"""An agent with action masks and several heads that depend on each other.

    python examples/ppo_masks_and_heads.py [PLOT.svg]

A robot chooses a tool and its setting. Tool 0 has no setting. The mask forbids the tool
that was used last. `head_relevance` says which setting belongs to which tool.
"""

from typing import Any

import gymnasium
import numpy as np
from _plot import Curves
from gymnasium import spaces

from esper import PPO


class Workshop(gymnasium.Env[Any, Any]):
    """Sixteen jobs; each asks for a tool and a setting. The best return is 16."""

    observation_space = spaces.MultiDiscrete([3, 8, 3])  # tool, setting, hot tool
    action_space = spaces.MultiDiscrete([3, 8, 8])  # tool, setting of 1, setting of 2
    USES = ((True, False, False), (True, True, False), (True, False, True))

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
        """Begin with cold tools."""
        super().reset(**given)
        self.time, self.hot = 0, 0
        return self.next_job()

    def next_job(self) -> tuple[Any, dict[str, Any]]:
        """Draw a job that is possible, and the mask of all heads in a row."""
        legal = np.array([True, self.hot != 1, self.hot != 2])
        self.tool = int(self.np_random.choice(np.flatnonzero(legal)))
        self.setting = int(self.np_random.integers(8))
        mask = np.concatenate([legal, np.ones(16, bool)])
        return np.array([self.tool, self.setting, self.hot]), {"action_mask": mask}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Use a tool."""
        tool = self.hot = int(action[0])
        right = tool == self.tool and (not tool or action[tool] == self.setting)
        self.time += 1
        observation, info = self.next_job()
        return observation, float(right), False, self.time == 16, info


def main(steps: int = 100_000) -> dict[str, float]:
    """Train with and without causal heads and return the mean returns."""
    curves = Curves("Masks and causal heads")
    for name, table in (("independent heads", None), ("head_relevance", Workshop.USES)):
        agent = PPO(Workshop, num_envs=16, head_relevance=table, seed=0)
        agent.learn(steps, progress=True, callback=curves.add(name))
    return curves.finish()


if __name__ == "__main__":
    main()
