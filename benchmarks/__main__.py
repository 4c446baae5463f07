"""`python -m benchmarks NAME`: a hot path beside a naive twin, or a promise tried.

Every benchmark is a module of this package with `run()`, whose parameters are its
options: `--kills 20` is `run(kills=20)`.
"""

import inspect
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

from benchmarks.timing import show
from esper.cli.failures import explain


def benchmarks() -> list[str]:
    """The modules of this package that answer a question."""
    folder = Path(__file__).parent
    return [
        module.name
        for module in iter_modules([str(folder)])
        if "\ndef run(" in (folder / f"{module.name}.py").read_text(encoding="utf-8")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and print its tables; returns the exit code."""
    torch.set_num_threads(1)
    parser = ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="name")
    for name in benchmarks():
        module = import_module(f"benchmarks.{name}")
        about = (module.__doc__ or "").splitlines()[0]
        own = commands.add_parser(name, help=about, description=module.__doc__)
        own.add_argument("--json", action="store_true", help="print data, not a table")
        _add_options(own, module.run)
    options = vars(parser.parse_args(arguments))
    run = import_module(f"benchmarks.{options.pop('name')}").run
    as_json = options.pop("json")
    try:
        show(run(**options), as_json=as_json)
    except Exception as error:
        return explain(error)
    return 0


def _add_options(parser: ArgumentParser, run: Callable[..., Any]) -> None:
    """An option for every parameter of `run` that is a number, a path or a flag."""
    for name, parameter in inspect.signature(run).parameters.items():
        option, default = f"--{name.replace('_', '-')}", parameter.default
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true", dest=name)
        elif isinstance(default, int | float | str):
            parser.add_argument(option, type=type(default), default=default, dest=name)


if __name__ == "__main__":
    sys.exit(main())
