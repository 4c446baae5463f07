"""The learning benchmark: its environments, and that it goes on where it stopped."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import rl, timing
from benchmarks.rl_tasks import HiddenVelocity, Repeat, Scheduling, TMaze, Tools
from esper.rl.doctor import examine


def played(env, choose, seed=0):
    """The return of one episode."""
    observation, _ = env.reset(seed=seed)
    total, over, time = 0.0, False, 0
    while not over:
        observation, reward, *ends, _ = env.step(choose(env, observation, time))
        total, over, time = total + reward, any(ends), time + 1
    return total


def through_the_maze(env, observation, time):
    return 0 if time < env.LENGTH else (2 if env._side > 0 else 3)


def by_weight(env, observation, time):
    return int(np.argmax(np.where(env._open, env._weights / env._lengths, -1.0)))


def recalled(env, observation, time):
    return env._symbols[time - env.BACK] if time >= env.BACK else 0


@pytest.mark.parametrize(
    ("env", "choose", "best"),
    [
        (TMaze(), through_the_maze, 1.0),
        (Repeat(), recalled, 1.0),
        (Scheduling(), by_weight, -1.0),
        (Tools(), lambda env, seen, time: [seen[0], seen[1], seen[1]], 16.0),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_best_return_is_what_the_environment_says(env, choose, best, seed):
    assert played(env, choose, seed) == pytest.approx(best)


@pytest.mark.parametrize("env", [HiddenVelocity, Scheduling, Tools])
def test_the_doctor_finds_nothing(env):
    assert examine(env, steps=300) == []


def test_what_the_ledger_has_is_not_trained_again(tmp_path, monkeypatch):
    task = replace(rl.TASKS["CartPole"], steps=2_048, peer=None)
    monkeypatch.setattr(rl, "TASKS", {"CartPole": task})
    monkeypatch.setattr(timing, "QUICK", False)  # which other tests leave behind
    ledger, plot = tmp_path / "rl.jsonl", tmp_path / "rl.svg"
    first = rl.run(str(ledger), str(plot), seeds=1)
    (training,) = rl.read(ledger)
    assert training.steps == 2_048
    assert training.curve[-1] is not None
    assert rl.run(str(ledger), str(plot), seeds=1).rows == first.rows
    assert ledger.read_text().count("\n") == 1
    assert plot.read_text().startswith("<?xml")
