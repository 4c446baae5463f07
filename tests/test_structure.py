"""One name for one class; few imports in each module; pins with hashes."""

import ast
import re
import tomllib
from pathlib import Path

from scripts.size import duplicate_classes, imports, trees

MODULES = trees()
ROOT = Path(__file__).parents[1]


def test_no_class_name_occurs_twice():
    # Every framework has a callback that grows, in a module of its own.
    assert duplicate_classes(MODULES) == ["GrowCallback"]


def test_a_module_imports_at_most_a_third_of_the_package():
    # A run of each kind is put together in one module: there settings become worlds,
    # policies, callbacks and arms.
    together = {"esper.experiment.train", "esper.rl.training"}
    limit = len(MODULES) / 3
    over = {name for name, others in imports(MODULES).items() if len(others) > limit}
    assert {name for name in over if not name.startswith("esper.cli")} == together


def test_the_run_of_the_guide_is_not_begun_by_worker_processes_that_import_it():
    text = ROOT.joinpath("docs/running.md").read_text("utf-8")
    (example,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        if "begin_run(" in code
    )
    *before, last = ast.parse(example).body
    assert all(isinstance(line, ast.Import | ast.ImportFrom) for line in before)
    assert ast.unparse(last).startswith("if __name__ == '__main__':")


def pins(name):
    """Version and number of hashes of every package of a constraints file."""
    lines = ROOT.joinpath(name).read_text("utf-8").replace("\\\n", " ").splitlines()
    pinned = re.compile(r"([a-z0-9-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})*)\s*")
    found = [pinned.fullmatch(line) for line in lines if line[0] not in "#-"]
    return {each[1]: (each[2], each[3].count("--hash")) for each in found}


def test_every_package_has_a_version_and_hashes():
    installed, tools = pins("constraints.txt"), pins("tools.txt")
    assert len(installed) > 100
    everything = installed | tools
    assert [name for name, (_, hashes) in everything.items() if not hashes] == ["torch"]
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text("utf-8"))
    (setuptools,) = project["build-system"]["requires"]
    assert setuptools == f"setuptools=={tools['setuptools'][0]}"
