"""What a run does when the disk refuses, numbers break, or things have changed."""

import json
from dataclasses import replace
from shutil import rmtree

import pytest

from esper.contracts.errors import BadInput, NumericsTrouble, StorageTrouble
from esper.experiment.config import Budget, Judging, Keeping
from esper.experiment.learned import MAY_BE_NAN, load_controller
from esper.experiment.news import Said, Watched
from esper.experiment.reading import rows
from esper.experiment.run import STORE, VERSIONS, Run
from esper.experiment.settings.presets import preset
from esper.experiment.storage.database import open_store
from esper.experiment.store import Store
from esper.experiment.trainer import Trainer, begin_run, resume_run
from esper.tamiyo.policy.network import PolicyConfig
from tests.experiment.training_script import config

SMALL = PolicyConfig(width=8, slot_width=8, offer_width=4)


def simulated(folder, name="run", **changed):
    """A run of moments."""
    own = preset("simulated")
    learner = replace(own.learner, policy=SMALL)
    learner = replace(learner, ppo=replace(learner.ppo, **changed))
    return replace(
        own,
        name=name,
        runs=str(folder),
        envs=4,
        budget=Budget(rounds=8),
        learner=learner,
        keeping=Keeping(every=1),
    )


def read(path, table):
    db = open_store(path / STORE)
    try:
        return list(rows(db, table))
    finally:
        db.close()


class Blocked:
    """Puts a file where checkpoints go, and takes it away again."""

    def __init__(self, path, until):
        self.path, self.until = path / "checkpoints", until

    def __call__(self, record):
        if record.round == 1:
            rmtree(self.path)
            self.path.touch()
        if record.round == self.until:
            self.path.unlink()
            self.path.mkdir()


def test_a_disk_that_refuses_is_tried_again_and_training_goes_on(tmp_path):
    said = []
    ending = begin_run(
        simulated(tmp_path), Blocked(tmp_path / "run", until=3), said.append
    )
    assert ending.rounds == 8
    warnings = [news.text for news in said if isinstance(news, Said) and news.warning]
    assert len(warnings) == 2
    assert all("Training goes on." in line for line in warnings)
    checkpoints = Run.read(ending.path).checkpoints(may_be_nan=MAY_BE_NAN)
    assert checkpoints.latest().manifest.step == 8


def test_a_disk_that_refuses_three_times_in_a_row_ends_the_run(tmp_path):
    told = []
    blocked = Blocked(tmp_path / "run", until=100)
    with pytest.raises(StorageTrouble):
        begin_run(
            simulated(tmp_path),
            lambda record: (told.append(record.round), blocked(record)),
        )
    assert told == [1, 2, 3]
    assert [row["round"] for row in read(tmp_path / "run", "live_rounds")] == told


def test_updates_that_are_never_finite_take_the_run_back_and_then_end_it(tmp_path):
    played = []
    with pytest.raises(NumericsTrouble, match=r"lower learner\.ppo\.learning_rate"):
        begin_run(
            simulated(tmp_path, value=3e38),
            lambda record: played.append((record.round, record.mean_return)),
        )
    assert [number for number, _ in played] == 4 * [1, 2, 3]
    tries = {tuple(played[start : start + 3]) for start in range(0, 12, 3)}
    assert len(tries) == 4  # chances are drawn anew
    notes = read(tmp_path / "run", "live_notes")
    assert [note["kind"] for note in notes] == 3 * ["refused"]
    assert "back to round 0" in notes[0]["text"]
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert "refused=16" in diagnosis["last"]


def test_a_resumed_run_warns_of_another_version(tmp_path):
    path = tmp_path / "run"

    class Stop(Exception):  # noqa: N818
        pass

    def stop(record):
        if record.round == 3:
            raise Stop

    with pytest.raises(Stop):
        begin_run(simulated(tmp_path), stop)
    facts = json.loads((path / VERSIONS).read_text())
    (path / VERSIONS).write_text(json.dumps(facts | {"torch": "1.0"}))
    said = []
    assert resume_run(path, hear=said.append).rounds == 8
    (line,) = [news.text for news in said if isinstance(news, Said) and news.warning]
    assert line.startswith("torch was '1.0' and is ")
    notes = read(path, "live_notes")
    assert [(row["kind"], row["text"]) for row in notes] == [("inexact", line)]


def test_a_run_starts_from_what_another_one_learnt(tmp_path):
    first = begin_run(simulated(tmp_path, "first"))
    start = load_controller(first.path).weights
    begun = []

    def look(record):
        begun.append(record.round)

    second = replace(simulated(tmp_path, "second"), start_from="first")
    second = replace(second, budget=Budget(rounds=1))
    tiny = replace(second.learner.ppo, learning_rate=1e-12)
    second = replace(second, learner=replace(second.learner, ppo=tiny))
    ending = begin_run(second, look)
    after = load_controller(ending.path).weights
    for name, tensor in start.items():
        if name not in ("value_mean", "value_scale"):
            assert (tensor - after[name]).abs().max() < 1e-6, name


def test_a_start_that_is_not_there_is_refused_before_anything_is_made(tmp_path):
    wrong = replace(simulated(tmp_path), start_from="nowhere")
    with pytest.raises(BadInput, match="there is no run 'nowhere'"):
        begin_run(wrong)
    assert list(tmp_path.iterdir()) == []


def test_time_ends_a_run_and_lowers_the_learning_rate_on_the_way(tmp_path):
    timed = replace(simulated(tmp_path), budget=Budget(rounds=None, minutes=2.0))
    with Store(tmp_path / STORE) as store:
        store.begin_attempt()
        trainer = Trainer(timed, store)
        assert (trainer.done, trainer.over) == (0.0, False)
        trainer.training.seconds = 60.0
        assert trainer.done == pytest.approx(0.5)
        assert not trainer.over
        full = timed.learner.ppo.learning_rate
        rate = trainer.play_round().learning_rate
        share = timed.learner.final_share
        assert rate == pytest.approx(full * (1 + share) / 2)
        trainer.training.seconds = 120.0
        assert (trainer.done, trainer.over) == (1.0, True)


def test_steps_end_a_run(tmp_path):
    short = replace(simulated(tmp_path), budget=Budget(rounds=None, env_steps=150))
    assert begin_run(short).rounds == 4  # of 12 decisions of 4 environments


def test_the_policy_is_watched_and_the_best_is_kept(tmp_path):
    said = []
    judging = Judging(every=3, hosts=2, controllers=("never",), processes=1)
    asked = replace(config(tmp_path, "run", 6), judging=judging)
    ending = begin_run(asked, hear=said.append)
    watched = [news for news in said if isinstance(news, Watched)]
    assert [news.round for news in watched] == [0, 3, 6]
    found = read(ending.path, "live_evaluations")
    rounds = {row["round"] for row in found if row["stage"] == "watched"}
    assert rounds == {0, 3, 6}
    best = max(watched, key=lambda news: news.mean_return)
    checkpoints = Run.read(ending.path).checkpoints(may_be_nan=MAY_BE_NAN)
    assert checkpoints.best().manifest.step == best.round
    judged = [row for row in found if row["stage"] == "judged"]
    assert {row["controller"] for row in judged} == {"Tamiyo", "never"}
    assert {row["task"] for row in judged} == {"teacher", "digits"}
    assert {row["round"] for row in judged} == {6}
    assert len(judged) == 2 * 2 * 2


def test_watching_changes_nothing_of_the_training(tmp_path):
    often, never = config(tmp_path, "often", 4), config(tmp_path, "never", 4)
    often = replace(often, judging=Judging(every=1, hosts=2, controllers=()))
    never = replace(never, judging=Judging(every=100, hosts=2, controllers=()))
    ends = [begin_run(each).path for each in (often, never)]
    states = [
        Run.read(path).checkpoints(may_be_nan=MAY_BE_NAN).latest().tensors
        for path in ends
    ]
    for name, value in states[0].items():
        if name != "training/seconds":
            other = states[1][name]
            assert value.nan_to_num(7.5).equal(other.nan_to_num(7.5)), name
