"""Slow twins of `esper.scan`: sums as textbooks write them, and the loops it replaces.

`scan_reference` and `gae_reference` are plain Python in float64 and contain no
recursion. The loops below are what one writes first, on torch tensors: per
environment and step, and per step over all environments.
"""

import math

import numpy as np
import torch


def scan_reference(decay, inputs, initial=None, *, reverse=False):
    """y_t = sum over k <= t of inputs_k * (product of the decays after k, up to t)."""
    decay, inputs = np.asarray(decay, np.float64), np.asarray(inputs, np.float64)
    if initial is None:
        initial = np.zeros_like(inputs[:, :1].sum(axis=1))
    if reverse:
        return scan_reference(decay[:, ::-1], inputs[:, ::-1], initial)[:, ::-1].copy()
    y = np.zeros_like(inputs)
    for env, *hidden in np.ndindex(inputs.shape[:1] + inputs.shape[2:]):
        row = (env, slice(None), *hidden)
        factors = [1.0, *decay[row]]
        summands = [float(np.asarray(initial)[(env, *hidden)]), *inputs[row]]
        for t in range(1, len(summands)):
            y[(env, t - 1, *hidden)] = sum(
                math.prod(factors[k + 1 : t + 1]) * summands[k] for k in range(t + 1)
            )
    return y


def advantages_of_episode(rewards, values, last_value, *, gamma, lam):
    """One episode; `last_value` is 0 if it terminated, else V of where it stopped."""
    following = [*values[1:], last_value]
    deltas = [
        r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)
    ]
    return [
        sum((gamma * lam) ** k * deltas[t + k] for k in range(len(deltas) - t))
        for t in range(len(deltas))
    ]


def gae_reference(
    rewards,
    values,
    dones,
    truncated,
    step_counts,
    final_values,
    last_values,
    *,
    gamma,
    lam,
):
    """Advantages and returns, each row cut into its episodes first."""
    advantages = np.zeros(np.shape(rewards))
    returns = np.zeros(np.shape(rewards))
    for env, count in enumerate(np.asarray(step_counts).tolist()):
        first = 0
        for t in range(count):
            if truncated[env][t]:
                last_value = float(final_values[env][t])
            elif dones[env][t]:
                last_value = 0.0
            elif t == count - 1:
                last_value = float(last_values[env])
            else:
                continue
            episode = slice(first, t + 1)
            own_values = [float(v) for v in values[env][episode]]
            advantages[env, episode] = advantages_of_episode(
                [float(r) for r in rewards[env][episode]],
                own_values,
                last_value,
                gamma=gamma,
                lam=lam,
            )
            returns[env, episode] = advantages[env, episode] + own_values
            first = t + 1
    return advantages, returns


def naive_gae_loop(*rollout, gamma, lam):
    """Every environment, every step, scalar tensors; every end stops the trace."""
    return _loop_over_environments(*rollout, gamma=gamma, lam=lam, leaky=False)


def leaky_gae_loop(*rollout, gamma, lam):
    """The same, but the trace runs on through a truncation into the next episode."""
    return _loop_over_environments(*rollout, gamma=gamma, lam=lam, leaky=True)


def _loop_over_environments(
    rewards,
    values,
    dones,
    truncated,
    step_counts,
    final_values,
    last_values,
    *,
    gamma,
    lam,
    leaky,
):
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    zero_tensor = torch.zeros((), dtype=rewards.dtype)
    for env in range(rewards.shape[0]):
        steps = int(step_counts[env])
        row_rewards, row_values = rewards[env], values[env]
        row_dones, row_truncated = dones[env], truncated[env]
        last_gae = zero_tensor.clone()
        for t in reversed(range(steps)):
            if row_truncated[t]:
                next_value = final_values[env, t]
            elif t == steps - 1:
                next_value = last_values[env]
            else:
                next_value = row_values[t + 1]
            if row_dones[t] and not (leaky and row_truncated[t]):
                last_gae = zero_tensor.clone()
            next_non_terminal = 1.0 - float(row_dones[t] and not row_truncated[t])
            delta = (
                row_rewards[t] + gamma * next_value * next_non_terminal - row_values[t]
            )
            last_gae = delta + gamma * lam * next_non_terminal * last_gae
            advantages[env, t] = last_gae
        returns[env, :steps] = advantages[env, :steps] + row_values[:steps]
    return advantages, returns


def time_gae_loop(
    rewards, values, dones, truncated, final_values, last_values, *, gamma, lam
):
    """Step by step over all environments at once, `[time, env]`; full rows only."""
    advantages = torch.zeros_like(rewards)
    last_gae = torch.zeros_like(last_values)
    next_values = torch.cat((values[1:], last_values[None]))
    next_values = torch.where(truncated, final_values, next_values)
    next_non_terminal = 1.0 - (dones & ~truncated).to(rewards.dtype)
    next_non_ended = 1.0 - dones.to(rewards.dtype)
    for t in reversed(range(rewards.shape[0])):
        delta = rewards[t] + gamma * next_values[t] * next_non_terminal[t] - values[t]
        last_gae = delta + gamma * lam * next_non_ended[t] * last_gae
        advantages[t] = last_gae
    return advantages, advantages + values
