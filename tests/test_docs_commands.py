"""Commands of the pages parse, and every page with Python has a test that runs it."""

import re
import shlex
from pathlib import Path

import pytest

from esper.cli import parser

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "examples/README.md", "SECURITY.md", "CONTRIBUTING.md"]
PAGES += [str(file.relative_to(ROOT)) for file in ROOT.glob("docs/*.md")]
RUN = {
    "tests/test_readme.py": "README start frameworks growing howto ppo running tamiyo",
    "tests/tasks/test_data.py": "tasks",
}
"""Pages with Python, by the tests that run them."""


def blocks(page, language):
    text = ROOT.joinpath(page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.M)


def commands():
    """Every `esper ...` in a block without a language; longer ones are indented."""
    for page in PAGES:
        for block in blocks(page, ""):
            for line in re.sub(r"\s*\\?\n +", " ", block).splitlines():
                if line.startswith("esper "):
                    yield pytest.param(line, id=f"{page}: {line[:50]}")


@pytest.mark.parametrize("line", [*commands()])
def test_a_command_of_a_page_parses(line, capsys):
    _, *given = shlex.split(line.split(" > ")[0], comments=True)
    try:
        parser(given[:1]).parse_args(given)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


def test_every_page_with_python_is_run():
    pages = {Path(page).stem for page in PAGES if blocks(page, "python")}
    assert pages == {*" ".join(RUN.values()).split()}
    for file, names in RUN.items():
        text = ROOT.joinpath(file).read_text("utf-8")
        assert [name for name in names.split() if f"{name}.md" not in text] == []


@pytest.mark.parametrize("kind", ["benchmarks", "research"])
def test_programs_that_pages_name_exist(kind):
    text = "\n".join(ROOT.joinpath(page).read_text("utf-8") for page in PAGES)
    names = {*re.findall(rf"python -m {kind} (\w+)", text)} - {"NAME"}
    assert names
    assert [n for n in names if not ROOT.joinpath(kind, f"{n}.py").is_file()] == []
