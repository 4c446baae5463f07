"""Backward induction over pairs of slot states, compiled.

Both planners walk back from the horizon over the pairs that can be reached, keep the
best value and the move that earns it, and then read the plan off from the start. They
know tables only: `following[state, move]` (-1 where illegal), `moves[state, nth]` and
`counts[state]` of legal moves (the first is WAIT), and `plants[move]`, the blueprint
that a move plants or -1.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.kernels import kernel

Array = NDArray[Any]


@kernel
def plantable(kind: int, fits: Array, needs: float, left: float) -> bool:
    """Whether a move plants nothing, or what fits and can be afforded."""
    return kind < 0 or (fits[kind] and needs <= left)


@kernel
def reachable(
    start: int,
    clock: int,
    horizon: int,
    fits: Array,
    following: Array,
    moves: Array,
    counts: Array,
    plants: Array,
) -> tuple[Array, Array]:
    """States a slot can be in, [time, nth], and how many they are at each time."""
    states = following.shape[0]
    found = np.zeros((horizon + 1, states), np.int64)
    number = np.zeros(horizon + 1, np.int64)
    found[clock, 0], number[clock] = start, 1
    for t in range(clock, horizon):
        known = np.zeros(states, np.bool_)
        for n in range(number[t]):
            state = found[t, n]
            for nth in range(counts[state]):
                move = moves[state, nth]
                then = following[state, move]
                if not known[then] and plantable(plants[move], fits, 0.0, 0.0):
                    known[then] = True
                    found[t + 1, number[t + 1]] = then
                    number[t + 1] += 1
    return found, number


@kernel
def plan_slots(
    value: Array,
    parameters: Array,
    damage: Array,
    fits: Array,
    budget: Array,
    start: Array,
    clock: Array,
    horizon: int,
    following: Array,
    moves: Array,
    counts: Array,
    plants: Array,
) -> tuple[Array, Array, Array]:
    """Best returns, and the slot and the move of every step: one slot moves at a time.

    Args:
        value: What a state adds to phi, [env, slot, state].
        parameters: Parameters of a state, [env, slot, state].
        damage: Damage of a move, [env, slot, move].
        fits: Whether a blueprint fits, [env, slot, blueprint].
        budget: Parameters that both slots may hold, [env].
        start: First state, [env, slot].
        clock: First time, [env].
        horizon: Last time.
        following: See above, as the rest.
        moves: Legal moves.
        counts: How many are legal.
        plants: What a move plants.
    """
    envs, states = value.shape[0], value.shape[2]
    returns = np.zeros(envs)
    slots = np.zeros((envs, horizon), np.int64)
    planned = np.zeros((envs, horizon), np.int64)
    worth = np.zeros((2, states, states))
    policy = np.zeros((horizon, states, states, 2), np.int8)
    for env in range(envs):
        begin = clock[env]
        found, number = reachable(
            start[env, 0],
            begin,
            horizon,
            fits[env, 0],
            following,
            moves,
            counts,
            plants,
        )
        found_too, number_too = reachable(
            start[env, 1],
            begin,
            horizon,
            fits[env, 1],
            following,
            moves,
            counts,
            plants,
        )
        for t in range(horizon, begin - 1, -1):
            later, now = worth[(t + 1) % 2], worth[t % 2]
            for a in found[t, : number[t]]:
                for b in found_too[t, : number_too[t]]:
                    if t == horizon:
                        now[a, b] = value[env, 0, a] + value[env, 1, b]
                        continue
                    best, slot, chosen = later[following[a, 0], following[b, 0]], 0, 0
                    for lane in range(2):
                        own, other = (b, a) if lane else (a, b)
                        left = budget[env] - parameters[env, 1 - lane, other]
                        still = following[other, 0]
                        for nth in range(1, counts[own]):
                            move = moves[own, nth]
                            then = following[own, move]
                            needs = parameters[env, lane, then]
                            if plantable(plants[move], fits[env, lane], needs, left):
                                total = (
                                    later[still, then] if lane else later[then, still]
                                )
                                total -= damage[env, lane, move]
                                if total > best:
                                    best, slot, chosen = total, lane, move
                    now[a, b] = best
                    policy[t, a, b, 0], policy[t, a, b, 1] = slot, chosen

        a, b = start[env, 0], start[env, 1]
        phi = value[env, 0, a] + value[env, 1, b]
        returns[env] = worth[begin % 2, a, b] - phi
        for t in range(begin, horizon):
            slot, move = policy[t, a, b]
            slots[env, t], planned[env, t] = slot, move
            a = following[a, 0 if slot else move]
            b = following[b, move if slot else 0]
    return returns, slots, planned


@kernel
def plan_types(
    value: Array,
    shown: Array,
    parameters: Array,
    damage: Array,
    fits: Array,
    budget: Array,
    start: Array,
    clock: Array,
    looks: Array,
    horizon: int,
    following: Array,
    moves: Array,
    counts: Array,
    plants: Array,
) -> tuple[Array, Array]:
    """Best average returns over two types, and every move, [env, type, time].

    One slot, moved under either type; equal observations force equal moves.

    Args:
        value: What a state adds to phi, [env, type, state].
        shown: The contribution seen in a state, [env, type, state].
        parameters: Parameters of a state, [env, state].
        damage: Damage of a move, [env, move].
        fits: Whether a blueprint fits, [env, blueprint].
        budget: Parameters that the slot may hold, [env].
        start: First state, [env].
        clock: First time, [env].
        looks: What is seen of a state apart from its contribution, as a number.
        horizon: Last time.
        following: See above, as the rest.
        moves: Legal moves.
        counts: How many are legal.
        plants: What a move plants.
    """
    envs, states = value.shape[0], value.shape[2]
    returns = np.zeros(envs)
    planned = np.zeros((envs, 2, horizon), np.int64)
    worth = np.zeros((2, states, states))
    policy = np.zeros((horizon, states, states, 2), np.int8)
    for env in range(envs):
        begin = clock[env]
        found, number = reachable(
            start[env], begin, horizon, fits[env], following, moves, counts, plants
        )
        for t in range(horizon, begin - 1, -1):
            later, now = worth[(t + 1) % 2], worth[t % 2]
            for a in found[t, : number[t]]:
                for b in found[t, : number[t]]:
                    if t == horizon:
                        now[a, b] = value[env, 0, a] + value[env, 1, b]
                        continue
                    equal = (
                        looks[a] == looks[b] and shown[env, 0, a] == shown[env, 1, b]
                    )
                    best, chosen, chosen_too = -np.inf, 0, 0
                    for nth in range(counts[a]):
                        move = moves[a, nth]
                        then = following[a, move]
                        needs = parameters[env, then]
                        if not plantable(plants[move], fits[env], needs, budget[env]):
                            continue
                        for nth_too in range(counts[b]):
                            other = moves[b, nth_too]
                            if equal and other != move:
                                continue
                            after = following[b, other]
                            needs = parameters[env, after]
                            if plantable(plants[other], fits[env], needs, budget[env]):
                                total = later[then, after]
                                total -= damage[env, move] + damage[env, other]
                                if total > best:
                                    best, chosen, chosen_too = total, move, other
                    now[a, b] = best
                    policy[t, a, b, 0], policy[t, a, b, 1] = chosen, chosen_too

        a = b = start[env]
        phi = value[env, 0, a] + value[env, 1, b]
        returns[env] = (worth[begin % 2, a, b] - phi) / 2
        for t in range(begin, horizon):
            planned[env, 0, t], planned[env, 1, t] = policy[t, a, b]
            a = following[a, planned[env, 0, t]]
            b = following[b, planned[env, 1, t]]
    return returns, planned
