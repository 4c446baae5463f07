"""An agent that chooses a tool and then its angle: Discrete and Box in one action.

    python examples/ppo_mixed_actions.py [PLOT.svg]

Each tool needs another angle. The agent does not see which tool it used last, and the
same tool twice in a row pays half, so it should change tools at random. That works only
if the angle depends on the tool that was drawn: `autoregressive=True`.
"""

from typing import Any

import gymnasium
import numpy as np
from _plot import Curves
from gymnasium import spaces

from esper import PPO


class Workbench(gymnasium.Env[Any, Any]):
    """Ten cuts with either tool; each pays up to 1."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Dict(
        tool=spaces.Discrete(2), angle=spaces.Box(-90.0, 90.0, (1,), np.float32)
    )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the first cut."""
        super().reset(seed=seed)
        self.time, self.last = 0, 0
        return self.show(), {}

    def show(self) -> Any:  # noqa: ANN401
        """A direction; the angle is relative to it."""
        self.direction = self.np_random.uniform(-1.0, 1.0)
        return np.array([self.direction], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Cut: tool 0 at 45 degrees to the left, tool 1 to the right."""
        wanted = 45.0 * self.direction + (45.0 if action["tool"] else -45.0)
        reward = max(0.0, 1.0 - abs(float(action["angle"][0]) - wanted) / 45.0)
        reward *= 0.5 if self.time and action["tool"] == self.last else 1.0
        self.time, self.last = self.time + 1, action["tool"]
        return self.show(), reward, False, self.time == 10, {}


def main(steps: int = 100_000) -> dict[str, float]:
    """Train both ways and return the mean returns."""
    curves = Curves("Choose a tool, then its angle")
    for chained in (False, True):
        agent = PPO(Workbench, num_envs=16, autoregressive=chained, seed=0)
        agent.learn(steps, callback=curves.add(f"autoregressive={chained}"))
    return curves.finish()


if __name__ == "__main__":
    main()
