"""A report as files, and its page in a real browser."""

import os
import shutil
import sqlite3
from html import unescape

import pytest

from esper.contracts.errors import InvalidInputError
from esper.files import FORMAT
from esper.report import write_report
from esper.report.page import SECTIONS
from esper.rl.training import begin_ppo
from esper.runs.run import Run
from esper.runs.store import Store
from tests.browser import browse, open_browser
from tests.report.runs import config, evaluate, make_run
from tests.training.killed_runs import small_ppo

TRICKS = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'>",
    '"><iframe srcdoc="<script>parent.hit = 1</script>">',
    "' onmouseover='window.hit = 1' x='",
    "</title><script>window.hit = 1</script>",
    "</style><script>window.hit = 1</script>",
    "</text></svg><script>window.hit = 1</script>",
    "]]><script>window.hit = 1</script>",
    "<!-- --><base href='https://example.org/'>",
    "<link rel=stylesheet href='https://example.org/x.css'>",
    "<meta http-equiv=refresh content='0;url=https://example.org/'>",
    "javascript:window.hit=1",
    "${window.hit = 1}",
    "{{ self._TemplateReference__context }}",
    "{% include '/etc/passwd' %}",
    "\x1b[2J\x07\x00",
    "\u202eretpircs\u2066",
    "../../x",
    "$\\frac{",
    "🌱" * 300,
)
NAMES = [
    f"{before}{trick}{after}"
    for trick in TRICKS
    for before, after in (
        *(("", ""), ("a", "b"), ('"', '"'), ("'", ""), (">", "<"), ("\n", "\t")),
        *(("&lt;", "&#60;"), ("-->", "<!--"), ("</pre>", ""), ("</td>", "<td>")),
    )
]
"""Two hundred names that would be programs if they were not escaped."""


@pytest.fixture(scope="module")
def page(reported):
    return unescape((reported / "report.html").read_text())


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run in which every name is hostile."""
    path = make_run(
        tmp_path_factory.mktemp("runs"),
        tasks=(TRICKS[0], TRICKS[7]),
        blueprints=(TRICKS[1], TRICKS[4]),
        arms=(TRICKS[2], "never", TRICKS[3]),
        notes=[("kind", name) for name in NAMES],
        toml="\n".join(NAMES).replace("\x00", ""),
    )
    return write_report(path.rename(path.with_name("<svg onload=window.hit=1>")))


# --- In a browser


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_the_page_is_complete_and_fits_the_window(browser, reported, width, dark):
    file = reported / "report.html"
    visit = browse(browser, file, width=width, dark=dark)
    page = visit.page
    assert visit.errors == []
    assert visit.requests == [file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("h1").all_inner_texts() == ["fern"]
    assert page.locator("h2").all_inner_texts() == [title for _, title in SECTIONS]
    boxes = page.evaluate(
        "[...document.querySelectorAll('svg')].map(s => {"
        "const b = s.getBoundingClientRect(); return [b.width, b.height]})"
    )
    assert len(boxes) == 18
    assert all(wide > 300 and high > 100 for wide, high in boxes)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 25, 29)" if dark else "rgb(255, 255, 255)")
    text = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    assert text == ("rgb(165, 175, 185)" if dark else "rgb(89, 99, 109)")
    for figure in page.locator("svg").all():
        assert figure.get_attribute("role") == "img"
        assert len(figure.get_attribute("aria-label")) > 30
    assert page.locator("table").count() == page.locator("table > caption").count()
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len({*ids})
    page.context.close()


def test_hostile_names_are_text_and_never_programs(browser, hostile):
    visit = browse(browser, hostile)
    page = visit.page
    page.mouse.move(640, 450)
    assert page.evaluate("window.hit") is None
    assert visit.errors == []
    assert visit.requests == [hostile.as_uri()]
    for tag in ("script", "img", "iframe", "base", "link", "object"):
        assert page.locator(tag).count() == 0
    handlers = page.evaluate(
        "[...document.querySelectorAll('*')].filter(e => [...e.attributes].some("
        "a => a.name.startsWith('on'))).length"
    )
    assert handlers == 0
    shown = page.evaluate(
        "[...document.querySelectorAll('td')].map(cell => cell.textContent)"
    )
    assert {visible(name) for name in NAMES} <= {*shown}
    assert page.locator("h1").all_inner_texts() == ["<svg onload=window.hit=1>"]
    titles = page.evaluate(
        "[...document.querySelectorAll('svg title')].map(t => t.textContent)"
    )
    assert any(title.startswith(TRICKS[1]) for title in titles)
    page.context.close()


def visible(name):
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in name)


# --- As files


def test_a_page_and_every_plot_are_written(reported, page):
    names = {file.stem for file in (reported / "plots").iterdir()}
    assert names == {
        *(
            f"{kind}-{task}"
            for task in ("1-letter", "2-digits")
            for kind in ("arms", "learning", "seeds", "planted", "outcomes")
        ),
        *("actions", "grown", "entropy", "kl"),
        *("clipped", "explained", "taken", "speed"),
    }
    for name in names:
        assert (reported / "plots" / f"{name}.png").stat().st_size > 1_000
        assert (reported / "plots" / f"{name}.svg").stat().st_size > 1_000
    assert page.count("<svg") == len(names)
    assert all(f'id="{section}"' in page for section, _ in SECTIONS)
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert f'http-equiv="Content-Security-Policy" content="{policy}"' in page
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page


def test_the_top_summarises_the_run(page):
    assert (
        "Tamiyo was trained on letter, digits for 6 rounds: 24 decisions in 6 s. "
        "The run is complete." in page
    )
    # Arms differ by 0.05 with a noise of 0.01; Tamiyo is the best.
    top = page.split("<h1>")[1].split("<dl")[0]
    where = "On 12 unseen hosts of each of digits, letter"
    assert f"{where}, 'Tamiyo' is above all 4 other arms." in top
    assert top.index("is above") < top.index("<table") < top.index("was trained")
    for table in page.split('<table class="numbers"')[1:4]:
        table = table.split("</table>")[0]
        heads = [part.split("<")[0] for part in table.split('scope="row">')[1:]]
        assert heads == ["Tamiyo", "never", "random", "early", "static"]
        strong = table.split('class="strong"')[1].split("</tr>")[0]
        assert "Tamiyo" in strong
        assert "0.600" in strong or "0.5" in strong


def test_a_report_made_again_elsewhere_is_the_same(reported, page, tmp_path):
    out = write_report(reported, tmp_path / "page.html")
    assert out == tmp_path / "page.html"
    assert unescape(out.read_text()) == page
    assert {file.name for file in tmp_path.iterdir()} == {"page.html", "page-plots"}
    again = {file.name: file.read_bytes() for file in (reported / "plots").iterdir()}
    for file in (tmp_path / "page-plots").iterdir():
        assert again.pop(file.name) == file.read_bytes()
    assert not again
    assert not [file for file in tmp_path.rglob(".*")]


def test_reports_of_an_evaluation_and_of_an_empty_run(tmp_path):
    with Run.create(tmp_path, "judged", config(), {}) as run:
        with Store(run.path / "events.sqlite", run.id) as store:
            store.begin_attempt()
            evaluate(store, ("letter",), ("never", "random", "early"), 0)
        page = write_report(run.path).read_text()
        assert write_report(run.path).read_text() == page
    assert "Controllers were evaluated on letter; none was trained." in page
    assert "in progress" in page
    assert " has the highest return; clearly above " in page
    assert page.count('class="none"') == 6  # five sections, and no notes
    assert page.count("<svg") == 1
    with Run.create(tmp_path, "young", config(), {}) as run:
        with Store(run.path / "events.sqlite", run.id):
            pass
        page = write_report(run.path).read_text()
    assert "have not been evaluated yet" in page
    assert page.count("<svg") == 0
    assert page.count('class="none"') == 8


def test_reports_of_ppo_and_of_a_stopped_evaluation(tmp_path):
    path = begin_ppo(small_ppo(tmp_path, "agent", 2)).path
    page = write_report(path).read_text()
    assert "PPO was trained on CartPole-v1 for 2 rounds: 192 steps in" in page
    assert "return of 1 episodes: " in page.partition("<main>")[0]
    assert "Tamiyo" not in page.partition("Configuration")[0]
    assert "planted" not in page
    with Run.create(tmp_path, "cut", config(), {"kind": "evaluation"}) as run:
        Store(run.path / "events.sqlite", run.id).close()
    assert "start a new one" in write_report(run.path).read_text()


def test_report_of_one_round_with_a_missing_return(tmp_path):
    path = make_run(tmp_path, tasks=("letter",), rounds=1, finished=False)
    with sqlite3.connect(path / "events.sqlite") as db:
        db.execute('UPDATE evaluations SET "return" = NULL WHERE host = 0')
    db.close()
    page = unescape(write_report(path).read_text())
    assert "for 1 round:" in page
    assert "Controllers cannot be compared: scores must be finite" in page


# --- What is refused


def no_database(path):
    (path / "events.sqlite").write_text("hello" * 1_000)


def torn(path):
    data = bytearray((path / "events.sqlite").read_bytes())
    data[4_096:] = b"\xff" * (len(data) - 4_096)
    (path / "events.sqlite").write_bytes(data)


def changed(statement):
    def change(path):
        with sqlite3.connect(path / "events.sqlite") as db:
            db.execute(statement)
        db.close()

    return change


def everything(folder):
    return {
        file.relative_to(folder): file.read_bytes() if file.is_file() else None
        for file in folder.rglob("*")
        if not file.name.endswith(("-shm", "-wal"))  # SQLite's own
    }


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (shutil.rmtree, "is no run; expected a folder"),
        (lambda path: (path / "config.toml").unlink(), "it has no config.toml"),
        (lambda path: (path / "events.sqlite").unlink(), "there is no store at"),
        (no_database, "cannot be used as a store: file is not a database"),
        (torn, "cannot be used as a store: .* malformed"),
        (changed(f"PRAGMA user_version = {FORMAT + 1}"), "an unknown version of Esper"),
        (changed("DROP VIEW live_rounds"), "has other tables than a store"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line_and_nothing_is_written(
    tmp_path, harm, message
):
    path = make_run(tmp_path, rounds=1, arms=())
    harm(path)
    before = everything(tmp_path)
    with pytest.raises(InvalidInputError, match=message) as caught:
        write_report(path)
    assert "\n" not in str(caught.value)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling"])
def test_what_is_no_regular_file_in_place_of_the_page_is_refused(tmp_path, kind):
    path = make_run(tmp_path, rounds=1, arms=())
    page, other = path / "report.html", tmp_path / "other.html"
    if kind == "pipe":
        os.mkfifo(page)
    else:
        page.symlink_to(other)
    if kind == "link":
        other.write_text("esper report")
    with pytest.raises(InvalidInputError, match=r"is not a regular file|is a link"):
        write_report(path)
    assert not other.exists() or other.read_text() == "esper report"


@pytest.mark.parametrize("name", ["report.html", "plots"])
def test_a_folder_or_file_in_the_way_is_refused(tmp_path, name):
    path = make_run(tmp_path, rounds=1, arms=())
    if name == "plots":
        (path / name).write_text("mine")
    else:
        (path / name).mkdir()
    with pytest.raises(InvalidInputError, match=r"is a folder|is not a folder"):
        write_report(path)


def test_a_configuration_that_would_fill_memory_is_shown_and_not_parsed(tmp_path):
    path = make_run(tmp_path, rounds=1, arms=(), toml=f"{'a.' * 100_000}a = 1")
    assert "a.a.a" in write_report(path).read_text()


def test_nothing_but_a_report_is_overwritten(reported, tmp_path):
    mine = tmp_path / "thesis.html"
    mine.write_text("my thesis")
    (tmp_path / "page-plots").write_text("mine")
    for out, message in (
        (mine, "not a report of Esper"),
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere" / "page.html", "Create it"),
        (tmp_path / "page.html", "plots are written there"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            write_report(reported, out)
    assert mine.read_text() == "my thesis"
    assert not (tmp_path / "page.html").exists()
