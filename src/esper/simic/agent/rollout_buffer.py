"""One rollout of all environments, stored as it happens.

Storage is allocated once and time-major, `[time, env, ...]`: a step of all
environments is one contiguous copy per field, and the advantage recurrence runs over
environments side by side. Readers see `[env, time, ...]`. A row may hold several
episodes and may be shorter than its neighbours; memory is kept only where a row starts.

An episode that *terminated* has no future; one that was *truncated* has the future that
its true final observation promises; a row that is merely *cut*, because the rollout is
over, has the future of the observation that comes next.
"""

from typing import NoReturn

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.devices import usable_device
from esper.contracts.errors import BadInput, CallOrder
from esper.contracts.features import Features
from esper.scan import gae
from esper.simic.agent.buffer_checks import (
    Kind,
    ValueCheck,
    require_finite,
    require_kinds,
    step_kinds,
)
from esper.simic.agent.sequence_batch import SequenceBatch, padded_sequences

RESULTS = ("advantages", "returns")


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

        kinds = step_kinds(num_envs, spec)
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
        self._check: ValueCheck | None = None
        if self.device.type == "cpu":
            self._check = ValueCheck(self._storage, spec)
            self._counts_array = self._counts.numpy()
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
            policy_version: Which policy is going to act.
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
            if self._check is not None:
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

        Shapes, dtypes and devices are checked everywhere; values on the CPU only,
        because a look at them would stall any other device.

        Args:
            features: What was seen.
            first: Whether it was the first observation of an episode; in mid-row
                this is so exactly after a step that ended one.
            rows: The mask rows the choices were drawn from.
            actions: The choices.
            log_probs: Their log-probabilities.
            distribution: Log-probabilities of all choices, 0 where illegal.
            values: V of what was seen.
            rewards: What the choices earned.
            terminated: The episode has no future; it counts where both flags are set.
            truncated: The episode was cut although it had a future.
            final_values: V of the true final observation, wherever truncated.
            acted: Who acted; the rows of others do not grow. None is everyone.
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
            self._write_level(step)
        else:
            self._write_ragged(step, acted)
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
        if self._check is not None:
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
        """Copy the rollout as one padded sequence per environment.

        Args:
            device: Where the copy shall be.
        """
        if not self._is_computed:
            raise CallOrder(
                "the advantages are missing: compute_advantages_and_returns() first."
            )
        valid = self._steps[: self._longest()] < self._counts[:, None]
        return padded_sequences(
            self._storage,
            valid.to(usable_device(device)),
            self._state,
            padding=not self._is_level,
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

    def _write_level(self, step: tuple[Tensor, ...]) -> None:
        """All rows grow and are equally long: one column."""
        if self._adds == self.max_steps:
            raise CallOrder(
                f"the buffer is full, every row has {self.max_steps} steps: reset() "
                "first."
            )
        torch._foreach_copy_(self._columns[self._adds], step)
        if self._check is not None:
            self._check(self._counts_array)
        self._counts += 1

    def _write_ragged(self, step: tuple[Tensor, ...], acted: Tensor | None) -> None:
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
        columns = torch.where(acted, self._counts, self.max_steps)
        for storage, values in zip(self._written, step, strict=True):
            storage.index_put_((columns, self._envs), values)
        if self._check is not None:
            self._check(columns.numpy())
        self._counts += acted
        self._is_level = False

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
        if self._check is not None:
            return int(self._counts_array.max())
        return min(self._adds, self.max_steps)
