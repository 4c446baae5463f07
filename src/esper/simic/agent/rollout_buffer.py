"""One rollout of all environments: stored as it happens, read as whole sequences.

Storage is allocated once and time-major, `[time, env, ...]`: a step of all
environments is one contiguous copy per field, and the advantage recurrence runs over
environments side by side. Readers see `[env, time, ...]`. A row may hold several
episodes and may be shorter than its neighbours; memory is kept only where a row starts.

An episode that *terminated* has no future; one that was *truncated* has the future that
its true final observation promises; a row that is merely *cut*, because the rollout is
over, has the future of the observation that comes next.

Shapes, dtypes and devices are checked everywhere. Values are checked on the CPU alone:
elsewhere a look would stall the device, and the update refuses non-finite numbers
anyway. A refused step is not counted, and the next one is written over it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64, Shaped
from numpy.typing import NDArray
from torch import Generator, Tensor

from esper.contracts.devices import usable_device
from esper.contracts.errors import (
    IllegalActionError,
    InvalidInputError,
    InvalidStateError,
    NoLegalActionError,
    NotFiniteError,
)
from esper.contracts.readonly import read_only
from esper.kernels import kernel
from esper.scan import Rollout, gae, gae_time_major, require_share
from esper.simic.agent.distribution import PolicySpec

Array = NDArray[Any]
Record = TypeVar("Record")
RESULTS: Final = ("advantages", "returns")
VIEWS: Final = ("dones", "truncated", "rewards", "values", "final_values", *RESULTS)
CHOSEN: Final = ("masks", "actions", "log_probs", "distribution")
"""What `_first_bad_choice` reads."""
ENDED: Final = ("episode_start", "dones", "truncated", "final_values")
"""What `_first_bad_end` reads."""
TOLERANCE: Final = 1e-4  # between a log-probability and its distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """What an update learns from: one row per environment, padded at its end.

    Minibatches split environments, never time, so memory can be unrolled from the row's
    first state. Tensors are contiguous; on padding they are 0, False and legal.
    """

    features: Any
    """What was seen before each choice: a dataclass or dict of tensors."""
    episode_start: Bool[Tensor, "env time"]
    """Whether the step is the first of an episode: memory starts anew before it."""
    masks: Bool[Tensor, "env time head choice"]
    """The mask rows the choices were drawn from."""
    actions: Shaped[Tensor, "env time head"]
    """int64 choices, or float32 numbers."""
    log_probs: Float[Tensor, "env time head"]
    """Log-probability of each choice under the policy that made it."""
    distribution: Float[Tensor, "env time head choice"]
    """Log-probabilities of all legal choices under that policy; of numbers, mean and
    log standard deviation."""
    values: Float[Tensor, "env time"]
    advantages: Float[Tensor, "env time"]
    returns: Float[Tensor, "env time"]
    valid_mask: Bool[Tensor, "env time"]
    """False on padding."""
    state: Float[Tensor, "env layers width"]
    """Memory before each row's first step."""
    group_size: int = 1
    """How many rows after each other have the same random streams."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        """A field by its name."""
        if name not in self.__slots__:
            raise KeyError(f"no field {name!r}; there are {', '.join(self.__slots__)}.")
        return getattr(self, name)

    @property
    def num_envs(self) -> int:
        """How many rows there are."""
        return self.valid_mask.shape[0]

    def select(self, index: Int64[Tensor, " chosen"]) -> "SequenceBatch":
        """The rows of some environments, copied; groups are not kept together."""
        index = index.to(self.valid_mask.device)
        chosen = map_tensors(lambda tensor: tensor.index_select(0, index), self)
        return replace(chosen, group_size=1)

    def minibatches(
        self, count: int, generator: Generator
    ) -> Iterator["SequenceBatch"]:
        """Split the environments at random; each is in exactly one part.

        Args:
            count: How many parts; their sizes differ by at most one.
            generator: A CPU generator; the only source of chance. It has moved on
                when this returns, however many parts are taken.
        """
        if not 1 <= count <= self.num_envs:
            raise InvalidInputError(
                f"count must lie in 1..{self.num_envs}, the number of environments, "
                f"got {count}."
            )
        order = torch.randperm(self.num_envs, generator=generator)
        return (self.select(part) for part in order.tensor_split(count))


def map_tensors(function: Callable[[Tensor], Tensor], value: Record) -> Record:
    """A record, whose fields may be records or dicts, with every tensor changed."""
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {  # type: ignore[return-value]
            name: map_tensors(function, part) for name, part in value.items()
        }
    if not is_dataclass(value):
        return value
    names = [field.name for field in fields(value)]
    parts = {name: map_tensors(function, getattr(value, name)) for name in names}
    return replace(value, **parts)  # type: ignore[type-var]


class Field(NamedTuple):
    """What a tensor must be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class StoredField:
    """A field of all steps, `[env, time]`; an assignment writes into the storage."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Be called what the attribute is called."""
        self._name = name

    def __get__(self, buffer: "TamiyoRolloutBuffer", owner: type) -> Tensor:
        """A view of the storage."""
        return buffer._views[self._name]

    def __set__(self, buffer: "TamiyoRolloutBuffer", values: Tensor) -> None:
        """Copy values of all steps into the storage."""
        view = buffer._views[self._name]
        if values is not view:  # `buffer.rewards *= 2` assigns what it wrote into
            buffer._require(
                [Field(self._name, tuple(view.shape), view.dtype)], [values]
            )
            view.copy_(values)


class TamiyoRolloutBuffer:
    """What happened since the last update, one row per environment.

    Calls come in this order: `begin` (optional), `add` for every step, `finish` unless
    every row ends with its episode, `compute_advantages_and_returns`,
    `get_batched_sequences`, `reset`. Instead of the first three, `join` takes over what
    other buffers hold.

    No write is lost. `dones`, `truncated`, `rewards`, `values`, `final_values`,
    `advantages` and `returns` are views of the storage: what is written into them, or
    assigned to them, is stored. `step_counts` is counted by `add` and refuses to be
    written into. Beyond `step_counts` views show leftovers.

    Args:
        num_envs: Environments that step together; rows.
        max_steps: Steps a row can hold.
        spec: What is observed and chosen; it decides the shapes.
        state_shape: Layers and width of the policy's memory.
        gamma: Discount per decision.
        gae_lambda: Trace decay: 0 is one-step TD, 1 is Monte Carlo.
        device: Where everything is stored.
        max_bytes: A buffer larger than this is refused.
    """

    dones = StoredField()
    """Whether a step ended its episode, for whatever reason."""
    truncated = StoredField()
    """Whether a step ended an episode that had a future."""
    rewards = StoredField()
    values = StoredField()
    """V(s) under the policy that acted."""
    final_values = StoredField()
    """V of the last observation where truncated."""
    advantages = StoredField()
    returns = StoredField()
    """Lambda-returns, once computed."""

    @torch.inference_mode(False)  # storage outlives the mode it is made in
    def __init__(
        self,
        num_envs: int,
        max_steps: int,
        spec: PolicySpec,
        *,
        state_shape: tuple[int, int],
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        device: torch.device | str = "cpu",
        max_bytes: int = 8 * 2**30,
    ) -> None:
        for name, count in (("num_envs", num_envs), ("max_steps", max_steps)):
            if not _is_count(count):
                raise InvalidInputError(
                    f"{name} must be at least 1 and whole, got {count!r}."
                )
        require_share("gamma", gamma)
        require_share("gae_lambda", gae_lambda)
        pair = isinstance(state_shape, Sequence) and len(state_shape) == 2
        if not pair or not all(map(_is_count, state_shape)):
            raise InvalidInputError(
                "state_shape must be two whole numbers from 1, layers and width, got "
                f"{state_shape!r}; pass policy.state_shape."
            )
        if not isinstance(spec, PolicySpec):
            raise InvalidInputError(
                f"spec must be an ActionSpec, got {type(spec).__name__}; anything that "
                "has what simic's PolicySpec names will do."
            )
        self.device = device = usable_device(device)
        self.num_envs, self.max_steps, self.spec = num_envs, max_steps, spec
        self.state_shape = tuple(state_shape)
        self.gamma, self.gae_lambda = float(gamma), float(gae_lambda)

        self._fields = step_fields(num_envs, spec)
        self._state_field = Field("state", (num_envs, *state_shape))
        # One column more: it takes the steps of environments that did not act.
        columns = max_steps + 1
        stored = [*self._fields, *(Field(name, (num_envs,)) for name in RESULTS)]
        self.nbytes = sum(columns * prod(f.shape) * f.dtype.itemsize for f in stored)
        self.nbytes += prod(self._state_field.shape) * 4
        if self.nbytes > max_bytes:
            raise InvalidInputError(
                f"{num_envs} environments x {max_steps} steps need {self.nbytes:,} "
                f"bytes, more than max_bytes = {max_bytes:,}."
            )
        self._storage = {
            # What is given as `terminated` is kept as `dones`.
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
        self._is_continuous = spec.action_dtype.is_floating_point
        self._looks = device.type == "cpu"
        if self._looks:
            results = [by_time[name] for name in RESULTS]
            self._count_array = self._counts.numpy()
            self._arrays = [field.numpy() for field in (*self._rollout, *results)]
            self._chosen = [self._storage[name].numpy() for name in CHOSEN]
            self._ended = [self._storage[name].numpy() for name in ENDED]
            self._finite = {
                f.name: self._storage[f.name].numpy().reshape(columns, num_envs, -1)
                for f in self._fields
                if f.dtype.is_floating_point and f.name != "final_values"
            }
        self.reset()

    def reset(self) -> None:
        """Forget everything; storage stays as it is and is written over."""
        self._counts.zero_()
        self._state.zero_()
        self.policy_version = 0
        self.group_size = 1
        self._adds = 0
        self._is_level = True  # Everyone acted in every step: rows are equally long.
        self._is_cut = False
        self.is_computed = False
        """Whether `advantages` and `returns` are those of this rollout."""

    def begin(
        self,
        state: Float32[Tensor, "env layers width"] | None = None,
        policy_version: int = 0,
        group_size: int = 1,
    ) -> None:
        """Say where the rows start; without it, with empty memory at version 0.

        Args:
            state: The policy's memory before the first step; copied.
            policy_version: Version of the policy that is going to act.
            group_size: How many environments in a row have the same random streams.
        """
        if self._adds:
            raise InvalidStateError(
                f"begin() after {self._adds} steps: rows start once; reset() first."
            )
        if group_size < 1 or self.num_envs % group_size:
            raise InvalidInputError(
                f"group_size is {group_size} but the buffer has {self.num_envs} "
                "environments; give a divisor."
            )
        if state is None:
            self._state.zero_()
        else:
            self._require([self._state_field], [state])
            self._require_known("state", state)
            self._state.copy_(state)
        self.policy_version, self.group_size = policy_version, group_size

    def add(
        self,
        *,
        features: Any,  # noqa: ANN401
        episode_start: Bool[Tensor, " env"],
        masks: Bool[Tensor, "env head choice"],
        actions: Shaped[Tensor, "env head"],
        log_probs: Float32[Tensor, "env head"],
        distribution: Float32[Tensor, "env head choice"],
        values: Float32[Tensor, " env"],
        rewards: Float32[Tensor, " env"],
        terminated: Bool[Tensor, " env"],
        truncated: Bool[Tensor, " env"],
        final_values: Float32[Tensor, " env"] | None = None,
        acted: Bool[Tensor, " env"] | None = None,
    ) -> None:
        """Copy one step of all environments.

        Args:
            features: What the policy read.
            episode_start: Whether an observation is the first of an episode. Inside a
                row this holds exactly after a step that ended one.
            masks: The mask rows that the choices were drawn from.
            actions: The choice of every head.
            log_probs: Log-probability of each choice, given the heads before it.
            distribution: Log-probabilities of all choices; not used where illegal.
            values: V of the observation.
            rewards: The rewards of the step.
            terminated: Whether the episode ended without a future; it counts even
                where `truncated` is set too.
            truncated: Whether the episode was cut although it had a future.
            final_values: V of the true final observation, where only `truncated` is
                set; None if nothing was truncated.
            acted: Environments whose rows grow; None is all of them.
        """
        self._require_open("add")
        given = (
            *self._leaves(features),
            episode_start,
            masks,
            actions,
            log_probs,
            distribution,
            values,
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
                    f"the buffer is full, every row has {self.max_steps} steps: "
                    "reset() first."
                )
            torch._foreach_copy_(self._columns[self._adds], step)
            self._require_values(self._counts)
            self._counts += 1
        else:
            self._add_ragged(step, acted)
        self._adds += 1

    def finish(self, last_values: Float32[Tensor, " env"]) -> None:
        """End the rollout where it stands.

        Args:
            last_values: V of the observation that comes next; not used for a row
                whose last step ended its episode.
        """
        self._require_open("cut")
        if not self._adds:
            raise InvalidStateError("finish() of an empty buffer: add() first.")
        self._require([Field("last_values", (self.num_envs,))], [last_values])
        used = torch.where(self._unfinished(), last_values, 0.0)
        self._require_known("last_values", used)
        self._last_values.copy_(used)
        self._is_cut = True

    def columns(self) -> dict[str, Tensor]:
        """A rollout that is full and cut, as `join` takes it; not copied."""
        if not (self._is_cut and self._is_level and self._adds == self.max_steps):
            raise InvalidStateError(
                "columns() of a rollout that goes on: fill and finish() it."
            )
        stored = {name: self._storage[name][:-1] for name in self._joined}
        return stored | {"state": self._state, "last_values": self._last_values}

    def require_columns(self, columns: Mapping[str, object], num_envs: int) -> None:
        """Refuse what is no rollout, of so many environments, that fits in here.

        Args:
            columns: As another buffer of as many steps gave them.
            num_envs: Environments that they are of.
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
                f"a rollout has other columns, got {', '.join(columns)}."
            )
        self._require(wanted, [columns[field.name] for field in wanted])
        for name, values in columns.items():
            assert isinstance(values, Tensor)
            known = name == "final_values" or not values.is_floating_point()
            if self._looks and not known and not bool(values.isfinite().all()):
                raise NotFiniteError(f"{name} of a rollout must be finite.")

    def join(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        policy_version: int = 0,
        group_size: int = 1,
    ) -> None:
        """Take over full rollouts of some environments each, in order.

        Args:
            parts: The `columns` of buffers with as many steps.
            policy_version: Of the policy that acted.
            group_size: As for `begin`.
        """
        for part in parts:
            self.require_columns(part, len(part["last_values"]))
        state = torch.cat([part["state"] for part in parts])
        self.begin(state, policy_version, group_size)
        for name, storage in zip(self._joined, self._written, strict=True):
            storage[:-1] = torch.cat([part[name] for part in parts], dim=1)
        self._counts.fill_(self.max_steps)
        self._adds = self.max_steps
        self.finish(torch.cat([part["last_values"] for part in parts]))

    def compute_advantages_and_returns(self) -> None:
        """Fill `advantages` and `returns` (lambda-returns), in place; 0 on padding."""
        if not self._longest():
            raise InvalidStateError("nothing to compute: add() first.")
        if not self._is_cut:
            unfinished = self._unfinished().cpu().numpy()
            if unfinished.any():
                raise InvalidStateError(
                    f"the episode of environment {int(unfinished.argmax())} goes on "
                    "after its last step: finish() first."
                )
        if self._looks:
            gae_time_major(*self._arrays, self.gamma, self.gae_lambda)
        else:
            views = [x.T if x.ndim == 2 else x for x in self._rollout]
            out = (self.advantages, self.returns)
            gae(*views, gamma=self.gamma, lam=self.gae_lambda, out=out)
        self.is_computed = True

    def get_batched_sequences(
        self, device: torch.device | str = "cpu"
    ) -> SequenceBatch:
        """Copy the rollout to a device, as one padded sequence per environment."""
        if not self.is_computed:
            raise InvalidStateError(
                "the advantages are missing: compute_advantages_and_returns() first."
            )
        device, length = usable_device(device), self._longest()
        valid = (self._steps[:length] < self._counts[:, None]).to(device)
        padding = not self._is_level

        def sequences(name: str) -> Tensor:
            whole = self._storage[name][:length].to(device).transpose(0, 1)
            whole = whole.clone(memory_format=torch.contiguous_format)
            if padding:  # selected away, never multiplied: NaN times 0 is NaN
                beyond = ~valid.view(*valid.shape, *[1] * (whole.ndim - 2))
                whole.masked_fill_(beyond, 0)
            return whole

        masks = sequences("masks")
        if padding:
            masks[..., 0] |= ~valid[..., None]
        copied = (
            "episode_start",
            "actions",
            "log_probs",
            "distribution",
            "values",
            *RESULTS,
        )
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
        """How many steps each row holds; for reading."""
        return read_only(self._counts, "add() counts steps, reset() begins at 0.")

    @property
    def is_full(self) -> bool:
        """Whether no row can take another step (reads the device)."""
        return not bool((self._counts < self.max_steps).any())

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: a rollout belongs to its policy's update."""
        raise InvalidStateError(
            "a rollout buffer cannot be pickled; collect a rollout anew."
        )

    def _leaves(self, features: Any) -> list[Tensor]:  # noqa: ANN401
        """The tensors of an observation, in the order of the spec."""
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
        if self.is_computed or self._is_cut:
            after = "compute" if self.is_computed else "cut"
            raise InvalidStateError(f"{call}() after {after}: reset() first.")

    def _add_ragged(self, step: tuple[Tensor, ...], acted: Tensor | None) -> None:
        """Some rows grow, each at its own end."""
        if acted is None:
            acted = torch.ones_like(self._envs, dtype=torch.bool)
        self._require([Field("acted", (self.num_envs,), torch.bool)], [acted])
        # No row can be full before so many calls, so the device need not be asked.
        if self._adds >= self.max_steps:
            full = (acted & (self._counts == self.max_steps)).cpu().numpy()
            if full.any():
                raise InvalidStateError(
                    f"the row of environment {int(full.argmax())} is full, it has "
                    f"{self.max_steps} steps: reset() first."
                )
        columns = torch.where(acted, self._counts, self.max_steps)
        for storage, values in zip(self._written, step, strict=True):
            storage.index_put_((columns, self._envs), values)
        self._require_values(columns)
        self._counts += acted
        self._is_level = False

    def _require(self, expected: Sequence[Field], given: Sequence[object]) -> None:
        """Refuse what is not a plain tensor of the right shape, dtype and device."""
        device = self.device
        for (name, shape, dtype), value in zip(expected, given, strict=True):
            if not isinstance(value, Tensor):
                problem = f"must be a tensor, got {type(value).__name__}"
            elif value.layout is not torch.strided:
                problem = f"must be dense, got {value.layout}"
            elif value.shape != shape or value.dtype is not dtype:
                problem = (
                    f"must be {dtype} of shape {shape}, got {value.dtype} of shape "
                    f"{tuple(value.shape)}"
                )
            elif value.device != device:
                problem = f"must be on {device}, got {value.device}; move it first"
            elif value.requires_grad:
                problem = "requires grad; detach it, or act under torch.no_grad()"
            else:
                continue
            raise InvalidInputError(f"{name} {problem}.")

    def _require_known(self, name: str, values: Float[Tensor, "env ..."]) -> None:
        if self._looks:
            array = values.contiguous().numpy().reshape(1, self.num_envs, -1)
            self._require_finite(name, array, np.zeros(self.num_envs, np.int64))

    def _require_finite(self, name: str, array: Array, at: Array) -> None:
        """Refuse NaN and infinity at each environment's column."""
        env = _first_infinite(array, at)
        if env >= 0:
            row = array[at[env], env]
            raise NotFiniteError(
                f"{name} of environment {env} at step {int(self._counts[env])} must be "
                f"finite, got {row[~np.isfinite(row)][0]}; leave the environment out."
            )

    def _require_values(self, columns: Int64[Tensor, " env"]) -> None:
        """Refuse a step in which a value cannot be meant; looks on the CPU only."""
        if not self._looks:
            return
        at = columns.numpy()
        for name, array in self._finite.items():
            self._require_finite(name, array, at)
        problem = env = head = 0
        if not self._is_continuous:
            problem, env, head = _first_bad_choice(*self._chosen, self._sizes, at)
        if problem:
            error, text = PROBLEMS[problem - 1]
            actions, log_probs = (x[at[env], env, head] for x in self._chosen[1:3])
            raise error(
                f"{text}; head {self.spec.head_names[head]!r} of environment {env} at "
                f"step {int(self._counts[env])}, choice {actions} with "
                f"log-probability {log_probs}."
            )
        problem, env = _first_bad_end(*self._ended, at)
        if problem:
            error, text = PROBLEMS[problem - 1]
            raise error(
                f"{text}; look at what was added of environment {env} at step "
                f"{int(self._counts[env])}."
            )

    def _unfinished(self) -> Bool[Tensor, " env"]:
        """Rows whose last step did not end its episode."""
        if self._is_level:
            return ~self._storage["dones"][self._adds - 1]
        ended = self._storage["dones"][self._counts - 1, self._envs]
        return ~ended & (self._counts > 0)

    def _longest(self) -> int:
        """Steps of the longest row, or what is known of it without asking a device."""
        if self._looks and not self._is_level:
            return int(self._count_array.max())
        return min(self._adds, self.max_steps)


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= 1


def step_fields(num_envs: int, spec: PolicySpec) -> tuple[Field, ...]:
    """What is stored of one step of all environments."""
    env, choices = (num_envs,), (num_envs, len(spec.sizes), spec.width)
    return (
        *(
            Field(f"features.{name}", (*env, *leaf.shape), leaf.dtype)
            for name, leaf in spec.observation.items()
        ),
        Field("episode_start", env, torch.bool),
        Field("masks", choices, torch.bool),
        Field("actions", choices[:2], spec.action_dtype),
        Field("log_probs", choices[:2]),
        Field("distribution", choices),
        Field("values", env),
        Field("rewards", env),
        Field("terminated", env, torch.bool),
        Field("truncated", env, torch.bool),
        Field("final_values", env),
    )


# One look at all values of a step, compiled: it runs at every step. Arrays are
# [time, env, ...], `at` is each environment's column, the last one if it did not act.

PADDED, NOTHING, OUTSIDE, FORBIDDEN, CONTRADICTED, LOST, TORN = range(1, 8)
PROBLEMS: Final = (
    (InvalidInputError, "rows allow more choices than the head has"),
    (
        NoLegalActionError,
        "rows allow nothing: let a head that is not used have choice 0",
    ),
    (IllegalActionError, "actions has a choice that the head does not have"),
    (
        IllegalActionError,
        "actions has a choice that its row forbids: store the rows used",
    ),
    (
        InvalidInputError,
        "log_probs contradict their distribution: store both as they were used",
    ),
    (NotFiniteError, "final_values must be finite where an episode is truncated"),
    (
        InvalidInputError,
        "first must be True after the end of an episode and nowhere else",
    ),
)


@kernel
def _first_infinite(values: Array, at: Array) -> int:
    """The first environment with a number that is not finite; -1 if there is none."""
    last = values.shape[0] - 1
    for env in range(values.shape[1]):
        if at[env] < last or last == 0:
            odd = 0
            for number in range(values.shape[2]):
                value = values[at[env], env, number]
                odd += value - value != 0  # NaN of NaN and infinity; vectorised
            if odd:
                return env
    return -1


@kernel
def _first_bad_choice(
    masks: Array,
    actions: Array,
    log_probs: Array,
    distribution: Array,
    sizes: Array,
    at: Array,
) -> tuple[int, int, int]:
    """The first choice that its row forbids or its distribution contradicts.

    Returns the problem, the environment and the head; (0, 0, 0) if there is none.
    """
    for env in range(masks.shape[1]):
        now = at[env]
        if now == masks.shape[0] - 1:
            continue
        for head in range(masks.shape[2]):
            row, size, action = (
                masks[now, env, head],
                sizes[head],
                actions[now, env, head],
            )
            if row[size:].any():
                return PADDED, env, head
            if not row.any():
                return NOTHING, env, head
            if not 0 <= action < size:
                return OUTSIDE, env, head
            if not row[action]:
                return FORBIDDEN, env, head
            given = log_probs[now, env, head]
            expected = distribution[now, env, head, action]
            if given > 0 or abs(given - expected) > TOLERANCE * (1 + abs(expected)):
                return CONTRADICTED, env, head
    return 0, 0, 0


@kernel
def _first_bad_end(
    episode_start: Array, dones: Array, truncated: Array, final_values: Array, at: Array
) -> tuple[int, int]:
    """The first truncation without a value, or beginning that follows no end.

    Returns the problem and the environment; (0, 0) if there is none.
    """
    for env in range(episode_start.shape[1]):
        now = at[env]
        if now == episode_start.shape[0] - 1:
            continue
        if truncated[now, env] and not np.isfinite(final_values[now, env]):
            return LOST, env
        if now > 0 and episode_start[now, env] != dones[now - 1, env]:
            return TORN, env
    return 0, 0
