"""What the package says it offers is there, and importing it is cheap."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest

import esper


@pytest.mark.parametrize("name", esper.__all__)
def test_every_public_name_can_be_had(name):
    assert getattr(esper, name) is not None
    assert name in dir(esper)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'Tamyio'"):
        _ = esper.Tamyio


def test_type_checkers_and_python_find_the_same_names_in_the_same_modules():
    """What is imported for type checkers alone is what is imported on first use."""
    block = next(
        node
        for node in ast.parse(Path(esper.__file__).read_text("utf-8")).body
        if isinstance(node, ast.If)
    )
    typed = {
        name.asname: "esper.datasets" if node.module == "esper" else node.module
        for node in block.body
        for name in node.names
        if name.name == name.asname  # the form that exports a name
    }
    assert typed == esper._HOMES
    for name, home in typed.items():
        found = getattr(esper, name)
        own = found.__name__ if isinstance(found, ModuleType) else found.__module__
        assert own == home, name


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import esper", "torch"),
        ("from esper import Grower, fit", "numba"),  # which takes a second
    ],
)
def test_importing_does_not_import(line, module):
    script = f"import sys\n{line}\nassert {module!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_public_names_can_be_imported_without_posix():
    """As on Windows, which has neither file locks nor limits of resources."""
    script = (
        "import sys; sys.modules.update(fcntl=None, resource=None)\n"
        "import esper\n"
        "from esper.contracts.errors import InvalidInputError\n"
        "from esper.runs.run import Run\n"
        "from pathlib import Path\n"
        "for name in esper.__all__: getattr(esper, name)\n"
        "try:\n    Run.create(Path(sys.argv[1]), 'one', '', {})\n"
        "except InvalidInputError as error:\n    print(error)"
    )
    with TemporaryDirectory() as folder:
        run = [sys.executable, "-c", script, folder]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "runs need the file locks of Linux or macOS" in done.stdout, done.stderr


def test_pages_import_public_names_from_the_package():
    root = Path(__file__).parents[1]
    for page in (root / "README.md", *root.glob("docs/*.md")):
        text = page.read_text("utf-8")
        for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and node.module != "esper":
                    names = {name.name for name in node.names}
                    assert not names & {*esper.__all__}, page.name


@pytest.mark.learns
def test_the_users_program_with_every_public_name_runs(tmp_path):
    """Its types are checked by `make check`."""
    file = Path(__file__).parent / "typing" / "user_script.py"
    tree = ast.parse(file.read_text("utf-8"))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {*esper.__all__} <= used
    runpy.run_path(str(file))["main"](tmp_path)
