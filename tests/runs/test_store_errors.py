"""The event store in trouble: real locks, real kills, readers meanwhile."""

import os
import signal
import sqlite3
from contextlib import closing
from multiprocessing import get_context
from random import Random
from threading import Thread
from time import sleep

import pytest

from esper.contracts.errors import StorageError
from esper.contracts.stages import Stage
from esper.runs import store as store_module
from esper.runs.database import open_store
from esper.runs.store import Store
from tests.runs.stores import ENVS, add_event, add_steps, ask, read, record, seqs


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.sqlite"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("esper.runs.database.TIMEOUT", 0.01)
    monkeypatch.setattr("esper.runs.database.LOCK_PATIENCE", 0.01)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(store_module, "FLUSH_ROWS", 2 * ENVS)


def test_a_thousand_rows_do_not_wait_for_a_flush(path, small_batches):
    with Store(path) as store:
        store.begin_attempt()
        add_steps(store, 1)
        assert seqs(path, 1) == []
        add_steps(store, 2)
        assert len(seqs(path, 1)) == 2 * ENVS


def test_a_locked_store_stops_nobody_and_loses_nothing(path, impatient, small_batches):
    store = Store(path)
    store.begin_attempt()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for number in range(1, 6):
            add_steps(store, number)
        with (
            Store(path) as late,
            pytest.raises(StorageError, match=r"is locked; 0 rows"),
        ):
            late.begin_attempt()
        with pytest.raises(StorageError, match=rf"is locked; {5 * ENVS} rows wait"):
            store.flush()
        other.execute("ROLLBACK")
    store.close()
    assert len(read(path, "steps")) == 5 * ENVS
    assert seqs(path, 1) == [*range(1, 5 * ENVS + 1)]


def test_a_lock_is_waited_for_when_rows_must_be_durable(path, monkeypatch):
    monkeypatch.setattr("esper.runs.database.TIMEOUT", 0.01)
    store = Store(path)
    store.begin_attempt()
    add_steps(store, 1)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    tries = []

    def watch(statement):
        tries.append(statement)
        if tries.count("BEGIN IMMEDIATE") == 3:
            other.execute("ROLLBACK")

    store._db.set_trace_callback(watch)
    assert store.flush() == ENVS
    assert tries.count("BEGIN IMMEDIATE") >= 3
    other.close()
    store.close()


def test_a_store_that_was_replaced_is_noticed_before_a_checkpoint(path):
    store = Store(path)
    store.begin_attempt()
    add_steps(store, 1)
    path.rename(path.with_suffix(".moved"))
    with pytest.raises(StorageError, match=r"cannot write .*No such file"):
        store.flush()
    path.touch()
    with pytest.raises(StorageError, match="replaced by another file"):
        store.flush()
    with pytest.raises(StorageError):
        store.close()


def test_a_full_disk_loses_nothing_that_waits(path):
    store = Store(path)
    store.begin_attempt()
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(200):
        store.add_note(number, "long", "x" * 1_000)
    with pytest.raises(StorageError, match="database or disk is full; 200 rows wait"):
        store.flush()
    assert seqs(path, 1) == []
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert store.flush() == 200
    store.close()
    assert seqs(path, 1) == [*range(1, 201)]


def test_a_durable_flush_syncs_even_if_nothing_waits(path):
    said = []
    with Store(path) as store:
        store.begin_attempt()
        add_steps(store, 1)
        store.flush(durable=False)
        store._db.set_trace_callback(said.append)
        assert store.flush() == ENVS
    commit = said.index("COMMIT")
    assert said.index("PRAGMA synchronous = FULL") < commit
    assert any(statement.startswith("UPDATE attempts") for statement in said[:commit])


# Kills.


def keep_writing(path, resume, pipe):
    """Write rounds until killed; say each number once it is acknowledged."""
    store = Store(path)
    attempt = store.begin_attempt(resume)
    number = resume or 0
    while True:
        number += 1
        for step in range(5):
            add_steps(store, number, step=5 * number + step)
            add_event(store, number, "planted", Stage.DORMANT, Stage.TRAINING)
        store.add_round(record(number))
        acknowledged = store.flush(durable=number % 2 == 0)
        os.write(pipe, b"%d %d %d\n" % (attempt, number, acknowledged))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kill_9_loses_and_doubles_nothing_that_was_acknowledged(path):
    random, resume, promised = Random(0), None, {}
    for number in range(10):
        reader, writer = os.pipe()
        arguments = (path, resume, writer)
        process = get_context("fork").Process(target=keep_writing, args=arguments)
        process.start()
        os.close(writer)
        said = os.read(reader, 100) if number % 2 else b""  # others may die at birth
        sleep(0.1 * random.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with open(reader, "rb") as pipe:
            lines = (said + pipe.read()).splitlines()
        if lines:
            attempt, last, acknowledged = map(int, lines[-1].split())
            promised[attempt] = acknowledged
            resume = max(1, last - random.randrange(3))
    assert len(promised) >= 5
    for attempt, acknowledged in promised.items():
        found = seqs(path, attempt)
        assert found == [*range(1, len(found) + 1)]
        assert len(found) >= acknowledged
    with Store(path) as store:
        store.begin_attempt(resume)
    live = ask(path, "SELECT round FROM live_rounds ORDER BY round")
    assert live == [(number,) for number in range(1, resume + 1)]
    doubled = "SELECT 1 FROM live_steps GROUP BY task, env, step HAVING count(*) > 1"
    assert ask(path, doubled) == []
    assert ask(path, "SELECT count(*) FROM live_steps") == [(5 * ENVS * resume,)]
    assert ask(path, "SELECT count(*) FROM live_events") == [(5 * resume,)]
    assert ask(path, "PRAGMA integrity_check") == [("ok",)]


def die_in_a_flush(path, statement):
    """Write a round; die at a statement of the flush of the next one."""
    store = Store(path)
    store.begin_attempt()
    left = [statement]

    def count(_):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for number in (1, 2):
        add_steps(store, number)
        add_event(store, number, "planted", Stage.DORMANT, Stage.TRAINING)
        store.add_round(record(number))
        if number == 2:
            store._db.set_trace_callback(count)
        store.flush()
    os._exit(0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_flush_that_dies_at_any_statement_leaves_whole_rounds(tmp_path):
    whole = ENVS + 1 + 1 + 8  # steps, an event, the round and its heads
    died = 0
    for statement in range(whole + 6):
        path = tmp_path / f"{statement}.sqlite"
        arguments = (path, statement)
        process = get_context("fork").Process(target=die_in_a_flush, args=arguments)
        process.start()
        process.join()
        died += process.exitcode == -signal.SIGKILL
        rounds = 1 if process.exitcode else 2
        assert seqs(path, 1) == [*range(1, rounds * whole + 1)], statement
    # Sync, begin, a statement for each row, update, commit: all of them were tried.
    assert died == whole + 4


def test_a_reader_sees_whole_rounds_while_somebody_writes(path):
    store = Store(path)
    store.begin_attempt()
    seen, going = [], [True]

    def look():
        with closing(open_store(path)) as db:
            while going:
                db.execute("BEGIN")
                (steps,) = db.execute("SELECT count(*) FROM live_steps").fetchone()
                (rounds,) = db.execute("SELECT count(*) FROM live_rounds").fetchone()
                db.execute("COMMIT")
                seen.append((steps, rounds))

    thread = Thread(target=look)
    thread.start()
    for number in range(1, 60):
        add_steps(store, number)
        store.add_round(record(number))
        store.flush(durable=False)
        looks = len(seen)
        while number % 10 == 0 and len(seen) == looks:
            sleep(0.001)
    going.clear()
    thread.join()
    store.close()
    assert len({rounds for _, rounds in seen}) > 2
    assert all(steps == rounds * ENVS for steps, rounds in seen)
