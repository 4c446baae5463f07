"""Growing a network as a Gymnasium environment, for agents of any library.

    gymnasium.make("esper.environment.gym:esper/Grow-v0", task="digits")
    gymnasium.make_vec("esper.environment.gym:esper/Grow-v0", num_envs=16)

An action is a number (`FlatActions`), an observation a row in [-1, 1] (`flatten`). The
mask is `action_masks()` and `info["action_mask"]`. An action that is not possible is a
WAIT that costs the penalty, with `info["invalid"]` set. The horizon terminates. The
score on the test rows is told in the last info of an episode and nowhere else.

The same seed gives the same episodes; without one, the next episode of the run begins.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.contracts.errors import BadInput, CallOrder
from esper.contracts.observation import Observation
from esper.contracts.stages import Stage
from esper.environment.flat import FlatActions, feature_names, flatten
from esper.environment.settings import GrowSettings
from esper.environment.terms import Ended

try:
    import gymnasium
    from gymnasium.spaces import Box, Discrete
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ModuleNotFoundError as error:
    raise BadInput(
        "esper/Grow-v0 needs gymnasium, which is not installed; "
        "pip install esper-lite[rl]"
    ) from error

ID = "esper/Grow-v0"
Row = NDArray[np.float32]
Info = dict[str, Any]


class GrowEnv(gymnasium.Env[Row, object]):
    """One host that trains and grows.

    Args:
        render_mode: `ansi` for `render()` to say in a line where the host is.
        settings: Fields of `GrowSettings`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self,
        render_mode: str | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise BadInput(f"render_mode must be None or 'ansi', got {render_mode!r}.")
        self.render_mode = render_mode
        self._settings = GrowSettings.named(settings)
        self._world = self._settings.world(1, 0)
        self.actions = FlatActions.of(self._world.spec)
        """What every action means."""
        self.features = feature_names(self._world.spec)
        """What stands in every place of an observation."""
        self.action_space = Discrete(len(self.actions))
        self.observation_space = _box(len(self.features))
        self._see: Observation | None = None
        self._next: Observation | None = None

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Row, Info]:
        """Begin an episode.

        Args:
            seed: Begin a new run: it decides data, hosts, batches and terms. Without
                one, the run goes on with its next episode.
            options: Begin a new run with other terms (rent, budget, rate).
        """
        if seed is not None or options or self._see is None:
            number = _draw(self, seed)
            world = self._settings.world(1, number, options)
            super().reset(seed=seed)
            self._world, self._see = world, world.reset()
        else:
            super().reset()
            self._see = self._world.reset() if self._next is None else self._next
        self._next = None
        return self._row(), {**self._info(), "invalid": False}

    def step(self, action: object) -> tuple[Row, float, bool, bool, Info]:
        """Carry out an action and train until the next decision."""
        if self._see is None or self._next is not None:
            late = "before reset()" if self._see is None else "after the last one"
            raise CallOrder(f"step() {late}; call reset() first.")
        if not self.action_space.contains(action):
            raise BadInput(
                f"action must be a whole number in 0..{len(self.actions) - 1}, got "
                f"{action!r}."
            )
        number = int(np.asarray(action))
        result = self._world.step(self.actions.sentences[number : number + 1])
        self._see, ended = result.observation, self._world.ended
        if ended is not None:
            assert self._world.last is not None
            self._see, self._next = self._world.last, result.observation
        info = {**self._info(), "invalid": bool(self._world.illegal[0])}
        if ended is not None:
            info |= {name: value[0].item() for name, value in _told(ended).items()}
        reward = float(result.reward[0])
        return self._row(), reward, ended is not None, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are possible now."""
        if self._see is None:
            raise CallOrder("action_masks() before reset(); call reset() first.")
        return _numpy(self.actions.possible(self._see)[0])

    def render(self) -> str | None:
        """Where the host is, in a line; None without a render mode."""
        if self.render_mode is None or self._see is None:
            return None
        host, slots = self._see.host, self._see.slots
        seeds = (Stage(stage).name.lower() for stage in slots.stage[0].tolist())
        return (
            f"{float(host.progress[0]):.0%} score {float(host.score[0]):.3f} "
            f"added {float(host.added[0]):.2f} slots {' '.join(seeds)}"
        )

    def _row(self) -> Row:
        assert self._see is not None
        return _numpy(flatten(self._see)[0])

    def _info(self) -> Info:
        return {"action_mask": self.action_masks().astype(np.int8)}


class GrowVectorEnv(VectorEnv[Row, object, NDArray[Any]]):
    """Hosts that train and grow together, much faster than one by one.

    An ended environment begins anew in the same step: its last observation and info are
    in `final_obs` and `final_info`. Environments differ by their number, not by a seed
    of their own; the first is the `GrowEnv` of the seed.

    Args:
        num_envs: How many hosts.
        settings: Fields of `GrowSettings`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:  # noqa: ANN401
        self._settings = GrowSettings.named(settings)
        self._world = self._settings.world(num_envs, 0)
        self.num_envs = num_envs
        self.actions = FlatActions.of(self._world.spec)
        """What every action means."""
        self.features = feature_names(self._world.spec)
        """What stands in every place of an observation."""
        self.single_action_space = Discrete(len(self.actions))
        self.single_observation_space = _box(len(self.features))
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._see: Observation | None = None

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Row, Info]:
        """Begin an episode everywhere; see `GrowEnv.reset`."""
        if seed is not None or options or self._see is None:
            number = _draw(self, seed)
            world = self._settings.world(self.num_envs, number, options)
            super().reset(seed=seed)
            self._see, self._world = world.reset(), world
        else:
            self._see = self._world.reset()
        nobody = np.zeros(self.num_envs, dtype=np.bool_)
        return _numpy(flatten(self._see)), self._info(self._see, ~nobody, nobody)

    def step(
        self, actions: object
    ) -> tuple[Row, NDArray[Any], NDArray[Any], NDArray[Any], Info]:
        """Carry out an action everywhere and train until the next decision."""
        if self._see is None:
            raise CallOrder("step() before reset(); call reset() first.")
        numbers = np.asarray(actions)
        if not (
            numbers.shape == (self.num_envs,)
            and numbers.dtype.kind in "iu"
            and bool(((numbers >= 0) & (numbers < len(self.actions))).all())
        ):
            raise BadInput(
                f"actions must be {self.num_envs} whole numbers in "
                f"0..{len(self.actions) - 1}, got {actions!r:.99}."
            )
        chosen = torch.from_numpy(numbers.astype(np.int64))
        result = self._world.step(self.actions.sentences[chosen])
        self._see = result.observation
        over = _numpy(result.terminated)
        invalid = _numpy(self._world.illegal)
        info = self._info(self._see, np.ones_like(over), invalid & ~over)
        if self._world.ended is not None:
            info |= self._final(self._world.ended, over, invalid & over)
        return (
            _numpy(flatten(self._see)),
            _numpy(result.reward).astype(np.float64),
            over,
            _numpy(result.truncated),
            info,
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are possible now, bool [env, action]."""
        if self._see is None:
            raise CallOrder("action_masks() before reset(); call reset() first.")
        return _numpy(self.actions.possible(self._see))

    def _info(
        self, see: Observation, where: NDArray[np.bool_], invalid: NDArray[np.bool_]
    ) -> Info:
        """What is told of some environments; zero of the others."""
        masks = _numpy(self.actions.possible(see)) & where[:, np.newaxis]
        return _flagged(
            {"action_mask": masks.astype(np.int8), "invalid": invalid}, where
        )

    def _final(
        self, ended: Ended, over: NDArray[np.bool_], invalid: NDArray[np.bool_]
    ) -> Info:
        """The last observation and info of the episodes that ended."""
        assert self._world.last is not None
        rows = np.full(self.num_envs, None, dtype=object)
        last = _numpy(flatten(self._world.last))
        for env in np.flatnonzero(over):
            rows[env] = last[env]
        told = {}
        for name, values in _told(ended).items():
            told[name] = np.zeros(self.num_envs, dtype=values.dtype)
            told[name][over] = values
        info = self._info(self._world.last, over, invalid) | _flagged(told, over)
        return _flagged({"final_obs": rows, "final_info": info}, over)


def _told(ended: Ended) -> dict[str, NDArray[Any]]:
    """What became of the episodes that ended; `test_score` is on the test rows."""
    told = {f.name: _numpy(getattr(ended, f.name)) for f in fields(Ended)}
    del told["env"]
    told["test_score"] = told.pop("test")
    return {
        name: values if values.dtype == np.bool_ else values.astype(np.float64)
        for name, values in told.items()
    }


def _flagged(told: Info, where: NDArray[np.bool_]) -> Info:
    """Each entry with a flag of where it holds, as vector infos are written."""
    return told | {f"_{name}": where.copy() for name in told}


def _draw(env: GrowEnv | GrowVectorEnv, seed: int | None) -> int:
    """The number of a new run: the seed, else one that chance gives."""
    if seed is None:
        return int(env.np_random.integers(2**31))
    if not isinstance(seed, int) or seed < 0:
        raise BadInput(f"seed must be a whole number from 0, got {seed!r:.99}.")
    return int(seed)


def _box(features: int) -> "Box[np.float32]":
    return Box(-1.0, 1.0, (features,), np.float32)


def _numpy(values: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = values.detach().cpu().numpy()
    return array


if ID not in gymnasium.registry:
    gymnasium.register(
        ID,
        entry_point=f"{__name__}:GrowEnv",
        vector_entry_point=f"{__name__}:GrowVectorEnv",
    )
