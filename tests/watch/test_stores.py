"""Sixty hostile stores and folders: answered without a traceback, script or leak."""

import json
import os
import random
import shutil
import sqlite3
from contextlib import closing

import pytest

from esper.runs.run import STORE, Run
from esper.runs.store import Store
from esper.watch.reading import run_id
from tests.browser import open_browser
from tests.report.runs import evaluate
from tests.watch.serving import FEATURES, fill, serving, shown_run

SECRET = "SENTINEL-OF-ANOTHER-FOLDER"
SCRIPT = '<img src=x onerror="pwned=1"><script>pwned=1</script>${pwned=1}'
VIEWS = ("curve", "learning", "hosts", "comparison", "host?task=letter&env=0")


def sql(*statements):
    """Change a store behind its back."""

    def change(path):
        with closing(sqlite3.connect(path / STORE, isolation_level=None)) as db:
            for statement in statements:
                db.execute(statement)

    return change


def rewritten(**files):
    """Write other files into the folder of a run."""

    def change(path):
        for name, data in files.items():
            (path / name.replace("_", ".")).write_bytes(data)

    return change


def facts(**changes):
    """Change `versions.json`."""

    def change(path):
        file = path / "versions.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def truncated(part):
    def change(path):
        os.truncate(path / STORE, int((path / STORE).stat().st_size * part))

    return change


def flipped(seed):
    def change(path):
        data = bytearray((path / STORE).read_bytes())
        stream = random.Random(seed)
        for _ in range(40):
            data[stream.randrange(100, len(data))] ^= 1 << stream.randrange(8)
        (path / STORE).write_bytes(data)

    return change


def linked(name):
    """Replace a file of the run by a link to the same file of another folder."""

    def change(path):
        (path / name).unlink()
        (path / name).symlink_to(path.parents[1] / "secret" / name)

    return change


def pipe(path):
    (path / STORE).unlink()
    os.mkfifo(path / STORE)


def folder(path):
    (path / STORE).unlink()
    (path / STORE).mkdir()


def more(**table):
    """Add rows that are valid, but strange."""

    def change(path):
        run = Run.read(path)
        with Store(path / STORE, run.id) as store:
            store.begin_attempt(3)
            for name, columns in table.items():
                store.add(name, round=4, **columns)

    return change


HOST = {"step": 16, "env": 0, "task": "letter", "episode": 4}
SEED = {**HOST, "slot": 0, "what": "planted", "stage_from": "DORMANT"}
DECISION = {**HOST, "action": "wait"}
HUGE, NAN, INF = 2**63 - 1, float("nan"), float("inf")
TEXTS = [SCRIPT, "\x1b[2J\x07", "\ud800", "𝔘" * 300, "../../secret", "'; DROP", ""]
NUMBERS = [NAN, INF, -INF, 1e308, -1e308, 0.0, 5e-324]
JSONS = ["{", "[]", "3", "null", "NaN", "[" * 5_000, '{"op": 1}']
JSONS += ['{"op": {"legal": [1]}}', '{"__proto__": {"legal": {"a": 1e999}}}']
JSONS += [json.dumps({SCRIPT: {SCRIPT: SCRIPT}})]
CHANGES = [
    *(truncated(part) for part in (0.0, 0.001, 0.1, 0.5, 0.9, 0.999)),
    *(flipped(seed) for seed in range(10)),
    *(linked(name) for name in (STORE, "config.toml", "versions.json", "lock")),
    pipe,
    folder,
    lambda path: (path / STORE).unlink(),
    lambda path: shutil.copy(path.parents[1] / "secret" / STORE, path / STORE),
    rewritten(events_sqlite=b"<!doctype html><h1>404</h1>"),
    rewritten(events_sqlite=b"SQLite format 3\0" + bytes(4_000)),
    sql("PRAGMA application_id = 7"),
    sql("PRAGMA user_version = 2000000000"),
    sql("CREATE TABLE more (x)"),
    sql("DROP VIEW live_rounds", "CREATE VIEW live_rounds AS SELECT 1 AS attempt"),
    sql("DROP TABLE notes"),
    sql("CREATE TRIGGER t AFTER INSERT ON notes BEGIN DELETE FROM rounds; END"),
    sql("ALTER TABLE steps ADD COLUMN script TEXT"),
    sql("UPDATE attempts SET versions = 'no json'"),
    sql("UPDATE attempts SET rows = 9223372036854775807"),
    sql(f"UPDATE rounds SET round = {HUGE}, env_steps = {HUGE}"),
    sql(f"UPDATE rounds SET round = -{HUGE}"),
    sql(f"UPDATE events SET slot = {HUGE}, step = -{HUGE}, episode = {HUGE}"),
    sql("UPDATE rounds SET nans = 'round attempt kl ' || hex(zeroblob(1000))"),
    sql("UPDATE notes SET text = ''", "UPDATE rounds SET kl = 9e999"),
    sql("UPDATE events SET what = hex(zeroblob(300000))"),
    sql(f"UPDATE layers SET width = -{HUGE}"),
    facts(tasks=[SCRIPT, None, {}], kind=SCRIPT, began=[1]),
    facts(esper="99.0"),
    facts(run={"a": 1}),
    rewritten(versions_json=b"[]"),
    rewritten(versions_json=b"[" * 100_000),
    rewritten(config_toml=b"\xff\xfe\x00"),
    rewritten(config_toml=b"budget = 3\nminutes = 1e999"),
    rewritten(config_toml=b"budget.rounds = " + b"9" * 4_000),
    rewritten(finished_json=b"nothing"),
    more(notes={"kind": [SCRIPT] * 7, "text": TEXTS}),
    more(notes={"kind": "big", "text": ["x" * 10**7] * 3}),
    more(heads={"head": TEXTS, "entropy": NUMBERS}),
    more(events={**SEED, "blueprint": TEXTS, "stage_to": TEXTS}),
    more(layers={**HOST, "layer": [*range(7)], "name": TEXTS, "width": HUGE}),
    more(decisions={**DECISION, "features": JSONS, "heads": JSONS, "value": NAN}),
    more(steps={**HOST, "score": [NAN, INF], "loss": -INF, "reward": 1e308}),
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Folders of runs, each hostile in its own way."""
    base = tmp_path_factory.mktemp("hostile")
    good = shown_run(base)
    for note in (shown_run(base, "secret"),):
        (note / "config.toml").write_text(f'tasks = ["{SECRET}"]\n')
        facts(kind=SECRET, tasks=[SECRET])(note)
    runs = base / "runs"
    runs.mkdir()
    for number, change in enumerate(CHANGES):
        path = runs / f"run-{number:02}"
        shutil.copytree(good, path)
        change(path)
    for name in (SCRIPT.replace("/", "∕"), "\n\x1b[31m", "💥" * 60, " ", "%2e%2e", "…"):
        shutil.copytree(good, runs / name)
    (runs / "file").write_text(SECRET)
    (runs / "link").symlink_to(base / "secret")
    os.symlink("loop", runs / "loop")
    with serving(runs) as server:
        yield server


def test_no_hostile_store_shows_a_traceback_or_another_folder(hostile):
    server = hostile
    status, listed = server.json("/api/runs")
    assert status == 200
    assert len(listed["runs"]) == len(CHANGES) + 6 >= 60
    assert SECRET not in json.dumps(listed)
    answered = []
    for run in listed["runs"]:
        for view in VIEWS:
            status, _, text = server.get(f"/api/runs/{run['id']}/{view}")
            assert status in (200, 404), (run, view, text[:300])
            assert SECRET not in text
            assert "Traceback" not in text
            found = json.loads(text, parse_constant=pytest.fail)
            answered.append(status)
            if status == 404:
                assert len(found["error"]) <= 250, found
                assert found["error"].isprintable()
    assert 0 < answered.count(404) < len(answered)
    assert server.process.poll() is None


@pytest.mark.timeout(120)
def test_no_name_or_text_of_a_store_becomes_script(tmp_path):
    runs = tmp_path / "runs"
    heads = {"op": {"chosen": SCRIPT, "legal": {SCRIPT: 0.9, "__proto__": "nan"}}}
    seen = {**FEATURES, SCRIPT: {SCRIPT: SCRIPT}, "__proto__": {"polluted": 1}}
    path = shown_run(
        runs, task=SCRIPT, blueprints=(SCRIPT, SCRIPT), heads=heads, seen=seen
    )
    with Store(path / STORE, Run.read(path).id) as store:
        store.begin_attempt(3)
        fill(store, [4], SCRIPT, blueprints=(SCRIPT, "javascript:pwned=1"))
        evaluate(store, [SCRIPT], (SCRIPT,), 4)
        store.add_note(4, SCRIPT, SCRIPT)
    name = SCRIPT.replace("/", "∕")
    os.rename(path, runs / name)
    with serving(runs) as server, open_browser() as browser:
        page = browser.new_page()
        errors = []
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        for view in ("runs", "learning", "hosts", "comparison"):
            page.goto(server.page(name, view))
            page.wait_for_selector(f"main[data-view={view}]")
        page.goto(server.page(name, "hosts", task=SCRIPT, env=0, episode=3, step=15))
        page.wait_for_selector("#earlier")
        assert "onerror" in page.inner_text("main")
        made = "document.querySelectorAll('main img, main script').length"
        found = page.evaluate(f"[typeof pwned, {{}}.polluted ?? 0, {made}]")
        assert found == ["undefined", 0, 0]
        assert errors == []


def test_ids_depend_on_the_folder_alone():
    assert run_id("fern") != run_id("reed")
    assert run_id("💥").isalnum()
