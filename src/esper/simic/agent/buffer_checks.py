"""What may be stored in a rollout: the right kind of tensor, sensible values in it.

Its kind (type, shape, dtype, device) is known without looking inside, so it is checked
on every device. Values are checked on the CPU alone: elsewhere a look would stall the
device, and the update refuses non-finite numbers anyway. The kernels look at
what was written to storage but not yet counted: a refused step leaves no trace.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.actions import HEAD_NAMES, NUM_HEADS, ActionSpec
from esper.contracts.errors import BadInput, IllegalAction, NoLegalAction
from esper.contracts.features import feature_shapes
from esper.kernels import kernel

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

_EMPTY, _PADDING, _OUTSIDE, _FORBIDDEN, _CONTRADICTED = range(1, 6)
_TOLERANCE = 1e-4  # between a log-probability and its distribution
_NO_FUTURE, _OUT_OF_STEP = range(1, 3)


class Kind(NamedTuple):
    """What a tensor must be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What it takes to store one."""
        return prod(self.shape) * self.dtype.itemsize


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


class ValueCheck:
    """Looks at one written step of every environment; for storage on the CPU."""

    def __init__(self, storage: Mapping[str, Tensor], spec: ActionSpec) -> None:
        arrays = {name: tensor.numpy() for name, tensor in storage.items()}
        steps, envs = arrays["rewards"].shape
        self._finite = tuple(arrays[name].reshape(steps, envs, -1) for name in FINITE)
        self._sizes = np.array(spec.sizes)
        self._actions, self._log_probs = arrays["actions"], arrays["log_probs"]
        self._choices = (
            arrays["rows"],
            self._actions,
            self._log_probs,
            arrays["distribution"],
            self._sizes,
        )
        self._dones, self._final_values = arrays["dones"], arrays["final_values"]
        self._borders = (
            arrays["first"],
            self._dones,
            arrays["truncated"],
            self._final_values,
        )

    def __call__(self, columns: Int64[np.ndarray, " env"]) -> None:
        """Refuse the step if a value in it cannot be meant.

        Args:
            columns: Where each environment's step stands; the very last column of
                storage means that the environment did not act.
        """
        field, env = _first_not_finite(self._finite, columns)
        if field >= 0:
            row = self._finite[field][columns[env], env]
            raise BadInput(
                f"{FINITE[field]} of environment {env} at step {columns[env]} must be "
                f"finite, got {row[~np.isfinite(row)][0]}; quarantine the environment."
            )
        problem, env, head = _first_illegal(*self._choices, columns)
        if problem:
            self._refuse_choice(problem, env, head, int(columns[env]))
        problem, env = _first_bad_border(*self._borders, columns)
        if problem:
            self._refuse_border(problem, env, int(columns[env]))

    def _refuse_choice(self, problem: int, env: int, head: int, step: int) -> NoReturn:
        place = f"head {HEAD_NAMES[head]!r} of environment {env} at step {step}"
        action, size = self._actions[step, env, head], self._sizes[head]
        if problem == _EMPTY:
            raise NoLegalAction(
                f"rows allow nothing for {place}; let a head that is not used have "
                "choice 0."
            )
        if problem == _PADDING:
            raise BadInput(f"rows allow more than the {size} choices of {place}.")
        if problem == _OUTSIDE:
            raise IllegalAction(
                f"actions has {action} for {place}, which has {size} choices."
            )
        if problem == _FORBIDDEN:
            raise IllegalAction(
                f"actions has {action} for {place}, which its row forbids; store the "
                "rows that were drawn from."
            )
        raise BadInput(
            f"log_probs has {self._log_probs[step, env, head]} for {place}, its "
            f"distribution {self._choices[3][step, env, head, action]}; store both as "
            "they were when the choice was made."
        )

    def _refuse_border(self, problem: int, env: int, step: int) -> NoReturn:
        place = f"environment {env} at step {step}"
        if problem == _NO_FUTURE:
            raise BadInput(
                f"final_values of {place} must be finite, got "
                f"{self._final_values[step, env]}; where an episode is truncated, give "
                "the value of its last observation."
            )
        ended = bool(self._dones[step - 1, env])
        raise BadInput(
            f"first of {place} must be {ended}: the step before "
            f"{'ended' if ended else 'did not end'} its episode."
        )


@kernel
def _first_not_finite(
    fields: tuple[NDArray[np.float32], ...], columns: NDArray[np.int64]
) -> tuple[int, int]:
    """Which field of which environment holds NaN or infinity; -1 if none does."""
    for field in range(len(fields)):
        values = fields[field]
        scratch = values.shape[0] - 1
        for env in range(values.shape[1]):
            if columns[env] == scratch:
                continue
            row = values[columns[env], env]
            finite = True
            for i in range(row.size):
                # Without a branch the loop becomes SIMD; x - x is 0 unless x is odd.
                finite &= row[i] - row[i] == 0.0
            if not finite:
                return field, env
    return -1, -1


@kernel
def _first_illegal(
    rows: NDArray[np.bool_],
    actions: NDArray[np.int64],
    log_probs: NDArray[np.float32],
    distribution: NDArray[np.float32],
    sizes: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> tuple[int, int, int]:
    """What is wrong with which head of which environment; 0 if nothing is."""
    scratch = rows.shape[0] - 1
    for env in range(rows.shape[1]):
        if columns[env] == scratch:
            continue
        for head in range(rows.shape[2]):
            row = rows[columns[env], env, head]
            action = actions[columns[env], env, head]
            size = sizes[head]
            if row[size:].any():
                return _PADDING, env, head
            inside = 0 <= action < size
            if not (inside and row[action]):
                if not row.any():
                    return _EMPTY, env, head
                return (_FORBIDDEN if inside else _OUTSIDE), env, head
            log_prob = log_probs[columns[env], env, head]
            expected = distribution[columns[env], env, head, action]
            if abs(log_prob - expected) > _TOLERANCE * (1.0 + abs(expected)) or (
                log_prob > 0.0
            ):
                return _CONTRADICTED, env, head
    return 0, -1, -1


@kernel
def _first_bad_border(
    first: NDArray[np.bool_],
    dones: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    final_values: NDArray[np.float32],
    columns: NDArray[np.int64],
) -> tuple[int, int]:
    """Who starts without an end before, or the reverse, or is cut without a future."""
    scratch = first.shape[0] - 1
    for env in range(first.shape[1]):
        step = columns[env]
        if step == scratch:
            continue
        if truncated[step, env] and not np.isfinite(final_values[step, env]):
            return _NO_FUTURE, env
        if step > 0 and first[step, env] != dones[step - 1, env]:
            return _OUT_OF_STEP, env
    return 0, -1
