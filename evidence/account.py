"""What a campaign has done so far, read from its ledger; it may be at work."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.contracts.errors import BadInput
from esper.experiment.storage.disk import short
from evidence.claims import LEARNED
from evidence.ledger import LEDGER, unpacked
from evidence.plots import Episode, events
from evidence.protocol import Protocol, protocol_of
from evidence.readout import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """All that a ledger holds but the recordings."""

    sha: str
    began: str
    versions: Mapping[str, Any]
    protocol: Protocol
    results: Sequence[Row]
    jobs: Sequence[Row]
    trainings: Sequence[Row]
    episode: Episode | None
    """The one that is shown."""


def read_campaign(folder: Path) -> Campaign:
    """Read all but the recordings, and one of those."""
    path = folder / LEDGER
    if not path.is_file():
        raise BadInput(
            f"{short(folder)} holds no {LEDGER}; name the folder of a campaign, or "
            "begin one with `python -m evidence run`."
        )
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as db:
            return _read(db)
    except sqlite3.Error as error:
        raise BadInput(f"{short(path)} is no ledger: {error}.") from None


def _read(db: sqlite3.Connection) -> Campaign:
    db.row_factory = sqlite3.Row
    known = db.execute("SELECT * FROM protocol").fetchone()
    if known is None:
        raise sqlite3.DatabaseError("it names no protocol")
    protocol = protocol_of(known["toml"].encode())

    def rows(table: str, order: str) -> list[Row]:
        found = db.execute(f"SELECT * FROM {table} ORDER BY {order}")
        return [dict(row) for row in found]

    key = "stage, arm, member, task, setting, rate, seed"
    return Campaign(
        sha=known["sha"],
        began=known["began"],
        versions=json.loads(known["versions"] or "{}"),
        protocol=protocol,
        results=rows("results", key),
        jobs=rows("jobs", "priority, id"),
        trainings=rows("trainings", "name"),
        episode=_episode(db, protocol),
    )


def _episode(db: sqlite3.Connection, protocol: Protocol) -> Episode | None:
    """Tamiyo's episode in which most happened, at the middle rent if there is one."""
    order = list(protocol.rents)
    middle = order[len(order) // 2]
    found = db.execute(
        "SELECT * FROM recordings WHERE arm = ? "
        "ORDER BY setting != ?, member, task, seed",
        (LEARNED, middle),
    )
    best, most = None, -1
    for row in found:
        if best is not None and (row["setting"] == middle) < (best.setting == middle):
            break
        recorded = unpacked(tuple(row))
        happened = events(recorded.stages)
        if happened > most:
            best, most = recorded, happened
    if best is None:
        return None
    return Episode(
        title=(
            f"{best.task} at {best.setting}, controller {best.member}, seed {best.seed}"
        ),
        stages=best.stages,
        blueprints=best.blueprints,
        alphas=best.alphas,
        scores=best.scores,
        slots=best.slots,
        names=best.names,
    )
