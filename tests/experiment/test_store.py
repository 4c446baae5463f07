"""The event store: what is stored, what counts, and what is refused."""

import sqlite3
from contextlib import closing
from dataclasses import fields
from math import inf, isnan, nan

import pytest
import torch

from esper.contracts.errors import BadInput, CallOrder
from esper.experiment.database import VERSION, columns_of, open_store
from esper.experiment.records import RoundRecord
from esper.experiment.store import Store
from esper.simic.agent.metrics import HeadRecord, UpdateRecord
from tests.experiment.stores import (
    ENVS,
    add_steps,
    ask,
    fill,
    read,
    record,
    seqs,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.sqlite"


# What is stored.


def test_every_field_of_an_update_and_of_its_heads_has_a_column(path):
    with Store(path), closing(open_store(path)) as db:
        rounds, heads = columns_of(db, "rounds"), columns_of(db, "heads")
    told = {field.name for field in fields(RoundRecord)} - {"update", "rounds"}
    told |= {field.name for field in fields(UpdateRecord)} - {"heads"}
    assert told <= rounds.keys()
    assert {field.name for field in fields(HeadRecord)} <= heads.keys()


def test_a_round_comes_back_as_it_was_told(path):
    with Store(path) as store:
        store.begin_attempt()
        store.add_round(record(3, stopped_at=5, mean_score=0.25))
    (row,) = read(path, "rounds")
    assert row["round"] == 3
    assert row["mean_return"] == pytest.approx(0.3)
    assert row["value_loss"] == 0.4
    assert row["stopped_at"] == 5
    assert row["mean_score"] == 0.25
    assert row["added"] is None
    heads = read(path, "heads")
    assert [head["kl"] for head in heads[:3]] == [0.0, 0.01, 0.02]
    assert heads[0]["head"] == "op"


def test_a_step_has_a_row_for_every_environment(path):
    score = torch.arange(ENVS) / 8
    with Store(path) as store:
        store.begin_attempt()
        add_steps(store, 1, step=7, score=score)
        score += 1.0  # a world that goes on writing into its tensors
    found = read(path, "steps")
    assert [row["env"] for row in found] == [0, 1, 2, 3]
    assert [row["score"] for row in found] == [0.0, 0.125, 0.25, 0.375]
    assert {row["step"] for row in found} == {7}
    assert {row["task"] for row in found} == {"letter"}


def test_missing_nan_and_infinite_stay_apart(path):
    odd = torch.tensor([nan, inf, -inf, 0.5])
    with Store(path) as store:
        store.begin_attempt()
        add_steps(store, 1, loss=odd, score=odd.roll(1), reward=odd, added=None)
        store.add_round(record(1, kl=nan, stopped_at=None, mean_score=inf))
    found = read(path, "steps")
    assert isnan(found[0]["loss"])
    assert [row["loss"] for row in found[1:]] == [inf, -inf, 0.5]
    assert isnan(found[1]["score"])
    assert [row["added"] for row in found] == [None] * ENVS
    (row,) = read(path, "rounds")
    assert isnan(row["kl"])
    assert row["stopped_at"] is None
    assert row["mean_score"] == inf
    marks = ask(path, "SELECT nans FROM steps ORDER BY seq")
    assert isnan(found[0]["reward"])
    assert marks == [("reward loss",), ("score",), (None,), (None,)]


def test_hostile_texts_are_stored_as_texts(path):
    texts = ["", "'; DROP TABLE notes; --", "\ud800 alone", "a\x00b", "x" * 10**7]
    with Store(path) as store:
        store.begin_attempt()
        for text in texts:
            store.add_note(1, "text", text)
    found = [row["text"] for row in read(path, "notes")]
    assert found[:2] == texts[:2]
    assert found[2] == "? alone"
    assert found[3] == "a\x00b"
    assert len(found[4]) == 10_000


def test_rows_are_numbered_over_all_tables_without_holes(path):
    fill(path)
    first, second = seqs(path, 1), seqs(path, 2)
    assert first == [*range(1, len(first) + 1)]
    assert second == [*range(1, len(second) + 1)]
    written = ask(path, "SELECT attempt, rows FROM attempts")
    assert written == [(1, len(first)), (2, len(second))]


# Attempts.


def test_rows_beyond_the_round_of_resumption_no_longer_count(path):
    fill(path)
    assert ask(path, "SELECT attempt, round FROM live_rounds") == [(1, 1), (2, 2)]
    assert ask(path, "SELECT count(*) FROM steps") == [(3 * ENVS,)]
    assert ask(path, "SELECT count(*) FROM live_steps") == [(2 * ENVS,)]
    assert ask(path, "SELECT what FROM live_events WHERE round = 1") == [("planted",)]
    assert ("pruned",) not in ask(path, "SELECT what FROM live_events")


def test_falling_back_twice_keeps_what_both_attempts_keep(path):
    for resume, count in ((None, 5), (4, 2), (2, 1), (3, 1)):
        with Store(path) as store:
            store.begin_attempt(resume)
            for number in range((resume or 0) + 1, (resume or 0) + count + 1):
                store.add_round(record(number))
    live = ask(path, "SELECT attempt, round FROM live_rounds ORDER BY round")
    assert live == [(1, 1), (1, 2), (3, 3), (4, 4)]


def test_an_attempt_from_the_start_leaves_nothing_of_earlier_ones(path):
    for _ in range(2):
        with Store(path) as store:
            store.begin_attempt()
            store.add_note(0, "host", "before the first round")
    assert ask(path, "SELECT attempt FROM live_notes") == [(2,)]


def test_rounds_that_are_not_there_at_resumption_are_noted(path):
    with Store(path) as store:
        store.begin_attempt()
        store.add_round(record(1))
    with Store(path) as store:
        store.begin_attempt(3)
    (note,) = read(path, "notes")
    assert note["kind"] == "gap"
    assert "2 of the rounds 1 to 3" in note["text"]


# Calls that cannot be meant.


def test_rows_before_the_attempt_are_refused(path):
    with Store(path) as store:
        with pytest.raises(CallOrder, match=r"begin_attempt\(\)"):
            store.add_note(1, "host", "too early")
        with pytest.raises(CallOrder, match=r"begin_attempt\(\)"):
            store.flush()


def test_a_second_attempt_in_one_store_is_refused(path):
    with Store(path) as store:
        store.begin_attempt()
        with pytest.raises(CallOrder, match="called before"):
            store.begin_attempt()


@pytest.mark.parametrize("number", [-1, 2**63])
def test_a_round_that_is_no_count_is_refused_and_nothing_is_stored(path, number):
    with Store(path) as store, Store(path) as other:
        store.begin_attempt()
        with pytest.raises(BadInput, match="round must be a whole number"):
            store.add_note(number, "host", "when?")
        with pytest.raises(BadInput, match="resume_round must be a whole number"):
            other.begin_attempt(number)
    assert seqs(path, 1) == []


def test_a_column_of_another_length_is_refused_and_nothing_is_stored(path):
    with Store(path) as store:
        store.begin_attempt()
        episodes = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(BadInput, match="episode must have 4 values, got 2"):
            store.add("steps", round=1, env=range(4), episode=episodes)
        with pytest.raises(BadInput, match="head must have 2 values, got 1"):
            store.add("heads", round=1, kl=[0.0, 0.1], head=["op"])
        with pytest.raises(BadInput, match="no column 'mood'"):
            store.add("heads", round=1, mood=1)
    assert seqs(path, 1) == []


def newer_schema(path):
    fill(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")


def no_database(path):
    path.write_bytes(b"\x89PNG not a database at all" * 100)


def another_database(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE wallet (coins)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (newer_schema, f"schema {VERSION + 1}, .* reads {VERSION}"),
        (no_database, "is no store"),
        (another_database, "no store of Esper"),
    ],
)
def test_what_is_no_store_of_ours_is_refused_and_left_alone(path, make, message):
    make(path)
    before = path.read_bytes()
    for opened in (Store, open_store):
        with pytest.raises(BadInput, match=message) as caught:
            opened(path)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_places_where_no_store_can_be_are_refused(tmp_path):
    for place in (tmp_path, tmp_path / "missing" / "events.sqlite"):
        with pytest.raises(BadInput, match="folder that exists"):
            Store(place)
        with pytest.raises(BadInput, match="no store at"):
            open_store(place)
