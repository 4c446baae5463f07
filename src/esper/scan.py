"""The linear recurrence y_t = decay_t * y_{t-1} + inputs_t.

Forwards it is the memory of the policy (`gated_scan`), backwards it is generalized
advantage estimation (`gae`). Its gradient is the same recurrence in reverse. At an
episode boundary decay is 0, and nothing passes it, not even NaN or inf. `causal_conv`
mixes the last inputs of an episode before they enter the recurrence.

On the CPU the loops are compiled; on other devices steps are combined in pairs, in
depth log2(time).
Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16; Blelloch 1990.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.kernels import kernel

Array = NDArray[Any]
Rollout = namedtuple(
    "Rollout", "rewards values dones truncated step_counts final_values last_values"
)
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
    The second half of the last axis of `gates` holds the candidates.
    """
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


def causal_conv(
    rows: Float[Tensor, "env taps_and_time width"],
    episode_start: Bool[Tensor, "env time"],
    taps: Float[Tensor, "tap width"],
    bias: Float[Tensor, " width"],
) -> tuple[Float[Tensor, "env time width"], Float[Tensor, "env last width"]]:
    """Return a convolution over the last inputs of each episode, and these inputs.

        mixed_t = bias + sum of taps_k * x_{t-k}, over the steps of the same episode

    `rows` begin with the `tap - 1` inputs before the first step, oldest first; `taps`
    begin with that of the present input. The inputs that are returned are the last
    `tap - 1`, newest first. Inputs of another episode are 0, also those of `rows`.
    """
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return _conv_by_lags(rows, episode_start, taps, bias)
    if torch.is_grad_enabled():
        return _conv(rows, episode_start, taps, bias)
    return _conv_forward(rows, episode_start, taps, bias)


def _conv_by_lags(
    rows: Tensor, episode_start: Tensor, taps: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """`causal_conv` as whole-tensor operations."""
    time, lags = episode_start.shape[1], taps.shape[0] - 1
    steps = torch.arange(time, device=rows.device)
    last_start = torch.where(episode_start, steps, -lags)
    if time > 1:  # ONNX has no cummax; an exported step needs none
        last_start = last_start.cummax(dim=1).values
    age = steps - last_start
    mixed = torch.addcmul(bias, rows[:, lags:], taps[0])
    for lag in range(1, lags + 1):
        earlier = rows.narrow(1, lags - lag, time)
        earlier = torch.where((age >= lag).unsqueeze(-1), earlier, 0.0)
        mixed = torch.addcmul(mixed, earlier, taps[lag])
    known = age[:, -1:] >= torch.arange(lags, device=rows.device)
    last = rows[:, rows.shape[1] - lags :].flip(1)
    return mixed, torch.where(known.unsqueeze(-1), last, 0.0)


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


class _Conv(torch.autograd.Function):
    """`causal_conv` on the CPU and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        episode_start: Tensor,
        taps: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the convolution and the last inputs."""
        ctx.save_for_backward(rows, episode_start, taps)
        return _conv_forward(rows, episode_start, taps, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:  # noqa: ANN401
        """Return the gradients of rows, taps and bias."""
        given = [x.detach().contiguous() for x in (*ctx.saved_tensors, *grads)]
        results = [torch.zeros_like(given[0]), torch.zeros_like(given[2])]
        _conv_gradients(*(x.numpy() for x in (*given, *results)))
        return results[0], None, results[1], grads[0].sum(dim=(0, 1))


_conv: Final[Callable[..., tuple[Tensor, Tensor]]] = _Conv.apply


def _conv_forward(
    rows: Tensor, episode_start: Tensor, taps: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    envs, lags, width = rows.shape[0], taps.shape[0] - 1, rows.shape[2]
    mixed = rows.new_empty(envs, episode_start.shape[1], width)
    last = rows.new_zeros(envs, lags, width)
    given = (x.detach().contiguous() for x in (rows, episode_start, taps, bias))
    _conv_rows(*(x.numpy() for x in (*given, mixed, last)))
    return mixed, last


@kernel
def _conv_rows(
    rows: Array,
    episode_start: Array,
    taps: Array,
    bias: Array,
    mixed: Array,
    last: Array,
) -> None:
    """`causal_conv` on `[row, time, lane]`; `last` holds zeros."""
    lags = taps.shape[0] - 1
    for row in range(mixed.shape[0]):
        known = lags  # lags whose inputs are of this episode, or 0
        for now in range(mixed.shape[1]):
            known = 0 if episode_start[row, now] else min(known + 1, lags)
            mixed[row, now] = bias
            for lag in range(known + 1):
                _add_product(rows[row, now + lags - lag], taps[lag], mixed[row, now])
        for lag in range(min(known + 1, lags)):
            last[row, lag] = rows[row, rows.shape[1] - 1 - lag]


@kernel
def _conv_gradients(
    rows: Array,
    episode_start: Array,
    taps: Array,
    grad: Array,
    grad_last: Array,
    grad_rows: Array,
    grad_taps: Array,
) -> None:
    """Gradients of `_conv_rows`, added to zeros."""
    lags = taps.shape[0] - 1
    for row in range(grad.shape[0]):
        known = lags
        for now in range(grad.shape[1]):
            known = 0 if episode_start[row, now] else min(known + 1, lags)
            for lag in range(known + 1):
                at = now + lags - lag
                _add_product(grad[row, now], taps[lag], grad_rows[row, at])
                _add_product(grad[row, now], rows[row, at], grad_taps[lag])
        for lag in range(min(known + 1, lags)):
            grad_rows[row, rows.shape[1] - 1 - lag] += grad_last[row, lag]


@kernel
def _add_product(one: Array, other: Array, total: Array) -> None:
    """Add a product of lanes; a separate function, so that it is vectorised."""
    for lane in range(total.shape[0]):
        total[lane] += one[lane] * other[lane]


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


def gae(rollout: Rollout, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of rows `[env, time]`; zero on padding.

        delta_t = r_t + gamma * next_t - V(s_t)
        A_t     = delta_t + gamma * lam * A_{t+1}, the last term only within an episode

    `next_t` is 0 where the episode terminated, `final_values` where it was truncated,
    `last_values` after the last step, and V(s_{t+1}) elsewhere. No gradient flows into
    the results, and the device is not read. `gae_time_major` is the loop for the CPU.
    """
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
