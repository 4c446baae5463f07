r"""The exact best return in the simulated world, with memory and without.

    V_t(a, b) = max over legal moves of  V_{t+1}(a', b') - damage,    V_H = phi

over the pairs of slot states that can be reached. Everything is deterministic, so the
optimum is a plan: one action per step.

A *memoryless* policy sees the time and the present observation. In a hidden instance
it must do well for both types at once, so `a` and `b` become the state of the usable
slot under either type, and where the two observations are equal so must be the moves.
Time is seen, so each observation comes once and the return is linear in the policy at
each: no stochastic policy does better than the best deterministic one.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, RELEVANT, Op
from esper.contracts.errors import InvalidInputError
from esper.contracts.stages import Stage
from esper.kernels import kernel
from esper.testing.simulated import HORIZON, Instances, SimulatedWorld
from esper.testing.slot_tables import (
    ACTS,
    LIFE,
    LIVES,
    NATURES,
    SPEC,
    Act,
    acted,
    damage,
    suiting_curve,
    suiting_style,
    worth,
)

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Plans:
    """What to do, and what it brings."""

    returns: Float64[Tensor, " env"]
    actions: Int64[Tensor, "env time head"]
    """The action at each step of the horizon; WAIT before an instance's start."""


class GivenWorld(SimulatedWorld):
    """A world whose environment i plays instance i in every episode."""

    def __init__(self, instances: Instances) -> None:
        if (instances.clock >= HORIZON).any():
            raise InvalidInputError(
                f"instances must start before step {HORIZON}, got one that starts at "
                f"{int(instances.clock.max())}."
            )
        super().__init__(len(instances))
        self._given = instances

    def _draw(self) -> Instances:
        return self._given

    @property
    def rest(self) -> Instances:
        """Rest of the current episodes, as instances that start now."""
        state = self._current()
        return replace(
            state.instances,
            life=state.life,
            blueprint=state.blueprint,
            style=state.style,
            clock=self._clock,
        )


def exchanged(instances: Instances) -> Instances:
    """The instances with good and bad hidden blueprints exchanged."""
    swapped = instances.gain[:, :, [0, 2, 1]]
    gain = torch.where(instances.hidden.view(-1, 1, 1), swapped, instances.gain)
    return replace(instances, gain=gain)


def optimal_returns(instances: Instances) -> Float64[Tensor, " env"]:
    """The best return of each instance."""
    return optimal_plans(instances).returns


def optimal_plans(instances: Instances) -> Plans:
    """A best plan for each instance, and its return."""
    task = Task.of(instances)
    returns, slots, moves = plan_slots(
        task.value,
        task.parameters,
        task.damage,
        task.fits,
        task.budget,
        task.start,
        task.clock,
        HORIZON,
        *RULES,
    )
    return Plans(torch.from_numpy(returns), spell(instances, slots, moves))


def best_memoryless_returns(instances: Instances) -> Float64[Tensor, " env"]:
    """The best return without memory, averaged over both types of each instance."""
    return best_memoryless_plans(instances).returns


def best_memoryless_plans(instances: Instances) -> Plans:
    """What a best memoryless policy does in each hidden instance.

    The returns are averages over the instance and its twin; the actions are those in
    the instance itself. Plans for `exchanged(instances)` are of the same policy.
    """
    if not instances.hidden.all():
        env = int(instances.hidden.logical_not().nonzero()[0])
        raise InvalidInputError(
            f"instance {env} is visible; memoryless plans are for hidden instances."
        )
    rows = np.arange(len(instances))
    fossil = torch.tensor([life.stage is Stage.FOSSILIZED for life in LIVES])
    usable = fossil[instances.life].logical_not().int().argmax(dim=1).numpy()
    good = instances.gain[rows, usable]  # [env, blueprint]
    own_type = (good[:, 1] < good[:, 2]).int().numpy()

    own, twin = Task.of(instances), Task.of(exchanged(instances))
    both = np.stack([own.value, twin.value], axis=1)  # [env, own or twin, slot, state]
    shown = np.stack([own.shown, twin.shown], axis=1)
    order = np.stack([own_type, 1 - own_type], axis=1)  # type 0 comes first
    pick = (rows[:, None], order, usable[:, None])
    held = own.parameters[rows, 1 - usable, own.start[rows, 1 - usable]]
    returns, moves = plan_types(
        both[pick],
        shown[pick],
        own.parameters[rows, usable],
        own.damage[rows, usable],
        own.fits[rows, usable],
        own.budget - held,
        own.start[rows, usable],
        own.clock,
        LOOKS,
        HORIZON,
        *RULES,
    )
    slots = np.broadcast_to(usable[:, None], moves.shape[::2])
    mine = moves[rows, own_type]
    return Plans(torch.from_numpy(returns), spell(instances, slots, mine))


KINDS: Final = len(SPEC.blueprints)
STATES: Final = tuple((life, kind) for life in LIVES for kind in range(KINDS))
"""A slot's life and blueprint; an empty slot is the first."""
MOVES: Final = tuple(
    (act, kind)
    for act in ACTS
    for kind in (range(KINDS) if act.op is Op.GERMINATE else (-1,))
)
"""What can be done to a slot, up to style and curve; WAIT is the first."""


def successors() -> Array:
    """The state after each move, [state, move]; -1 where illegal."""
    table = np.full((len(STATES), len(MOVES)), -1)
    for state, (life, kind) in enumerate(STATES):
        for move, (act, planted) in enumerate(MOVES):
            after = acted(life, act)
            if after is not None:
                kept = kind if planted < 0 else planted
                empty = after.stage is Stage.DORMANT
                table[state, move] = 0 if empty else LIFE[after] * KINDS + kept
    return table


def legal_moves(following: Array) -> tuple[Array, Array]:
    """The legal moves of each state, [state, nth], and how many they are."""
    legal = following >= 0
    return np.argsort(~legal, axis=1, kind="stable"), legal.sum(axis=1)


FOLLOWING: Final = successors()
RULES: Final = (
    FOLLOWING,
    *legal_moves(FOLLOWING),
    np.array([kind for _, kind in MOVES]),
)
"""What follows, the legal moves, how many, and the blueprint that a move plants."""
LOOKS: Final = np.unique(
    [
        (life.stage, life.age, life.alpha, life.target, life.settled, kind)
        for life, kind in STATES
    ],
    axis=0,
    return_inverse=True,
)[1]
"""States with one number look the same, apart from their contribution."""


@dataclass(frozen=True, slots=True)
class Task:
    """Instances as the planners need them: numbers per slot and state."""

    value: Array
    """What each state adds to phi, [env, slot, state]."""
    shown: Array
    """The contribution that is seen, [env, slot, state]."""
    parameters: Array
    """Parameters of each state, [env, slot, state]."""
    damage: Array
    """Least damage of each move, [env, slot, move]."""
    fits: Array
    budget: Array
    start: Array
    """First state, [env, slot]."""
    clock: Array

    @classmethod
    def of(cls, instances: Instances) -> "Task":
        """Tabulate the instances."""
        kinds = np.array([kind for _, kind in STATES])
        planted = np.array([life.stage is not Stage.DORMANT for life, _ in STATES])
        seen = np.array([life.measured for life, _ in STATES])
        share = np.array(
            [[worth(life, wants_half=h) for life, _ in STATES] for h in (False, True)]
        )
        least = np.array(
            [
                [damage(act, None, None, *nature) for act, _ in MOVES]
                for nature in NATURES
            ]
        )
        gain = np.take(instances.gain.double().numpy(), kinds, axis=2)
        sizes = np.take(instances.parameters.double().numpy(), kinds, axis=2)
        parameters = sizes * planted
        contribution = share[instances.wants_half.numpy()] * gain
        rent = instances.rent.double().numpy()[:, None, None]
        start = instances.life * KINDS + instances.blueprint.clamp(min=0)
        return cls(
            value=contribution - rent * parameters,
            shown=contribution * seen,
            parameters=parameters,
            damage=least[instances.nature.numpy()],
            fits=np.ascontiguousarray(instances.fits.numpy()),
            budget=np.ascontiguousarray(instances.budget.double().numpy()),
            start=np.ascontiguousarray(start.numpy()),
            clock=np.ascontiguousarray(instances.clock.numpy()),
        )


def spell(
    instances: Instances, slots: Array, moves: Array
) -> Int64[Tensor, "env time head"]:
    """Moves as actions, with the style and the curve that suit the slot."""
    move = torch.from_numpy(moves)
    actions = torch.tensor([spelt(act, kind) for act, kind in MOVES])[move]
    slot = torch.from_numpy(np.ascontiguousarray(slots))
    nature = instances.nature.gather(1, slot)  # [env, time]
    suits = torch.tensor(
        [
            [
                [*HEADS[HEAD["style"]].choices].index(suiting_style(deep)),
                [*HEADS[HEAD["alpha_curve"]].choices].index(suiting_curve(lively)),
            ]
            for deep, _, lively in NATURES
        ]
    )[nature]
    actions[..., HEAD["slot"]] = slot
    actions[..., [HEAD["style"], HEAD["alpha_curve"]]] = suits
    return torch.where(RELEVANT[actions[..., 0]], actions, 0)


def spelt(act: Act, kind: int) -> list[int]:
    """An act's heads; style, slot and curve are left open."""
    numbers = {"tempo": act.tempo, "alpha_target": act.target, "alpha_speed": act.speed}
    heads = {"op": int(act.op), "blueprint": max(kind, 0)}
    for name, number in numbers.items():
        choices = [*HEADS[HEAD[name]].choices.values()]
        heads[name] = choices.index(number) if number else 0
    return [heads.get(head.name, 0) for head in HEADS]


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

    The arrays are those of `Task` and of `RULES`.
    """
    envs, states = value.shape[0], value.shape[2]
    returns = np.zeros(envs)
    slots = np.zeros((envs, horizon), np.int64)
    planned = np.zeros((envs, horizon), np.int64)
    worth = np.zeros((2, states, states))
    policy = np.zeros((horizon, states, states, 2), np.int8)
    for env in range(envs):
        begin = clock[env]
        rules = (following, moves, counts, plants)
        found, number = reachable(start[env, 0], begin, horizon, fits[env, 0], *rules)
        found_too, number_too = reachable(
            start[env, 1], begin, horizon, fits[env, 1], *rules
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

    One slot, moved under either type; equal observations force equal moves. The
    arrays are those of `Task` for the usable slot, with types in the place of slots.
    """
    envs, states = value.shape[0], value.shape[2]
    returns = np.zeros(envs)
    planned = np.zeros((envs, 2, horizon), np.int64)
    worth = np.zeros((2, states, states))
    policy = np.zeros((horizon, states, states, 2), np.int8)
    for env in range(envs):
        begin = clock[env]
        rules = (following, moves, counts, plants)
        found, number = reachable(start[env], begin, horizon, fits[env], *rules)
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
