"""Training on a family: other worlds in every round, and resumed to the bit."""

import signal
import sys
from dataclasses import replace

import pytest

from esper.cli.train import report_interruption
from esper.contracts.errors import EsperWarning, InvalidInputError
from esper.contracts.state import load, save
from esper.environment.growing import GrowingWorld
from esper.runs.records import VALIDATION
from esper.runs.run import Run
from esper.runs.train_config import Budget, EvalConfig, TrainConfig, World, preset
from esper.tamiyo.policy.network import PolicyConfig
from esper.tasks.catalogue import task as find_task
from esper.training import pretraining
from esper.training import recordings as recording
from esper.training.controller_ppo import controller_loop
from esper.training.loop import Callback
from esper.training.recordings import RecordConfig, read_recordings
from esper.training.train import begin_run, resume_run
from esper.training.worlds import check_worlds, mixture_for, steps_of, tasks_of
from tests.training.test_train import assert_equal, read, state

SHORT = World(
    horizon=3, decision_every=2, slots=4, blueprints=("widen_8",), rent=(0.001, 0.08)
)


def family():
    base = preset("family")
    small = PolicyConfig(width=16, slot_width=8, offer_width=8)
    return replace(
        base,
        num_envs=2,
        variants=2,
        start_from=None,
        budget=Budget(rounds=4),
        world=replace(SHORT, group_size=2, at_once=True),
        learner=replace(base.learner, policy=small),
    )


def training(config):
    return controller_loop(mixture_for(config), config, steps_of(config))


def test_a_training_that_was_saved_goes_on_to_the_bit_in_worlds_of_its_own():
    config = family()
    one = training(config)
    for _ in range(2):
        one.play_round()
    kept = save(one)
    other = training(config)
    load(other, kept)
    hosts = [str(one.algorithm.mixture.world(0, number).host) for number in (1, 2)]
    assert hosts[0] != hosts[1]
    for each in (one, other):
        each.play_round()
        each.play_round()
    assert_equal(save(one), save(other))


def test_validation_families_are_the_same_for_every_run_and_never_trained_on():
    runs = [replace(family(), rng_seed=seed) for seed in (0, 1)]
    validation = [[str(task) for task in tasks_of(run, VALIDATION)] for run in runs]
    assert validation[0] == validation[1]
    trained = [
        str(task) for run in runs for n in range(9) for task in tasks_of(run, drawing=n)
    ]
    assert len({*trained}) == len(trained)
    assert not {*trained} & {*validation[0]}


def test_a_family_is_redrawn_and_other_tasks_are_not():
    assert mixture_for(family()).redrawn
    plain = TrainConfig(tasks=("digits",), num_envs=2, world=World(horizon=2))
    assert not mixture_for(plain).redrawn


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tasks": ("family", "letter")}, "tasks has 'family' and others"),
        ({"num_envs": 3}, "group_size is 2, which does not divide num_envs 3"),
    ],
)
def test_families_that_cannot_be_are_refused(changes, words):
    with pytest.raises(InvalidInputError, match=words):
        replace(family(), **changes)


def test_slots_are_shared_out_over_the_places_of_a_host():
    digits = find_task("digits")  # two places
    terms = World(slots=6, blueprints=("widen_8",))
    assert GrowingWorld(digits, 1, 0, settings=terms).spec.slots.max_slots == 6
    with pytest.raises(InvalidInputError, match="2 places"):
        GrowingWorld(digits, 1, 0, settings=replace(terms, slots=5))


class Log(Callback):
    """Rounds and progress of a run; sends a signal at the first part of one."""

    def __init__(self, interrupted=None):
        self.rounds, self.progress, self.interrupted = [], [], interrupted

    def on_round_end(self, loop, record):
        self.rounds.append(record)

    def on_progress(self, name, done, total, text):
        self.progress.append((name, done))
        if (name, done) == (self.interrupted, 1):
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A short run that starts from two recordings of its own."""
    monkeypatch.setattr(pretraining, "SCRIPTS_PER_HOST", 4)
    monkeypatch.setattr(pretraining, "PASSES", 2)
    return replace(
        family(),
        start_from="recordings",
        recordings=2,
        budget=Budget(rounds=3),
        evaluation=EvalConfig(every=2, hosts=1, controllers=()),
        runs=str(tmp_path),
        name="small",
    )


def test_a_run_that_starts_from_recordings_stores_what_its_episodes_earned(recorded):
    log = Log()
    result = begin_run(recorded, [log])
    assert len(log.rounds) == 3
    assert {name for name, _ in log.progress} == {"recording", "fitting"}
    for record in log.rounds:
        found = read(result.path, "live_episodes")
        returns = [row["return"] for row in found if row["round"] == record.round]
        assert sum(returns) / len(returns) == pytest.approx(
            record.mean_return, abs=1e-5
        )
    facts = Run.read(result.path).finished
    assert facts["recorded_steps"] == 2 * 4 * 3


@pytest.mark.parametrize(("when", "kept"), [("recording", 1), ("fitting", 2)])
def test_a_start_that_is_interrupted_goes_on_with_what_was_recorded(
    recorded, when, kept, capsys
):
    whole = begin_run(replace(recorded, name="whole"), [])
    result = begin_run(recorded, [Log(when)])
    assert (result.rounds, result.signal) == (0, signal.SIGTERM)
    assert len([*(result.path / "recordings").glob("*.safetensors")]) == kept
    report_interruption(result, "train")
    text = f"before round 1; {kept} recordings are kept, pretraining will be"
    assert text in capsys.readouterr().out

    log = Log()
    assert resume_run(result.path, [log]).signal is None
    assert [each for each in log.progress if each[0] == "recording"] == [
        ("recording", number) for number in range(kept + 1, 3)
    ]
    assert_equal(state(whole.path)[1], state(result.path)[1])
    assert not (result.path / "recordings").exists()
    assert Run.read(result.path).finished == Run.read(whole.path).finished


def test_a_recording_of_the_start_that_was_damaged_is_made_again(recorded):
    result = begin_run(recorded, [Log("fitting")])
    (result.path / "recordings" / "000001.safetensors").write_bytes(b"damaged")
    log = Log()
    with pytest.warns(EsperWarning, match="It is recorded again"):
        assert resume_run(result.path, [log]).signal is None
    assert log.progress[0] == ("recording", 2)


def test_recordings_may_be_gone_once_the_policy_was_fitted(recorded, tmp_path):
    folder = tmp_path / "given"
    recording.record(RecordConfig(stop="end", tasks=2, scripts=4), folder)
    world = replace(preset("family").world, horizon=3, decision_every=2, group_size=2)

    class Gone(Log):
        def on_round_end(self, loop, record):
            (folder / "000001.safetensors").unlink(missing_ok=True)

    config = replace(recorded, start_from=str(folder), world=world)
    steps = sum(each.steps for each in read_recordings(folder))
    finished = Run.read(begin_run(config, [Gone()]).path).finished
    assert finished["recorded_steps"] == steps > 0


def test_a_family_without_a_package_is_refused_before_anything_trains(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInputError, match="pip install scikit-learn"):
        check_worlds(preset("family"))
