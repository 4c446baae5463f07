"""Rollout buffer: one row of steps per environment, read as padded sequences.

Storage is allocated once and is time-major, `[time, env, ...]`; readers see
`[env, time, ...]`. A row may hold several episodes, and rows may differ in length.
Memory is stored only for the start of a row. A *terminated* episode does not bootstrap,
a *truncated* one bootstraps from its final observation, and a row that `finish` cuts
bootstraps from the next observation.

Shapes, dtypes and devices are always checked. Values are checked only on the CPU,
because a check would stall other devices. A rejected step is not counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64, Shaped
from numpy.typing import NDArray
from torch import Generator, Tensor

from esper.contracts.checks import require_int, require_number
from esper.contracts.devices import (
    Tree,
    map_tensors,
    require_tensor,
    to_device,
    usable_device,
)
from esper.contracts.errors import (
    IllegalActionError,
    InvalidInputError,
    InvalidStateError,
    NoLegalActionError,
    NotFiniteError,
)
from esper.contracts.readonly import read_only
from esper.kernels import kernel
from esper.scan import Rollout, gae, gae_time_major
from esper.simic.agent.distribution import Decision, Policy, PolicySpec

Array = NDArray[Any]
RESULTS: Final = ("advantages", "returns")
VIEWS: Final = ("dones", "truncated", "rewards", "values", "final_values", *RESULTS)
CHOICE_FIELDS: Final = ("masks", "actions", "log_probs", "distribution")
END_FIELDS: Final = ("episode_start", "dones", "truncated", "final_values")
LOG_PROB_TOLERANCE: Final = 1e-4  # between a log-probability and its distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """Padded sequences for an update, one row per environment.

    Minibatches split environments, never time, so memory can be unrolled from the row's
    first state. Tensors are contiguous. On padding they are 0 or False, and choice 0 is
    legal.
    """

    features: Any
    """Observations: a dataclass or dict of tensors."""
    episode_start: Bool[Tensor, "env time"]
    """Whether the step is the first of an episode; memory is reset before it."""
    masks: Bool[Tensor, "env time head choice"]
    """Legal choices of each head."""
    actions: Shaped[Tensor, "env time head"]
    """int64 if all heads are choices, float32 if some are numbers."""
    log_probs: Float[Tensor, "env time head"]
    """Log-probability of each action under the policy that acted."""
    distribution: Float[Tensor, "env time head choice"]
    """Log-probabilities of all choices under that policy. For a number: mean and log
    standard deviation."""
    values: Float[Tensor, "env time"]
    advantages: Float[Tensor, "env time"]
    returns: Float[Tensor, "env time"]
    valid_mask: Bool[Tensor, "env time"]
    """False on padding."""
    state: Float[Tensor, "env layers width"]
    """Memory before each row's first step."""
    group_size: int = 1
    """Number of consecutive rows that share random numbers."""

    def __getitem__(self, name: str) -> Any:
        """Return a field by name."""
        if name not in self.__slots__:
            raise KeyError(f"no field {name!r}; there are {', '.join(self.__slots__)}.")
        return getattr(self, name)

    @property
    def num_envs(self) -> int:
        """Number of rows."""
        return self.valid_mask.shape[0]

    def single_steps(self) -> "SequenceBatch":
        """Make every step a row of its own, for policies without memory."""
        rows = {
            name: map_tensors(lambda t: t.flatten(0, 1).unsqueeze(1), self[name])
            for name in self.__slots__
            if name not in ("state", "group_size")
        }
        steps = self.valid_mask.numel()
        return SequenceBatch(
            **rows, state=self.state.new_zeros(steps, *self.state.shape[1:])
        )

    def minibatches(
        self, count: int, generator: Generator
    ) -> Iterator["SequenceBatch"]:
        """Split the rows at random into at most `count` parts of nearly equal size.

        The order is drawn from `generator`, on the CPU, before this returns. Groups are
        not kept together.
        """
        return shuffled(replace(self, group_size=1), self.valid_mask, count, generator)


def shuffled(
    tree: Tree, like: Tensor, count: int, generator: Generator
) -> Iterator[Tree]:
    """Split the rows of all tensors at random, as `SequenceBatch.minibatches`.

    `like` is one of the tensors. Rows are copied once, so parts are views.
    """
    rows = like.shape[0]
    order = torch.randperm(rows, generator=generator)
    order = to_device(order, like.device)
    mixed = map_tensors(lambda x: x.index_select(0, order), tree)
    size, longer = divmod(rows, count := min(count, rows))
    ends = [size * part + min(part, longer) for part in range(count + 1)]
    return (map_tensors(itemgetter(slice(*part)), mixed) for part in pairwise(ends))


class Field(NamedTuple):
    """Expected name, shape and dtype of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class StoredField:
    """A view `[env, time]` of the storage; an assignment copies into it."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the attribute's name."""
        self._name = name

    def __get__(self, buffer: "TamiyoRolloutBuffer", owner: type) -> Tensor:
        """Return the view."""
        return buffer._views[self._name]

    def __set__(self, buffer: "TamiyoRolloutBuffer", values: Tensor) -> None:
        """Copy values of all steps into the storage."""
        view = buffer._views[self._name]
        if values is not view:  # `buffer.rewards *= 2` assigns the view itself
            buffer._require(
                [Field(self._name, tuple(view.shape), view.dtype)], [values]
            )
            view.copy_(values)


class TamiyoRolloutBuffer:
    """Stores the steps since the last update, one row per environment.

    Order of calls: `begin` (optional), `add` for every step, `finish` unless every row
    ends with its episode, `compute_advantages_and_returns`, `get_batched_sequences`,
    `reset`. `join` replaces the first three calls by the contents of other buffers.

    `dones`, `truncated`, `rewards`, `values`, `final_values`, `advantages` and
    `returns` are writable views `[env, time]` of the storage. `step_counts` is
    read-only. Views hold old data beyond `step_counts`.

    Args:
        num_envs: Number of environments.
        max_steps: Maximum number of steps per environment.
        spec: Observation and action space of the policy.
        state_shape: Layers and width of the policy's memory.
        gamma: Discount factor.
        gae_lambda: Trace decay: 0 is one-step TD, 1 is Monte Carlo.
        device: Device of the storage.
        max_bytes: Maximum size of the storage.
    """

    dones = StoredField()
    """Whether the step ended its episode (terminated or truncated)."""
    truncated = StoredField()
    """Whether the step truncated its episode; False where it terminated."""
    rewards = StoredField()
    values = StoredField()
    """V(s) under the policy that acted."""
    final_values = StoredField()
    """V of the final observation where truncated."""
    advantages = StoredField()
    returns = StoredField()
    """Lambda-returns."""

    @classmethod
    def for_policy(
        cls, policy: Policy, num_envs: int, max_steps: int, **settings: Any
    ) -> "TamiyoRolloutBuffer":
        """Create a buffer with the spec and the memory shape of a policy.

        Args:
            policy: The policy that will act.
            num_envs: Number of environments.
            max_steps: Maximum number of steps per environment.
            settings: Further arguments of `TamiyoRolloutBuffer`, such as `gamma`.
        """
        shape = policy.state_shape
        return cls(num_envs, max_steps, policy.spec, state_shape=shape, **settings)

    @torch.inference_mode(False)  # the storage is also used outside of this mode
    def __init__(
        self,
        num_envs: int,
        max_steps: int,
        spec: PolicySpec,
        *,
        state_shape: tuple[int, int],
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        device: torch.device | str = "cpu",
        max_bytes: int = 8 * 2**30,
    ) -> None:
        require_int("num_envs", num_envs)
        require_int("max_steps", max_steps)
        require_number("gamma", gamma, 0.0, 1.0)
        require_number("gae_lambda", gae_lambda, 0.0, 1.0)
        if not isinstance(state_shape, Sequence) or len(state_shape) != 2:
            raise InvalidInputError(
                f"state_shape must be layers and width, got {state_shape!r}. Pass "
                "policy.state_shape."
            )
        for size in state_shape:
            require_int("state_shape", size)
        if not isinstance(spec, PolicySpec):
            raise InvalidInputError(
                f"spec must be an ActionSpec, got {type(spec).__name__}. Pass the "
                "policy's spec."
            )
        self.device = device = usable_device(device, has_values=False)
        self.num_envs, self.max_steps, self.spec = num_envs, max_steps, spec
        self.state_shape = tuple(state_shape)
        self.gamma, self.gae_lambda = float(gamma), float(gae_lambda)

        self._fields = step_fields(num_envs, spec)
        self._state_field = Field("state", (num_envs, *state_shape))
        # The extra column takes the steps of environments that did not act.
        columns = max_steps + 1
        stored = [*self._fields, *(Field(name, (num_envs,)) for name in RESULTS)]
        self.nbytes = sum(columns * prod(f.shape) * f.dtype.itemsize for f in stored)
        self.nbytes += prod(self._state_field.shape) * 4
        if self.nbytes > max_bytes:
            raise InvalidInputError(
                f"{num_envs} environments x {max_steps} steps need {self.nbytes:,} "
                f"bytes, more than max_bytes = {max_bytes:,}. Use fewer or raise it."
            )
        self._storage = {
            # `add` takes `terminated` and stores `dones`.
            "dones" if f.name == "terminated" else f.name: torch.zeros(
                (columns, *f.shape), dtype=f.dtype, device=device
            )
            for f in stored
        }
        by_time = {name: self._storage[name][:max_steps] for name in VIEWS}
        self._views = {name: field.T for name, field in by_time.items()}
        self._joined = [*self._storage][: len(self._fields)]
        self._written = [self._storage[name] for name in self._joined]
        self._columns = [*zip(*map(torch.unbind, self._written), strict=True)]
        self._counts = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._last_values = torch.zeros(num_envs, device=device)
        by_time |= {"step_counts": self._counts, "last_values": self._last_values}
        self._rollout = [by_time[name] for name in Rollout._fields]
        self._state = torch.zeros(self._state_field.shape, device=device)
        self._unknown = torch.full((num_envs,), torch.nan, device=device)
        self._envs = torch.arange(num_envs, device=device)
        self._steps = torch.arange(max_steps, device=device)
        self._sizes = np.array(spec.sizes)
        self._names = tuple(spec.observation)
        self._numeric = np.array(spec.numeric)
        self._checks_values = device.type == "cpu"
        if self._checks_values:
            results = [by_time[name] for name in RESULTS]
            self._count_array = self._counts.numpy()
            self._arrays = [field.numpy() for field in (*self._rollout, *results)]
            names = (*CHOICE_FIELDS, *END_FIELDS)
            self._checked = [self._storage[name].numpy() for name in names]
            self._finite = {
                f.name: self._storage[f.name].numpy().reshape(columns, num_envs, -1)
                for f in self._fields
                if f.dtype.is_floating_point and f.name != "final_values"
            }
        self.reset()

    def reset(self) -> None:
        """Discard all steps."""
        self._counts.zero_()
        self._state.zero_()
        self.policy_version = 0
        self.group_size = 1
        self._adds = 0
        self._is_level = True  # all rows have the same length
        self._is_finished = False
        self.is_computed = False
        """Whether `advantages` and `returns` belong to this rollout."""

    def begin(
        self,
        state: Float32[Tensor, "env layers width"] | None = None,
        policy_version: int = 0,
        group_size: int = 1,
    ) -> None:
        """Set the memory and the policy version at the start of the rows.

        Args:
            state: The policy's memory before the first step; zeros if None.
            policy_version: `PPOAgent.version` of the policy that will act.
            group_size: Number of consecutive environments that share random numbers.
        """
        if self._adds:
            raise InvalidStateError(
                f"begin() after {self._adds} steps. Call reset() first."
            )
        if group_size < 1 or self.num_envs % group_size:
            raise InvalidInputError(
                f"group_size is {group_size} but the buffer has {self.num_envs} "
                "environments. Use a divisor."
            )
        if state is None:
            self._state.zero_()
        else:
            self._require([self._state_field], [state])
            self._require_finite_rows("state", state)
            self._state.copy_(state)
        self.policy_version, self.group_size = policy_version, group_size

    def add(
        self,
        decision: Decision | None = None,
        *,
        features: Any,
        episode_start: Bool[Tensor, " env"],
        rewards: Float32[Tensor, " env"],
        terminated: Bool[Tensor, " env"],
        truncated: Bool[Tensor, " env"],
        masks: Bool[Tensor, "env head choice"] | None = None,
        actions: Shaped[Tensor, "env head"] | None = None,
        log_probs: Float32[Tensor, "env head"] | None = None,
        distribution: Float32[Tensor, "env head choice"] | None = None,
        values: Float32[Tensor, " env"] | None = None,
        final_values: Float32[Tensor, " env"] | None = None,
        acted: Bool[Tensor, " env"] | None = None,
    ) -> None:
        """Store one step of all environments.

        Pass either `decision`, as `Policy.act` returns it, or its parts: `masks`,
        `actions`, `log_probs`, `distribution` and `values`.

        Args:
            decision: What the policy returned for this step.
            features: Observation that the policy read.
            episode_start: Whether the observation is the first of an episode. Within a
                row it must be True exactly after the end of an episode.
            rewards: Reward of the step.
            terminated: Whether the episode reached a terminal state. Takes precedence
                over `truncated`.
            truncated: Whether the episode was cut off, for instance by a time limit.
            masks: Legal choices of each head.
            actions: Action of each head.
            log_probs: Log-probability of each action, given the heads before it.
            distribution: Log-probabilities of all choices; ignored where illegal.
            values: V of the observation.
            final_values: V of the final observation; required where truncated.
            acted: Environments that took this step; all if None.
        """
        self._require_open("add")
        parts = (masks, actions, log_probs, distribution, values)
        if decision is not None:
            if any(part is not None for part in parts):
                raise InvalidInputError(
                    "add() got a decision and parts of one. Pass either of them."
                )
            chosen = (decision.masks, decision.actions, decision.log_probs)
            parts = (*chosen, decision.distribution, decision.values)
        given: tuple[Any, ...] = (
            *self._leaves(features),
            episode_start,
            *parts,
            rewards,
            terminated,
            truncated,
            self._unknown if final_values is None else final_values,
        )
        self._require(self._fields, given)
        cut_short = truncated > terminated
        step = (*given[:-3], terminated | truncated, cut_short, given[-1])
        if self._is_level and acted is None:
            if self._adds == self.max_steps:
                raise InvalidStateError(
                    f"the buffer is full, every row has {self.max_steps} steps. Call "
                    "reset() first."
                )
            torch._foreach_copy_(self._columns[self._adds], step)
            self._require_values(self._counts)
            self._counts += 1
        else:
            self._add_ragged(step, acted)
        self._adds += 1

    def finish(self, last_values: Float32[Tensor, " env"]) -> None:
        """End the rollout.

        Args:
            last_values: V of the next observation; ignored for rows whose last step
                ended an episode.
        """
        self._require_open("finish")
        if not self._adds:
            raise InvalidStateError("finish() on an empty buffer. Call add() first.")
        self._require([Field("last_values", (self.num_envs,))], [last_values])
        used = torch.where(self._unfinished(), last_values, 0.0)
        self._require_finite_rows("last_values", used)
        self._last_values.copy_(used)
        self._is_finished = True

    def columns(self) -> dict[str, Tensor]:
        """Return the storage of a full, finished rollout for `join`; no copy."""
        if not (self._is_finished and self._is_level and self._adds == self.max_steps):
            raise InvalidStateError(
                "columns() on a rollout that is not full. Fill it and call finish()."
            )
        stored = {name: self._storage[name][:-1] for name in self._joined}
        return stored | {"state": self._state, "last_values": self._last_values}

    def require_columns(self, columns: Mapping[str, object], num_envs: int) -> None:
        """Check that `columns` are a full rollout of `num_envs` environments.

        They may be on the CPU or on the device of the buffer.
        """
        steps = (self.max_steps, num_envs)
        wanted = [
            Field(name, (*steps, *storage.shape[2:]), storage.dtype)
            for name, storage in zip(self._joined, self._written, strict=True)
        ]
        wanted.append(Field("state", (num_envs, *self.state_shape)))
        wanted.append(Field("last_values", (num_envs,)))
        if columns.keys() != {field.name for field in wanted}:
            raise InvalidInputError(
                f"the rollout has unexpected columns: {', '.join(columns)}."
            )
        state = columns["state"]
        is_host = isinstance(state, Tensor) and state.device.type == "cpu"
        device = torch.device("cpu") if is_host else self.device
        self._require(wanted, [columns[field.name] for field in wanted], device)
        for name, values in columns.items():
            assert isinstance(values, Tensor)
            if name == "final_values" or not values.is_floating_point():
                continue
            if is_host and not bool(values.isfinite().all()):
                raise NotFiniteError(f"{name} of the rollout contains NaN or inf.")

    def join(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        policy_version: int = 0,
        group_size: int = 1,
    ) -> None:
        """Fill the buffer with full rollouts, each of some of the environments.

        Args:
            parts: `columns()` of other buffers with the same `max_steps`, in order.
            policy_version: `PPOAgent.version` of the policy that acted.
            group_size: See `begin`.
        """
        for part in parts:
            self.require_columns(part, len(part["last_values"]))
        axes = dict.fromkeys(self._joined, 1) | {"state": 0, "last_values": 0}
        whole = {
            name: torch.cat([part[name] for part in parts], dim=axis)
            for name, axis in axes.items()
        }
        whole = to_device(whole, self.device)
        self.begin(whole["state"], policy_version, group_size)
        for name, storage in zip(self._joined, self._written, strict=True):
            storage[:-1] = whole[name]
        self._counts.fill_(self.max_steps)
        self._adds = self.max_steps
        self.finish(whole["last_values"])

    def compute_advantages_and_returns(self) -> None:
        """Compute `advantages` and `returns` (lambda-returns); 0 on padding."""
        if not self._longest():
            raise InvalidStateError("the buffer is empty. Call add() first.")
        if not self._is_finished:
            unfinished = self._unfinished().cpu().numpy()
            if unfinished.any():
                raise InvalidStateError(
                    f"the last episode of environment {int(unfinished.argmax())} has "
                    "not ended. Call finish() first."
                )
        if self._checks_values:
            gae_time_major(*self._arrays, self.gamma, self.gae_lambda)
        else:
            views = [x.T if x.ndim == 2 else x for x in self._rollout]
            results = gae(Rollout(*views), self.gamma, self.gae_lambda)
            self.advantages.copy_(results[0])
            self.returns.copy_(results[1])
        self.is_computed = True

    def get_batched_sequences(
        self, device: torch.device | str = "cpu"
    ) -> SequenceBatch:
        """Copy the rollout to a device as one padded sequence per environment."""
        if not self.is_computed:
            raise InvalidStateError(
                "the advantages are missing. Call compute_advantages_and_returns() "
                "first."
            )
        device = usable_device(device, has_values=False)
        length = self._longest()
        valid = (self._steps[:length] < self._counts[:, None]).to(device)
        padding = not self._is_level

        def sequences(name: str) -> Tensor:
            whole = self._storage[name][:length].to(device).transpose(0, 1)
            whole = whole.clone(memory_format=torch.contiguous_format)
            if padding:  # fill, do not multiply: NaN times 0 is NaN
                beyond = ~valid.view(*valid.shape, *[1] * (whole.ndim - 2))
                whole.masked_fill_(beyond, 0)
            return whole

        masks = sequences("masks")
        if padding:
            masks[..., 0] |= ~valid[..., None]
        copied = ("episode_start", *CHOICE_FIELDS[1:], "values", *RESULTS)
        return SequenceBatch(
            features=self.spec.observation_type(
                **{name: sequences(f"features.{name}") for name in self._names}
            ),
            masks=masks,
            **{name: sequences(name) for name in copied},
            valid_mask=valid,
            state=self._state.to(device).clone(),
            group_size=self.group_size,
        )

    @property
    def step_counts(self) -> Int64[Tensor, " env"]:
        """Number of steps in each row; read-only."""
        return read_only(self._counts, "add() counts steps, reset() begins at 0.")

    @property
    def is_full(self) -> bool:
        """Whether every row has `max_steps` steps; reads from the device."""
        return not bool((self._counts < self.max_steps).any())

    def __reduce__(self) -> NoReturn:
        """Raise an error: a rollout is only valid for its policy's next update."""
        raise InvalidStateError(
            "a rollout buffer cannot be pickled or copied. Collect a new rollout."
        )

    def _leaves(self, features: Any) -> list[Tensor]:
        """Return the tensors of an observation in the order of the spec."""
        kind: type[Any] = self.spec.observation_type
        if not isinstance(features, kind):
            raise InvalidInputError(
                f"features must be {kind.__name__}, got {type(features).__name__}."
            )
        if kind is not dict:
            return [getattr(features, name) for name in self._names]
        if features.keys() != self.spec.observation.keys():
            raise InvalidInputError(
                f"features must have {', '.join(self._names)}, got "
                f"{', '.join(features)}."
            )
        return [features[name] for name in self._names]

    def _require_open(self, call: str) -> None:
        if self.is_computed or self._is_finished:
            raise InvalidStateError(
                f"{call}() on a finished rollout. Call reset() first."
            )

    def _add_ragged(self, step: tuple[Tensor, ...], acted: Tensor | None) -> None:
        """Append a step to the rows of the environments that acted."""
        if acted is None:
            acted = torch.ones_like(self._envs, dtype=torch.bool)
        self._require([Field("acted", (self.num_envs,), torch.bool)], [acted])
        # No row can be full earlier, so the device is not read.
        if self._adds >= self.max_steps:
            full = (acted & (self._counts == self.max_steps)).cpu().numpy()
            if full.any():
                raise InvalidStateError(
                    f"the row of environment {int(full.argmax())} is full, it has "
                    f"{self.max_steps} steps. Call reset() first."
                )
        columns = torch.where(acted, self._counts, self.max_steps)
        for storage, values in zip(self._written, step, strict=True):
            storage.index_put_((columns, self._envs), values)
        self._require_values(columns)
        self._counts += acted
        self._is_level = False

    def _require(
        self,
        expected: Sequence[Field],
        given: Sequence[object],
        device: torch.device | None = None,
    ) -> None:
        """Check that tensors are dense and have the right shape, dtype and device."""
        device = device or self.device
        for (name, shape, dtype), value in zip(expected, given, strict=True):
            require_tensor(name, value, shape, dtype, device)
            assert isinstance(value, Tensor)
            if value.layout is not torch.strided or value.requires_grad:
                raise InvalidInputError(
                    f"{name} must be dense and detached. Act under torch.no_grad()."
                )

    def _require_finite_rows(self, name: str, values: Float[Tensor, "env ..."]) -> None:
        if self._checks_values:
            array = values.contiguous().numpy().reshape(1, self.num_envs, -1)
            self._require_finite(name, array, np.zeros(self.num_envs, np.int64))

    def _require_finite(self, name: str, array: Array, at: Array) -> None:
        """Check for NaN and inf at column `at[env]` of each environment."""
        env = _first_infinite(array, at)
        if env >= 0:
            row = array[at[env], env]
            raise NotFiniteError(
                f"{name} of environment {env} at step {int(self._counts[env])} must be "
                f"finite, got {row[~np.isfinite(row)][0]}. Fix the environment, or "
                "leave it out with `acted`."
            )

    def _require_values(self, columns: Int64[Tensor, " env"]) -> None:
        """Check the values of the step just written; on the CPU only."""
        if not self._checks_values:
            return
        at = columns.numpy()
        for name, array in self._finite.items():
            self._require_finite(name, array, at)
        problem, env, head = _first_problem(
            *self._checked, self._sizes, self._numeric, at
        )
        if not problem:
            return
        error, text = PROBLEMS[problem]
        where = f"environment {env} at step {int(self._counts[env])}"
        if head < 0:
            raise error(f"{text} Check the data of {where}.")
        action, log_prob = (x[at[env], env, head] for x in self._checked[1:3])
        raise error(
            f"{text} Head {self.spec.head_names[head]!r} of {where}: action {action}, "
            f"log-probability {log_prob}."
        )

    def _unfinished(self) -> Bool[Tensor, " env"]:
        """Return which rows have a last step that did not end its episode."""
        if self._is_level:
            return ~self._storage["dones"][self._adds - 1]
        ended = self._storage["dones"][self._counts - 1, self._envs]
        return ~ended & (self._counts > 0)

    def _longest(self) -> int:
        """Return the length of the longest row; an upper bound on other devices."""
        if self._checks_values and not self._is_level:
            return int(self._count_array.max())
        return min(self._adds, self.max_steps)


def step_fields(num_envs: int, spec: PolicySpec) -> tuple[Field, ...]:
    """Return the fields of one step of all environments."""
    env, choices = (num_envs,), (num_envs, len(spec.sizes), spec.width)
    action = torch.float32 if any(spec.numeric) else torch.int64
    return (
        *(
            Field(f"features.{name}", (*env, *leaf.shape), leaf.dtype)
            for name, leaf in spec.observation.items()
        ),
        Field("episode_start", env, torch.bool),
        Field("masks", choices, torch.bool),
        Field("actions", choices[:2], action),
        Field("log_probs", choices[:2]),
        Field("distribution", choices),
        Field("values", env),
        Field("rewards", env),
        Field("terminated", env, torch.bool),
        Field("truncated", env, torch.bool),
        Field("final_values", env),
    )


# Checks of the values of one step, compiled because they run at every step. Arrays are
# [time, env, ...]; `at` is each environment's column, the last one if it did not act.

PADDING, EMPTY, OUT_OF_RANGE, ILLEGAL, MISMATCH, NO_FINAL_VALUE, BAD_START = range(1, 8)
PROBLEMS: Final = {
    PADDING: (InvalidInputError, "masks allow more choices than the head has."),
    EMPTY: (NoLegalActionError, "masks allow no choice. Allow 0 in unused heads."),
    OUT_OF_RANGE: (IllegalActionError, "actions are out of range."),
    ILLEGAL: (IllegalActionError, "actions are illegal. Store the masks used to act."),
    MISMATCH: (InvalidInputError, "log_probs and distribution do not match."),
    NO_FINAL_VALUE: (NotFiniteError, "final_values must be finite where truncated."),
    BAD_START: (
        InvalidInputError,
        "episode_start must be True exactly after the end of an episode.",
    ),
}


@kernel
def _first_infinite(values: Array, at: Array) -> int:
    """Return the first environment with a NaN or inf; -1 if there is none."""
    last = values.shape[0] - 1
    for env in range(values.shape[1]):
        if at[env] < last or last == 0:
            odd = 0
            for number in range(values.shape[2]):
                value = values[at[env], env, number]
                odd += value - value != 0  # true for NaN and inf; vectorised
            if odd:
                return env
    return -1


@kernel
def _first_problem(
    masks: Array,
    actions: Array,
    log_probs: Array,
    distribution: Array,
    episode_start: Array,
    dones: Array,
    truncated: Array,
    final_values: Array,
    sizes: Array,
    numeric: Array,
    at: Array,
) -> tuple[int, int, int]:
    """Return the first problem, its environment and its head, or zeros.

    The head is -1 if the problem is one of the whole step.
    """
    for env in range(masks.shape[1]):
        now = at[env]
        if now == masks.shape[0] - 1:
            continue
        if truncated[now, env] and not np.isfinite(final_values[now, env]):
            return NO_FINAL_VALUE, env, -1
        if now > 0 and episode_start[now, env] != dones[now - 1, env]:
            return BAD_START, env, -1
        for head in range(masks.shape[2]):
            mask, action = masks[now, env, head], int(actions[now, env, head])
            if mask[sizes[head] :].any():
                return PADDING, env, head
            if not mask.any():
                return EMPTY, env, head
            if numeric[head]:
                continue
            if not 0 <= action < sizes[head] or action != actions[now, env, head]:
                return OUT_OF_RANGE, env, head
            if not mask[action]:
                return ILLEGAL, env, head
            given = log_probs[now, env, head]
            expected = distribution[now, env, head, action]
            allowed = LOG_PROB_TOLERANCE * (1 + abs(expected))
            if given > 0 or abs(given - expected) > allowed:
                return MISMATCH, env, head
    return 0, 0, 0
