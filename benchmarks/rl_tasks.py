"""Environments of the learning benchmark that Gymnasium does not have.

Each needs one thing: memory, masks, or heads that matter for some choices only. The
best return is known in all but `HiddenVelocity`, where it is that of CartPole.
"""

from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Step = tuple[Any, float, bool, bool, dict[str, Any]]
Shown = tuple[Any, dict[str, Any]]


class HiddenVelocity(gymnasium.ObservationWrapper[Any, Any, Any]):
    """CartPole without its two velocities."""

    def __init__(self) -> None:
        env = gymnasium.make("CartPole-v1", disable_env_checker=True)
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, spaces.Box)
        self.observation_space = spaces.Box(space.low[[0, 2]], space.high[[0, 2]])

    def observation(self, observation: Any) -> Any:  # noqa: ANN401
        """Position and angle."""
        return observation[[0, 2]]


class TMaze(gymnasium.Env[Any, Any]):
    """A corridor of 50 cells; what is shown at its beginning says where to turn.

    Passive T-maze (Ni et al. 2023, https://arxiv.org/abs/2307.03864): steps that do not
    lead ahead cost 1/50, turning to the right side at the junction pays 1. The best
    return is 1; without memory it is 0.5.
    """

    LENGTH: Final = 50
    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(4)  # ahead, back, up, down

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Shown:
        """Draw the side and begin."""
        super().reset(seed=seed)
        self._side = int(self.np_random.choice([-1, 1]))
        self._at = self._time = 0
        return self._seen(), {}

    def _seen(self) -> NDArray[np.float32]:
        is_start, is_junction = self._time == 0, self._at == self.LENGTH
        row = [is_start, is_junction, self._side * is_start]
        return np.array(row, np.float32)

    def step(self, action: Any) -> Step:  # noqa: ANN401
        """Walk, or turn."""
        self._time += 1
        is_over = self._time > self.LENGTH
        reward = 0.0
        if is_over and self._at == self.LENGTH:
            reward = float(action == (2 if self._side > 0 else 3))
        move = {0: 1, 1: -1}.get(int(action), 0)
        self._at = min(max(self._at + move, 0), self.LENGTH)
        if not is_over and self._at < self._time:
            reward -= 1.0 / self.LENGTH
        return self._seen(), reward, is_over, False, {}


class Repeat(gymnasium.Env[Any, Any]):
    """Say which of four symbols was shown two steps ago; the best return is 1."""

    SYMBOLS: Final = 4
    BACK: Final = 2
    LENGTH: Final = 32
    observation_space = spaces.Discrete(SYMBOLS)
    action_space = spaces.Discrete(SYMBOLS)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Shown:
        """Draw all symbols."""
        super().reset(seed=seed)
        self._symbols = self.np_random.integers(self.SYMBOLS, size=self.LENGTH + 1)
        self._time = 0
        return int(self._symbols[0]), {}

    def step(self, action: Any) -> Step:  # noqa: ANN401
        """Compare."""
        asked = self._time - self.BACK
        is_right = asked >= 0 and int(action) == self._symbols[asked]
        self._time += 1
        over = self._time == self.LENGTH
        reward = is_right / (self.LENGTH - self.BACK)
        return int(self._symbols[self._time]), reward, over, False, {}


class Scheduling(gymnasium.Env[Any, Any]):
    """One machine, eight jobs with lengths and weights; each is done once.

    The return is minus the weighted completion time over that of the best order, which
    is known (Smith 1956: by weight per length): at best -1. A mask forbids jobs that
    are done.
    """

    JOBS: Final = 8
    observation_space = spaces.Box(0.0, 1.0, (3 * JOBS,), np.float32)
    action_space = spaces.Discrete(JOBS)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Shown:
        """Draw the jobs."""
        super().reset(seed=seed)
        self._lengths, self._weights = self.np_random.uniform(0.1, 1.0, (2, self.JOBS))
        self._open = np.ones(self.JOBS, bool)
        self._clock = 0.0
        order = np.argsort(-self._weights / self._lengths)
        ends = np.cumsum(self._lengths[order])
        self._best = float((self._weights[order] * ends).sum())
        return self._seen(), {}

    def _seen(self) -> NDArray[np.float32]:
        row = (self._lengths * self._open, self._weights * self._open, self._open)
        return np.concatenate(row).astype(np.float32)

    def action_masks(self) -> NDArray[np.bool_]:
        """Jobs that are not done."""
        return self._open.copy()

    def step(self, action: Any) -> Step:  # noqa: ANN401
        """Do a job; one that is done already only costs."""
        job = int(action)
        self._clock += self._lengths[job]
        reward = -self._weights[job] * self._clock / self._best
        self._open[job] = False
        return self._seen(), float(reward), not self._open.any(), False, {}


class Tools(gymnasium.Env[Any, Any]):
    """Choose one of three tools, of which two have a setting that only they read.

    Shown are the tool that is needed (0 rests) and a digit, which its setting must be.
    The tool that was used last is worn and may not be used again at once. Sixteen
    steps; the best return is 16.
    """

    RELEVANT: Final = ((True, False, False), (True, True, False), (True, False, True))
    LENGTH: Final = 16
    observation_space = spaces.MultiDiscrete([3, 4, 3])
    action_space = spaces.MultiDiscrete([3, 4, 4])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Shown:
        """Begin rested."""
        super().reset(seed=seed)
        self._time, self._worn = 0, 0
        return self._show()

    def _show(self) -> Shown:
        usable = np.array([tool == 0 or tool != self._worn for tool in range(3)])
        self._need = int(self.np_random.choice(np.flatnonzero(usable)))
        self._digit = int(self.np_random.integers(4))
        mask = np.concatenate((usable, np.ones(8, bool)))
        seen = np.array([self._need, self._digit, self._worn])
        return seen, {"action_mask": mask}

    def step(self, action: Any) -> Step:  # noqa: ANN401
        """Use a tool."""
        tool = int(action[0])
        is_right = tool == self._need
        if is_right and tool:
            is_right = int(action[tool]) == self._digit
        self._worn, self._time = tool, self._time + 1
        observation, info = self._show()
        return observation, float(is_right), False, self._time >= self.LENGTH, info
