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
anyway. A refused step leaves no trace.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from numpy.typing import NDArray
from torch import Generator, Tensor

from esper.contracts.actions import HEAD_NAMES, NUM_HEADS, ActionSpec
from esper.contracts.devices import usable_device
from esper.contracts.errors import BadInput, CallOrder, IllegalAction, NoLegalAction
from esper.contracts.features import Features, feature_shapes
from esper.scan import gae

RESULTS = ("advantages", "returns")
FINITE = (
    "features.host",
    "features.slots",
    "features.offers",
    "rewards",
    "values",
    "log_probs",
    "distribution",
)
"""Stored fields that must be finite."""
_TOLERANCE = 1e-4  # between a log-probability and its distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """What an update learns from: one row per environment, padded at its end.

    Minibatches split environments, never time, so memory can be unrolled from the row's
    first state. Tensors are contiguous; on padding they are 0, False and legal.
    """

    features: Features
    """What was seen before each choice."""
    first: Bool[Tensor, "env time"]
    """Whether the step is the first of an episode: memory starts anew before it."""
    rows: Bool[Tensor, "env time head choice"]
    """The mask rows the choices were drawn from."""
    actions: Int64[Tensor, "env time head"]
    log_probs: Float[Tensor, "env time head"]
    """Log-probability of each choice under the policy that made it."""
    distribution: Float[Tensor, "env time head choice"]
    """Log-probabilities of all choices under that policy."""
    values: Float[Tensor, "env time"]
    advantages: Float[Tensor, "env time"]
    returns: Float[Tensor, "env time"]
    valid_mask: Bool[Tensor, "env time"]
    """False on padding."""
    state: Float[Tensor, "env layers width"]
    """Memory before each row's first step."""
    group_size: int = 1
    """How many rows after each other have the same random streams."""

    def __getitem__(self, name: str) -> Tensor | Features | int:
        """A field by its name."""
        if name not in self.__slots__:
            raise KeyError(f"no field {name!r}; there are {', '.join(self.__slots__)}.")
        field: Tensor | Features | int = getattr(self, name)
        return field

    @property
    def num_envs(self) -> int:
        """How many rows there are."""
        return self.valid_mask.shape[0]

    def select(self, index: Int64[Tensor, " chosen"]) -> "SequenceBatch":
        """The rows of some environments, copied; groups are not kept together."""
        index = index.to(self.valid_mask.device)
        chosen = {
            field.name: getattr(self, field.name).index_select(0, index)
            for field in fields(self)
            if field.name not in ("features", "group_size")
        }
        seen = {
            field.name: getattr(self.features, field.name).index_select(0, index)
            for field in fields(self.features)
        }
        return SequenceBatch(features=Features(**seen), **chosen)

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
            raise BadInput(
                f"count must lie in 1..{self.num_envs}, the number of environments, "
                f"got {count}."
            )
        order = torch.randperm(self.num_envs, generator=generator)
        return (self.select(part) for part in order.tensor_split(count))


class Kind(NamedTuple):
    """What a tensor must be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What it takes to store one."""
        return prod(self.shape) * self.dtype.itemsize


class TamiyoRolloutBuffer:
    """What happened since the last update, one row per environment.

    Calls come in this order: `begin` (optional), `add` for every step, `cut` unless
    every row ends with its episode, `compute_advantages_and_returns`,
    `get_batched_sequences`, `reset`.

    Args:
        num_envs: Environments that step together; rows.
        max_steps: Steps a row can hold.
        spec: The action space; it decides the shapes.
        state_shape: Layers and width of the policy's memory.
        gamma: Discount per decision.
        gae_lambda: Trace decay: 0 is one-step TD, 1 is Monte Carlo.
        device: Where everything is stored.
        max_bytes: A buffer larger than this is refused.
    """

    @torch.inference_mode(False)  # storage outlives the mode it is made in
    def __init__(
        self,
        num_envs: int,
        max_steps: int,
        spec: ActionSpec,
        *,
        state_shape: tuple[int, int],
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        device: torch.device | str = "cpu",
        max_bytes: int = 8 * 2**30,
    ) -> None:
        for name, count in (("num_envs", num_envs), ("max_steps", max_steps)):
            if count < 1:
                raise BadInput(f"{name} must be at least 1, got {count}.")
        for name, share in (("gamma", gamma), ("gae_lambda", gae_lambda)):
            if not 0.0 <= share <= 1.0:
                raise BadInput(f"{name} must lie in [0, 1], got {share}.")
        if not isinstance(spec, ActionSpec):
            raise BadInput(f"spec must be an ActionSpec, got {type(spec).__name__}.")
        device = usable_device(device)
        self.num_envs, self.max_steps, self.spec = num_envs, max_steps, spec
        self.state_shape = tuple(state_shape)
        self.gamma, self.gae_lambda = float(gamma), float(gae_lambda)

        kinds = self._kinds = step_kinds(num_envs, spec)
        self._state_kind = Kind("state", (num_envs, *state_shape), torch.float32)
        self._acted_kind = Kind("acted", (num_envs,), torch.bool)
        self._last_kind = Kind("last_values", (num_envs,), torch.float32)
        results = [self._last_kind._replace(name=name) for name in RESULTS]
        # One column more: it takes the steps of environments that did not act.
        columns = max_steps + 1
        self.nbytes = columns * sum(kind.nbytes for kind in (*kinds, *results))
        self.nbytes += self._state_kind.nbytes
        if self.nbytes > max_bytes:
            raise BadInput(
                f"{num_envs} environments x {max_steps} steps need {self.nbytes:,} "
                f"bytes, more than max_bytes = {max_bytes:,}."
            )
        self._storage = {
            kind.name: torch.zeros(
                (columns, *kind.shape), dtype=kind.dtype, device=device
            )
            for kind in (*kinds, *results)
        }
        self._written = [self._storage[kind.name] for kind in kinds]
        self._columns = [*zip(*map(torch.unbind, self._written), strict=True)]
        # What is given as `terminated` is kept as `dones`.
        self._given = [
            kind._replace(name="terminated") if kind.name == "dones" else kind
            for kind in kinds
        ]
        self._counts = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._last_values = torch.zeros(num_envs, device=device)
        self._state = torch.zeros(self._state_kind.shape, device=device)
        self._unknown = torch.full((num_envs,), torch.nan, device=device)
        self._envs = torch.arange(num_envs, device=device)
        self._steps = torch.arange(max_steps, device=device)
        self.device = self._state.device
        self._looks = self.device.type == "cpu"
        self._beyond = np.arange(spec.width) >= np.array(spec.sizes)[:, None]
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
        self._is_computed = False

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
            raise CallOrder(
                f"begin() after {self._adds} steps: rows start once; reset() first."
            )
        if group_size < 1 or self.num_envs % group_size:
            raise BadInput(
                f"group_size is {group_size} but the buffer has {self.num_envs} "
                "environments; give a divisor."
            )
        if state is None:
            self._state.zero_()
        else:
            require_kinds([self._state_kind], [state], self.device)
            if self._looks:
                require_finite("state", state)
            self._state.copy_(state)
        self.policy_version, self.group_size = policy_version, group_size

    def add(
        self,
        *,
        features: Features,
        first: Bool[Tensor, " env"],
        rows: Bool[Tensor, "env head choice"],
        actions: Int64[Tensor, "env head"],
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

        `first` says whether an observation was the first of an episode: in mid-row this
        is so exactly after a step that ended one. `rows` are the mask rows the choices
        were drawn from, `distribution` the log-probabilities of all choices, 0 where
        illegal. An episode that `terminated` has no future, whatever `truncated` says;
        where only the latter is set, `final_values` is V of the true final observation.
        Only rows of environments that `acted` grow; None is everyone.
        """
        self._require_open("add")
        if not isinstance(features, Features):
            raise BadInput(f"features must be Features, got {type(features).__name__}.")
        given = (
            features.host,
            features.slots,
            features.offers,
            first,
            rows,
            actions,
            log_probs,
            distribution,
            values,
            rewards,
            terminated,
            truncated,
            self._unknown if final_values is None else final_values,
        )
        require_kinds(self._given, given, self.device)
        cut_short = truncated > terminated
        step = (*given[:-3], terminated | truncated, cut_short, given[-1])
        if self._is_level and acted is None:
            if self._adds == self.max_steps:
                raise CallOrder(
                    f"the buffer is full, every row has {self.max_steps} steps: "
                    "reset() first."
                )
            self._require_values(step)
            torch._foreach_copy_(self._columns[self._adds], step)
            self._counts += 1
        else:
            self._add_ragged(step, acted)
        self._adds += 1

    def cut(self, last_values: Float32[Tensor, " env"]) -> None:
        """End the rollout where it stands.

        Args:
            last_values: V of the observation that comes next; not used for a row
                whose last step ended its episode.
        """
        self._require_open("cut")
        if not self._adds:
            raise CallOrder("cut() of an empty buffer: add() first.")
        require_kinds([self._last_kind], [last_values], self.device)
        used = torch.where(self._unfinished(), last_values, 0.0)
        if self._looks:
            require_finite("last_values", used)
        self._last_values.copy_(used)
        self._is_cut = True

    def compute_advantages_and_returns(self) -> None:
        """Fill `advantages` and `returns` (lambda-returns), in place; 0 on padding."""
        if not self._longest():
            raise CallOrder("nothing to compute: add() first.")
        if not self._is_cut:
            unfinished = self._unfinished().cpu().numpy()
            if unfinished.any():
                raise CallOrder(
                    f"the episode of environment {int(unfinished.argmax())} goes on "
                    "after its last step: cut() first."
                )
        gae(
            self.rewards,
            self.values,
            self.dones,
            self.truncated,
            self._counts,
            self._view("final_values"),
            self._last_values,
            gamma=self.gamma,
            lam=self.gae_lambda,
            out=(self.advantages, self.returns),
        )
        self._is_computed = True

    def get_batched_sequences(
        self, device: torch.device | str = "cpu"
    ) -> SequenceBatch:
        """Copy the rollout to a device, as one padded sequence per environment."""
        if not self._is_computed:
            raise CallOrder(
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

        rows = sequences("rows")
        if padding:
            rows[..., 0] |= ~valid[..., None]
        copied = ("first", "actions", "log_probs", "distribution", "values", *RESULTS)
        return SequenceBatch(
            features=Features(
                *(sequences(f"features.{field.name}") for field in fields(Features))
            ),
            rows=rows,
            **{name: sequences(name) for name in copied},
            valid_mask=valid,
            state=self._state.to(device).clone(),
            group_size=self.group_size,
        )

    @property
    def step_counts(self) -> Int64[Tensor, " env"]:
        """How many steps each row holds; views show leftovers beyond."""
        return self._counts.clone()

    @property
    def is_full(self) -> bool:
        """Whether no row can take another step."""
        if self._is_level or self._adds < self.max_steps:
            return self._adds == self.max_steps
        return not bool((self._counts < self.max_steps).cpu().numpy().any())

    @property
    def dones(self) -> Bool[Tensor, "env time"]:
        """Whether a step ended its episode, for whatever reason."""
        return self._view("dones")

    @property
    def truncated(self) -> Bool[Tensor, "env time"]:
        """Whether a step ended an episode that had a future."""
        return self._view("truncated")

    @property
    def rewards(self) -> Float32[Tensor, "env time"]:
        """What was earned, as the environments said it."""
        return self._view("rewards")

    @property
    def values(self) -> Float32[Tensor, "env time"]:
        """V(s) under the policy that acted."""
        return self._view("values")

    @property
    def advantages(self) -> Float32[Tensor, "env time"]:
        """How much better a step was than expected, once computed."""
        return self._view("advantages")

    @property
    def returns(self) -> Float32[Tensor, "env time"]:
        """What the values should have been, once computed."""
        return self._view("returns")

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: a rollout belongs to its policy's update."""
        raise CallOrder("a rollout buffer cannot be pickled; collect a rollout anew.")

    def _view(self, name: str) -> Tensor:
        return self._storage[name][: self.max_steps].T

    def _require_open(self, call: str) -> None:
        if self._is_computed or self._is_cut:
            after = "compute" if self._is_computed else "cut"
            raise CallOrder(f"{call}() after {after}: reset() first.")

    def _add_ragged(self, step: tuple[Tensor, ...], acted: Tensor | None) -> None:
        """Some rows grow, each at its own end."""
        if acted is None:
            acted = torch.ones_like(self._envs, dtype=torch.bool)
        require_kinds([self._acted_kind], [acted], self.device)
        # No row can be full before so many calls, so the device need not be asked.
        if self._adds >= self.max_steps:
            full = (acted & (self._counts == self.max_steps)).cpu().numpy()
            if full.any():
                raise CallOrder(
                    f"the row of environment {int(full.argmax())} is full, it has "
                    f"{self.max_steps} steps: reset() first."
                )
        self._require_values(step, acted)
        columns = torch.where(acted, self._counts, self.max_steps)
        for storage, values in zip(self._written, step, strict=True):
            storage.index_put_((columns, self._envs), values)
        self._counts += acted
        self._is_level = False

    def _require_values(
        self, step: tuple[Tensor, ...], acted: Tensor | None = None
    ) -> None:
        """Refuse a step in which a value cannot be meant; looks on the CPU only."""
        if not self._looks:
            return
        who = self._envs.numpy() if acted is None else acted.numpy().nonzero()[0]
        arrays = {
            kind.name: tensor.numpy() if acted is None else tensor.numpy()[who]
            for kind, tensor in zip(self._kinds, step, strict=True)
        }
        counts = self._counts.numpy()[who]

        def place(row: int | np.integer) -> str:
            return f"environment {who[row]} at step {counts[row]}"

        for name in FINITE:
            finite = np.isfinite(arrays[name])
            if not finite.all():
                odd = ~finite
                row = odd.nonzero()[0][0]
                raise BadInput(
                    f"{name} of {place(row)} must be finite, got "
                    f"{arrays[name][odd][0]}; quarantine the environment."
                )
        _require_choices(arrays, self.spec, self._beyond, place)
        final = arrays["final_values"]
        lost = arrays["truncated"] & ~np.isfinite(final)
        if lost.any():
            row = lost.argmax()
            raise BadInput(
                f"final_values of {place(row)} must be finite, got {final[row]}; where "
                "an episode is truncated, give the value of its last observation."
            )
        ended = self._storage["dones"].numpy()[counts - 1, who]
        torn = (counts > 0) & (arrays["first"] != ended)
        if torn.any():
            row = torn.argmax()
            raise BadInput(
                f"first of {place(row)} must be {ended[row]}: the step before "
                f"{'ended' if ended[row] else 'did not end'} its episode."
            )

    def _unfinished(self) -> Bool[Tensor, " env"]:
        """Rows whose last step did not end its episode."""
        if self._is_level:
            return ~self._storage["dones"][self._adds - 1]
        ended = self._storage["dones"][self._counts - 1, self._envs]
        return ~ended & (self._counts > 0)

    def _longest(self) -> int:
        """Steps of the longest row, or what is known of it without asking a device."""
        if self._is_level:
            return self._adds
        if self._looks:
            return int(self._counts.numpy().max())
        return min(self._adds, self.max_steps)


def step_kinds(num_envs: int, spec: ActionSpec) -> tuple[Kind, ...]:
    """What is stored of one step of all environments."""
    heads, width = NUM_HEADS, spec.width
    axes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        **{
            f"features.{name}": (torch.float32, shape)
            for name, shape in feature_shapes(spec).items()
        },
        "first": (torch.bool, ()),
        "rows": (torch.bool, (heads, width)),
        "actions": (torch.int64, (heads,)),
        "log_probs": (torch.float32, (heads,)),
        "distribution": (torch.float32, (heads, width)),
        "values": (torch.float32, ()),
        "rewards": (torch.float32, ()),
        "dones": (torch.bool, ()),
        "truncated": (torch.bool, ()),
        "final_values": (torch.float32, ()),
    }
    return tuple(
        Kind(name, (num_envs, *shape), dtype) for name, (dtype, shape) in axes.items()
    )


def require_kinds(
    kinds: Sequence[Kind], values: Sequence[object], device: torch.device
) -> None:
    """Refuse what is not a plain tensor of the right shape, dtype and device."""
    for kind, value in zip(kinds, values, strict=True):
        if not (
            isinstance(value, Tensor)
            and value.shape == kind.shape
            and value.dtype is kind.dtype
            and value.device == device
            and value.layout is torch.strided
            and not value.requires_grad
        ):
            raise BadInput(_complaint(kind, value, device))


def _complaint(kind: Kind, value: object, device: torch.device) -> str:
    if not isinstance(value, Tensor):
        return f"{kind.name} must be a tensor, got {type(value).__name__}."
    if value.layout is not torch.strided:
        return f"{kind.name} must be dense, got {value.layout}."
    if value.shape != kind.shape or value.dtype != kind.dtype:
        return (
            f"{kind.name} must be {kind.dtype} of shape {kind.shape}, got "
            f"{value.dtype} of shape {tuple(value.shape)}."
        )
    if value.device != device:
        return f"{kind.name} must be on {device}, got {value.device}; move it first."
    return f"{kind.name} requires grad; detach it, or act under torch.no_grad()."


def require_finite(name: str, values: Float[Tensor, "env ..."]) -> None:
    """Refuse NaN and infinity in a tensor on the CPU, naming the environment."""
    array = values.numpy()
    odd = ~np.isfinite(array)
    if odd.any():
        env = int(np.argwhere(odd)[0][0])
        raise BadInput(
            f"{name} of environment {env} must be finite, got {array[odd][0]}."
        )


def _require_choices(
    step: Mapping[str, NDArray[Any]],
    spec: ActionSpec,
    beyond: NDArray[np.bool_],
    place: Callable[[int], str],
) -> None:
    """Refuse choices that their rows forbid, or that contradict their distribution."""
    rows, actions, log_probs = step["rows"], step["actions"], step["log_probs"]
    sizes = np.array(spec.sizes)
    outside = (actions < 0) | (actions >= sizes)
    at = np.arange(actions.size) * spec.width + np.where(outside, 0, actions).ravel()
    expected = step["distribution"].ravel()[at].reshape(actions.shape)
    forbidden = outside | ~rows.ravel()[at].reshape(actions.shape)
    distance = np.abs(log_probs - expected)
    contradicted = (distance > _TOLERANCE * (1.0 + np.abs(expected))) | (
        log_probs > 0.0
    )
    padding = np.any(rows & beyond, axis=2)
    wrong: NDArray[np.bool_] = forbidden | contradicted | padding
    if not wrong.any():
        return
    row, head = (int(index) for index in np.argwhere(wrong)[0])
    where = f"head {HEAD_NAMES[head]!r} of {place(row)}"
    action, size = actions[row, head], sizes[head]
    if padding[row, head]:
        raise BadInput(f"rows allow more than the {size} choices of {where}.")
    if not rows[row, head].any():
        raise NoLegalAction(
            f"rows allow nothing for {where}; let a head that is not used have choice "
            "0."
        )
    if outside[row, head]:
        raise IllegalAction(
            f"actions has {action} for {where}, which has {size} choices."
        )
    if forbidden[row, head]:
        raise IllegalAction(
            f"actions has {action} for {where}, which its row forbids; store the rows "
            "that were drawn from."
        )
    raise BadInput(
        f"log_probs has {log_probs[row, head]} for {where}, its distribution "
        f"{expected[row, head]}; store both as they were when the choice was made."
    )
