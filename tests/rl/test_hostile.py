"""An environment that raises, hangs or lies ends a command with one line."""

import os
import signal
import subprocess
import sys
import time

import gymnasium
import pytest

from esper import PPO
from esper.contracts.errors import EsperWarning, InvalidInputError, WorkersError
from esper.rl.doctor import examine
from esper.rl.vector import Vector
from esper.workers.deadline import Watch, timed
from tests.hostile_envs import HOSTILE, Tame, faults_of, run_hostile
from tests.workers.test_jobs import gone

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def made(name):
    return lambda: gymnasium.make(f"hostile/{name}-v0", disable_env_checker=True)


def test_there_are_many_hostile_environments():
    assert len(HOSTILE) >= 40


@pytest.mark.parametrize(
    ("name", "command", "code", "words"),
    [
        ("init_exits", "doctor", 2, "cannot be made: SystemExit: 0"),
        ("reset_exits", "doctor", 1, "reset(seed=0) raised SystemExit: 0"),
        ("step_exits", "doctor", 1, "raised SystemExit: 0"),
        ("step_generator", "doctor", 1, "raised GeneratorExit"),
        ("step_escapes", "doctor", 1, "raised RuntimeError: ?[2J"),
        ("step_unprintable", "doctor", 1, "raised Unprintable: no message"),
        ("reset_sleeps", "doctor", 1, "reset(seed=0) did not return in 0.5 s"),
        ("step_busy", "doctor", 1, "did not return in 0.5 s"),
        ("init_sleeps", "doctor", 6, "in 0.5 s. Fix it, or increase --timeout"),
        ("close_raises", "doctor", 1, "close() raised RuntimeError: ?[2J"),
        ("reward_digits", "doctor", 1, "the reward is"),
        ("space_huge", "doctor", 2, "1,000,000,000 numbers"),
        ("space_lies", "doctor", 1, "SystemExit"),
        ("step_exits", "ppo", 2, "in step() at step 0 of environment 0: SystemExit"),
        ("step_escapes", "ppo", 2, "RuntimeError: ?[2J"),
        ("step_sleeps", "ppo", 6, "step() at step 0 did not return in 0.5 s"),
        ("mask_method_sleeps", "ppo", 6, "action_masks() at step 0 did not return"),
        ("init_sleeps", "ppo", 6, "did not return in 0.5 s. Fix it, or increase env_"),
        ("close_exits", "ppo", 0, "warning: an environment failed in close(): SystemE"),
        ("reward_text", "ppo", 2, "could not convert"),
        ("space_huge", "ppo", 2, "1,000,000,000 numbers"),
        ("action_huge", "ppo", 2, "which is too many"),
    ],
)
def test_a_hostile_environment_ends_a_command_with_one_line(
    tmp_path, name, command, code, words
):
    found = run_hostile(name, command, tmp_path)
    assert not faults_of(name, command, found)
    assert found.code == code
    assert words in found.out + found.err
    assert found.finished == (command == "ppo" and code == 0)
    lines = found.out if code == 1 else found.err
    assert lines.count("\n") == 1, lines


def test_names_of_parts_of_an_observation_are_printed_without_escapes(tmp_path):
    found = run_hostile("escapes_in_keys", "doctor", tmp_path)
    assert not faults_of("escapes_in_keys", "doctor", found)
    assert "step 0: ?[2J?]0;owned???? ranges from 99 to 99" in found.out


@LINUX
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("step_holds_gil", "did not return in 0.5 s"),
        ("step_ends_process", "ended this process"),
    ],
)
def test_a_command_outlives_what_no_signal_can_interrupt(tmp_path, name, words):
    found = run_hostile(name, "doctor", tmp_path)
    assert not faults_of(name, "doctor", found)
    assert found.code == 6
    assert words in found.err


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("step_sleeps", WorkersError, r"environment 0 of .*: step\(\) at step 0 did"),
        ("reset_sleeps", WorkersError, r"reset\(\) at step 0 did not return in 0.5"),
        ("mask_method_sleeps", WorkersError, r"action_masks\(\) at step 0 did not"),
        ("step_exits", InvalidInputError, "SystemExit: 0"),
        ("step_local", InvalidInputError, "Local: local"),
        ("mask_method_raises", InvalidInputError, r"RuntimeError: \?\[2J"),
    ],
)
def test_a_process_of_an_environment_has_a_deadline(name, error, words, capfd):
    agent = PPO(made(name), num_envs=2, rollout_steps=4, width=8, vectorization="async")
    if error is WorkersError:
        agent.world._seconds = agent.world.env.seconds = 0.5
    processes = agent.world.env.processes
    with pytest.raises(error, match=words):
        agent.learn(8)
    assert not any(process.is_alive() for process in processes)
    agent.close()
    assert capfd.readouterr().err == ""


class Once(Tame):
    """Can be made in the first process only; hangs or raises in others."""

    first = 0
    hangs = False

    def __init__(self):
        if os.getpid() != Once.first:
            time.sleep(600 if Once.hangs else 0)
            raise SystemExit(0)


@pytest.mark.parametrize("hangs", [True, False])
def test_an_environment_that_cannot_be_made_in_its_process_is_one_line(hangs, capfd):
    Once.first, Once.hangs = os.getpid(), hangs
    error, words = InvalidInputError, "Once cannot be made: SystemExit: 0"
    if hangs:
        error, words = WorkersError, "did not return in 0.5 s"
    with pytest.raises(error, match=words):
        Vector(Once, 2, "async", env_timeout=0.5)
    assert capfd.readouterr().err == ""


PARENT = """
import time
import torch
from esper.rl.vector import Vector
from tests.hostile_envs import Tame

class Sleeps(Tame):
    def step(self, action):
        time.sleep(600 if action else 0)
        return super().step(action)

vector = Vector(Sleeps, 2, "async", num_workers=2)
vector.reset()
print(*[process.pid for process in vector.env.processes], flush=True)
vector.step(torch.tensor([[0], [1]]))
"""


@LINUX
def test_environments_end_with_the_process_that_started_them():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    )
    workers = [*map(int, parent.stdout.readline().split())]
    assert len(workers) == 2
    time.sleep(0.5)  # one of them is in its step
    parent.kill()
    parent.communicate()
    assert all(map(gone, workers))


def test_the_library_installs_no_signal_handler():
    before = signal.getsignal(signal.SIGALRM)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    agent = PPO(Tame, num_envs=1, rollout_steps=4, width=8)
    agent.learn(8)
    assert signal.getsignal(signal.SIGALRM) == before
    with Watch():
        assert signal.getsignal(signal.SIGALRM) != before
        assert timed(lambda: 3, "it", 1.0, "seconds") == 3
    # The earlier timer is restored.
    assert signal.getsignal(signal.SIGALRM) == before
    assert left - 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= left


def test_an_interrupt_raises_keyboard_interrupt():
    class Interrupted(Tame):
        def step(self, action):
            signal.raise_signal(signal.SIGINT)
            return super().step(action)

    # Background processes ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            PPO(Interrupted, num_envs=1, rollout_steps=4, width=8).learn(8)
        with pytest.raises(KeyboardInterrupt):
            examine(Interrupted, steps=10)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_environment_that_cannot_be_closed_is_a_warning():
    for name in ("close_raises", "close_exits"):
        agent = PPO(made(name), num_envs=3, rollout_steps=4, width=8)
        with pytest.warns(EsperWarning, match="failed in close") as warned:
            agent.close()
        assert len(warned) == 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_timeout_raises(seconds):
    with pytest.raises(InvalidInputError, match="env_timeout must be"):
        PPO(Tame, num_envs=1, env_timeout=seconds)
