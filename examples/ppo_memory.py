"""An agent that must repeat the card it saw four steps ago (POPGym's RepeatPrevious).

    python examples/ppo_memory.py [PLOT.svg]

Every step shows one of four suits. The action must name the suit of four steps ago. An
agent without memory can only guess. This takes about a minute.
"""

from typing import Any

import gymnasium
import numpy as np
from _plot import Curves
from gymnasium import spaces

from esper import PPO


class RepeatPrevious(gymnasium.Env[int, int]):
    """Reward 1/48 for each right suit and -1/48 for each wrong one."""

    observation_space = spaces.Discrete(4)
    action_space = spaces.Discrete(4)
    LENGTH, LAG = 52, 4

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Shuffle the cards."""
        super().reset(seed=seed)
        cards = np.repeat(np.arange(4), self.LENGTH // 4)
        self.cards, self.time = self.np_random.permutation(cards), 0
        return int(self.cards[0]), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Compare the action with an earlier card and show the next one."""
        reward = 0.0
        if self.time >= self.LAG:
            right = action == self.cards[self.time - self.LAG]
            reward = (1.0 if right else -1.0) / (self.LENGTH - self.LAG)
        self.time += 1
        over = self.time == self.LENGTH
        return int(self.cards[self.time - over]), reward, over, False, {}


def main(steps: int = 150_000) -> dict[str, float]:
    """Train with and without memory and return the mean returns."""
    curves = Curves("Repeat the card of four steps ago")
    for memory in ("none", "conv-mingru"):
        agent = PPO(RepeatPrevious, memory=memory, num_envs=16, seed=0)
        agent.learn(steps, progress=True, callback=curves.add(f"memory={memory}"))
    return curves.finish()


if __name__ == "__main__":
    main()
