"""Gymnasium vector environments with one interface for all autoreset modes.

The autoreset mode decides when the first observation of the next episode arrives:

    SAME_STEP   with the last step; `info["final_obs"]` has the final observation
    NEXT_STEP   one step later; that step ignores its action and is not counted
    DISABLED    after `reset(options={"reset_mask": ...})`, which is called here

Errors of an environment, also `SystemExit`, are raised again as one line.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from multiprocessing import TimeoutError as WaitTimeout
from multiprocessing.connection import wait
from queue import Empty
from threading import Thread
from typing import Any, Final, Literal, TypeVar, cast, get_args

import gymnasium
import numpy as np
from gymnasium import Env, Space, spaces
from gymnasium.error import CustomSpaceError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import (
    EsperError,
    EsperWarning,
    InvalidInputError,
    NotFiniteError,
    WorkersError,
)
from esper.contracts.messages import described, one_line
from esper.rl.nested import Path, from_parts, value_at
from esper.rl.spaces import MASK, SpaceSpec, require_sizes
from esper.workers.deadline import TIMEOUT, late, timed

T = TypeVar("T")
Array = NDArray[Any]
Source = str | Callable[[], Env[Any, Any]] | VectorEnv[Any, Any, Any]
Vectorization = Literal["sync", "async", "native"]
MaskSource = Literal["auto", "observation", "info", "method"]
MASK_METHOD: Final = "action_masks"
TIMEOUT_SETTING: Final = "env_timeout"
UNUSABLE: Final = "returned an unusable value"
WORKER_ERROR_TIMEOUT: Final = 5.0
"""Seconds to wait for the error, or the exit, of a process that failed."""


@dataclass(frozen=True, slots=True)
class View:
    """Observations and masks of all environments before a step."""

    observation: Any
    """An element of the batched observation space."""
    masks: Bool[Tensor, "env *op head choice"] | None
    """Legal choices, as `SpaceSpec.head_masks` returns them; None: all."""
    episode_start: Array
    """Whether the observation is the first of an episode."""
    acts: Array
    """Whether the next action counts: False where an environment is about to reset."""
    where: str = ""
    """Name and step of the environments, for errors."""


@dataclass(frozen=True, slots=True)
class VectorStep:
    """Result of one step of all environments."""

    view: View
    rewards: Array
    terminated: Array
    truncated: Array
    final: Any
    """Final observations, if an episode was truncated; else None."""


class SyncEnvs(SyncVectorEnv):
    """`SyncVectorEnv` with autoreset in the same step and 20 % less overhead.

    Infos contain final observations and masks only, as lists.
    """

    at = 0
    """Index of the environment that was called last."""

    def __init__(
        self, makers: Sequence[Callable[[], Env[Any, Any]]], seconds: float = TIMEOUT
    ) -> None:
        self._seconds = seconds
        super().__init__(makers, autoreset_mode=AutoresetMode.SAME_STEP)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:  # noqa: ANN401
        """Step all environments and reset those whose episode ended."""
        space, found = self.single_observation_space, []
        each = zip(self.envs, iterate(self.action_space, actions), strict=True)
        for self.at, (env, action) in enumerate(each):
            found.append(env.step(action))
        shown, paid, *ends, infos = map(list, zip(*found, strict=True))
        terminated, truncated = np.array(ends, bool)
        rewards = self._numbers(paid)
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
        return _batch(space, shown), rewards, terminated, truncated, info

    def _numbers(self, rewards: list[Any]) -> Array:
        """Rewards as an array; a reward may be an array with one element."""
        with suppress(ValueError, TypeError):  # the loop below finds which one
            numbers = np.array(rewards, np.float64)
            if numbers.ndim == 1:
                return numbers
        numbers = np.empty(self.num_envs)
        for self.at, reward in enumerate(rewards):
            found = np.asarray(reward, np.float64)
            if found.size != 1:
                raise ValueError(f"the reward has the shape {found.shape}")
            numbers[self.at] = found.item()
        return numbers

    def close_extras(self, **options: Any) -> None:  # noqa: ANN401
        """Close every environment; errors become one warning."""
        close_all([env.close for env in getattr(self, "envs", ())], self._seconds)


class RaisedInWorker(Exception):  # noqa: N818
    """Text of an error in the process of an environment; it can be pickled."""


class ContainedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment in its own process, whose errors can be pickled."""

    def __init__(self, env: Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self._seconds = seconds

    def reset(self, **options: Any) -> Any:  # noqa: ANN401
        """Start an episode."""
        return _contained(partial(self.env.reset, **options))

    def step(self, action: Any) -> Any:  # noqa: ANN401
        """Step the environment."""
        return _contained(partial(self.env.step, action))

    def get_wrapper_attr(self, name: str) -> Any:  # noqa: ANN401
        """An attribute, or a method whose errors can be pickled."""
        found = _contained(partial(super().get_wrapper_attr, name))
        return (lambda: _contained(found)) if callable(found) else found

    def close(self) -> None:
        """Close the environment; an error becomes a warning."""
        close_all([self.env.close], self._seconds)


class UnmadeEnv(gymnasium.Env[Any, Any]):
    """Placeholder for an environment that cannot be made in its process."""

    observation_space: Any = None
    action_space: Any = None

    def __init__(self, why: str) -> None:
        self._why = why

    def get_wrapper_attr(self, name: str) -> Any:  # noqa: ANN401
        """Raise the error of the constructor."""
        raise RaisedInWorker(self._why)


def _contained(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    try:
        return call()
    except BaseException as error:
        raise RaisedInWorker(described(error)) from None


def close_all(closes: Sequence[Callable[[], object]], seconds: float) -> None:
    """Close environments; errors become one warning, since no result is lost."""
    failure: BaseException | None = None
    for close in closes:
        try:
            timed(close, "close() of an environment", seconds, TIMEOUT_SETTING)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = failure or error
            if isinstance(error, WorkersError):  # the others would hang too
                break
    if failure is not None:
        what = f"an environment failed in close(): {described(failure)}"
        warnings.warn(one_line(what), EsperWarning, stacklevel=3)


class AsyncEnvs(AsyncVectorEnv):
    """`AsyncVectorEnv` that also limits the time of constructors and of `close`."""

    def __init__(
        self, makers: Sequence[Callable[[], Env[Any, Any]]], seconds: float
    ) -> None:
        self._seconds = seconds
        mode = AutoresetMode.SAME_STEP
        try:
            try:
                super().__init__(makers, autoreset_mode=mode)
            except ValueError as error:
                if not isinstance(error.__cause__, CustomSpaceError):
                    raise
                # Text, for example, cannot be shared.
                super().__init__(makers, autoreset_mode=mode, shared_memory=False)
        except BaseException:
            kill(self)
            raise

    def close_extras(
        self, timeout: float | None = None, terminate: bool = False
    ) -> None:
        """Ask the processes to exit, and kill those that do not."""
        if self._state is AsyncState.DEFAULT and not terminate:
            for pipe in self.parent_pipes:
                with suppress(OSError, AttributeError):  # of a process that died
                    pipe.send(("close", None))
            until = time.monotonic() + (timeout or self._seconds)
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))
        kill(self)

    def _check_spaces(self) -> None:
        self.call_async("render_mode")  # returns once all constructors returned
        self.call_wait(self._seconds)
        super()._check_spaces()  # type: ignore[no-untyped-call]

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """Raise the first error without Gymnasium's tracebacks."""
        if not all(successes):
            try:
                error = self.error_queue.get(timeout=WORKER_ERROR_TIMEOUT)[2]
            except Empty:
                error = RaisedInWorker("an error that cannot be pickled")
            raise error


def kill(env: AsyncVectorEnv) -> None:
    """Kill all processes of a vector environment."""
    for process in getattr(env, "processes", ()):
        process.kill()
        process.join()
    env.closed = True


def _batch(space: Space[Any], shown: list[Any]) -> Any:  # noqa: ANN401
    """Observations of all environments as an element of the batched space."""
    if type(space) is spaces.Box:  # faster than `concatenate`
        return np.array(shown).astype(space.dtype, casting="same_kind", copy=False)
    blank: Any = create_empty_array(space, len(shown), np.empty)
    return concatenate(space, shown, blank)


class Vector:
    """All environments, stepped together; the parameters are those of `PPO`.

    A vector environment keeps its own `num_envs` and autoreset mode. Environments in
    this process are interrupted after `env_timeout` only in the commands of Esper.
    """

    def __init__(
        self,
        source: Source,
        num_envs: int = 8,
        vectorization: Vectorization = "sync",
        head_relevance: tuple[tuple[bool, ...], ...] | None = None,
        masks: MaskSource | None = "auto",
        env_timeout: float = TIMEOUT,
    ) -> None:
        self.name, self._seconds = _name(source), env_timeout
        self.steps = 0
        """Steps since the environments were made."""
        if isinstance(source, VectorEnv):
            self.env: VectorEnv[Any, Any, Any] = source
        else:
            self.env = _made(source, self.name, num_envs, vectorization, env_timeout)
        try:
            self._inspect(head_relevance, masks)
        except BaseException:
            if not isinstance(source, VectorEnv):
                self.close()
            raise

    def _inspect(
        self,
        head_relevance: tuple[tuple[bool, ...], ...] | None,
        masks: MaskSource | None,
    ) -> None:
        """Read number, spaces and autoreset mode of the environments."""
        self.num_envs = int(self.env.num_envs)
        mode = self.env.metadata.get("autoreset_mode")
        if mode is None:
            raise InvalidInputError(
                f"{self.name} has no autoreset mode. Set its "
                "metadata['autoreset_mode'] to a gymnasium.vector.AutoresetMode."
            )
        self.mode = AutoresetMode(mode)
        seen, acted = self.env.single_observation_space, self.env.single_action_space
        self.spec = SpaceSpec(seen, acted, head_relevance)
        if masks not in (*get_args(MaskSource), None):
            raise InvalidInputError(
                f"masks must be auto, observation, info, method or None, got {masks!r}."
            )
        self._base = self.env.unwrapped
        self._finds_masks = masks == "auto"
        self._masks = masks
        self._ended = np.zeros(self.num_envs, bool)
        self._method: Callable[[], Any] | None = None

    def reset(self, seed: int | None) -> View:
        """Start an episode in every environment."""
        return self._guarded("reset", partial(self._reset, seed), UNUSABLE)

    def step(self, actions: Any) -> VectorStep:  # noqa: ANN401
        """Step every environment."""
        return self._guarded("step", partial(self._step, actions), UNUSABLE)

    def _reset(self, seed: int | None) -> View:
        if isinstance(self._base, AsyncVectorEnv):
            with suppress(NoAsyncCallError):  # unless a step was interrupted
                self._guarded("step", partial(self._base.step_wait, self._seconds))
        observation, info = self._call("reset", seed=seed)
        if self._masks == "auto":
            self._masks = self._guarded("reset", partial(self._mask_source, info))
        self._ended = np.zeros(self.num_envs, bool)
        return self._view(observation, info, ~self._ended, ~self._ended)

    def _step(self, actions: Any) -> VectorStep:  # noqa: ANN401
        observation, rewards, terminated, truncated, info = self._call("step", actions)
        self.steps += 1
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        ended, before, final = terminated | truncated, self._ended, None
        had_future = (truncated & ~terminated).any()
        everyone = np.ones(self.num_envs, bool)
        if self.mode is AutoresetMode.NEXT_STEP:
            self._ended = ended
            final = observation if had_future else None
            view = self._view(observation, info, before, ~ended)
        elif self.mode is AutoresetMode.DISABLED and ended.any():
            final = deepcopy(observation) if had_future else None
            observation, fresh = self._call("reset", options={"reset_mask": ended})
            view = self._view(observation, _joined(info, fresh, ended), ended, everyone)
        else:
            if had_future:
                final = self._final(observation, info, ended)
            view = self._view(observation, info, ended, everyone)
        numbers = self._rewards(rewards, ~before)
        return VectorStep(view, numbers, terminated, truncated, final)

    def _rewards(self, rewards: Any, acted: Array) -> Array:  # noqa: ANN401
        """Rewards `[env]`; raises for NaN and infinity where an action counted."""
        found, step = np.asarray(rewards), self.steps - 1
        if found.size != self.num_envs:
            raise InvalidInputError(
                f"{self.name} gave rewards of the shape {found.shape} at step {step}. "
                f"Return {self.num_envs} numbers."
            )
        found = found.reshape(self.num_envs)
        with np.errstate(over="ignore"):
            numbers = found.astype(np.float32)
        broken = ~np.isfinite(numbers) & acted
        if broken.any():
            env = int(broken.argmax())
            raise NotFiniteError(
                f"{self.name} gave the reward {found[env]} in environment {env} at "
                f"step {step}. Rewards must be finite."
            )
        return numbers

    def close(self) -> None:
        """Close the environments and end their processes."""
        if isinstance(self.env, SyncEnvs | AsyncEnvs):
            self.env.close()
        else:
            close_all([self.env.close], self._seconds)

    def _call(self, name: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call a method of the vector environment with a time limit."""
        if not isinstance(self.env, AsyncVectorEnv):
            call = partial(getattr(self.env, name), *args, **options)
            return self._guarded(name, call, limited=True)
        start = partial(getattr(self.env, f"{name}_async"), *args, **options)
        answer = partial(getattr(self.env, f"{name}_wait"), self._seconds)
        return self._guarded(name, lambda: (start(), answer())[1])

    def _guarded(
        self,
        name: str,
        call: Callable[[], T],
        verb: str = "raised",
        *,
        limited: bool = False,
    ) -> T:
        """The result of a call; raises its errors again as one line."""
        try:
            if not limited:
                return call()
            what = f"{self.name}: {name}() at step {self.steps}"
            return timed(call, what, self._seconds, TIMEOUT_SETTING)
        except (EsperError, NoAsyncCallError, KeyboardInterrupt):
            raise
        except BaseException as error:  # an environment may raise SystemExit
            raise self._failure(name, error, verb) from error

    def _failure(self, call: str, error: BaseException, verb: str) -> EsperError:
        """The error to raise, in one line that names environment and step."""
        when = f"in {call}() at step {self.steps}"
        if isinstance(self._base, AsyncVectorEnv):
            lost = isinstance(error, EOFError | ConnectionError)
            sentinels = [process.sentinel for process in self._base.processes]
            # A pipe breaks a moment before its process is gone.
            ended = wait(sentinels, timeout=WORKER_ERROR_TIMEOUT) if lost else []
            dead = [at for at, each in enumerate(sentinels) if each in ended]
            pipes = enumerate(self._base.parent_pipes)
            slow = [at for at, pipe in pipes if pipe is None or not pipe.poll()]
            # `close` would wait for pending calls, or raise their errors.
            kill(self._base)
            if isinstance(error, WaitTimeout):
                who = f"environment {[*slow, 0][0]} of {self.name}"
                what = f"{who}: {call}() at step {self.steps}"
                return WorkersError(late(what, self._seconds, TIMEOUT_SETTING))
            if lost:
                who = f"environment {dead[0]}" if dead else "environment"
                return WorkersError(f"the process of {who} of {self.name} died {when}.")
        who = f" of environment {self.env.at}" if isinstance(self.env, SyncEnvs) else ""
        what = _text(error).rstrip(".")
        return InvalidInputError(f"{self.name} {verb} {when}{who}: {what}.")

    def _view(
        self,
        observation: Any,  # noqa: ANN401
        info: Mapping[str, Any],
        episode_start: Array,
        acts: Array,
    ) -> View:
        """Observations with their masks; all is legal where actions are ignored."""
        where, masks = f"{self.name} at step {self.steps}", None
        if self._masks is not None:
            found = self._query_masks(observation, info, acts)
            try:
                masks = self.spec.head_masks(found, self.num_envs, acts)
            except InvalidInputError as error:
                raise type(error)(f"{where}: {error}") from None
        elif self._finds_masks and MASK in info and not self.spec.is_continuous:
            raise InvalidInputError(
                f"{self.name} gave info['{MASK}'] at step {self.steps}, but none at "
                "reset. Return one from every reset and step."
            )
        return View(observation, masks, episode_start, acts, f" of {where}")

    def _query_masks(
        self,
        observation: Any,  # noqa: ANN401
        info: Mapping[str, Any],
        acts: Array,
    ) -> Any:  # noqa: ANN401
        """Masks as the environments return them."""
        if self._masks == "observation":
            return observation[MASK]
        if self._masks == "method":
            if self._method is None:  # a search through wrappers is slow
                self._method = self._guarded(MASK_METHOD, self._mask_method)
            return self._guarded(MASK_METHOD, self._method, limited=True)
        masks, there = info.get(MASK), np.asarray(info.get(f"_{MASK}", acts))
        missing = acts & ~there
        if masks is None or missing.any():
            env = 0 if masks is None else int(missing.argmax())
            raise InvalidInputError(
                f"{self.name} gave no info['{MASK}'] in environment {env} at step "
                f"{self.steps}. Return one from every reset and step."
            )
        return masks

    def _mask_source(self, info: Mapping[str, Any]) -> MaskSource | None:
        """Where the environments return masks."""
        if self.spec.is_continuous:
            return None
        if self.spec.has_mask:
            return "observation"
        if MASK in info:
            return "info"
        if isinstance(self._base, AsyncVectorEnv):  # a failed call ends its processes
            env = self._base.env_fns[0]()
            found = env.has_wrapper_attr(MASK_METHOD)
            env.close()
        elif isinstance(self._base, SyncVectorEnv):
            found = all(env.has_wrapper_attr(MASK_METHOD) for env in self._base.envs)
        else:
            found = hasattr(self._base, MASK_METHOD)
        return "method" if found else None

    def _mask_method(self) -> Callable[[], Any]:
        """A function that returns the masks of all environments."""
        if isinstance(self._base, AsyncVectorEnv):
            ask, answer = self._base.call_async, self._base.call_wait
            return lambda: [*(ask(MASK_METHOD), answer(self._seconds))[1]]
        if isinstance(self._base, SyncVectorEnv):
            methods = [env.get_wrapper_attr(MASK_METHOD) for env in self._base.envs]
            return lambda: [method() for method in methods]
        found: Callable[[], Any] = getattr(self._base, MASK_METHOD)
        return found

    def _final(self, observation: Any, info: Mapping[str, Any], ended: Array) -> Any:  # noqa: ANN401
        """All observations, with final observations where episodes ended."""
        finals = info.get("final_obs")
        there = np.asarray(info.get("_final_obs", ended))
        if finals is None or (ended & ~there).any():
            raise InvalidInputError(
                f"{self.name} resets in the same step but gave no info['final_obs'] at "
                f"step {self.steps}. Truncated episodes need it."
            )

        def replaced(path: Path) -> Array:
            array = np.array(value_at(observation, path), copy=True)
            for env in np.flatnonzero(ended).tolist():
                array[env] = _final_part(finals, path, env)
            return array

        return from_parts(self.env.single_observation_space, replaced)


def _name(source: Source) -> str:
    name: object = source
    if isinstance(source, VectorEnv):
        spec = getattr(source, "spec", None)
        name = spec.id if spec is not None else type(source).__name__
    elif not isinstance(source, str):
        name = getattr(source, "__name__", type(source).__name__)
    return one_line(str(name), 80)


def _made(
    source: Source, name: str, num_envs: int, vectorization: str, seconds: float
) -> VectorEnv[Any, Any, Any]:
    """A new vector environment, with autoreset in the same step unless native."""
    if not callable(source) and not isinstance(source, str):
        raise InvalidInputError(
            "env must be an id, a function that makes an environment, or a VectorEnv, "
            f"got {type(source).__name__}."
        )
    what, make = f"{name}: the constructor", cast("Callable[[], Any]", source)
    start: Callable[[], VectorEnv[Any, Any, Any]]
    if isinstance(source, str):
        # Gymnasium's checks slow down every step; `esper doctor` checks more.
        make = partial(gymnasium.make, source, disable_env_checker=True)
    one = partial(_one, lambda: timed(make, what, seconds, TIMEOUT_SETTING))
    if vectorization == "sync":
        start = partial(SyncEnvs, [one] * num_envs, seconds)
    elif vectorization == "async":
        worker = partial(_in_worker, partial(_one, make), one, os.getpid(), seconds)
        start = partial(AsyncEnvs, [worker] * num_envs, seconds)
    elif isinstance(source, str):
        mode = "vector_entry_point"
        native = partial(gymnasium.make_vec, source, num_envs, vectorization_mode=mode)
        start = partial(timed, native, what, seconds, TIMEOUT_SETTING)
    else:
        raise InvalidInputError(
            "vectorization 'native' needs an id. Or pass a VectorEnv itself."
        )
    try:
        return start()
    except (EsperError, KeyboardInterrupt):
        raise
    except WaitTimeout:
        raise WorkersError(late(what, seconds, TIMEOUT_SETTING)) from None
    except BaseException as error:
        raise InvalidInputError(f"{name} cannot be made: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, RaisedInWorker) else described(error)


def _one(make: Callable[[], Any]) -> Any:  # noqa: ANN401
    env = make()
    if isinstance(env, VectorEnv):
        raise InvalidInputError("the function makes a VectorEnv; pass what it makes.")
    require_sizes(env.observation_space)
    return env


def _in_worker(
    make: Callable[[], Any],
    make_here: Callable[[], Any],
    parent: int,
    seconds: float,
) -> Any:  # noqa: ANN401
    """An environment in its own process, which ends with its parent.

    `AsyncVectorEnv` also makes one in the process `parent`, for its spaces; there
    `make_here` is called.
    """
    if os.getpid() == parent:
        return ContainedEnv(make_here(), seconds)
    Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        return ContainedEnv(make(), seconds)
    except BaseException as error:
        return UnmadeEnv(described(error))


def _end_with_parent(parent: int) -> None:
    """Exit when the parent is gone, also while a call of the environment hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _final_part(finals: Any, path: Path, env: int) -> Any:  # noqa: ANN401
    """A part of one final observation, from a batch or from one object per row."""
    is_row = False
    for name in path:
        if not is_row and isinstance(finals, np.ndarray | list):
            finals, is_row = finals[env], True
        finals = finals[name]
    return finals if is_row else finals[env]


def _joined(
    info: Mapping[str, Any], fresh: Mapping[str, Any], reset: Array
) -> dict[str, Any]:
    """Masks of a step, replaced by those of a reset where there was one."""
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
