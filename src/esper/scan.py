"""The linear recurrence y_t = decay_t * y_{t-1} + inputs_t.

Forwards it is the memory of the policy (`gated_scan`), backwards it is generalized
advantage estimation (`gae`). Its gradient is the same recurrence in reverse. At an
episode boundary decay is 0, and nothing passes it, not even NaN or inf.

On the CPU the loops are compiled; on other devices steps are combined in pairs, in
depth log2(time).
Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16; Blelloch 1990.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.contracts.checks import require_number
from esper.contracts.devices import require_tensor
from esper.contracts.errors import InvalidInputError
from esper.kernels import kernel

Array = NDArray[Any]
Rollout = namedtuple(
    "Rollout", "rewards values dones truncated step_counts final_values last_values"
)
FLOATS: Final = (torch.float32, torch.float64)
LEAST_WRITE: Final = 1e-30  # sqrt has an infinite slope at 0


def gated_scan(
    gates: Float[Tensor, "env time twice_hidden"],
    episode_start: Bool[Tensor, "env time"],
    initial: Float[Tensor, "env hidden"],
) -> Float[Tensor, "env time hidden"]:
    """Return the recurrence of a MinGRU; differentiable in gates and initial.

        z_t = sigmoid(gate_t)      keep_t = 0 at an episode start, else 1 - z_t
        y_t = keep_t * y_{t-1} + (z_t (2 - z_t))^1/2 * candidate_t

    The factor (1 - keep^2)^1/2 keeps the variance of y independent of the time span.

    Args:
        gates: Gates and, in the second half of the last axis, candidates.
        episode_start: Where y is reset, even if it is NaN or inf.
        initial: y before the first step.
    """
    _require_gates(gates, episode_start, initial)
    if gates.device.type != "cpu" or torch.compiler.is_compiling():
        return _gated_by_scan(gates, episode_start, initial)
    if torch.is_grad_enabled():
        return _gated(gates, episode_start, initial)
    return _gated_forward(gates, episode_start, initial)[1]


def _gated_by_scan(gates: Tensor, episode_start: Tensor, initial: Tensor) -> Tensor:
    """`gated_scan` as whole-tensor operations."""
    gate, candidate = gates.chunk(2, dim=-1)
    update = torch.sigmoid(gate)
    # Select, do not multiply: an old state may be NaN.
    decay = torch.where(episode_start.unsqueeze(-1), 0.0, 1.0 - update)
    size = (update * (2.0 - update)).clamp(min=LEAST_WRITE)
    inputs = size.sqrt() * candidate
    if gates.shape[1] == 1 and not torch.is_grad_enabled():
        return _step(decay, initial.unsqueeze(1), inputs)
    return _scan(decay, inputs, initial)


def gae(
    rewards: Float[Tensor, "env time"],
    values: Float[Tensor, "env time"],
    dones: Bool[Tensor, "env time"],
    truncated: Bool[Tensor, "env time"],
    step_counts: Int[Tensor, " env"],
    final_values: Float[Tensor, "env time"],
    last_values: Float[Tensor, " env"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "env time"], Float[Tensor, "env time"]]:
    """Return advantages and returns of rows with several episodes; zero on padding.

        delta_t = r_t + gamma * next_t - V(s_t)
        A_t     = delta_t + gamma * lam * A_{t+1}, the last term only within an episode

    `next_t` is 0 where the episode terminated, `final_values` where it was truncated,
    `last_values` after the last step, and V(s_{t+1}) elsewhere. No gradient flows into
    the results. Time-major memory is fastest.

    Args:
        rewards: Reward of each step.
        values: V(s_t) under the policy that acted.
        dones: Whether the step ended its episode (terminated or truncated).
        truncated: Whether the step truncated its episode; False where it terminated.
        step_counts: Number of steps in each row; later steps are ignored.
        final_values: V of the final observation where truncated.
        last_values: V of the observation after a row's last step.
        gamma: Discount factor.
        lam: Trace decay; 0 is one-step TD, 1 is Monte Carlo.
    """
    rollout = Rollout(
        rewards, values, dones, truncated, step_counts, final_values, last_values
    )
    _require_rollout(rollout, gamma, lam)
    if rewards.device.type != "cpu":
        return _gae_log_depth(rollout, gamma, lam)
    given = [(x.T if x.ndim == 2 else x).detach().contiguous() for x in rollout]
    advantages, returns = (torch.zeros_like(given[0]) for _ in range(2))
    if rewards.numel():
        gae_time_major(*(x.numpy() for x in (*given, advantages, returns)), gamma, lam)
    return advantages.T, returns.T


class _Scan(torch.autograd.Function):
    """The recurrence in log depth, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        decay: Float[Tensor, "env time hidden"],
        inputs: Float[Tensor, "env time hidden"],
        initial: Float[Tensor, "env hidden"],
    ) -> Float[Tensor, "env time hidden"]:
        """Return y."""
        y = _log_depth(decay, inputs, initial)
        ctx.save_for_backward(decay, y, initial)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        """Return the gradients of decay, inputs and initial."""
        decay, y, initial = ctx.saved_tensors
        zero = torch.zeros_like(initial)
        # `initial` acts as the input of a step before the first one.
        start, gap = initial.unsqueeze(1), zero.unsqueeze(1)
        ahead, sums = torch.cat((decay, gap), 1), torch.cat((gap, grad), 1)
        total = _log_depth(ahead, sums, zero, reverse=True)
        before = torch.cat((start, y[:, :-1]), 1)
        return total[:, 1:] * before, total[:, 1:], total[:, 0]


_scan: Final[Callable[..., Tensor]] = _Scan.apply


class _Gated(torch.autograd.Function):
    """`gated_scan` on the CPU and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        gates: Tensor,
        episode_start: Tensor,
        initial: Tensor,
    ) -> Tensor:
        """Return y."""
        update, y = _gated_forward(gates, episode_start, initial)
        ctx.save_for_backward(gates, episode_start, initial, update, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:  # noqa: ANN401
        """Return the gradients of gates and initial."""
        given = [x.detach().contiguous() for x in (*ctx.saved_tensors, grad)]
        grad_gates, grad_initial = map(torch.empty_like, (given[0], given[2]))
        results = (grad_gates, grad_initial)
        _gated_gradients(*(x.numpy() for x in (*given, *results)))
        return grad_gates, None, grad_initial


_gated: Final[Callable[..., Tensor]] = _Gated.apply


def _gated_forward(
    gates: Tensor, episode_start: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the updates z and the results y."""
    update = torch.sigmoid(gates[..., : gates.shape[-1] // 2]).contiguous()
    y = torch.empty_like(update)
    given = (
        x.detach().contiguous() for x in (update, gates, episode_start, initial, y)
    )
    _gated_rows(*(x.numpy() for x in given))
    return update, y


@kernel
def _gated_rows(
    update: Array, gates: Array, episode_start: Array, initial: Array, y: Array
) -> None:
    """`gated_scan` on `[row, time, lane]`."""
    rows, time, lanes = update.shape
    for row in range(rows):
        before = initial[row]
        for now in range(time):
            candidate, fresh = gates[row, now, lanes:], episode_start[row, now]
            _gated_lanes(update[row, now], candidate, fresh, before, y[row, now])
            before = y[row, now]


@kernel
def _gated_lanes(
    update: Array, candidate: Array, fresh: bool, before: Array, y: Array
) -> None:
    """One step of one row; a separate function, so that it is vectorised."""
    kind = y.dtype.type
    one, two, least = kind(1), kind(2), kind(LEAST_WRITE)
    for lane in range(y.shape[0]):
        z = update[lane]
        size = z * (two - z)
        write = np.sqrt(least if size < least else size) * candidate[lane]
        carried = (one - z) * before[lane] + write
        y[lane] = write if fresh else carried


@kernel
def _gated_gradients(
    gates: Array,
    episode_start: Array,
    initial: Array,
    update: Array,
    y: Array,
    grad: Array,
    grad_gates: Array,
    grad_initial: Array,
) -> None:
    """Gradients of `_gated_rows`; `grad_initial` is also the running gradient."""
    rows, time, lanes = update.shape
    grad_initial[:] = 0
    for row in range(rows):
        for step in range(time):
            now = time - 1 - step
            _gated_lane_gradients(
                update[row, now],
                gates[row, now, lanes:],
                episode_start[row, now],
                y[row, now - 1] if now else initial[row],
                grad[row, now],
                grad_gates[row, now, :lanes],
                grad_gates[row, now, lanes:],
                grad_initial[row],
            )


@kernel
def _gated_lane_gradients(
    update: Array,
    candidate: Array,
    fresh: bool,
    before: Array,
    grad: Array,
    grad_gate: Array,
    grad_candidate: Array,
    trace: Array,
) -> None:
    """One step of one row; a separate function, so that it is vectorised."""
    kind = grad.dtype.type
    zero, one, two, least = kind(0), kind(1), kind(2), kind(LEAST_WRITE)
    for lane in range(grad.shape[0]):
        z = update[lane]
        keep, size, total = one - z, z * (two - z), trace[lane] + grad[lane]
        root = np.sqrt(least if size < least else size)
        slope = zero if size < least else keep / root
        by_write = total * candidate[lane] * slope
        by_keep = total * before[lane]
        grad_update = by_write if fresh else by_write - by_keep
        grad_gate[lane] = grad_update * (z * keep)
        grad_candidate[lane] = total * root
        trace[lane] = zero if fresh else total * keep


def _step(decay: Tensor, before: Tensor, inputs: Tensor) -> Tensor:
    """Return one step of the recurrence; select where decay is 0, as 0 * NaN is NaN."""
    return torch.where(decay == 0, inputs, decay * before + inputs)


def _log_depth(
    decay: Tensor, inputs: Tensor, initial: Tensor, *, reverse: bool = False
) -> Tensor:
    """Return the recurrence in either direction, in about 2 log2(time) steps."""
    if reverse:
        decay, inputs = decay.flip(1), inputs.flip(1)
    start = _step(decay[:, :1], initial.unsqueeze(1), inputs[:, :1])
    y = _combine_pairs(decay, torch.cat((start, inputs[:, 1:]), dim=1))
    return y.flip(1) if reverse else y


def _combine_pairs(decay: Tensor, inputs: Tensor) -> Tensor:
    """Combine pairs of steps, solve for the odd steps, then fill in the even ones."""
    time = inputs.shape[1]
    if time <= 1:
        return inputs
    even, odd, third = slice(0, time // 2 * 2, 2), slice(1, None, 2), slice(2, None, 2)
    both = _step(decay[:, odd], decay[:, even], torch.zeros_like(decay[:, odd]))
    paired = _step(decay[:, odd], inputs[:, even], inputs[:, odd])
    y = inputs.clone()
    y[:, odd] = _combine_pairs(both, paired)
    between = slice(1, time - 1, 2)
    y[:, third] = _step(decay[:, third], y[:, between], inputs[:, third])
    return y


def _gae_log_depth(rollout: Rollout, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """`gae` as whole-tensor operations, without a device read."""
    rewards, values, dones, truncated, step_counts, final_values, last_values = rollout
    with torch.no_grad():
        cut_values = last_values.unsqueeze(1)
        steps = torch.arange(rewards.shape[1], device=rewards.device)
        counts = step_counts.unsqueeze(1)
        valid, is_last = steps < counts, steps == counts - 1
        following = torch.cat((values[:, 1:], cut_values), dim=1)
        following = torch.where(is_last, cut_values, following)
        following = torch.where(dones, 0.0, following)
        following = torch.where(truncated, final_values, following)
        deltas = torch.where(valid, rewards + gamma * following - values, 0.0)
        goes_on = valid & ~(dones | truncated | is_last)
        decay = torch.where(goes_on, torch.full_like(deltas, gamma * lam), 0.0)
        advantages = _log_depth(
            decay, deltas, torch.zeros_like(last_values), reverse=True
        )
        return advantages, torch.where(valid, advantages + values, 0.0)


@kernel
def gae_time_major(
    rewards: Array,
    values: Array,
    dones: Array,
    truncated: Array,
    step_counts: Array,
    final_values: Array,
    last_values: Array,
    advantages: Array,
    returns: Array,
    gamma: float,
    lam: float,
) -> None:
    """`gae` on contiguous arrays `[time, env]`; writes `advantages` and `returns`."""
    time, envs = rewards.shape
    rollout = Rollout(
        rewards, values, dones, truncated, step_counts, final_values, last_values
    )
    following, trace = last_values.copy(), np.zeros_like(last_values)
    shortest = step_counts.min()
    for step in range(time):
        now = time - 1 - step
        _gae_lanes(now, rollout, gamma, lam, following, trace, advantages, returns)
        if now >= shortest:
            # Undo the step in rows where it is padding.
            for env in range(envs):
                if now >= step_counts[env]:
                    following[env] = last_values[env]
                    trace[env] = advantages[now, env] = returns[now, env] = 0


@kernel
def _gae_lanes(
    time: int,
    rollout: Rollout,
    gamma: float,
    lam: float,
    following: Array,
    trace: Array,
    advantages: Array,
    returns: Array,
) -> None:
    """One step of all environments `[time, env]`, as if it were valid in all.

    A separate function without branches, so that the compiler vectorises it.
    """
    kind = advantages.dtype.type
    scale, fade, zero = kind(gamma), kind(gamma * lam), kind(0)
    for env in range(trace.shape[0]):
        done, truncated = rollout.dones[time, env], rollout.truncated[time, env]
        value, final = rollout.values[time, env], rollout.final_values[time, env]
        bootstrap = zero if done else following[env]
        bootstrap = final if truncated else bootstrap
        carried = fade * trace[env]
        carried = zero if done | truncated else carried
        delta = rollout.rewards[time, env] + scale * bootstrap - value
        following[env] = value
        trace[env] = delta + carried
        advantages[time, env] = delta + carried
        returns[time, env] = delta + carried + value


def _require_gates(gates: Tensor, episode_start: Tensor, initial: Tensor) -> None:
    """Check the arguments of `gated_scan`."""
    shape = gates.shape
    if len(shape) != 3 or shape[2] % 2:
        raise InvalidInputError(
            f"gates must be [env, time, 2 * hidden], got shape {tuple(shape)}."
        )
    require_tensor("gates", gates, shape, FLOATS, gates.device)
    row = (shape[0], shape[2] // 2)
    require_tensor("episode_start", episode_start, shape[:2], torch.bool, gates.device)
    require_tensor("initial", initial, row, gates.dtype, gates.device)


def _require_rollout(rollout: Rollout, gamma: float, lam: float) -> None:
    """Check the arguments of `gae`."""
    require_number("gamma", gamma, 0.0, 1.0)
    require_number("lam", lam, 0.0, 1.0)
    values, shape = rollout.values, rollout.values.shape
    if len(shape) != 2:
        raise InvalidInputError(
            f"values must be [env, time], got shape {tuple(shape)}."
        )
    require_tensor("values", values, shape, FLOATS, values.device)
    row, kind = shape[:1], values.dtype
    for name, size, dtypes in (
        ("rewards", shape, kind),
        ("dones", shape, torch.bool),
        ("truncated", shape, torch.bool),
        ("step_counts", row, (torch.int64, torch.int32)),
        ("final_values", shape, kind),
        ("last_values", row, kind),
    ):
        require_tensor(name, getattr(rollout, name), size, dtypes, values.device)
