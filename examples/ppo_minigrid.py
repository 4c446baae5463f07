"""An agent that opens a door with a key, from images: MiniGrid DoorKey 5x5.

    pip install minigrid
    python examples/ppo_minigrid.py [PLOT.svg]

MiniGrid declares bytes up to 255 and shows codes up to 10. `PPO` scales them by the
largest number seen. The text of the mission is left out with a warning. The agent sees
7 x 7 cells around it. This takes about four minutes.
"""

import warnings
from typing import Any

import gymnasium
from _plot import Curves

from esper import PPO

warnings.filterwarnings("ignore", message=".*is text and is left out")


def make() -> gymnasium.Env[Any, Any]:
    """One environment; importing minigrid registers it."""
    import minigrid  # noqa: F401

    return gymnasium.make("MiniGrid-DoorKey-5x5-v0", disable_env_checker=True)


def main(steps: int = 200_000) -> dict[str, float]:
    """Train with and without memory and return the mean returns."""
    curves = Curves("MiniGrid DoorKey 5x5 from images")
    for memory in ("none", "conv-mingru"):
        agent = PPO(make, memory=memory, num_envs=16, seed=0)
        agent.learn(steps, progress=True, callback=curves.add(f"memory={memory}"))
    return curves.finish()


if __name__ == "__main__":
    main()
