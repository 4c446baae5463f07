"""The site shows every public name; pages are tested, and broken links are found."""

import re
from pathlib import Path

import pytest

import esper
from scripts.check_links import broken_links

ROOT = Path(__file__).parents[1]
NAV = re.findall(r"^ +- .*: (\S+\.md)$", ROOT.joinpath("mkdocs.yml").read_text(), re.M)
PAGES = ["README.md", "examples/README.md", "SECURITY.md", "CONTRIBUTING.md"]
PAGES += [str(file.relative_to(ROOT)) for file in ROOT.glob("docs/*.md")]
RUN = {
    "tests/test_readme.py": "README start frameworks growing howto ppo running tamiyo",
    "tests/tasks/test_data.py": "tasks",
}
"""Pages with Python, by the tests that run them."""


def test_every_public_name_has_an_entry_in_the_reference():
    pages = "\n".join(file.read_text() for file in ROOT.glob("docs/reference/*.md"))
    shown = re.findall(r"^::: esper\.(\w+)$", pages, flags=re.M)
    assert sorted(shown) == sorted({*esper.__all__} - {"__version__"})


def test_the_menu_has_every_page_of_the_guide_once():
    assert len(NAV) == len({*NAV})
    assert [page for page in NAV if not ROOT.joinpath(page).is_file()] == []
    pages = {str(file.relative_to(ROOT)) for file in ROOT.glob("docs/*.md")}
    assert pages <= {*NAV}


def test_a_test_runs_the_python_of_every_page():
    texts = {page: ROOT.joinpath(page).read_text("utf-8") for page in PAGES}
    pages = {Path(page).stem for page, text in texts.items() if "```python" in text}
    assert pages == {*" ".join(RUN.values()).split()}
    for file, names in RUN.items():
        tests = ROOT.joinpath(file).read_text("utf-8")
        assert [name for name in names.split() if f"{name}.md" not in tests] == []


@pytest.mark.parametrize("kind", ["benchmarks", "research"])
def test_programs_that_pages_name_exist(kind):
    pages = [ROOT / page for page in PAGES] + [*ROOT.glob(f"{kind}/*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    names = {*re.findall(rf"python -m {kind} (\w+)", text)} - {"NAME"}
    assert names
    assert [n for n in names if not ROOT.joinpath(kind, f"{n}.py").is_file()] == []


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("other/#here", False),
        ("other/#there", True),
        ("gone/", True),
        ("#top", False),
        ("#bottom", True),
        ("plot.svg", False),
        ("../secret", True),
        ("https://example.org/gone", False),
        ("mailto:a@example.org", False),
    ],
)
def test_a_link_without_a_target_is_found(link, broken, tmp_path):
    site = tmp_path / "site"
    (site / "other").mkdir(parents=True)
    (tmp_path / "secret").touch()
    (site / "plot.svg").touch()
    (site / "other" / "index.html").write_text('<h1 id="here">Here</h1>')
    page = site / "index.html"
    page.write_text(f'<h1 id="top">Top</h1><a href="{link}">link</a>')
    assert broken_links(site) == ([f"index.html: {link}"] if broken else [])
