"""Nothing that is loaded can run: the calls which could do so are not in the source.

Names of modules to import are literals, but for those that are listed here. No function
of torch is looked up by a name that is no literal: a file could hold it. A wrong
exception is never swallowed whole.
"""

import ast
from pathlib import Path

import esper

SOURCE = Path(esper.__file__).parent
MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
"""What executes what it reads, or may."""
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "os.system",
    "os.popen",
    "torch.jit.load",
    "torch.export.load",
    "torch.hub.load",
    "runpy.run_path",
    "runpy.run_module",
}
ARCHIVES = {"extract", "extractall", "unpack_archive"}
DYNAMIC = {
    "__init__.py": {"_HOMES[name]"},  # our own table of where names live
}
"""Imports of modules whose names are no literals."""
LIBRARIES = {"torch", "F", "Tensor", "nn", "np", "builtins", "sys", "os", "operator"}
"""What holds functions."""
RECORDS = {
    *("self", "states", "new", "old", "norm", "own", "module", "factory", "fresh"),
    *("record", "more", "self.wrapper", "config"),
}
"""Objects in `growth` that hold no functions of a library."""


def dangers(tree, file):
    """What is dangerous in one file."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from _modules(alias.name for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield from _modules([module])
            case ast.Call():
                yield from _call(node, file)
                yield from _lookup(node, file)
            case ast.Attribute(attr="__dict__" | "__getattribute__"):
                if _root(node) in LIBRARIES:
                    yield ast.unparse(node)
            case ast.ExceptHandler(body=[ast.Pass()], type=kind):
                caught = "" if kind is None else ast.unparse(kind)
                if caught in ("", "Exception", "BaseException"):
                    yield f"except {caught}: pass"


def _modules(names):
    for name in names:
        if name.split(".")[0] in MODULES:
            yield f"import {name}"


def _call(node, file):
    name = ast.unparse(node.func)
    given = {word.arg: word.value for word in node.keywords}
    flags = {key: getattr(value, "value", value) for key, value in given.items()}
    if name in BUILTINS or name in CALLS:
        yield name
    if name == "torch.load" and flags.get("weights_only") is not True:
        yield "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and flags.get("allow_pickle") is not False:
        yield "numpy.load without allow_pickle=False"
    if flags.get("allow_pickle", False) is not False:
        yield "allow_pickle"
    if flags.get("shell", False) is not False:
        yield "shell"
    if name.split(".")[-1] in ARCHIVES:
        yield f"{name}, which writes where an archive says"
    if name.split(".")[-1] == "import_module":
        wanted = node.args[0]
        if isinstance(wanted, ast.Constant):
            yield from _modules([str(wanted.value)])
        elif ast.unparse(wanted) not in DYNAMIC.get(file, ()):
            yield f"import_module({ast.unparse(wanted)})"


def _lookup(node, file):
    """A function that is looked up by a name that is no literal."""
    name, text = ast.unparse(node.func).split(".")[-1], ast.unparse(node)
    if name in ("attrgetter", "methodcaller"):
        yield text
    if name == "vars" and node.args and _root(node.args[0]) in LIBRARIES:
        yield text
    if name == "getattr" and not isinstance(node.args[1], ast.Constant):
        where = ast.unparse(node.args[0])
        strange = file.startswith("growth/") and where not in RECORDS
        if strange or _root(node.args[0]) in LIBRARIES:
            yield text


def _root(node):
    """The name that a chain of attributes begins with."""
    return ast.unparse(node).split(".")[0]


def found_in(text, file="some.py"):
    return [*dangers(ast.parse(text), file)]


def test_the_source_has_no_dangerous_call():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        name = file.relative_to(SOURCE).as_posix()
        assert not found_in(file.read_text(encoding="utf-8"), name), name


SWALLOWS = "try:\n    x()\nexcept {}:\n    pass"
DANGEROUS = """
import pickle
import os, dill as d
from joblib import load
from yaml import load
import_module('pickle')
importlib.import_module(name)
import_module(f'plugins.{name}')
import_module(f'benchmarks.{options.name}')
torch.load(file)
torch.load(file, weights_only=False)
torch.load(file, weights_only=safe)
torch.export.load(file)
np.load(file)
np.load(file, allow_pickle=True)
loadtxt(file, allow_pickle=some)
subprocess.run(words, shell=True)
os.system('ls')
eval('1')
exec(text)
compile(text, '', 'exec')
__import__(name)
archive.extractall(folder)
getattr(torch, name)
getattr(torch.nn.functional, name, None)
getattr(Tensor, saved['name'])
getattr(os, name)
vars(torch)[name]
torch.__dict__[name]
Tensor.__getattribute__(h, name)
operator.attrgetter(name)(torch)
"""
IN_GROWTH = """
getattr(space, name)
getattr(NAMESPACES.get(where), last, None)
{n: getattr(one, n) for n in dir(one)}
"""
HARMLESS = """
model.eval()
re.compile('x')
torch.load(file, weights_only=True)
np.load(file, allow_pickle=False)
import_module('duckdb')
getattr(torch, 'relu')
getattr(space, name)
vars(self)
self.__dict__
"""


def test_the_gate_sees_what_it_should_and_lets_pass_what_is_harmless():
    swallows = [SWALLOWS.format(error) for error in ("", "Exception", "BaseException")]
    for text in (*DANGEROUS.strip().split("\n"), *swallows):
        assert found_in(text), text
    for text in IN_GROWTH.strip().split("\n"):
        assert found_in(text, "growth/middle.py"), text
    for text in (*HARMLESS.strip().split("\n"), SWALLOWS.format("OSError")):
        assert not found_in(text), text


def test_every_exception_of_the_gate_is_needed():
    for file, names in DYNAMIC.items():
        text = (SOURCE / file).read_text(encoding="utf-8")
        found = found_in(text)
        assert found == [f"import_module({name})" for name in names]
