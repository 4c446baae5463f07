"""Rows and files of a store."""

import csv
import sys
from contextlib import closing
from math import inf, isnan, nan

import pytest
import torch

from esper.contracts.errors import BadInput, StorageTrouble
from esper.experiment.database import TABLES, export, open_store, rows
from esper.experiment.store import Store
from tests.experiment.stores import add_steps, record


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "it's a store.sqlite"
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


def test_csv_tells_missing_nan_infinite_and_empty_apart(path, tmp_path):
    files = export(path, tmp_path / "out", "csv")
    assert [file.name for file in files] == [f"{table}.csv" for table in TABLES]
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    with files[TABLES.index("steps")].open(newline="") as file:
        found = [*csv.DictReader(file)]
    assert [row["loss"] for row in found[:3]] == ["nan", "inf", "-inf"]
    assert float(found[3]["loss"]) == live(path)["steps"][3]["loss"]
    assert {row["added"] for row in found} == {""}
    notes = files[TABLES.index("notes")].read_text()
    assert notes.endswith(',"text",""\n')
    with files[TABLES.index("notes")].open(newline="") as file:
        first = next(iter(csv.DictReader(file)))
        assert first["text"] == 'a "quoted", line\nand another'


def test_only_what_counts_is_exported(path, tmp_path):
    files = export(path, tmp_path / "out", "csv")
    with files[TABLES.index("rounds")].open(newline="") as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["1"]


def test_parquet_holds_what_the_store_holds(path, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    files = export(path, tmp_path / "it's here")
    assert sorted(files) == sorted((tmp_path / "it's here").iterdir())
    for table, file in zip(TABLES, files, strict=True):
        with closing(duckdb.connect()) as db:
            name = str(file).replace("'", "''")
            query = db.execute(f"SELECT * FROM '{name}' ORDER BY attempt, seq")
            names = [column[0] for column in query.description]
            found = [dict(zip(names, row, strict=True)) for row in query.fetchall()]
        stored = live(path)[table]
        assert len(found) == len(stored)
        for one, other in zip(found, stored, strict=True):
            assert one.keys() == other.keys()
            assert all(same(one[name], other[name]) for name in one), table


def test_parquet_without_duckdb_says_what_to_install(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(BadInput, match=r"esper-lite\[query\]"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_are_never_overwritten(path, tmp_path):
    export(path, tmp_path / "out", "csv")
    (tmp_path / "out" / "rounds.csv").write_text("mine")
    with pytest.raises(BadInput, match=r"already has rounds\.csv"):
        export(path, tmp_path / "out", "csv")
    assert (tmp_path / "out" / "rounds.csv").read_text() == "mine"


def test_a_folder_that_is_a_file_is_refused_in_one_line(path):
    with pytest.raises(StorageTrouble, match="cannot export to"):
        export(path, path, "csv")


def test_unknown_tables_are_refused(path):
    with (
        closing(open_store(path)) as db,
        pytest.raises(BadInput, match="no table 'wallet'; known: rounds"),
    ):
        [*rows(db, "wallet")]


def test_nan_comes_back_as_nan(path):
    assert isnan(live(path)["steps"][0]["loss"])
    assert live(path)["steps"][0]["added"] is None
