"""A report as files."""

import shutil
import sqlite3
from html import unescape

import pytest

from esper.contracts.errors import BadInput
from esper.experiment.run import Run
from esper.experiment.storage.schema import VERSION
from esper.experiment.store import Store
from esper.report import write_report
from tests.report.runs import config, judge, make_run

SECTIONS = ("worth", "learning", "lives", "choices", "heads", "health", "run")


@pytest.fixture(scope="module")
def path(reported):
    return reported


@pytest.fixture(scope="module")
def page(path):
    return (path / "report.html").read_text()


def everything(folder):
    return {
        file.relative_to(folder): file.read_bytes() if file.is_file() else None
        for file in folder.rglob("*")
        if not file.name.endswith(("-shm", "-wal"))  # SQLite's own
    }


def test_a_page_and_every_figure_are_written(path, page):
    names = {file.stem for file in (path / "plots").iterdir()}
    assert names == {
        *(
            f"{kind}-{task}"
            for task in ("1-letter", "2-digits")
            for kind in ("arms", "size", "learning", "lives", "planted", "became")
        ),
        *("deeds", "grown", "entropy", "kl"),
        *("clipped", "explained", "taken", "speed"),
    }
    for name in names:
        assert (path / "plots" / f"{name}.png").stat().st_size > 1_000
        assert (path / "plots" / f"{name}.svg").stat().st_size > 1_000
    assert page.count("<svg") == len(names)
    assert all(f'id="{section}"' in page for section in SECTIONS)


def test_the_headline_says_what_the_run_is(page):
    assert (
        "Tamiyo was trained on letter and digits for 6 rounds: 24 decisions in 6 s. "
        "The run is complete." in page
    )


def test_the_verdict_says_what_is_shown(page):
    # Arms are 0.05 apart with a luck of 0.01, and Tamiyo is the best by far.
    assert (
        "All tasks together: the return of Tamiyo is shown to be above never, early, "
        "random and static." in page
    )


def test_the_table_has_every_arm_and_the_learned_one_stands_out(page):
    tables = page.split("<table")[1:4]
    for one in tables:
        heads = [part.split("<")[0] for part in one.split('scope="row">')[1:]]
        assert heads == ["Tamiyo", "never", "random", "early", "static"]
        strong = one.split('class="strong"')[1].split("</tr>")[0]
        assert "Tamiyo" in strong
        assert "0.600" in strong or "0.5" in strong


def test_a_report_made_again_elsewhere_is_the_same(path, page, tmp_path):
    out = write_report(path, tmp_path / "page.html")
    assert out == tmp_path / "page.html"
    assert out.read_text() == page
    assert {file.name for file in tmp_path.iterdir()} == {"page.html", "page-plots"}
    again = {file.name: file.read_bytes() for file in (path / "plots").iterdir()}
    for file in (tmp_path / "page-plots").iterdir():
        assert again.pop(file.name) == file.read_bytes()
    assert not again


def test_a_report_takes_the_place_of_the_last_one(tmp_path):
    path = make_run(tmp_path, tasks=("letter",), rounds=0, arms=("never",))
    first = write_report(path).read_text()
    assert write_report(path).read_text() == first
    assert not [file for file in path.rglob(".*")]


def test_judgements_alone_are_a_report(tmp_path):
    with Run.create(tmp_path, "judged", config(), {}) as run:
        with Store(run.path / "events.sqlite") as store:
            store.begin_attempt()
            judge(store, ("letter",), ("never", "random", "early"), 0)
        page = write_report(run.path).read_text()
    assert "Controllers were judged on letter; nobody was trained." in page
    assert "still going on" in page
    assert "On letter: " in page
    assert page.count('class="none"') == 6  # five sections, and no notes
    assert page.count("<svg") == 2


def test_a_run_that_has_not_written_anything_is_a_report(tmp_path):
    with Run.create(tmp_path, "young", config(), {}) as run:
        with Store(run.path / "events.sqlite"):
            pass
        page = write_report(run.path).read_text()
    assert "have not been judged yet" in page
    assert page.count("<svg") == 0
    assert page.count('class="none"') == 8


def test_one_round_is_a_report(tmp_path):
    path = make_run(tmp_path, rounds=1, tasks=("letter",), finished=False)
    assert "for 1 round:" in write_report(path).read_text()


def test_figures_that_cannot_be_compared_do_not_stop_a_report(tmp_path):
    path = make_run(tmp_path, tasks=("letter",), rounds=0)
    with sqlite3.connect(path / "events.sqlite") as db:
        db.execute('UPDATE evaluations SET "return" = NULL WHERE host = 0')
    db.close()
    page = unescape(write_report(path).read_text())
    assert "Nothing can be compared: scores must be finite" in page


def no_run(path):
    (path / "config.toml").unlink()


def no_store(path):
    (path / "events.sqlite").unlink()


def no_database(path):
    (path / "events.sqlite").write_text("hello" * 1_000)


def torn(path):
    data = bytearray((path / "events.sqlite").read_bytes())
    data[4_096:] = b"\xff" * (len(data) - 4_096)
    (path / "events.sqlite").write_bytes(data)


def newer(path):
    with sqlite3.connect(path / "events.sqlite") as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()


def other_tables(path):
    with sqlite3.connect(path / "events.sqlite") as db:
        db.execute("DROP VIEW live_rounds")
    db.close()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (shutil.rmtree, "is no run; expected a folder"),
        (no_run, "it has no config.toml"),
        (no_store, "there is no store at"),
        (no_database, "is no store: file is not a database"),
        (torn, "is damaged or of another version"),
        (newer, "use a newer Esper"),
        (other_tables, "is damaged or of another version: no such table"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line_and_nothing_is_written(
    tmp_path, harm, message
):
    path = make_run(tmp_path, rounds=1, arms=())
    harm(path)
    before = everything(tmp_path)
    with pytest.raises(BadInput, match=message) as caught:
        write_report(path)
    assert "\n" not in str(caught.value)
    assert everything(tmp_path) == before


def test_nothing_but_a_report_is_overwritten(path, tmp_path):
    mine = tmp_path / "thesis.html"
    mine.write_text("my thesis")
    for out, message in (
        (mine, "no report of Esper"),
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere" / "page.html", "make it first"),
    ):
        with pytest.raises(BadInput, match=message):
            write_report(path, out)
    (tmp_path / "page-plots").write_text("mine")
    with pytest.raises(BadInput, match="figures go there"):
        write_report(path, tmp_path / "page.html")
    assert mine.read_text() == "my thesis"
    assert not (tmp_path / "page.html").exists()
