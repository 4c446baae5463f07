"""The command line: parses, refuses in one line, and runs one command.

Nothing heavy is imported before a command is known, so `esper --help` is instant. Each
command is a module with `HELP`, `run` and, if it has options, `add`.
"""

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Final

from esper.cli import (
    blueprints,
    completion,
    config,
    evaluate,
    export,
    grow,
    report,
    runs,
    tasks,
    train,
)
from esper.cli.arguments import Parser
from esper.cli.failures import explain_output, report_failure
from esper.cli.stdio import safe_streams

COMMANDS: Final[dict[str, ModuleType]] = {
    "train": train,
    "grow": grow,
    "evaluate": evaluate,
    "report": report,
    "runs": runs,
    "export": export,
    "config": config,
    "tasks": tasks,
    "blueprints": blueprints,
    "completion": completion,
}

EXAMPLES: Final = """\
examples:
  esper train                          train Tamiyo on real networks, about five minutes
  esper train --resume NAME            go on with a run that was interrupted
  esper train --preset simulated       on the simulated world, two minutes
  esper report NAME                    a run as one page
  esper grow --task letter --controller tamiyo
                                       grow one network and print its history
  esper evaluate --task letter         every controller that does not learn
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with safe_streams() as stdout:
        code = _run(given)
        stdout.flush()
        return explain_output(stdout.failed, code)


def _run(given: list[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not os.environ.get("COLUMNS", "1").strip("0"):  # a terminal of unknown width
        del os.environ["COLUMNS"]
    try:
        options = parser(given[:1]).parse_args(given)
        command = COMMANDS[options.command]
        if getattr(command, "NEEDS_TORCH", True):
            import torch

            torch.set_num_threads(1)
        return int(command.run(options))
    except SystemExit as stop:  # a parser that helped or refused
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("esper: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return report_failure(error)


def parser(complete: Collection[str] = ()) -> Parser:
    """Every command with its options.

    Args:
        complete: Commands whose options may need torch; the others of this kind have
            none.
    """
    whole = Parser(
        prog="esper",
        description="A controller that watches a neural network train and grows it.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=module.HELP,
            description=getattr(module, "DESCRIPTION", module.HELP),
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        own.usage = getattr(module, "USAGE", None)
        if hasattr(module, "add") and (name in complete or own.usage is None):
            module.add(own)
    return whole


__all__ = ["COMMANDS", "main", "parser"]


if __name__ == "__main__":
    sys.exit(main())
