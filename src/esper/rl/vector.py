"""Gymnasium's vector environments, whatever their autoreset mode, as one kind of world.

An episode that ended is followed by the first observation of the next one:

    SAME_STEP   it comes with the last step; the true final observation is in
                `info["final_obs"]`
    NEXT_STEP   it comes one step later; that step ignores its action and is not counted
    DISABLED    we ask for it, by `reset(options={"reset_mask": ...})`

Masks come from a Dict observation, from `info["action_mask"]` or from the method
`action_masks()`, and always belong to the observation beside them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import Env, Space, spaces
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import BadInput, EsperError, WorkersTrouble
from esper.rl.spaces import MASK, SpaceSpec

Array = NDArray[Any]
Source = str | Callable[[], Env[Any, Any]] | VectorEnv[Any, Any, Any]
KINDS: Final = ("sync", "async", "native")
METHOD: Final = "action_masks"


@dataclass(frozen=True, slots=True)
class View:
    """What all environments show before they act."""

    observation: Any
    """As the batched observation space has it."""
    rows: Bool[Tensor, "env *op head choice"] | None
    """What each head may choose, as `SpaceSpec.rows` says; None is everything."""
    first: Array
    """Whether the observation is the first of an episode."""
    acts: Array
    """Whether the next action counts: False where an environment is about to reset."""
    where: str = ""
    """Name and step of the environments, for refusals."""


@dataclass(frozen=True, slots=True)
class VectorStep:
    """What came of one action of all environments."""

    view: View
    rewards: Array
    terminated: Array
    truncated: Array
    final: Any
    """The last observation of truncated episodes, where there are any; else None."""


class SyncEnvs(SyncVectorEnv):
    """Gymnasium's, resetting in the same step, with a step of a fifth less overhead.

    Infos keep what is read here: final observations and masks, as lists.
    """

    at = 0
    """The environment that was called last."""

    def __init__(self, makers: Sequence[Callable[[], Env[Any, Any]]]) -> None:
        super().__init__(makers, autoreset_mode=AutoresetMode.SAME_STEP)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:  # noqa: ANN401
        """Act everywhere; an episode that ended is followed by the next one."""
        space, found = self.single_observation_space, []
        each = zip(self.envs, iterate(self.action_space, actions), strict=True)
        for self.at, (env, action) in enumerate(each):
            found.append(env.step(action))
        shown, rewards, *ends, infos = map(list, zip(*found, strict=True))
        terminated, truncated = np.array(ends, bool)
        info: dict[str, Any] = {}
        for at in np.flatnonzero(terminated | truncated):
            finals = info.setdefault("final_obs", [None] * self.num_envs)
            finals[at] = deepcopy(shown[at])  # a reset may write over it
            self.at = int(at)
            shown[at], infos[at] = self.envs[at].reset()
        there = [MASK in each for each in infos]
        if any(there):
            info[MASK] = [each.get(MASK) for each in infos]
            info[f"_{MASK}"] = np.array(there)
        return (
            _batch(space, shown),
            np.array(rewards, np.float64),
            terminated,
            truncated,
            info,
        )


def _batch(space: Space[Any], shown: list[Any]) -> Any:  # noqa: ANN401
    """Observations of all environments, as the batched space has them."""
    if type(space) is spaces.Box:  # faster than Gymnasium's way
        return np.array(shown).astype(space.dtype, casting="same_kind", copy=False)
    blank: Any = create_empty_array(space, len(shown), np.empty)
    return concatenate(space, shown, blank)


class Vector:
    """All environments, stepped together.

    Args:
        source: The id of an environment, a function that makes one, or a vector
            environment, which keeps its autoreset mode.
        envs: How many to make; a vector environment has its own number.
        kind: "sync" steps them in this process, "async" each in a process of its own;
            "native" is the id's own vector environment.
        relevant: As in `SpaceSpec`.
        masks: Where masks come from: "observation", "info", "method", None for
            nowhere; "auto" finds out.
    """

    def __init__(
        self,
        source: Source,
        envs: int = 8,
        kind: str = "sync",
        relevant: tuple[tuple[bool, ...], ...] | None = None,
        masks: str | None = "auto",
    ) -> None:
        self.name = _name(source)
        self.env = (
            source if isinstance(source, VectorEnv) else _made(source, envs, kind)
        )
        self.num_envs = int(self.env.num_envs)
        mode = self.env.metadata.get("autoreset_mode")
        if mode is None:
            raise BadInput(
                f"{self.name} does not say how it resets; set its "
                "metadata['autoreset_mode'] to a gymnasium.vector.AutoresetMode."
            )
        self.mode = AutoresetMode(mode)
        self.spec = SpaceSpec(
            self.env.single_observation_space, self.env.single_action_space, relevant
        )
        if masks not in ("auto", "observation", "info", "method", None):
            raise BadInput(
                f"masks must be auto, observation, info, method or None, got {masks!r}."
            )
        self._base = self.env.unwrapped
        self._finds_masks = masks == "auto"
        self._masks = masks
        self._ended = np.zeros(self.num_envs, bool)
        self._method: Callable[[], Any] | None = None
        self.steps = 0
        """Steps since the environments were made."""

    def reset(self, seed: int | None) -> View:
        """Begin an episode everywhere."""
        if isinstance(self._base, AsyncVectorEnv):
            with suppress(NoAsyncCallError):  # unless a step was interrupted
                self._base.step_wait()
        observation, info = self._call("reset", seed=seed)
        if self._masks == "auto":
            self._masks = self._mask_source(info)
        self._ended = np.zeros(self.num_envs, bool)
        return self._view(observation, info, ~self._ended, ~self._ended)

    def step(self, actions: Any) -> VectorStep:  # noqa: ANN401
        """Act everywhere."""
        observation, rewards, terminated, truncated, info = self._call("step", actions)
        self.steps += 1
        terminated, truncated = (
            np.array(x, bool, copy=True) for x in (terminated, truncated)
        )
        ended, before, final = terminated | truncated, self._ended, None
        had_future = (truncated & ~terminated).any()
        everyone = np.ones(self.num_envs, bool)
        if self.mode is AutoresetMode.NEXT_STEP:
            self._ended = ended
            final = observation if had_future else None
            view = self._view(observation, info, before, ~ended)
        elif self.mode is AutoresetMode.DISABLED and ended.any():
            final = deepcopy(observation) if had_future else None
            options = {"reset_mask": ended}
            observation, fresh = self._call("reset", options=options)
            view = self._view(observation, _joined(info, fresh, ended), ended, everyone)
        else:
            if had_future:
                final = self._final(observation, info, ended)
            view = self._view(observation, info, ended, everyone)
        rewards = np.asarray(rewards).astype(np.float32)
        return VectorStep(view, rewards, terminated, truncated, final)

    def close(self) -> None:
        """End the environments' processes, if they have any."""
        self.env.close()

    def _call(self, name: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call the environments; what they raise becomes one line."""
        return self._guarded(name, partial(getattr(self.env, name), *args, **options))

    def _guarded(self, name: str, call: Callable[[], Any]) -> Any:  # noqa: ANN401
        try:
            return call()
        except EsperError:
            raise
        except Exception as error:
            raise self._failure(name, error) from error

    def _failure(self, call: str, error: Exception) -> EsperError:
        """What environments raised, in one line that names which of them and when."""
        when = f"in {call}() at step {self.steps}"
        if isinstance(self._base, AsyncVectorEnv):
            lost = isinstance(error, EOFError | ConnectionError)
            sentinels = [process.sentinel for process in self._base.processes]
            # A pipe breaks a moment before its process is gone.
            ended = wait(sentinels, timeout=5.0) if lost else []
            dead = [at for at, each in enumerate(sentinels) if each in ended]
            # Closing it would wait for calls that are under way, or raise what they do.
            for process in self._base.processes:
                process.kill()
                process.join()
            self._base.closed = True
            if lost:
                which = f" {dead[0]}" if dead else ""
                return WorkersTrouble(
                    f"the process of environment{which} of {self.name} died {when}."
                )
        who = f" of environment {self.env.at}" if isinstance(self.env, SyncEnvs) else ""
        what = " ".join(str(error).split())[:120]
        return BadInput(
            f"{self.name} raised {type(error).__name__} {when}{who}: {what}"
        )

    def _view(
        self,
        observation: Any,  # noqa: ANN401
        info: Mapping[str, Any],
        first: Array,
        acts: Array,
    ) -> View:
        rows = self._rows(observation, info, acts)
        where = f" of {self.name} at step {self.steps}"
        return View(observation, rows, first, acts, where)

    def _rows(
        self,
        observation: Any,  # noqa: ANN401
        info: Mapping[str, Any],
        acts: Array,
    ) -> Bool[Tensor, "env *op head choice"] | None:
        """The masks of this moment; all is legal where the action is ignored."""
        if self._masks is None:
            if self._finds_masks and MASK in info and not self.spec.is_continuous:
                raise BadInput(
                    f"{self.name} gave info['{MASK}'] at step {self.steps}, but none "
                    "at reset; give one at every reset and step."
                )
            return None
        if self._masks == "observation":
            masks = observation[MASK]
        elif self._masks == "info":
            masks, there = info.get(MASK), info.get(f"_{MASK}", acts)
            if masks is None or (acts & ~np.asarray(there)).any():
                env = 0 if masks is None else int((acts & ~np.asarray(there)).argmax())
                raise BadInput(
                    f"{self.name} gave no info['{MASK}'] in environment {env} at step "
                    f"{self.steps}; give one at every reset and step."
                )
        else:
            masks = self._ask()
        if isinstance(masks, list) or (  # a tuple is one array for each head
            isinstance(masks, np.ndarray) and masks.dtype == object
        ):
            masks = self._stacked(masks)
        try:
            return self.spec.rows(masks, self.num_envs, acts)
        except BadInput as error:
            what = f"{self.name} at step {self.steps}: {error}"
            raise type(error)(what) from None

    def _stacked(self, masks: list[Any] | Array) -> Array:
        """One array of the masks of each environment; None is where it has ended."""
        if {*map(type, masks)} == {np.ndarray}:
            return np.array([*masks])
        each = [None if m is None else self.spec.mask_row(m) for m in masks]
        known = next((m for m in each if m is not None), self.spec.allowed.numpy())
        full = np.ones_like(known)
        return np.stack([full if m is None else m for m in each])

    def _mask_source(self, info: Mapping[str, Any]) -> str | None:
        """Where this environment has masks."""
        if self.spec.is_continuous:
            return None
        if self.spec.has_mask:
            return "observation"
        if MASK in info:
            return "info"
        if isinstance(self._base, AsyncVectorEnv):  # a question can end its processes
            env = self._base.env_fns[0]()
            found = env.has_wrapper_attr(METHOD)
            env.close()
        elif isinstance(self._base, SyncVectorEnv):
            found = all(env.has_wrapper_attr(METHOD) for env in self._base.envs)
        else:
            found = hasattr(self._base, METHOD)
        return "method" if found else None

    def _ask(self) -> Any:  # noqa: ANN401
        """What the method says: one mask per environment."""
        if self._method is None:  # looking through wrappers takes long
            self._method = self._guarded(METHOD, self._mask_method)
        return self._guarded(METHOD, self._method)

    def _mask_method(self) -> Callable[[], Any]:
        """What asks all environments for their masks."""
        if isinstance(self._base, AsyncVectorEnv):
            call = self._base.call
            return lambda: [*call(METHOD)]
        if isinstance(self._base, SyncVectorEnv):
            methods = [env.get_wrapper_attr(METHOD) for env in self._base.envs]
            return lambda: [method() for method in methods]
        found: Callable[[], Any] = getattr(self._base, METHOD)
        return found

    def _final(self, observation: Any, info: Mapping[str, Any], ended: Array) -> Any:  # noqa: ANN401
        """All observations, with the final ones where episodes ended."""
        finals = info.get("final_obs")
        there = np.asarray(info.get("_final_obs", ended))
        if finals is None or (ended & ~there).any():
            raise BadInput(
                f"{self.name} resets in the same step but gave no info['final_obs'] at "
                f"step {self.steps}; without it a truncated episode cannot be valued."
            )
        space = self.env.single_observation_space
        return _replaced(space, observation, finals, np.flatnonzero(ended))


def _name(source: Source) -> str:
    if isinstance(source, str):
        return source
    if isinstance(source, VectorEnv):
        spec = getattr(source, "spec", None)
        return spec.id if spec is not None else type(source).__name__
    return getattr(source, "__name__", type(source).__name__)


def _made(source: Source, envs: int, kind: str) -> VectorEnv[Any, Any, Any]:
    """A vector environment of that kind, resetting in the same step if it can."""
    if kind not in KINDS:
        raise BadInput(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    if not 1 <= envs <= 65_536:
        raise BadInput(f"envs must lie in 1..65536, got {envs}.")
    if not callable(source) and not isinstance(source, str):
        raise BadInput(
            "env must be an id, a function that makes an environment, or a VectorEnv, "
            f"got {type(source).__name__}."
        )
    if kind == "native":
        if not isinstance(source, str):
            raise BadInput("kind 'native' needs an id; or pass a VectorEnv itself.")
        return _guarded(
            lambda: gymnasium.make_vec(
                source, envs, vectorization_mode="vector_entry_point"
            ),
            source,
        )
    make: Any = source
    if isinstance(source, str):
        # Its checks would be paid for at every step; `esper doctor` checks more.
        make = partial(gymnasium.make, source, disable_env_checker=True)
    if kind == "sync":
        return _guarded(lambda: SyncEnvs([partial(_one, make)] * envs), _name(source))
    same = AutoresetMode.SAME_STEP
    return _guarded(
        lambda: AsyncVectorEnv([make] * envs, autoreset_mode=same), _name(source)
    )


def _one(make: Callable[[], Any]) -> Any:  # noqa: ANN401
    env = make()
    if isinstance(env, VectorEnv):
        raise BadInput("the function makes a VectorEnv; pass what it makes.")
    return env


def _guarded(
    make: Callable[[], VectorEnv[Any, Any, Any]], name: str
) -> VectorEnv[Any, Any, Any]:
    try:
        return make()
    except BadInput:
        raise
    except Exception as error:
        what = " ".join(str(error).split())[:120]
        raise BadInput(
            f"{name} cannot be made: {type(error).__name__}: {what}"
        ) from error


def _replaced(space: Space[Any], batch: Any, finals: Any, at: Array) -> Any:  # noqa: ANN401
    """A copy of batched observations with other rows at some places.

    Args:
        space: Of one observation.
        batch: Observations of all environments.
        finals: The others, as a batch too, or as an array of objects.
        at: The places.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces
        names = list(inner) if isinstance(inner, dict) else range(len(inner))
        parts = [
            _replaced(inner[name], batch[name], _parts(finals, name), at)  # type: ignore[index]
            for name in names
        ]
        return (
            dict(zip(inner, parts, strict=True))
            if isinstance(inner, dict)
            else tuple(parts)
        )
    array = np.array(batch, copy=True)
    for env in at:
        array[env] = finals[env]
    return array


def _parts(finals: Any, name: str | int) -> Any:  # noqa: ANN401
    """One part of final observations."""
    if isinstance(finals, np.ndarray | list):  # one per environment that ended
        return [None if final is None else final[name] for final in finals]
    return finals[name]


def _joined(
    info: Mapping[str, Any], fresh: Mapping[str, Any], reset: Array
) -> dict[str, Any]:
    """The mask of a step, with those of a reset where there was one."""
    if MASK not in info or MASK not in fresh:
        return dict(fresh if MASK in fresh else info)
    old, new = info[MASK], fresh[MASK]
    there = [np.asarray(x.get(f"_{MASK}", np.ones_like(reset))) for x in (info, fresh)]

    def merge(old: Any, new: Any) -> Any:  # noqa: ANN401
        if isinstance(old, Mapping):
            return {name: merge(old[name], new[name]) for name in old}
        merged = np.array(old, copy=True)
        merged[reset] = np.asarray(new)[reset]
        return merged

    flags = np.where(reset, there[1], there[0])
    return {MASK: merge(old, new), f"_{MASK}": flags}
