"""`python -m benchmarks NAME`: a hot path beside a naive twin, or a promise tried.

Every benchmark is a module of this package with `run()`, whose parameters are its
options: `--kills 20` is `run(kills=20)`.
"""

import ast
import inspect
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from esper.cli.output import report_failure


def questions(package: str) -> dict[str, str]:
    """The question of every module of a package that has a `run`."""
    found = {}
    for file in sorted((Path(__file__).parents[1] / package).glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if "run" in names:
            found[file.stem] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


def main(arguments: Sequence[str] | None = None, *, package: str = "benchmarks") -> int:
    """Run one benchmark or study and print its tables; returns the exit code."""
    torch.set_num_threads(1)
    given = list(sys.argv[1:] if arguments is None else arguments)
    known = questions(package)
    lines = "\n".join(f"  {name:16}{about}" for name, about in known.items())
    parser = ArgumentParser(
        prog=f"python -m {package}",
        epilog=f"{package}:\n{lines}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=known, metavar="name")
    name = parser.parse_args(given[:1]).name
    run = import_module(f"{package}.{name}").run
    options = vars(_parser(f"{package} {name}", known[name], run).parse_args(given[1:]))
    as_json, timing.QUICK = options.pop("json"), options.pop("quick")
    try:
        timing.show(run(**options), as_json=as_json)
    except Exception as error:
        return report_failure(error)
    return 0


def _parser(name: str, about: str, run: Callable[..., Any]) -> ArgumentParser:
    """Options for the parameters of `run` that are numbers, texts or flags."""
    parser = ArgumentParser(prog=f"python -m {name}", description=about)
    parser.add_argument("--json", action="store_true", help="print data, not a table")
    parser.add_argument(
        "--quick", action="store_true", help="call each side once, to see it work"
    )
    for parameter in inspect.signature(run).parameters.values():
        option = f"--{parameter.name.replace('_', '-')}"
        if isinstance(parameter.default, bool):
            parser.add_argument(option, action="store_true")
        else:
            kind = str if parameter.default is None else type(parameter.default)
            parser.add_argument(option, type=kind, default=parameter.default)
    return parser


if __name__ == "__main__":
    sys.exit(main())
