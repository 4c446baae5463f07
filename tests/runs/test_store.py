"""The event store: what is stored, what counts, what is refused, read and exported."""

import csv
import re
import sqlite3
import sys
from contextlib import closing
from dataclasses import fields
from math import inf, isnan, nan
from pathlib import Path

import pytest
import torch

from esper.contracts.errors import InvalidInputError, InvalidStateError, StorageError
from esper.contracts.stages import Stage
from esper.files import FORMAT
from esper.runs.database import TABLES, VIEWS, columns_of, open_store, rows
from esper.runs.records import RoundRecord
from esper.runs.store import UNSTORED, Store, export
from esper.simic.agent.metrics import HeadRecord, UpdateRecord
from tests.runs.stores import ENVS, add_event, add_steps, ask, fill, read, record, seqs

DOCS = Path(__file__).resolve().parents[2] / "docs" / "store.md"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "it's a store.sqlite"


# What is stored.


def test_every_field_of_an_update_and_of_its_heads_has_a_column(path):
    with Store(path), closing(open_store(path)) as db:
        rounds, heads = columns_of(db, "rounds"), columns_of(db, "heads")
    told = {field.name for field in fields(RoundRecord)} - {
        "update",
        "rounds",
        *UNSTORED,
    }
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


def test_an_attempt_from_the_start_leaves_nothing_and_gaps_are_noted(path):
    for _ in range(2):
        with Store(path) as store:
            store.begin_attempt()
            store.add_round(record(1))
    assert ask(path, "SELECT attempt FROM live_rounds") == [(2,)]
    with Store(path) as store:
        store.begin_attempt(3)
    (note,) = read(path, "notes")
    assert note["kind"] == "gap"
    assert "2 of the rounds 1 to 3" in note["text"]


# Calls that cannot be meant.


def test_calls_that_cannot_be_meant_are_refused_and_nothing_is_stored(path):
    with Store(path) as store:
        with pytest.raises(InvalidStateError, match=r"call begin_attempt\(\)"):
            store.add_note(1, "host", "when?")
        store.begin_attempt()
        with pytest.raises(ValueError, match="shorter"):
            store.add("heads", round=1, kl=[0.0, 0.1], head=["op"])
        with pytest.raises(InvalidInputError, match="no column 'mood'"):
            store.add("heads", round=1, mood=1)
    assert seqs(path, 1) == []


def newer_schema(path):
    fill(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")


def no_database(path):
    path.write_bytes(b"\x89PNG not a database at all" * 100)


def another_database(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE wallet (coins)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (newer_schema, "was written by an unknown version of Esper"),
        (no_database, "cannot be used as a store"),
        (another_database, "no store of Esper"),
    ],
)
def test_what_is_no_store_of_ours_is_refused_and_left_alone(path, make, message):
    make(path)
    before = path.read_bytes()
    for opened in (Store, open_store):
        with pytest.raises(InvalidInputError, match=message) as caught:
            opened(path)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_places_where_no_store_can_be_are_refused(tmp_path):
    for place in (tmp_path, tmp_path / "missing" / "events.sqlite"):
        with pytest.raises(InvalidInputError, match="folder that exists"):
            Store(place)
        with pytest.raises(InvalidInputError, match=r"no store at|not a regular file"):
            open_store(place)


# Views, and the page about them.


VIEWED = {
    "round, mean_return, learning_rate, episodes FROM learning_curve": [
        (1, 0.1, 1e-3, 0),
        (2, 0.2, 1e-3, 1),
    ],
    "slot, seed, stage, from_step, to_step FROM seed_lives": [
        (0, 1, "TRAINING", 1, 2),
        (0, 1, "BLENDING", 2, 4),
        (0, 1, "HOLDING", 4, 5),
        (0, 1, "FOSSILIZED", 5, 6),
        (1, 1, "TRAINING", 2, 6),
    ],
    "round, step, slot, blueprint, became FROM choices": [
        (1, 1, 0, "large", "kept"),
        (2, 2, 1, "large", "neither"),
    ],
    'round, step, env, "return", how FROM episode_ends': [(2, 6, 0, 0.5, "in time")],
    "round, head, entropy FROM head_entropy WHERE kl = 0": [
        (1, "op", 0.5),
        (2, "op", 0.5),
    ],
}


def test_views_show_what_counts_over_all_attempts(path):
    fill(path)
    for query, expected in VIEWED.items():
        assert ask(path, f"SELECT {query}") == expected, query


def test_a_slot_that_is_planted_again_has_another_seed(path):
    with Store(path) as store:
        store.begin_attempt()
        add_event(store, 1, "planted", Stage.DORMANT, Stage.TRAINING)
        add_event(store, 2, "pruned", Stage.TRAINING, Stage.DORMANT)
        add_event(store, 5, "planted", Stage.DORMANT, Stage.TRAINING)
    lives = "SELECT seed, stage, from_step, to_step FROM seed_lives"
    assert ask(path, lives) == [(1, "TRAINING", 1, 2), (2, "TRAINING", 5, None)]
    choices = "SELECT seed, step, blueprint, became FROM choices"
    assert ask(path, choices) == [(1, 1, "large", "pruned"), (2, 5, "large", "neither")]


def test_every_view_and_every_query_of_the_page_runs(path):
    fill(path)
    for name in VIEWS:
        assert ask(path, f"SELECT * FROM {name}"), name
    queries = re.findall(r"```sql\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert len(queries) >= 3
    for query in queries:
        assert ask(path, query), query


def test_the_page_names_every_table_column_and_view(path):
    fill(path)
    text = DOCS.read_text()
    with closing(open_store(path)) as db:
        for table in (*TABLES, "attempts"):
            assert f"`{table}`" in text
            for column in columns_of(db, table):
                assert f"`{column}`" in text, (table, column)
    for view in VIEWS:
        assert f"`{view}`" in text


# Rows and files.


@pytest.fixture
def stored(path):
    with Store(path) as store:
        store.begin_attempt()
        add_steps(store, 1, loss=torch.tensor([nan, inf, -inf, 0.1]), added=None)
        store.add_note(1, "text", 'a "quoted", line\nand another')
        store.add_note(1, "text", "")
        store.add_round(record(1))
        store.add_round(record(2))
    with Store(path) as store:
        store.begin_attempt(1)
    return path


def live(path):
    with closing(open_store(path)) as db:
        return {table: [*rows(db, f"live_{table}")] for table in TABLES}


def same(one, other):
    return one == other or (one != one and other != other)


def test_csv_tells_missing_nan_infinite_and_empty_apart(stored, tmp_path):
    files = export(stored, tmp_path / "out", "csv")
    assert [file.name for file in files] == [f"{table}.csv" for table in TABLES]
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    with files[TABLES.index("steps")].open(newline="") as file:
        found = [*csv.DictReader(file)]
    assert [row["loss"] for row in found[:3]] == ["nan", "inf", "-inf"]
    assert float(found[3]["loss"]) == live(stored)["steps"][3]["loss"]
    assert {row["added"] for row in found} == {""}
    notes = files[TABLES.index("notes")].read_text()
    assert notes.endswith(',"text",""\n')
    with files[TABLES.index("notes")].open(newline="") as file:
        first = next(iter(csv.DictReader(file)))
        assert first["text"] == 'a "quoted", line\nand another'
    with files[TABLES.index("rounds")].open(newline="") as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["1"]  # what counts
    assert isnan(live(stored)["steps"][0]["loss"])
    assert live(stored)["steps"][0]["added"] is None


def test_parquet_holds_what_the_store_holds(stored, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    files = export(stored, tmp_path / "it's here")
    assert sorted(files) == sorted((tmp_path / "it's here").iterdir())
    for table, file in zip(TABLES, files, strict=True):
        with closing(duckdb.connect()) as db:
            name = str(file).replace("'", "''")
            query = db.execute(f"SELECT * FROM '{name}' ORDER BY attempt, seq")
            names = [column[0] for column in query.description]
            found = [dict(zip(names, row, strict=True)) for row in query.fetchall()]
        for one, other in zip(found, live(stored)[table], strict=True):
            assert one.keys() == other.keys()
            assert all(same(one[name], other[name]) for name in one), table


def test_exports_that_cannot_be_are_refused(stored, tmp_path, monkeypatch):
    export(stored, tmp_path / "out", "csv")
    (tmp_path / "out" / "rounds.csv").write_text("mine")
    with pytest.raises(InvalidInputError, match=r"already has rounds\.csv"):
        export(stored, tmp_path / "out", "csv")
    assert (tmp_path / "out" / "rounds.csv").read_text() == "mine"
    with pytest.raises(StorageError, match="cannot export to"):
        export(stored, stored, "csv")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(InvalidInputError, match=r"\.\[query\]"):
        export(stored, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    readonly = pytest.raises(sqlite3.OperationalError, match="readonly")
    with closing(open_store(stored)) as db, readonly:
        db.execute("DELETE FROM steps")
