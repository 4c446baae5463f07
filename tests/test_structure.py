"""One name for one class; few imports in each module; pins with hashes."""

import ast
import inspect
import re
import tomllib
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path

import esper
from scripts.size import duplicate_classes, imports, trees

MODULES = trees()
ROOT = Path(__file__).parents[1]


def test_no_class_name_occurs_twice():
    # Every framework has a callback that grows, in a module of its own.
    assert duplicate_classes(MODULES) == ["GrowCallback"]


def test_a_module_imports_at_most_a_third_of_the_package():
    # A run of each kind is put together in one module: there settings become worlds,
    # policies, callbacks and arms. Three modules handle whole agents.
    runs = {"esper.training.train", "esper.rl.training"}
    agents = {f"esper.rl.{name}" for name in ("ppo", "device_check", "callbacks")}
    limit = len(MODULES) / 3
    over = {name for name, others in imports(MODULES).items() if len(others) > limit}
    assert {name for name in over if not name.startswith("esper.cli")} <= runs | agents


def documented_calls():
    """Every public function, class and public method of Esper's own, by name."""
    for name in esper.__all__:
        call = getattr(esper, name)
        if callable(call):
            yield name, call
        for method in dir(call) if isinstance(call, type) else ():
            found = inspect.getattr_static(call, method)
            found = getattr(found, "__func__", found)
            own = str(getattr(found, "__module__", "")).startswith("esper.")
            if inspect.isfunction(found) and own and not method.startswith("_"):
                yield f"{name}.{method}", found


def described_parameters(call):
    """Names in the `Args:` of a docstring, and fields with a docstring below them."""
    _, _, args = (inspect.getdoc(call) or "").partition("\nArgs:\n")
    found = re.findall(r"^    (\w+): \S", args.split("\n\n")[0], flags=re.MULTILINE)
    if not is_dataclass(call):
        return {*found}
    (tree,) = ast.parse(inspect.getsource(call)).body
    below = zip(tree.body, tree.body[1:], strict=False)
    return {*found} | {
        field.target.id
        for field, text in below
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def test_all_of_three_or_more_public_parameters_are_described():
    missing = {}
    for name, call in documented_calls():
        with suppress(ValueError):  # an exception has no signature
            parameters = {*inspect.signature(call).parameters} - {"self", "cls"}
            if len(parameters) >= 3 and (
                left := parameters - described_parameters(call)
            ):
                missing[name] = left
    assert missing == {}


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
