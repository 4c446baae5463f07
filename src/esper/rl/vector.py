"""Gymnasium vector environments with one interface for all autoreset modes.

The autoreset mode decides when the first observation of the next episode arrives:

    SAME_STEP   with the last step; `info["final_obs"]` has the final observation
    NEXT_STEP   one step later; that step ignores its action and is not counted
    DISABLED    after `reset(options={"reset_mask": ...})`, which is called here

Errors of an environment, also `SystemExit`, are raised again as one line.
"""

import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from ctypes import c_int
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from multiprocessing import Pipe, Process, RawValue
from multiprocessing import TimeoutError as WaitTimeout
from threading import Thread
from typing import Any, Final, Literal, TypeVar, cast, get_args

import gymnasium
import numpy as np
import torch
from gymnasium import Env, Space, spaces
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import (
    CloudpickleWrapper,
    batch_space,
    concatenate,
    create_empty_array,
    iterate,
)
from jaxtyping import Bool, Shaped
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
from esper.contracts.world import StepResult
from esper.rl.nested import Path, from_parts, value_at
from esper.rl.observations import ObservationReader
from esper.rl.spaces import MASK, SpaceSpec, require_sizes
from esper.workers.deadline import TIMEOUT, late, timed
from esper.workers.jobs import available_cores

T = TypeVar("T")
Array = NDArray[Any]
Source = str | Callable[[], Env[Any, Any]] | Env[Any, Any] | VectorEnv[Any, Any, Any]
Vectorization = Literal["sync", "async", "native"]
MaskSource = Literal["auto", "observation", "info", "method"]
MASK_METHOD: Final = "action_masks"
TIMEOUT_SETTING: Final = "env_timeout"
UNUSABLE: Final = "returned an unusable value"


@dataclass(frozen=True, slots=True)
class View:
    """What the policy sees of all environments before a step."""

    features: dict[str, Tensor]
    masks: Bool[Tensor, "env *op head choice"] | None
    """Legal choices, as `SpaceSpec.head_masks` returns them; None: all."""
    episode_start: Bool[Tensor, " env"]
    acts: Bool[Tensor, " env"] | None = None
    """Whether the next action counts: not before a reset. None: all do."""


class SyncEnvs(SyncVectorEnv):
    """`SyncVectorEnv` with autoreset in the same step and 20 % less overhead.

    Infos contain final observations and masks only, as lists. `at` holds the index of
    the environment that was called last.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], Env[Any, Any]]],
        seconds: float = TIMEOUT,
        at: Any = None,
    ) -> None:
        self._seconds, self.at = seconds, c_int() if at is None else at
        super().__init__(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        if len({id(env.unwrapped) for env in self.envs}) < self.num_envs:
            raise InvalidInputError(
                "the function returned the same environment twice. Make a new one in "
                "each call, or pass the environment itself."
            )

    @property
    def has_masks(self) -> bool:
        """Whether every environment has a method for masks."""
        return all(env.has_wrapper_attr(MASK_METHOD) for env in self.envs)

    @cached_property
    def _mask_methods(self) -> list[Callable[[], Any]]:
        return [env.get_wrapper_attr(MASK_METHOD) for env in self.envs]

    def masks(self) -> list[Any]:
        """What the method for masks of every environment returns."""
        methods, found = self._mask_methods, []
        for self.at.value, method in enumerate(methods):
            found.append(method())
        return found

    def reset_rows(self, seed: int | None) -> list[tuple[Any, ...]]:
        """The start of an episode in each environment, in the form of a step."""
        resets, found = [env.reset for env in self.envs], []
        for self.at.value, reset in enumerate(resets):
            shown, info = reset(seed=None if seed is None else seed + self.at.value)
            mask = [info[MASK]] if MASK in info else []
            if MASK_METHOD in info and not (mask or self.has_masks):
                what = f"info['{MASK_METHOD}'] is not read. Name it '{MASK}'."
                warnings.warn(what, EsperWarning, stacklevel=2)
            found.append((shown, 0.0, False, False, mask, None))
        return found

    def step_rows(self, actions: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Step each environment and reset it if its episode ended.

        Rows end with a list of a mask, or of none, and the final observation or None.
        """
        each, found = zip(self.envs, actions, strict=True), []
        for self.at.value, (env, action) in enumerate(each):
            shown, reward, terminated, truncated, info = env.step(action)
            final = None
            if terminated or truncated:
                final = deepcopy(shown)  # a reset may write over it
                shown, info = env.reset()
            mask = [info[MASK]] if MASK in info else []
            found.append((shown, reward, terminated, truncated, mask, final))
        return found

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        """Start an episode in every environment."""
        shown, *_, info = _joined_rows(self, self.reset_rows(seed))
        return shown, info

    def step(self, actions: Any) -> Any:
        """Step all environments and reset those whose episode ended."""
        given = [*iterate(self.action_space, actions)]
        return _joined_rows(self, self.step_rows(given))

    def close_extras(self, **options: Any) -> None:
        """Close every environment; errors become one warning."""
        close_all([env.close for env in getattr(self, "envs", ())], self._seconds)


def _joined_rows(envs: Any, rows: list[Any]) -> tuple[Any, ...]:
    """The results of all environments as those of a vector environment."""
    shown, paid, *ends, masks, finals = map(list, zip(*rows, strict=True))
    if all(type(reward) is float for reward in paid):
        rewards = np.array(paid)
    else:
        rewards = np.empty(len(paid))
        for at, reward in enumerate(paid):
            envs.at.value, number = at, np.asarray(reward, np.float64)
            if number.size != 1:  # it may be an array with one element
                raise ValueError(f"the reward has the shape {number.shape}")
            rewards[at] = number.item()
    info: dict[str, Any] = {}
    if any(map(len, masks)):
        info[MASK] = [mask[0] if mask else None for mask in masks]
        info[f"_{MASK}"] = np.array([*map(bool, masks)])
    if any(final is not None for final in finals):
        info["final_obs"] = finals
    observation = _batch(envs.single_observation_space, shown)
    return observation, rewards, *np.array(ends, bool), info


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


class RaisedInWorker(Exception):  # noqa: N818
    """Text of an error in another process; it can be pickled."""


class AsyncEnvs(VectorEnv[Any, Any, Any]):
    """Environments in processes, each of which steps a share of them.

    `at` holds the index of the environment that failed. After a failure, all processes
    are dead. After an interrupt, the next call waits for the one before.
    """

    def __init__(
        self, make: Callable[[], Any], num_envs: int, workers: int, seconds: float
    ) -> None:
        self.seconds, self.num_envs, self.at = seconds, num_envs, c_int()
        self._pid = os.getpid()
        bounds = np.linspace(0, num_envs, min(workers, num_envs) + 1).astype(int)
        self._shares = [slice(*pair) for pair in pairwise(bounds.tolist())]
        self._places = [RawValue("i") for _ in self._shares]
        self.processes: list[Any] = []
        self._pipes: list[Any] = []
        for share, place in zip(self._shares, self._places, strict=True):
            here, there = Pipe()
            given = (there, CloudpickleWrapper(make), share, seconds, place)
            process = Process(target=_work, args=given, daemon=True)
            process.start()
            self.processes.append(process)
            self._pipes.append(here)
            there.close()  # so that the pipe breaks with its process
        self._pending = {*range(len(self._pipes))}
        facts = [found.fn for found in self._answers()]
        seen, acted, self.metadata, self.has_masks = facts[0]
        if any(each[:2] != (seen, acted) for each in facts):
            self._kill()
            raise InvalidInputError("the environments have different spaces.")
        self.single_observation_space, self.single_action_space = seen, acted
        self.action_space = batch_space(acted, num_envs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Start an episode in every environment."""
        starts = [share.start for share in self._shares]
        seeds = [(None if seed is None else seed + start,) for start in starts]
        shown, *_, info = _joined_rows(self, self._request("reset_rows", seeds))
        return shown, info

    def step(self, actions: Any) -> Any:
        """Step all environments and reset those whose episode ended."""
        rows = [*iterate(self.action_space, actions)]
        given = [(rows[share],) for share in self._shares]
        return _joined_rows(self, self._request("step_rows", given))

    def masks(self) -> list[Any]:
        """What the method for masks of every environment returns."""
        return self._request("masks", [()] * len(self._pipes))

    def _request(self, name: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results of a method of `SyncEnvs` in all processes, after each other."""
        if self._pending:  # the last call was interrupted
            self._answers()
        self._pending = {*range(len(self._pipes))}
        for pipe, arguments in zip(self._pipes, given, strict=True):
            with suppress(OSError):  # of a process that died; its answer says so
                pipe.send((name, arguments))
        return [*chain(*self._answers())]

    def _answers(self) -> list[Any]:
        """The answers of all processes; raises the first error."""
        until, found = time.monotonic() + self.seconds, []
        for worker in sorted(self._pending):
            try:
                if not self._pipes[worker].poll(max(0.0, until - time.monotonic())):
                    raise WaitTimeout
                found.append(self._pipes[worker].recv())
                if isinstance(found[-1], BaseException):
                    raise found[-1]
            except Exception:
                self.at.value = self._shares[worker].start + self._places[worker].value
                self._kill()
                raise
            self._pending.remove(worker)
        return found

    def close_extras(self, **options: Any) -> None:
        """Ask the processes to exit, and kill those that do not."""
        if not self._pending:
            for pipe in self._pipes:
                with suppress(OSError):  # of a process that died
                    pipe.send(("close", ()))
            until = time.monotonic() + self.seconds
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.closed = True

    def __del__(self) -> None:
        if not self.closed and self._pid == os.getpid():  # not in a fork
            self._kill()


def _work(pipe: Any, make: Any, share: slice, seconds: float, at: Any) -> None:
    """Make some environments, then do what the pipe asks for until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what it means
    Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    envs: Any = None
    name, given = "start", ()
    with suppress(EOFError, OSError):  # the parent is gone
        while name != "close":
            try:
                if name == "start":
                    makers = [make.fn] * (share.stop - share.start)
                    envs = SyncEnvs(makers, seconds, at)
                    seen = envs.single_observation_space
                    facts = (seen, envs.single_action_space, envs.metadata)
                    pipe.send(CloudpickleWrapper((*facts, envs.has_masks)))  # type: ignore[arg-type]
                else:
                    pipe.send(getattr(envs, name)(*given))
            except BaseException as error:  # an environment may raise SystemExit
                is_ours = isinstance(error, EsperError)
                pipe.send(error if is_ours else RaisedInWorker(described(error)))
            name, given = pipe.recv()
        envs.close()


def _end_with_parent(parent: int) -> None:
    """Exit when the parent is gone, also while a call of the environment hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _batch(space: Space[Any], shown: list[Any]) -> Any:
    """Observations of all environments as an element of the batched space."""
    if type(space) is spaces.Box:  # faster than `concatenate`
        array = np.array(shown)
        cast = array.astype(space.dtype, casting="same_kind", copy=False)
        if cast.dtype.kind == "i" and cast.dtype != array.dtype:
            wrong = array[cast != array]
            if len(wrong):
                raise ValueError(f"{wrong[0]} does not fit into {space.dtype}")
        return cast
    blank: Any = create_empty_array(space, len(shown), np.empty)
    return concatenate(space, shown, blank)


class Vector:
    """All environments, stepped together, as a `World` for rollouts.

    The parameters are those of `PPO`. `seed` is that of the next reset. `reader` reads
    observations; with `learns`, it updates its statistics.

    A vector environment keeps its own `num_envs` and autoreset mode. Environments in
    this process are interrupted after `env_timeout` only in the commands of Esper.
    """

    group_size = 1
    seed: int | None = None
    learns = False

    def __init__(
        self,
        source: Source,
        num_envs: int = 8,
        vectorization: Vectorization = "sync",
        head_relevance: tuple[tuple[bool, ...], ...] | None = None,
        masks: MaskSource | None = "auto",
        env_timeout: float = TIMEOUT,
        num_workers: int | None = None,
    ) -> None:
        self.name, self._seconds = _name(source), env_timeout
        self.steps = 0
        """Steps since the environments were made."""
        self.is_given = isinstance(source, Env | VectorEnv)
        """Whether the caller made the environments."""
        if isinstance(source, VectorEnv):
            self.env: VectorEnv[Any, Any, Any] = source
        elif isinstance(source, Env):
            if vectorization != "sync":
                raise InvalidInputError(
                    f"vectorization {vectorization!r} makes new environments. Pass an "
                    "id or a function instead of an environment."
                )
            require_sizes(source.observation_space)
            self.env = SyncEnvs([lambda: source], env_timeout)
        else:
            workers = num_workers or available_cores() or 1
            self.env = _made(
                source, self.name, num_envs, vectorization, env_timeout, workers
            )
        try:
            self._inspect(head_relevance, masks)
        except BaseException:
            self.release()
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
        self.resets_later = self.mode is AutoresetMode.NEXT_STEP
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
        self.reader = ObservationReader(self.spec, normalize=False)

    def reset(self) -> View:
        """Start an episode in every environment."""
        return self._guarded("reset", self._reset, UNUSABLE)

    def step(self, actions: Shaped[Tensor, "env head"]) -> StepResult[View]:
        """Step every environment."""
        return self._guarded("step", partial(self._step, actions), UNUSABLE)

    def _reset(self) -> View:
        if isinstance(self._base, AsyncVectorEnv):
            with suppress(NoAsyncCallError):  # unless a step was interrupted
                self._guarded("step", partial(self._base.step_wait, self._seconds))
        observation, info = self._call("reset", seed=self.seed)
        if self._masks == "auto":
            self._masks = self._guarded("reset", partial(self._mask_source, info))
        self._ended = np.zeros(self.num_envs, bool)
        return self._view(observation, info, ~self._ended, ~self._ended)

    def _step(self, actions: Tensor) -> StepResult[View]:
        given = self.spec.to_env(actions)
        observation, rewards, terminated, truncated, info = self._call("step", given)
        self.steps += 1
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        ended, acted, final = terminated | truncated, ~self._ended, None
        had_future = (truncated & ~terminated & acted).any()
        fresh, acts = ended, np.ones(self.num_envs, bool)
        if self.resets_later:
            self._ended, fresh, acts = ended, ~acted, ~ended
            final = observation if had_future else None
        elif self.mode is AutoresetMode.DISABLED and ended.any():
            final = deepcopy(observation) if had_future else None
            observation, new = self._call("reset", options={"reset_mask": ended})
            info = _joined(info, new, ended)
        elif had_future:
            final = self._final(observation, info, ended)
        reward, last = self._rewards(rewards, acted), None
        if final is not None:
            features = self.reader.read(final, acted, self._where)
            last = View(features, None, torch.from_numpy(fresh))
        return StepResult(
            observation=self._view(observation, info, fresh, acts),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            final=last,
        )

    def _rewards(self, rewards: Any, acted: Array) -> Array:
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

    def release(self) -> None:
        """Close the environments, unless the caller made them."""
        if not self.is_given:
            self.close()

    def close(self) -> None:
        """Close the environments and end their processes."""
        if isinstance(self.env, SyncEnvs | AsyncEnvs):
            self.env.close()
        else:
            close_all([self.env.close], self._seconds)

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the vector environment with a time limit."""
        call = partial(getattr(self.env, name), *args, **options)
        return self._guarded(name, call, limited=not isinstance(self.env, AsyncEnvs))

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
        when, who = f"in {call}() at step {self.steps}", ""
        if isinstance(self.env, SyncEnvs | AsyncEnvs):
            who = f"environment {self.env.at.value}"
        if isinstance(error, WaitTimeout):
            what = f"{who} of {self.name}: {call}() at step {self.steps}"
            return WorkersError(late(what, self._seconds, TIMEOUT_SETTING))
        if isinstance(self.env, AsyncEnvs) and isinstance(error, EOFError | OSError):
            return WorkersError(f"the process of {who} of {self.name} died {when}.")
        who = f" of {who}" if who else ""
        what = _text(error).rstrip(".")
        return InvalidInputError(f"{self.name} {verb} {when}{who}: {what}.")

    def _view(
        self,
        observation: Any,
        info: Mapping[str, Any],
        episode_start: Array,
        acts: Array,
    ) -> View:
        """Observations with their masks; all is legal where actions are ignored."""
        masks = None
        if self._masks is not None:
            found = self._query_masks(observation, info, acts)
            try:
                masks = self.spec.head_masks(found, self.num_envs, acts)
            except InvalidInputError as error:
                where = f"{self.name} at step {self.steps}"
                raise type(error)(f"{where}: {error}") from None
        elif self._finds_masks and MASK in info and not self.spec.is_continuous:
            raise InvalidInputError(
                f"{self.name} gave info['{MASK}'] at step {self.steps}, but none at "
                "reset. Return one from every reset and step."
            )
        features = self.reader.read(observation, acts, self._where, learn=self.learns)
        all_act = None if acts.all() else torch.from_numpy(acts)
        return View(features, masks, torch.from_numpy(episode_start), all_act)

    @property
    def _where(self) -> str:
        """Name and step of the environments, for errors."""
        return f" of {self.name} at step {self.steps}"

    def _query_masks(
        self, observation: Any, info: Mapping[str, Any], acts: Array
    ) -> Any:
        """Masks as the environments return them."""
        if self._masks == "observation":
            return observation[MASK]
        if self._masks == "method":
            base = self._base
            if isinstance(base, SyncEnvs | AsyncEnvs):
                method: Callable[[], Any] = base.masks
            elif isinstance(base, SyncVectorEnv | AsyncVectorEnv):
                method = partial(base.call, MASK_METHOD)
            else:
                method = getattr(base, MASK_METHOD)
            limited = not isinstance(base, AsyncEnvs)
            found = self._guarded(MASK_METHOD, method, limited=limited)
            return [*found] if isinstance(found, tuple) else found
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
        if isinstance(self._base, SyncEnvs | AsyncEnvs):
            found = self._base.has_masks
        elif isinstance(self._base, AsyncVectorEnv):  # a failed call ends its processes
            env = self._base.env_fns[0]()
            found = env.has_wrapper_attr(MASK_METHOD)
            env.close()
        elif isinstance(self._base, SyncVectorEnv):
            found = all(env.has_wrapper_attr(MASK_METHOD) for env in self._base.envs)
        else:
            found = hasattr(self._base, MASK_METHOD)
        return "method" if found else None

    def _final(self, observation: Any, info: Mapping[str, Any], ended: Array) -> Any:
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
    if isinstance(source, Env | VectorEnv):
        spec = getattr(source, "spec", None)
        name = spec.id if spec is not None else type(source).__name__
    elif not isinstance(source, str):
        name = getattr(source, "__name__", type(source).__name__)
    return one_line(str(name), 80)


def _made(
    source: Source,
    name: str,
    num_envs: int,
    vectorization: str,
    seconds: float,
    workers: int,
) -> VectorEnv[Any, Any, Any]:
    """A new vector environment, with autoreset in the same step unless native."""
    if not callable(source) and not isinstance(source, str):
        raise InvalidInputError(
            "env must be an id, a function that makes an environment, an Env or a "
            f"VectorEnv, got {type(source).__name__}."
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
        start = partial(AsyncEnvs, partial(_one, make), num_envs, workers, seconds)
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


def _one(make: Callable[[], Any]) -> Any:
    env = make()
    if isinstance(env, VectorEnv):
        raise InvalidInputError("the function makes a VectorEnv; pass what it makes.")
    require_sizes(env.observation_space)
    return env


def _final_part(finals: Any, path: Path, env: int) -> Any:
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

    def merge(old: Any, new: Any) -> Any:
        if isinstance(old, Mapping):
            return {name: merge(old[name], new[name]) for name in old}
        merged = np.array(old, copy=True)
        merged[reset] = np.asarray(new)[reset]
        return merged

    flags = np.where(reset, there[1], there[0])
    return {MASK: merge(old, new), f"_{MASK}": flags}
