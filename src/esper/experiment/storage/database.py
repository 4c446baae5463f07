"""The doors to a run's event store: one for the writer, one for everybody else.

What is no store, or a store of a later schema, is refused before anything is changed.
Readers cannot write, and so never checkpoint the log: before SQLite 3.51.3, two
connections that do so at the same moment can damage a database.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from esper.contracts.errors import BadInput
from esper.experiment.storage.schema import APPLICATION, VERSION, statements

PATIENCE: Final = 1.0
"""Seconds to wait for somebody else's lock."""
OLDEST: Final = (3, 37, 0)
"""SQLite that knows strict tables."""


def open_writer(path: Path) -> sqlite3.Connection:
    """The connection that writes; the store is made if there is none."""
    if sqlite3.sqlite_version_info < OLDEST:
        needed, got = ".".join(map(str, OLDEST)), sqlite3.sqlite_version
        raise BadInput(f"SQLite {needed} or later is needed, got {got}; update Python.")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadInput(
            f"{path} cannot be a store: name a file in a folder that exists."
        )
    try:
        db = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    except sqlite3.Error as error:
        raise BadInput(f"cannot open {path}: {error}; is it yours to write?") from None
    try:
        if _is_empty(path, db):
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                if not _tables(db):  # else somebody was faster
                    for statement in statements():
                        db.execute(statement)
        check(path, db)
        db.execute("PRAGMA journal_mode = WAL")
    except sqlite3.Error as error:
        db.close()
        raise BadInput(f"{path} cannot be used: {error}; name another file.") from None
    except BadInput:
        db.close()
        raise
    return db


def open_store(path: Path | str) -> sqlite3.Connection:
    """A connection that can only read, also while somebody writes.

    Args:
        path: The database of a run.
    """
    path = Path(path).absolute()
    if not path.is_file():
        raise BadInput(f"there is no store at {path}; name the database of a run.")
    try:
        db = sqlite3.connect(
            f"{path.as_uri()}?mode=ro", uri=True, timeout=PATIENCE, isolation_level=None
        )
    except sqlite3.Error as error:
        raise BadInput(f"cannot open {path}: {error}.") from None
    try:
        check(path, db)
    except BadInput:
        db.close()
        raise
    return db


def check(path: Path, db: sqlite3.Connection) -> None:
    """Refuse what is no store, or one of a later schema."""
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        raise BadInput(f"{path} is no store: {error}; name another file.") from None
    if application != APPLICATION:
        raise BadInput(f"{path} is a database but no store of Esper; name another.")
    if version != VERSION:
        age = "a newer Esper" if version > VERSION else "the Esper that wrote it"
        raise BadInput(
            f"{path} has schema {version}, and this Esper reads {VERSION}; use {age}."
        )


def columns_of(db: sqlite3.Connection, table: str) -> dict[str, str]:
    """Names and types of the columns of a table or view, in order."""
    found = db.execute("SELECT name, type FROM pragma_table_info(?)", (table,))
    return dict(found.fetchall())


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; the lock for writing is taken at once."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _is_empty(path: Path, db: sqlite3.Connection) -> bool:
    """Whether nobody has put anything in; refuses what is no database."""
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return version == 0 and not _tables(db)
    except sqlite3.DatabaseError as error:
        raise BadInput(f"{path} is no store: {error}; name another file.") from None


def _tables(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
