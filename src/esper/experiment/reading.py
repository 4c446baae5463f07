"""Reading a run's event store: rows with their NaNs, and export to files.

An exported table has what counts of it. In CSV a missing value is empty, an empty text
is "", and numbers that are none are `nan`, `inf` and `-inf`. Parquet is made of that by
DuckDB, which needs the extra `query`.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from math import nan
from pathlib import Path
from sqlite3 import Connection
from sqlite3 import Error as SQLiteError
from typing import Any, Final, Literal

from esper.contracts.errors import BadInput, StorageTrouble
from esper.experiment.storage.database import columns_of, open_store
from esper.experiment.storage.schema import TABLES

Format = Literal["parquet", "csv"]
KINDS: Final = {"INTEGER": "BIGINT", "REAL": "DOUBLE", "TEXT": "VARCHAR"}
"""What DuckDB calls SQLite's types."""


def rows(db: Connection, table: str) -> Iterator[dict[str, Any]]:
    """The rows of a table or `live_` view in order, NaN where it was NaN.

    Args:
        db: From `open_store`.
        table: A table of the store, or `live_` and its name.
    """
    if table.removeprefix("live_") not in TABLES:
        raise BadInput(f"the store has no table {table!r}; known: {', '.join(TABLES)}.")
    names = [*columns_of(db, table)]
    for values in db.execute(f"SELECT * FROM {table} ORDER BY attempt, seq"):
        row = dict(zip(names, values, strict=True))
        marks = row.pop("nans")
        yield row | dict.fromkeys(marks.split(), nan) if marks else row


def export(
    path: Path | str, folder: Path | str, kind: Format = "parquet"
) -> list[Path]:
    """Write what counts of every table to a file of its own.

    Args:
        path: The database of a run.
        folder: Where to; it is made, and must not hold files of these names.
        kind: "parquet" (needs DuckDB) or "csv".

    Returns:
        The files.
    """
    if kind not in ("parquet", "csv"):
        raise BadInput(f"kind must be 'parquet' or 'csv', got {kind!r}.")
    duckdb = _duckdb() if kind == "parquet" else None
    folder, db = Path(folder), open_store(path)
    try:
        files = [folder / f"{table}.{kind}" for table in TABLES]
        taken = [file.name for file in files if file.exists()]
        if taken:
            raise BadInput(f"{folder} already has {taken[0]}; name another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        db.execute("BEGIN")  # all tables as of one moment
        for table, file in zip(TABLES, files, strict=True):
            draft = folder / f".{table}.csv"
            types = _write_csv(db, table, draft)
            if duckdb is not None:
                packed = folder / f".{table}.parquet"
                _pack(duckdb, draft, packed, types)
                draft.unlink()
                draft = packed
            os.replace(draft, file)
    except OSError as error:
        why = error.strerror or error
        raise StorageTrouble(f"cannot export to {folder}: {why}.") from None
    except SQLiteError as error:
        raise StorageTrouble(f"cannot read {path}: {error}.") from None
    finally:
        db.close()
    return files


def _write_csv(db: Connection, table: str, file: Path) -> dict[str, str]:
    """Write one table; return its columns with their types."""
    types = columns_of(db, table)
    del types["nans"]
    with file.open("w", encoding="utf-8", newline="") as out:
        out.write(",".join(types) + "\n")
        for row in rows(db, f"live_{table}"):
            out.write(",".join(map(_cell, row.values())) + "\n")
    return types


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case str():
            return '"' + value.replace('"', '""') + '"'
    return repr(value)


def _pack(duckdb: Any, csv: Path, parquet: Path, types: dict[str, str]) -> None:  # noqa: ANN401
    """Have DuckDB read one file and write the other."""
    kinds = ", ".join(f"'{name}': '{KINDS[kind]}'" for name, kind in types.items())
    source, target = (str(file).replace("'", "''") for file in (csv, parquet))
    db = duckdb.connect()
    try:
        db.execute(
            f"COPY (SELECT * FROM read_csv('{source}', header=true, auto_detect=false, "
            f"delim=',', quote='\"', escape='\"', nullstr='', "
            f"allow_quoted_nulls=false, columns={{{kinds}}})) "
            f"TO '{target}' (FORMAT parquet)"
        )
    except duckdb.Error as error:
        why = str(error).splitlines()[0]
        raise StorageTrouble(f"cannot write {parquet}: {why}") from None
    finally:
        db.close()


def _duckdb() -> Any:  # noqa: ANN401
    try:
        return import_module("duckdb")
    except ImportError:
        raise BadInput(
            "Parquet needs DuckDB: pip install 'esper-lite[query]', or export CSV."
        ) from None
