"""The training loop and runs: exact resume, rollback, refusing disks, budgets."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from shutil import rmtree

import pytest
import torch

from esper.contracts.errors import (
    InvalidInputError,
    NumericsError,
    RunLockedError,
    StorageError,
)
from esper.contracts.state import load, save
from esper.environment.cohort import Cohort
from esper.environment.growing import GrowingWorld
from esper.runs.controllers import load_controller
from esper.runs.database import open_store, rows
from esper.runs.run import STORE, VERSIONS, Run
from esper.runs.train_config import (
    Budget,
    CheckpointConfig,
    EvalConfig,
    Learner,
    TrainConfig,
    World,
    from_toml,
    preset,
)
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.testing.simulated import SimulatedWorld
from esper.training.controller_ppo import ControllerPPO, controller_loop
from esper.training.loop import OnRoundEnd, TrainingLoop
from esper.training.train import begin_run, resume_run
from esper.training.worlds import mixture_for, steps_of
from tests.census import changed, fixed, stateful
from tests.environment.test_growing import TINY, VARIED
from tests.training.training_script import ROUNDS, Log, config

SCRIPT = "tests.training.training_script"
SETTINGS = World(rent=(0.0, 0.1), budget=(0.5, 3.0))
SMALL = PolicyConfig(width=8, slot_width=8, offer_width=4)
WORLDS = {
    "shared": lambda seed: GrowingWorld(TINY, 4, seed, settings=SETTINGS),
    "varied": lambda seed: GrowingWorld(VARIED, 4, seed, settings=SETTINGS),
    "simulated": lambda seed: SimulatedWorld(4, seed, hidden_share=0.5),
}


def simulated(folder, name="run", **changed):
    """A run of moments."""
    own = preset("simulated")
    ppo = replace(own.learner.ppo, **changed)
    return replace(
        own,
        name=name,
        runs=str(folder),
        num_envs=4,
        budget=Budget(rounds=4),
        learner=replace(own.learner, policy=SMALL, ppo=ppo),
        checkpoint=CheckpointConfig(every=1),
    )


def loop_of(settings):
    return controller_loop(mixture_for(settings), settings, steps_of(settings))


def checkpoints(path):
    return Run.read(path).checkpoints()


def state(path):
    """The newest checkpoint."""
    found = checkpoints(path).latest()
    return found.manifest.step, found.tensors


def assert_equal(one, other):
    """Two states, but for the time they took."""
    assert one.keys() == other.keys()
    for name in one.keys() - {"seconds"}:
        same = torch.equal(one[name].nan_to_num(7.5), other[name].nan_to_num(7.5))
        assert same, name


def read(path, table):
    with closing(open_store(path / STORE)) as db:
        return [*rows(db, table)]


# The loop.


@pytest.mark.parametrize("kind", WORLDS)
def test_a_training_goes_on_to_the_bit_from_what_was_saved(kind):
    learner = Learner(ppo=PPOConfig(minibatches=2, epochs=2), policy=SMALL)
    own = TrainConfig(rng_seed=5, budget=Budget(rounds=6), learner=learner)
    whole, other = (controller_loop(WORLDS[kind](5), own, 7) for _ in range(2))
    whole.play_round()
    load(other, save(whole))
    for _ in range(2):
        # Time and the mean over earlier rounds are not part of what is saved.
        own = {"seconds": 0.0, "recent_return": 0.0, "recent_length": 0.0}
        first, second = whole.play_round(), other.play_round()
        assert repr(replace(first, **own)) == repr(replace(second, **own))
        assert_equal(save(whole), save(other))


@pytest.fixture(scope="module")
def loop():
    """A training that has played a round: whatever is filled once is filled."""
    loop = loop_of(replace(config("nowhere", "run", 6), num_envs=2))
    loop.play_round()
    return loop


def test_whatever_changes_in_a_training_is_saved_or_derived(loop):
    before, held = fixed(loop), save(loop)
    for _ in range(2):
        loop.play_round()
    assert changed(loop, before) == []
    after = save(loop)
    moved = {
        name
        for name, value in after.items()
        if not torch.equal(value.nan_to_num(7.5), held[name].nan_to_num(7.5))
    }
    for part in ("policy", "optimizer", "generator", "moments"):
        assert any(name.startswith(f"algorithm/agent/{part}") for name in moved), part
    for part in ("episodes", "live/observation", "world/_phi"):
        assert any(name.startswith(f"algorithm/shards/1/{part}") for name in moved), (
            part
        )
    assert {type(part) for _, part in stateful(loop)} == {
        TrainingLoop,
        ControllerPPO,
        PPOAgent,
    }


def test_whatever_changes_in_a_world_is_saved_or_derived(loop):
    world = loop.algorithm.mixture.world(1)
    before = fixed(world)
    loop.play_round()
    assert changed(world, before) == []
    assert {*map(type, dict(stateful(world)).values())} >= {GrowingWorld, Cohort}


def test_whatever_is_forgotten_is_found(loop, monkeypatch):
    world = loop.algorithm.mixture.world(1)
    forgotten = (
        *((loop, PPOAgent, name) for name in ("moments", "generator")),
        *((loop, ControllerPPO, name) for name in ("shards", "round")),
        (loop, TrainingLoop, "seconds"),
        *((world, GrowingWorld, name) for name in ("_phi", "cohort")),
    )
    for whole, owner, name in forgotten:
        with monkeypatch.context() as patch:
            left = tuple(part for part in owner.STATE if part != name)
            patch.setattr(owner, "STATE", left)
            before = fixed(whole)
            loop.play_round()
            lines = changed(whole, before)
        assert any(line.endswith(f".{name}") for line in lines), name


def test_time_ends_a_training_and_lowers_the_learning_rate_on_the_way(tmp_path):
    timed = replace(simulated(tmp_path), budget=Budget(rounds=None, minutes=2.0))
    loop = loop_of(timed)
    assert (loop.done, loop.over) == (0.0, False)
    loop.seconds = 60.0
    assert loop.done == pytest.approx(0.5)
    assert not loop.over
    rate = loop.play_round().learning_rate
    end = timed.learner.end_factor
    assert rate == pytest.approx(timed.learner.ppo.learning_rate * (1 + end) / 2)
    loop.seconds = 120.0
    assert (loop.done, loop.over) == (1.0, True)


# A run that is interrupted.


@pytest.mark.usefixtures("default_signals")
def test_a_run_that_was_interrupted_goes_on_to_the_bit(tmp_path, finished):
    whole, _ = finished

    def interrupt(record):
        if record.round == 2:
            signal.raise_signal(signal.SIGTERM)

    result = begin_run(config(tmp_path, "hit"), [OnRoundEnd(interrupt)])
    assert (result.rounds, result.signal) == (3, signal.SIGTERM)
    assert state(result.path)[0] == 3
    assert resume_run(result.path).signal is None
    assert_equal(state(result.path)[1], state(whole)[1])
    for question in (
        "SELECT round, mean_return FROM live_rounds ORDER BY round",
        "SELECT step, env, task, reward FROM live_steps ORDER BY step, task, env",
        'SELECT step, env, task, "return" FROM live_episodes ORDER BY step, task, env',
    ):
        found = []
        for each in (result.path, whole):
            with closing(open_store(each / STORE)) as db:
                found.append(db.execute(question).fetchall())
        assert found[0] == found[1]
    assert len(read(result.path, "live_steps")) == ROUNDS * 4 * 4


@pytest.mark.slow
@pytest.mark.timeout(900)  # all kernels are compiled
def test_a_run_is_the_same_where_code_is_compiled_and_where_it_is_loaded(
    tmp_path, finished
):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    for name in ("compiled", "loaded"):
        command = [sys.executable, "-m", SCRIPT, str(tmp_path), name]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        assert_equal(state(tmp_path / name)[1], state(finished[0])[1])
    assert any((tmp_path / "kept").rglob("engine.train*.nbc"))


def test_a_run_says_what_it_was_made_of_and_is_not_begun_again(finished):
    whole, _ = finished
    run, before = Run.read(whole), state(whole)
    own = from_toml(run.config_toml)
    usual = config(whole.parent, "whole")
    assert replace(own, evaluation=usual.evaluation) == usual
    steps = ROUNDS * 4 * 4
    expected = {"rounds": ROUNDS, "env_steps": steps, "recorded_steps": 0}
    assert run.finished == expected
    assert before[0] == ROUNDS
    with pytest.raises(InvalidInputError, match="run whole is complete"):
        resume_run(whole)
    with pytest.raises(RunLockedError):
        begin_run(own)
    assert_equal(state(whole)[1], before[1])


def test_the_policy_is_evaluated_and_the_best_checkpoint_is_kept(finished):
    path, log = finished
    assert [number for number, _ in log.evaluations] == [0, 3, 6]
    found = read(path, "live_evaluations")
    assert {row["round"] for row in found if row["stage"] == "validation"} == {0, 3, 6}
    best = max(log.evaluations, key=lambda pair: pair[1])[0]
    assert checkpoints(path).best().manifest.step == best
    evaluated = [row for row in found if row["stage"] == "test"]
    assert {(row["controller"], row["task"], row["round"]) for row in evaluated} == {
        (arm, task, 6)
        for arm in ("Tamiyo", "never", "early", "static")
        for task in ("teacher", "digits")
    }
    assert len(evaluated) == 4 * 2 * 3


# Disks that refuse, numbers that break, things that changed.


class Blocked:
    """Puts a file where checkpoints go, and takes it away again."""

    def __init__(self, path, until):
        self.path, self.until, self.rounds = path / "checkpoints", until, []

    def __call__(self, record):
        self.rounds.append(record.round)
        if record.round == 1:
            rmtree(self.path)
            self.path.touch()
        if record.round == self.until:
            self.path.unlink()
            self.path.mkdir()


def test_a_disk_that_refuses_is_tried_again_and_training_goes_on(tmp_path):
    log, blocked = Log(), Blocked(tmp_path / "run", until=3)
    result = begin_run(simulated(tmp_path), [OnRoundEnd(blocked), log])
    assert result.rounds == 4
    assert len(log.warnings) == 2
    assert all("Training continues." in line for line in log.warnings)
    assert state(result.path)[0] == 4


def test_a_disk_that_refuses_three_times_in_a_row_ends_the_run(tmp_path):
    blocked = Blocked(tmp_path / "run", until=100)
    with pytest.raises(StorageError):
        begin_run(simulated(tmp_path), [OnRoundEnd(blocked)])
    assert blocked.rounds == [1, 2, 3]
    assert [row["round"] for row in read(tmp_path / "run", "live_rounds")] == [1, 2, 3]


def test_updates_that_are_never_finite_take_the_run_back_and_then_end_it(tmp_path):
    played = []
    with pytest.raises(NumericsError, match=r"Lower its learning_rate"):
        begin_run(
            simulated(tmp_path, value_coef=3e38),
            [OnRoundEnd(lambda each: played.append((each.round, each.mean_return)))],
        )
    assert [number for number, _ in played] == 4 * [1, 2, 3]
    tries = {tuple(played[start : start + 3]) for start in range(0, 12, 3)}
    assert len(tries) == 4  # streams are drawn again
    notes = read(tmp_path / "run", "live_notes")
    assert [note["kind"] for note in notes] == 3 * ["refused"]
    assert "restarting from round 0" in notes[0]["text"]
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert "refused=16" in diagnosis["last"]


def test_a_resumed_run_warns_of_another_version(tmp_path):
    path, log = tmp_path / "run", Log()

    def stop(record):
        if record.round == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        begin_run(simulated(tmp_path), [OnRoundEnd(stop)])
    facts = json.loads((path / VERSIONS).read_text())
    (path / VERSIONS).write_text(json.dumps(facts | {"torch": "1.0"}))
    assert resume_run(path, [log]).rounds == 4
    (line,) = log.warnings
    assert line.startswith("torch was '1.0' and is ")
    notes = [(row["kind"], row["text"]) for row in read(path, "live_notes")]
    assert notes == [("inexact", line)]


# Where a run starts and ends.


def test_a_run_starts_from_what_another_one_learnt(tmp_path):
    start = load_controller(begin_run(simulated(tmp_path, "first")).path).weights
    second = simulated(tmp_path, "second", learning_rate=1e-12)
    second = replace(second, start_from="first", budget=Budget(rounds=1))
    after = load_controller(begin_run(second).path).weights
    value = [name for name in start if name.startswith("value_")]
    for name in start.keys() - {*value} | {"value_hidden.weight"}:
        assert (start[name] - after[name]).abs().max() < 1e-6, name
    # Units of the value follow the new returns; what it predicts stays the same.
    for weights in (start, after):
        scale, mean = weights["value_scale"], weights["value_mean"]
        weights["value_out.weight"] = scale * weights["value_out.weight"]
        weights["value_out.bias"] = scale * weights["value_out.bias"] + mean
    assert start["value_scale"] != after["value_scale"]
    for name in ("value_out.weight", "value_out.bias"):
        torch.testing.assert_close(start[name], after[name], rtol=1e-4, atol=1e-5)


def test_a_start_that_is_not_there_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(InvalidInputError, match="there is no run 'nowhere'"):
        begin_run(replace(simulated(tmp_path), start_from="nowhere"))
    assert list(tmp_path.iterdir()) == []
    short = replace(simulated(tmp_path), budget=Budget(rounds=None, env_steps=150))
    assert begin_run(short).rounds == 4  # of 12 decisions of 4 environments


def test_evaluation_changes_nothing_of_the_training(tmp_path):
    found = []
    for every in (1, 100):
        evaluation = EvalConfig(every=every, hosts=2, controllers=())
        asked = replace(config(tmp_path, f"every-{every}", 2), evaluation=evaluation)
        found.append(state(begin_run(asked).path)[1])
    assert_equal(*found)
