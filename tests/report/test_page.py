"""The page in a real browser."""

from html import unescape

import pytest

from esper.report import write_report
from tests.browser import browse, open_browser
from tests.report.runs import make_run

SECTIONS = [
    "What it was worth",
    "Learning",
    "The lives of seeds",
    "What was chosen, and where",
    "How decided each head is",
    "Health of the updates",
    "The run itself",
]
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
    "{{constructor.constructor('window.hit = 1')()}}",
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
        ("", ""),
        ("a", "b"),
        ('"', '"'),
        ("'", ""),
        (">", "<"),
        ("&lt;", "&#60;"),
        ("\n", "\t"),
        ("-->", "<!--"),
        ("</pre>", ""),
        ("</td>", "<td>"),
    )
]
"""Two hundred names that would rather be programs."""


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def file(reported):
    return reported / "report.html"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run whose every name is hostile, its folder's too."""
    path = make_run(
        tmp_path_factory.mktemp("runs"),
        tasks=(TRICKS[0], TRICKS[7]),
        blueprints=(TRICKS[1], TRICKS[4]),
        arms=(TRICKS[2], "never", TRICKS[3]),
        notes=[("kind", name) for name in NAMES],
        toml="\n".join(NAMES).replace("\x00", ""),
    )
    return write_report(path.rename(path.with_name("<svg onload=window.hit=1>")))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_the_page_is_quiet_whole_and_as_wide_as_the_window(browser, file, width, dark):
    visit = browse(browser, file, width=width, dark=dark)
    page = visit.page
    assert visit.errors == []
    assert visit.requests == [file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("h1").all_inner_texts() == ["fern"]
    assert page.locator("h2").all_inner_texts() == SECTIONS
    boxes = page.evaluate(
        "[...document.querySelectorAll('svg')].map(s => {"
        "const b = s.getBoundingClientRect(); return [b.width, b.height]})"
    )
    assert len(boxes) == 20
    assert all(wide > 300 and high > 100 for wide, high in boxes)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 25, 29)" if dark else "rgb(255, 255, 255)")
    words = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    assert words == ("rgb(165, 175, 185)" if dark else "rgb(89, 99, 109)")
    page.context.close()


def test_every_figure_has_words_and_every_table_a_caption(browser, file):
    visit = browse(browser, file)
    page = visit.page
    for figure in page.locator("svg").all():
        assert figure.get_attribute("role") == "img"
        assert len(figure.get_attribute("aria-label")) > 30
    assert page.locator("table").count() == page.locator("table > caption").count()
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    marks = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(marks) == len({*marks})
    page.context.close()


def test_names_never_become_programs(browser, hostile):
    visit = browse(browser, hostile)
    page = visit.page
    page.mouse.move(640, 450)
    assert page.evaluate("window.hit") is None
    assert visit.errors == []
    assert visit.requests == [hostile.as_uri()]
    for tag in ("script", "img", "iframe", "base", "link", "object"):
        assert page.locator(tag).count() == 0
    found = page.evaluate(
        "[...document.querySelectorAll('*')].filter(e => [...e.attributes].some("
        "a => a.name.startsWith('on'))).length"
    )
    assert found == 0
    page.context.close()


def test_hostile_names_are_read_as_they_are(browser, hostile):
    visit = browse(browser, hostile)
    page = visit.page
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


def test_only_inline_styles_are_allowed(file):
    text = unescape(file.read_text())
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert f'http-equiv="Content-Security-Policy" content="{policy}"' in text
    assert "http://" not in text.replace("http://www.w3.org/", "")
    assert "https://" not in text


def visible(name):
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in name)
