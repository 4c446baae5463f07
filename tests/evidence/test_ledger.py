"""The ledger keeps what it was given, whole or not at all, under one protocol."""

import sqlite3
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from esper.contracts.errors import BadInput
from evidence.ledger import (
    Ledger,
    Recorded,
    Result,
    Trained,
    known_states,
)

TOML = b"anything = 1\n"


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "it.sqlite", TOML, {"torch": "2"}) as made:
        made.plan([("a", 0, "tuning"), ("b", 1, "counted")])
        yield made


def result(**changes):
    some = Result(
        stage="counted",
        arm="never",
        member=-1,
        task="digits",
        setting="low",
        rate=0.1,
        seed=3,
        score=0.1 + 0.2,
        test=0.5,
        added=0.0,
        macs=1.0,
        training_macs=1e12,
        area=0.25,
        seconds=0.125,
        panicked=0,
        planted=0,
    )
    return replace(some, **changes)


def recorded(seed=3):
    chance = np.random.default_rng(seed)
    return Recorded(
        arm="tamiyo",
        member=1,
        task="digits",
        setting="low",
        seed=seed,
        actions=chance.integers(0, 6, (5, 8)).astype(np.int8),
        stages=chance.integers(0, 6, (5, 4)).astype(np.int8),
        blueprints=chance.integers(-1, 3, (5, 4)).astype(np.int8),
        alphas=chance.random((5, 4)).astype(np.float32),
        scores=chance.random(5).astype(np.float32),
        slots=("0->2 #1", "0->2 #2", "0->2 #3", "0->2 #4"),
        names=("widen_8", "widen_16"),
    )


def test_what_is_written_is_read_as_it_was(ledger):
    trained = Trained(
        name="tamiyo-1",
        arm="tamiyo",
        member=1,
        env_steps=7,
        seconds=0.5,
        run="controllers/tamiyo-1",
        facts="{}",
    )
    rows = [result(), result(seed=4), result(arm="early")]
    ledger.finish("a", 1.5, results=rows, recordings=[recorded()], trained=trained)
    assert ledger.results(arm="never") == rows[:2]
    assert ledger.results(arm="early", seed=3) == rows[2:]
    assert ledger.trained("tamiyo-1") == trained
    assert ledger.trained("tamiyo-2") is None
    (found,) = ledger.recordings("tamiyo", 1, "digits", "low").values()
    for name in Recorded.__slots__:
        got, wanted = getattr(found, name), getattr(recorded(), name)
        if isinstance(wanted, np.ndarray):
            assert got.dtype == wanted.dtype
            assert_array_equal(got, wanted)
        else:
            assert got == wanted
    assert ledger.states() == {"a": "done", "b": "waiting"}


def test_a_job_that_cannot_be_written_has_written_nothing(ledger):
    rows = [result(), result(seed=2**70)]
    with pytest.raises(OverflowError):
        ledger.finish("a", 1.0, results=rows)
    assert ledger.results() == []
    assert ledger.states()["a"] == "waiting"


def test_jobs_that_are_planned_again_keep_their_state(ledger, tmp_path):
    ledger.finish("a", 1.0)
    ledger.fail("b", 0.5, "no memory")
    ledger.plan([("b", 0, "counted"), ("a", 1, "tuning"), ("c", 2, "tuning")])
    assert ledger.states() == {"a": "done", "b": "failed", "c": "waiting"}
    states, durations = known_states(tmp_path / "it.sqlite")
    assert states == ledger.states()
    assert durations == {"a": 1.0}


def test_another_protocol_needs_another_folder(ledger, tmp_path):
    with Ledger(tmp_path / "it.sqlite", TOML, {}) as again:
        assert again.states() == ledger.states()
    words = "changing the protocol starts a new table: use another folder"
    with pytest.raises(BadInput, match=words):
        Ledger(tmp_path / "it.sqlite", TOML + b" ", {})


def test_what_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "text").write_text("no database, and long enough not to be empty" * 9)
    for path in (tmp_path / "text", tmp_path / "no folder" / "it", tmp_path):
        with pytest.raises(BadInput):
            Ledger(path, TOML, {})
    with pytest.raises(BadInput):
        known_states(tmp_path / "text")
    assert known_states(tmp_path / "none") == ({}, {})
    assert not (tmp_path / "none").exists()


def test_the_protocol_is_kept_with_the_versions(ledger, tmp_path):
    with sqlite3.connect(tmp_path / "it.sqlite") as db:
        ((toml, versions),) = db.execute("SELECT toml, versions FROM protocol")
        (mode,) = db.execute("PRAGMA journal_mode").fetchone()
    assert (toml, versions, mode) == (TOML.decode(), '{"torch": "2"}', "wal")
    db.close()
