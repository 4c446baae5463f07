"""Learning on a device: the same results as on the CPU, and few transfers."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from esper.cli import main
from esper.contracts.devices import to_device
from esper.contracts.errors import InvalidInputError
from esper.contracts.state import load, save
from esper.rl import device_check
from esper.rl.device_check import MatchEnv, compare
from esper.rl.ppo import PPO
from esper.rl.training import PPORunConfig, begin_ppo, resume_ppo
from esper.runs.train_config import CheckpointConfig, digest
from esper.simic.agent.memory import MEMORIES
from esper.training.controller_ppo import ControllerPPO
from esper.training.loop import OnRoundEnd
from esper.training.train import begin_run, resume_run
from esper.training.worlds import mixture_for, steps_of
from tests.fake_device import COMPUTE, FAKE, TO_DEVICE, TO_HOST, FakeDevice, FakeTensor
from tests.rl.environments import Chance, Tabled
from tests.rollouts import make_policy, random_observation
from tests.training.test_train import simulated

ENVS, STEPS, EPOCHS, MINIBATCHES = 4, 12, 3, 2
TASKS = {"cartpole": "CartPole-v1", "masked": Chance}


def agent_in(env, device, **changes):
    """A small agent."""
    settings = {"num_envs": ENVS, "rollout_steps": STEPS, "width": 16, "seed": 3}
    settings |= {"epochs": EPOCHS, "minibatches": MINIBATCHES}
    return PPO(env, **settings | changes, device=device)


def taken(device, call):
    """What a call does on the device."""
    before = len(device.events)
    call()
    return device.events[before:]


def kinds(events):
    return [event.kind for event in events]


def interrupt(record):
    """End a run after its second round."""
    if record.round == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def assert_learns_the_same(env, **changes):
    # Rounding differs between compiled loops and torch; small steps keep it small.
    changes = {"learning_rate": 1e-3} | changes
    cpu = agent_in(env, "cpu", **changes)
    with FakeDevice():
        fake = agent_in(env, FAKE, **changes)
        for _ in range(2):
            for agent in (cpu, fake):
                agent.collect()
            for name in ("actions", "masks", "rewards", "dones"):
                ours, theirs = (a.agent.buffer._storage[name] for a in (cpu, fake))
                assert isinstance(theirs, FakeTensor)
                assert_close(theirs.cpu()[:STEPS], ours[:STEPS], rtol=0, atol=1e-6)
            records = [agent.update() for agent in (cpu, fake)]
            assert records[0].steps_taken == records[1].steps_taken > 0
        found, expected = save(fake), save(cpu)
        assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("task", TASKS)
def test_learning_on_a_device_gives_the_actions_and_weights_of_the_cpu(task, memory):
    assert_learns_the_same(TASKS[task], memory=memory)


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        (Tabled, {"memory": "mingru"}),
        (Chance, {"autoregressive": True, "separate_value": True}),
        ("Pendulum-v1", {}),
    ],
)
def test_other_heads_learn_the_same_on_a_device(env, changes):
    assert_learns_the_same(env, **changes)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("task", TASKS)
def test_a_device_gets_three_copies_per_step_and_one_per_epoch(task, memory):
    with FakeDevice() as device:
        agent = agent_in(TASKS[task], FAKE, memory=memory)
        agent.collect()
        agent.update()
        rollout = taken(device, agent.collect)
        step, in_loop = agent.agent.step, []
        agent.agent.step = lambda *args: (
            in_loop.extend(taken(device, lambda: rows.append(step(*args))))
            or rows.pop()
        )
        rows = []
        update = taken(device, agent.update)
    # Inputs, noise and results of every step; the last observation.
    assert kinds(rollout).count(TO_DEVICE) == 3 * STEPS + 1
    assert kinds(rollout).count(TO_HOST) == STEPS  # actions
    assert kinds(update).count(TO_DEVICE) == EPOCHS  # the order of minibatches
    assert kinds(update).count(TO_HOST) == 1  # the record
    assert set(kinds(in_loop)) == {COMPUTE}
    waits = [event for event in rollout + update if event.waits]
    assert {event.kind for event in waits} == {TO_HOST}


def assert_noise_comes_first(events):
    assert kinds(events).count(TO_DEVICE) == 1
    assert kinds(events)[0] == TO_DEVICE
    assert TO_HOST not in kinds(events)


@pytest.mark.parametrize("env", ["CartPole-v1", Chance, Tabled, "Pendulum-v1"])
def test_noise_is_copied_before_the_forward_pass(env):
    with FakeDevice() as device:
        agent = agent_in(env, FAKE, memory="mingru")
        agent.collect()
        seen, state = agent._rollout.observation, agent._rollout.state
        inputs = (*agent.policy.read(seen), seen.episode_start)
        inputs = to_device(inputs, agent.device)
        act = agent.policy.act
        assert_noise_comes_first(
            taken(device, lambda: act(*inputs, state, Generator().manual_seed(0)))
        )
        assert TO_DEVICE not in kinds(taken(device, lambda: act(*inputs, state, None)))


def test_the_controller_copies_noise_before_the_forward_pass():
    policy, generator = make_policy(), Generator().manual_seed(0)
    seen = random_observation(4, policy.spec, generator)
    inputs = (*policy.read(seen), seen.episode_start)
    state, draws = policy.initial_state(4), Generator()
    expected = policy.act(*inputs, state, draws.manual_seed(1))
    with FakeDevice() as device:
        policy.to(FAKE)
        moved = to_device((*inputs, state), torch.device(FAKE))
        policy.act(*moved, None)  # tables are copied once
        found = []
        assert_noise_comes_first(
            taken(
                device, lambda: found.append(policy.act(*moved, draws.manual_seed(1)))
            )
        )
        assert torch.equal(found[0].actions.cpu(), expected.actions)
        assert_close(found[0].log_probs.cpu(), expected.log_probs)


def test_a_tree_is_copied_at_once_whatever_its_dtypes():
    tree = (
        {"image": torch.arange(7, dtype=torch.uint8), "vector": torch.randn(3, 2)},
        None,
        torch.tensor([True, False, True]),
        (torch.tensor(5), torch.randn(0, 4), torch.randn(4, 3).T.double()),
    )
    assert to_device(tree, torch.device("cpu")) is tree
    with FakeDevice() as device:
        where = torch.device(FAKE)
        moved = to_device(tree, where)
        assert kinds(device.events).count(TO_DEVICE) == 1
        assert to_device(moved, where) is moved
        back = torch.utils._pytree.tree_map(
            lambda x: None if x is None else x.cpu(), moved
        )
    assert_close(back[0], tree[0], rtol=0, atol=0)
    assert_close(back[2:], tree[2:], rtol=0, atol=0)


def test_an_agent_of_a_device_is_loaded_on_the_cpu(tmp_path):
    with FakeDevice():
        agent = agent_in("CartPole-v1", FAKE)
        agent.learn(ENVS * STEPS)
        agent.save(tmp_path / "agent.safetensors")
        found = agent.predict([0.1, 0.2, 0.3, 0.4])[0]
    there = PPO.load(tmp_path / "agent.safetensors")
    assert there.device == torch.device("cpu")
    assert there.predict([0.1, 0.2, 0.3, 0.4])[0] == found
    assert b"privateuse" not in (tmp_path / "agent.safetensors").read_bytes()


def test_a_controller_learns_the_same_on_a_device(tmp_path):
    config = simulated(tmp_path)

    def made(device):
        own = replace(config, device=device)
        return ControllerPPO(mixture_for(own), own, steps_of(own))

    cpu = made("cpu")
    with FakeDevice() as device:
        fake = made(FAKE)
        for _ in range(2):
            rollout = taken(device, lambda: [cpu.collect(), fake.collect()])
            update = taken(device, lambda: [cpu.update(), fake.update()])
        assert kinds(rollout).count(TO_DEVICE) == 1
        assert {event.operation for event in update if event.waits} == {"_to_copy"}
        assert kinds(update).count(TO_HOST) == 1
        kept = save(fake)
        assert_close(kept, save(cpu), rtol=1e-4, atol=1e-5)
    other = made("cpu")
    load(other, kept)  # a checkpoint fits everywhere
    other.collect()
    assert digest(replace(config, device="cuda")) == digest(config)


def test_a_device_that_is_not_here_is_refused_before_there_is_a_run(tmp_path):
    folder = ["--runs", str(tmp_path / "runs")]
    given = ["ppo", "CartPole-v1", "--device", "nonsense", *folder]
    assert main(given) == 2
    given = ["train", "--preset", "simulated", "--device", "nonsense", *folder]
    assert main(given) == 2
    assert not (tmp_path / "runs").exists()


def test_a_run_of_a_device_is_resumed_on_another(tmp_path):
    config = PPORunConfig(
        env="CartPole-v1",
        num_envs=ENVS,
        rollout_steps=STEPS,
        total_steps=3 * ENVS * STEPS,
        checkpoint=CheckpointConfig(every=1),
        episodes=2,
        device=FAKE,
        name="run",
        runs=str(tmp_path),
    )

    with FakeDevice():
        path = begin_ppo(config, [OnRoundEnd(interrupt)]).path
    with pytest.raises(InvalidInputError, match="device 'nonsense' cannot be used"):
        resume_ppo(path, device="nonsense")
    assert resume_ppo(path, device="cpu").rounds == 3


def test_a_controller_is_trained_on_a_device_and_resumed_on_another(tmp_path):
    config = replace(simulated(tmp_path), device=FAKE)

    with FakeDevice():
        path = begin_run(config, [OnRoundEnd(interrupt)]).path
    with pytest.raises(InvalidInputError, match="device 'nonsense' cannot be used"):
        resume_run(path, device="nonsense")
    assert main(["train", "--resume", str(path), "--device", "cpu"]) == 0


def test_doctor_compares_a_device_with_the_cpu(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(MEMORIES) + 1
    assert all("largest difference 0.0e+00" in line for line in lines[:-1])
    assert lines[-1] == "cpu: same weights as on the CPU, up to rounding."


def test_doctor_reports_a_device_that_learns_something_else(capsys, monkeypatch):
    monkeypatch.setattr(device_check, "MEMORIES", ["none"])
    changes = iter((0.0, 0.1))
    monkeypatch.setattr(
        device_check,
        "save",
        lambda policy: {"x": policy.value_out.weight.detach() + next(changes)},
    )
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "differ by more than 0.001" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--device", "nonsense"], ["--device", "meta"], []])
def test_doctor_refuses_in_one_line(given, capsys):
    assert main(["doctor", *given]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_check_passes_on_the_fake_device(monkeypatch):
    monkeypatch.setattr(device_check, "MEMORIES", ["mingru"])
    with FakeDevice() as device:
        (row,) = compare(FAKE, updates=2)
    assert row.passed
    assert 0 < row.difference < 1e-5
    assert device.copies(TO_HOST)


def test_the_environment_of_the_check_can_be_learnt():
    agent = PPO(MatchEnv, num_envs=8, rollout_steps=32)
    before = agent.evaluate(20).mean
    agent.learn(8 * 32 * 20)
    assert agent.evaluate(20).mean > before + 2
