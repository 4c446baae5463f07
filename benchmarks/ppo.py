"""How many steps per CPU-second does `esper.PPO` make beside its peers?

One rollout and one update of 64 environments x 128 steps, 4 epochs, 4 minibatches,
layers of 64 numbers, one thread; CPU-seconds. Each side has a process of its own. They
take turns, and the best turn counts. No update is stopped early: all sides take the
same number of optimiser steps.

Peers: sb3-contrib's RecurrentPPO (one LSTM that value and policy share) and
MaskablePPO (no memory), and a plain script with an LSTM in the manner of CleanRL.
Tasks: CartPole; CartPole that has a mask; and eight choices of four with masks, of
which RecurrentPPO sees none. "Native" is Gymnasium's own vector form of CartPole, which
the peers cannot use; all others step environments one by one.
"""

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from math import prod
from multiprocessing import get_context
from time import process_time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from benchmarks import timing
from benchmarks.plain_lstm import PlainLSTM
from benchmarks.timing import Report
from esper.rl.ppo import PPO
from esper.rl.vector import Source

MINIBATCHES = 4
SIZES = ("num_envs", "rollout_steps", "minibatches")
TURNS = 9
OURS = "esper MinGRU"
Side = Callable[[], object]


def size() -> tuple[int, int]:
    """Environments, and steps of each."""
    return (4, 8) if timing.QUICK else (64, 128)


class MaskedCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole in which both pushes are always legal, and which says so."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1", disable_env_checker=True))

    def action_masks(self) -> NDArray[np.bool_]:
        """Everything."""
        return np.ones(2, bool)


class EightHeads(gymnasium.Env[Any, Any]):
    """Eight choices of four, a random mask for each, rewards for low choices."""

    observation_space = spaces.Box(-1.0, 1.0, (16,), np.float32)
    action_space = spaces.MultiDiscrete([4] * 8)

    def __init__(self) -> None:
        self._masks = np.random.default_rng(0).random((50, 32)) < 0.5
        self._masks[:, ::4] = True
        self._seen = np.zeros(16, np.float32)
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin."""
        self._step = 0
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Fifty steps."""
        self._step += 1
        return self._seen, -float(action[0]), False, self._step >= 50, {}

    def action_masks(self) -> NDArray[np.bool_]:
        """What is legal now."""
        return self._masks[self._step % 50]


def run(beside: str = "", only: str = "") -> list[Report]:
    """Steps per CPU-second of every side, and where the time of ours goes.

    Args:
        beside: Measure only sides whose name holds this, beside ours.
        only: Measure only the task of this name, or only "settings".
    """
    report = Report(
        "PPO, 64 environments",
        ("task", "side", "steps per CPU-second", "ours with MinGRU is"),
        notes=["128 steps, 4 epochs, 4 minibatches, layers of 64; CPU time, best turn"],
    )
    for task, every in tasks().items():
        names = [name for name in every if name == OURS or beside in name]
        if len(names) == 1 or only not in (task, ""):
            continue
        rates = measure(task, names)
        ours = rates[OURS]
        for name, rate in rates.items():
            times = None if name == OURS else f"{ours / rate:.2f}× as fast"
            report.add(task, name, rate, times)
    reports = [report] if report.rows else []
    return reports if beside or only not in ("settings", "") else [*reports, shares()]


def shares() -> Report:
    """Where the time of the default call goes, and of more environments."""
    report = Report(
        "Settings of esper.PPO on CartPole",
        (
            "memory",
            *SIZES,
            "steps per CPU-s",
            "environment",
            "acting",
            "update",
            "rest",
        ),
        notes=["the parts are CPU milliseconds of 2,048 steps; best turn"],
    )
    every: tuple[dict[str, int], ...] = ({}, {"num_envs": 64})
    every += ({"num_envs": 64, "rollout_steps": 128, "minibatches": MINIBATCHES},)
    agents = [
        PPO(cartpole, memory=memory, target_kl=math.inf, **sizes)
        for memory in ("none", "conv-mingru")
        for sizes in every
    ]
    best: dict[PPO, list[float]] = {}
    for turn in range(2 if timing.QUICK else 1 + TURNS):
        for agent in agents:
            found = parts_of(agent)
            if turn and sum(found) < sum(best.get(agent, [math.inf])):
                best[agent] = found
    for agent, (*parts, rest) in best.items():
        own = agent.settings
        rate = 2048 / sum((*parts, rest)) * 1e3
        sizes = (str(getattr(own, name)) for name in SIZES)
        report.add(own.memory, *sizes, rate, *parts, rest)
    return report


def parts_of(agent: PPO) -> list[float]:
    """CPU milliseconds of 2,048 steps: environment, acting, update and rest."""
    steps = 8192
    parts = (agent.world, "step"), (agent.policy, "act"), (agent.agent, "update")
    took = [0.0] * len(parts)

    def timed(at: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*given: Any, **options: Any) -> Any:  # noqa: ANN401
            began = process_time()
            result = call(*given, **options)
            took[at] += process_time() - began
            return result

        return timed_call

    for at, (owner, name) in enumerate(parts):
        object.__setattr__(owner, name, timed(at, getattr(owner, name)))
    try:
        began = process_time()
        agent.learn(steps)
        rest = process_time() - began - sum(took)
    finally:
        for owner, name in parts:
            object.__delattr__(owner, name)
    return [1e3 * seconds * 2048 / steps for seconds in (*took, rest)]


def cartpole() -> gymnasium.Env[Any, Any]:
    """CartPole without the checks of every step."""
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


def tasks() -> dict[str, dict[str, Callable[[], Side]]]:
    """What is compared on each task, not made yet."""
    memories = {OURS: "mingru", "esper ConvMinGRU": "conv-mingru"}
    memories |= {"esper GRU": "gru", "esper LSTM": "lstm"}
    memories["esper attention"] = "attention"
    memories["esper no memory"] = "none"
    return {
        "CartPole": {
            **{name: partial(_ours, cartpole, kind) for name, kind in memories.items()},
            f"{OURS}, native": partial(_ours, "CartPole-v1", "mingru", "native"),
            "RecurrentPPO": partial(_recurrent, cartpole),
            "plain LSTM": lambda: PlainLSTM(cartpole, *size(), MINIBATCHES).round,
        },
        "CartPole, masked": {
            OURS: partial(_ours, MaskedCartPole, "mingru"),
            "MaskablePPO": partial(_maskable, MaskedCartPole),
        },
        "8 heads, masked": {
            OURS: partial(_ours, EightHeads, "mingru"),
            "RecurrentPPO without masks": partial(_recurrent, EightHeads),
        },
    }


def measure(task: str, names: list[str]) -> dict[str, float]:
    """Best steps per CPU-second of each side, turn by turn.

    Each side has a process of its own, as its users run it: `esper.PPO` makes malloc
    keep freed memory, which makes all other sides in its process faster too.
    """
    best = dict.fromkeys(names, 0.0)
    with ExitStack() as stack:
        one = partial(ProcessPoolExecutor, 1, get_context("spawn"))
        pools = {name: stack.enter_context(one()) for name in names}
        for turn in range(2 if timing.QUICK else 1 + TURNS):
            for name, pool in pools.items():
                took = pool.submit(_turn, task, name, quick=timing.QUICK).result()
                if turn:  # the first one compiles and warms up
                    best[name] = max(best[name], prod(size()) / took)
    return best


@cache
def _side(task: str, name: str) -> Side:
    torch.set_num_threads(1)
    return tasks()[task][name]()


def _turn(task: str, name: str, *, quick: bool) -> float:
    """CPU-seconds of one turn, in the process of a side."""
    timing.QUICK = quick
    side = _side(task, name)
    began = process_time()
    side()
    return process_time() - began


def _ours(make: Source, memory: str, kind: str = "sync") -> Side:
    envs, steps = size()
    agent = PPO(
        make,
        memory=memory,
        num_envs=envs,
        rollout_steps=steps,
        vectorization=kind,
        minibatches=MINIBATCHES,
        learning_rate=3e-4,
        target_kl=math.inf,
    )
    return lambda: agent.learn(envs * steps)


def _peer_settings() -> dict[str, Any]:
    envs, steps = size()
    return {
        "n_steps": steps,
        "batch_size": envs * steps // MINIBATCHES,
        "n_epochs": 4,
        "device": "cpu",
        "seed": 0,
    }


def _recurrent(make: Callable[[], gymnasium.Env[Any, Any]]) -> Side:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    policy = {
        "lstm_hidden_size": 64,
        "shared_lstm": True,
        "enable_critic_lstm": False,
        "net_arch": [64],
    }
    peer = RecurrentPPO(
        "MlpLstmPolicy",
        DummyVecEnv([make] * size()[0]),
        policy_kwargs=policy,
        **_peer_settings(),
    )
    return lambda: peer.learn(prod(size()), reset_num_timesteps=False)


def _maskable(make: Callable[[], gymnasium.Env[Any, Any]]) -> Side:
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    peer = MaskablePPO("MlpPolicy", DummyVecEnv([make] * size()[0]), **_peer_settings())
    return lambda: peer.learn(prod(size()), reset_num_timesteps=False)
