"""Gymnasium's vector environments, whatever their autoreset mode, as one kind of world.

An episode that ended is followed by the first observation of the next one:

    SAME_STEP   it comes with the last step; the true final observation is in
                `info["final_obs"]`
    NEXT_STEP   it comes one step later; that step ignores its action and is not counted
    DISABLED    we ask for it, by `reset(options={"reset_mask": ...})`

Masks come from a Dict observation, from `info["action_mask"]` or from the method
`action_masks()`, and always belong to the observation beside them.

Whatever an environment raises becomes one line, `SystemExit` too. A process of an
environment has a deadline for every call, and ends with the process that started it.
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
from typing import Any, Final, Literal, TypeVar, get_args

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
from esper.rl.spaces import MASK, SpaceSpec, require_sizes
from esper.workers.deadline import TIMEOUT, late, timed

T = TypeVar("T")
Array = NDArray[Any]
Source = str | Callable[[], Env[Any, Any]] | VectorEnv[Any, Any, Any]
Vectorization = Literal["sync", "async", "native"]
KINDS: Final = get_args(Vectorization)
MaskSource = Literal["auto", "observation", "info", "method"]
MASK_SOURCES: Final = get_args(MaskSource)
METHOD: Final = "action_masks"
OPTION: Final = "env_timeout"
UNUSABLE: Final = "returned what cannot be used"
GIVE_UP: Final = 5.0
"""Seconds to wait for what a process that failed has to say."""


@dataclass(frozen=True, slots=True)
class View:
    """What all environments show before they act."""

    observation: Any
    """As the batched observation space has it."""
    masks: Bool[Tensor, "env *op head choice"] | None
    """What each head may choose, as `SpaceSpec.head_masks` says; None is everything."""
    episode_start: Array
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

    def __init__(
        self, makers: Sequence[Callable[[], Env[Any, Any]]], seconds: float = TIMEOUT
    ) -> None:
        self._seconds = seconds
        super().__init__(makers, autoreset_mode=AutoresetMode.SAME_STEP)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:  # noqa: ANN401
        """Act everywhere; an episode that ended is followed by the next one."""
        space, found = self.single_observation_space, []
        each = zip(self.envs, iterate(self.action_space, actions), strict=True)
        for self.at, (env, action) in enumerate(each):
            found.append(env.step(action))
        shown, rewards, *ends, infos = map(list, zip(*found, strict=True))
        terminated, truncated = np.array(ends, bool)
        numbers = self._numbers(rewards)
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
            numbers,
            terminated,
            truncated,
            info,
        )

    def _numbers(self, rewards: list[Any]) -> Array:
        """Rewards as numbers; arrays of one number will do."""
        with suppress(ValueError, TypeError):  # which of them is found below
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
        """Close every environment; what one raises is a warning."""
        close_all([env.close for env in getattr(self, "envs", ())], self._seconds)


class RaisedInWorker(Exception):  # noqa: N818
    """What an environment raised in its process, in words; it can be sent."""


class ContainedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment in its own process; whatever it raises can be sent."""

    def __init__(self, env: Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self._seconds = seconds

    def reset(self, **options: Any) -> Any:  # noqa: ANN401
        """Begin an episode."""
        return _contained(partial(self.env.reset, **options))

    def step(self, action: Any) -> Any:  # noqa: ANN401
        """Act."""
        return _contained(partial(self.env.step, action))

    def get_wrapper_attr(self, name: str) -> Any:  # noqa: ANN401
        """An attribute, or a method whose errors can be sent."""
        found = _contained(partial(super().get_wrapper_attr, name))
        return (lambda: _contained(found)) if callable(found) else found

    def close(self) -> None:
        """Close it; what it raises is a warning."""
        close_all([self.env.close], self._seconds)


class UnmadeEnv(gymnasium.Env[Any, Any]):
    """Stands for an environment that cannot be made in its process."""

    observation_space: Any = None
    action_space: Any = None

    def __init__(self, why: str) -> None:
        self._why = why

    def get_wrapper_attr(self, name: str) -> Any:  # noqa: ANN401
        """Raise why it cannot be made."""
        raise RaisedInWorker(self._why)


def _contained(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    try:
        return call()
    except BaseException as error:
        raise RaisedInWorker(described(error)) from None


def close_all(closes: Sequence[Callable[[], object]], seconds: float) -> None:
    """Close environments; what they raise is one warning: all results are there."""
    failure: BaseException | None = None
    for close in closes:
        try:
            timed(close, "close() of an environment", seconds, OPTION)
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
    """Gymnasium's, with a deadline also for making and closing environments.

    Args:
        makers: Functions that make environments.
        seconds: How long a call may take.
    """

    def __init__(
        self, makers: Sequence[Callable[[], Env[Any, Any]]], seconds: float
    ) -> None:
        self._seconds = seconds
        start = partial(
            super().__init__, makers, autoreset_mode=AutoresetMode.SAME_STEP
        )
        try:
            try:
                start()
            except ValueError as error:
                if not isinstance(error.__cause__, CustomSpaceError):
                    raise
                start(shared_memory=False)  # such as text
        except BaseException:
            kill(self)
            raise

    def close_extras(
        self, timeout: float | None = None, terminate: bool = False
    ) -> None:
        """End the processes; those that do not end by themselves are killed."""
        if self._state is AsyncState.DEFAULT and not terminate:
            for pipe in self.parent_pipes:
                with suppress(OSError, AttributeError):  # of a process that died
                    pipe.send(("close", None))
            until = time.monotonic() + (timeout or self._seconds)
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))
        kill(self)

    def _check_spaces(self) -> None:
        self.call_async("render_mode")  # answered when an environment is made
        self.call_wait(self._seconds)
        super()._check_spaces()  # type: ignore[no-untyped-call]

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """Raise the first error; Gymnasium would print tracebacks too."""
        if not all(successes):
            try:
                error = self.error_queue.get(timeout=GIVE_UP)[2]
            except Empty:
                error = RaisedInWorker("an error that cannot be sent")
            raise error


def kill(env: AsyncVectorEnv) -> None:
    """End all processes of environments at once, whatever they do."""
    for process in getattr(env, "processes", ()):
        process.kill()
        process.join()
    env.closed = True


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
        head_relevance: As in `SpaceSpec`.
        masks: Where masks come from: "observation", "info", "method", None for
            nowhere; "auto" finds out.
        env_timeout: Seconds that one call of all environments may take. It holds for
            environments in processes; those in this process are interrupted only in
            the commands of Esper.
    """

    def __init__(
        self,
        source: Source,
        envs: int = 8,
        kind: Vectorization = "sync",
        head_relevance: tuple[tuple[bool, ...], ...] | None = None,
        masks: MaskSource | None = "auto",
        env_timeout: float = TIMEOUT,
    ) -> None:
        if not 0.0 < env_timeout < float("inf"):
            raise InvalidInputError(
                f"env_timeout must be finite and above 0: {env_timeout}."
            )
        self.name, self._seconds = _name(source), env_timeout
        self.steps = 0
        """Steps since the environments were made."""
        if isinstance(source, VectorEnv):
            self.env: VectorEnv[Any, Any, Any] = source
            self._reset_envs(head_relevance, masks)
            return
        self.env = _made(source, envs, kind, env_timeout)
        try:
            self._reset_envs(head_relevance, masks)
        except BaseException:
            self.close()
            raise

    def _reset_envs(
        self,
        head_relevance: tuple[tuple[bool, ...], ...] | None,
        masks: MaskSource | None,
    ) -> None:
        """Learn what the environments are like."""
        self.num_envs = int(self.env.num_envs)
        mode = self.env.metadata.get("autoreset_mode")
        if mode is None:
            raise InvalidInputError(
                f"{self.name} does not say how it resets; set its "
                "metadata['autoreset_mode'] to a gymnasium.vector.AutoresetMode."
            )
        self.mode = AutoresetMode(mode)
        self.spec = SpaceSpec(
            self.env.single_observation_space,
            self.env.single_action_space,
            head_relevance,
        )
        if masks not in (*MASK_SOURCES, None):
            raise InvalidInputError(
                f"masks must be auto, observation, info, method or None, got {masks!r}."
            )
        self._base = self.env.unwrapped
        self._finds_masks = masks == "auto"
        self._masks = masks
        self._ended = np.zeros(self.num_envs, bool)
        self._method: Callable[[], Any] | None = None

    def reset(self, seed: int | None) -> View:
        """Begin an episode everywhere."""
        return self._guarded("reset", partial(self._reset, seed), UNUSABLE)

    def step(self, actions: Any) -> VectorStep:  # noqa: ANN401
        """Act everywhere."""
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
        numbers = self._rewards(rewards, ~before)
        return VectorStep(view, numbers, terminated, truncated, final)

    def _rewards(self, rewards: Any, acted: Array) -> Array:  # noqa: ANN401
        """Rewards `[env]`; refuses NaN and infinity where an action counted."""
        found, step = np.asarray(rewards), self.steps - 1
        if found.size != self.num_envs:
            raise InvalidInputError(
                f"{self.name} gave rewards of the shape {found.shape} at step {step}; "
                f"give {self.num_envs} numbers."
            )
        found = found.reshape(self.num_envs)
        with np.errstate(over="ignore"):
            numbers = found.astype(np.float32)
        broken = ~np.isfinite(numbers) & acted
        if broken.any():
            env = int(broken.argmax())
            raise NotFiniteError(
                f"{self.name} gave the reward {found[env]} in environment {env} at "
                f"step {step}; rewards must be finite."
            )
        return numbers

    def close(self) -> None:
        """Close the environments and end their processes, if they have any."""
        if isinstance(self.env, SyncEnvs | AsyncEnvs):
            self.env.close()
        else:
            close_all([self.env.close], self._seconds)

    def _call(self, name: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call the environments; what they raise becomes one line."""
        if not isinstance(self.env, AsyncVectorEnv):
            return self._timed(name, partial(getattr(self.env, name), *args, **options))
        start = partial(getattr(self.env, f"{name}_async"), *args, **options)
        answer = partial(getattr(self.env, f"{name}_wait"), self._seconds)
        return self._guarded(name, lambda: (start(), answer())[1])

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        """The same with a deadline, where signals can interrupt the call."""
        what = f"{self.name}: {name}() at step {self.steps}"
        return self._guarded(name, lambda: timed(call, what, self._seconds, OPTION))

    def _guarded(self, name: str, call: Callable[[], T], verb: str = "raised") -> T:
        try:
            return call()
        except (EsperError, NoAsyncCallError, KeyboardInterrupt):
            raise
        except BaseException as error:  # an environment may raise SystemExit
            raise self._failure(name, error, verb) from error

    def _failure(self, call: str, error: BaseException, verb: str) -> EsperError:
        """What environments raised, in one line that names which of them and when."""
        when = f"in {call}() at step {self.steps}"
        if isinstance(self._base, AsyncVectorEnv):
            lost = isinstance(error, EOFError | ConnectionError)
            sentinels = [process.sentinel for process in self._base.processes]
            # A pipe breaks a moment before its process is gone.
            ended = wait(sentinels, timeout=GIVE_UP) if lost else []
            dead = [at for at, each in enumerate(sentinels) if each in ended]
            pipes = enumerate(self._base.parent_pipes)
            slow = [at for at, pipe in pipes if pipe is None or not pipe.poll()]
            # Closing it would wait for calls that are under way, or raise what they do.
            kill(self._base)
            if isinstance(error, WaitTimeout):
                what = f"environment {[*slow, 0][0]} of {self.name}: {call}() at step"
                text = late(f"{what} {self.steps}", self._seconds, OPTION)
                return WorkersError(text)
            if lost:
                which = f" {dead[0]}" if dead else ""
                return WorkersError(
                    f"the process of environment{which} of {self.name} died {when}."
                )
        who = f" of environment {self.env.at}" if isinstance(self.env, SyncEnvs) else ""
        what = str(error) if isinstance(error, RaisedInWorker) else described(error)
        return InvalidInputError(f"{self.name} {verb} {when}{who}: {what.rstrip('.')}.")

    def _view(
        self,
        observation: Any,  # noqa: ANN401
        info: Mapping[str, Any],
        episode_start: Array,
        acts: Array,
    ) -> View:
        masks = self._masks_now(observation, info, acts)
        where = f" of {self.name} at step {self.steps}"
        return View(observation, masks, episode_start, acts, where)

    def _masks_now(
        self,
        observation: Any,  # noqa: ANN401
        info: Mapping[str, Any],
        acts: Array,
    ) -> Bool[Tensor, "env *op head choice"] | None:
        """The masks of this moment; all is legal where the action is ignored."""
        if self._masks is None:
            if self._finds_masks and MASK in info and not self.spec.is_continuous:
                raise InvalidInputError(
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
                raise InvalidInputError(
                    f"{self.name} gave no info['{MASK}'] in environment {env} at step "
                    f"{self.steps}; give one at every reset and step."
                )
        else:
            masks = self._query_masks()
        try:
            return self.spec.head_masks(masks, self.num_envs, acts)
        except InvalidInputError as error:
            what = f"{self.name} at step {self.steps}: {error}"
            raise type(error)(what) from None

    def _mask_source(self, info: Mapping[str, Any]) -> MaskSource | None:
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

    def _query_masks(self) -> Any:  # noqa: ANN401
        """What the method says: one mask per environment."""
        if self._method is None:  # looking through wrappers takes long
            self._method = self._guarded(METHOD, self._mask_method)
        return self._timed(METHOD, self._method)

    def _mask_method(self) -> Callable[[], Any]:
        """What asks all environments for their masks."""
        if isinstance(self._base, AsyncVectorEnv):
            ask, answer = self._base.call_async, self._base.call_wait
            return lambda: [*(ask(METHOD), answer(self._seconds))[1]]
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
            raise InvalidInputError(
                f"{self.name} resets in the same step but gave no info['final_obs'] at "
                f"step {self.steps}; without it a truncated episode cannot be valued."
            )
        space = self.env.single_observation_space
        return _replaced(space, observation, finals, np.flatnonzero(ended))


def _name(source: Source) -> str:
    name: object = source
    if isinstance(source, VectorEnv):
        spec = getattr(source, "spec", None)
        name = spec.id if spec is not None else type(source).__name__
    elif not isinstance(source, str):
        name = getattr(source, "__name__", type(source).__name__)
    return one_line(str(name), 80)


def _made(
    source: Source, envs: int, kind: str, seconds: float
) -> VectorEnv[Any, Any, Any]:
    """A vector environment of that kind, resetting in the same step if it can."""
    if kind not in KINDS:
        raise InvalidInputError(
            f"vectorization must be one of {', '.join(KINDS)}, got {kind!r}."
        )
    if not 1 <= envs <= 65_536:
        raise InvalidInputError(f"envs must lie in 1..65536, got {envs}.")
    if not callable(source) and not isinstance(source, str):
        raise InvalidInputError(
            "env must be an id, a function that makes an environment, or a VectorEnv, "
            f"got {type(source).__name__}."
        )
    name = _name(source)
    what = f"{name}: the constructor"
    make: Any = source
    if kind == "native":
        if not isinstance(source, str):
            raise InvalidInputError(
                "kind 'native' needs an id; or pass a VectorEnv itself."
            )
        mode = "vector_entry_point"
        make = partial(gymnasium.make_vec, source, envs, vectorization_mode=mode)
        return _guarded(lambda: timed(make, what, seconds, OPTION), name)
    if isinstance(source, str):
        # Its checks would be paid for at every step; `esper doctor` checks more.
        make = partial(gymnasium.make, source, disable_env_checker=True)
    one = partial(_one, lambda: timed(make, what, seconds, OPTION))
    if kind == "sync":
        return _guarded(lambda: SyncEnvs([one] * envs, seconds), name)
    worker = partial(_in_worker, partial(_one, make), one, os.getpid(), seconds)
    try:
        return _guarded(lambda: AsyncEnvs([worker] * envs, seconds), name)
    except WaitTimeout:
        raise WorkersError(late(what, seconds, OPTION)) from None


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
    """An environment in a process of its own, which ends with its parent.

    Args:
        make: Makes it.
        make_here: The same, in the process that learns: for its spaces.
        parent: The process that learns.
        seconds: How long a call may take.
    """
    if os.getpid() == parent:
        return ContainedEnv(make_here(), seconds)
    Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        return ContainedEnv(make(), seconds)
    except BaseException as error:
        return UnmadeEnv(described(error))


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone; no pipe tells while a call hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _guarded(
    make: Callable[[], VectorEnv[Any, Any, Any]], name: str
) -> VectorEnv[Any, Any, Any]:
    try:
        return make()
    except (EsperError, KeyboardInterrupt, WaitTimeout):
        raise
    except BaseException as error:
        what = str(error) if isinstance(error, RaisedInWorker) else described(error)
        raise InvalidInputError(f"{name} cannot be made: {what}") from error


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
