"""How many steps per CPU-second does `esper.PPO` make beside its peers?

One rollout and one update of 64 environments x 128 steps, 4 epochs, 4 minibatches,
layers of 64 numbers, one thread, in one process, turn by turn; CPU-seconds, best turn.
No update is stopped early: all sides take the same number of optimiser steps.
Peers: sb3-contrib's RecurrentPPO (one LSTM that value and policy share) and
MaskablePPO (no memory), and a plain script with an LSTM in the manner of CleanRL.
Tasks: CartPole; CartPole that has a mask; and eight choices of four with masks, of
which RecurrentPPO sees none. "Native" is Gymnasium's own vector form of CartPole, which
the peers cannot use; all others step environments one by one.
"""

import math
from collections.abc import Callable
from functools import partial
from math import prod
from time import process_time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from benchmarks import timing
from benchmarks.plain_lstm import PlainLSTM
from benchmarks.timing import Report
from esper.rl.ppo import PPO
from esper.rl.vector import Source

PARTS = 4
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


def run(beside: str = "") -> Report:
    """Steps per CPU-second of every side.

    Args:
        beside: Measure only sides whose name holds this, beside ours.
    """
    report = Report(
        "PPO, 64 environments",
        ("task", "side", "steps per CPU-second", "ours with MinGRU is"),
        notes=["128 steps, 4 epochs, 4 minibatches, layers of 64; CPU time, best turn"],
    )
    for task, every in tasks().items():
        sides = {n: make for n, make in every.items() if n == OURS or beside in n}
        if len(sides) == 1:
            continue
        rates = measure({name: make() for name, make in sides.items()})
        ours = rates[OURS]
        for name, rate in rates.items():
            times = None if name == OURS else f"{ours / rate:.2f}× as fast"
            report.add(task, name, rate, times)
    return report


def tasks() -> dict[str, dict[str, Callable[[], Side]]]:
    """What is compared on each task, not made yet."""

    def cartpole() -> gymnasium.Env[Any, Any]:
        return gymnasium.make("CartPole-v1", disable_env_checker=True)

    memories = {OURS: "mingru", "esper ConvMinGRU": "conv-mingru"}
    memories |= {"esper GRU": "gru", "esper LSTM": "lstm"}
    memories["esper no memory"] = "none"
    return {
        "CartPole": {
            **{name: partial(_ours, cartpole, kind) for name, kind in memories.items()},
            f"{OURS}, native": partial(_ours, "CartPole-v1", "mingru", "native"),
            "RecurrentPPO": partial(_recurrent, cartpole),
            "plain LSTM": lambda: PlainLSTM(cartpole, *size(), PARTS).round,
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


def measure(sides: dict[str, Side]) -> dict[str, float]:
    """Best steps per CPU-second of each side, turn by turn."""
    envs, steps = size()
    best = dict.fromkeys(sides, 0.0)
    for turn in range(2 if timing.QUICK else 1 + TURNS):
        for name, side in sides.items():
            began = process_time()
            side()
            if turn:  # the first one compiles and warms up
                rate = envs * steps / (process_time() - began)
                best[name] = max(best[name], rate)
    return best


def _ours(make: Source, memory: str, kind: str = "sync") -> Side:
    envs, steps = size()
    agent = PPO(
        make,
        memory=memory,
        num_envs=envs,
        rollout_steps=steps,
        vectorization=kind,
        minibatches=PARTS,
        learning_rate=3e-4,
        target_kl=math.inf,
    )
    return lambda: agent.learn(envs * steps)


def _peer_settings() -> dict[str, Any]:
    envs, steps = size()
    return {
        "n_steps": steps,
        "batch_size": envs * steps // PARTS,
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
