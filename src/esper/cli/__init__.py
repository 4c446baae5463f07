"""The command line: parses the arguments and runs one command.

Commands import heavy modules when they run, so `esper --help` is fast.
"""

import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from textwrap import fill
from typing import Final

from esper import __version__
from esper.cli.arguments import Command, Parser
from esper.cli.evaluate import EVALUATE, RECORD
from esper.cli.grow import BLUEPRINTS, GROW, TASKS
from esper.cli.output import (
    finish_output,
    outlived,
    printed_warnings,
    report_failure,
    safe_streams,
    sudden_interrupts,
)
from esper.cli.ppo import DOCTOR, PPO
from esper.cli.runs import COMPLETION, EXPORT, REPORT, RUNS
from esper.cli.train import CONFIG, TRAIN
from esper.cli.watch import WATCH
from esper.workers.deadline import Watch

COMMANDS: Final[dict[str, Command]] = {
    "train": TRAIN,
    "grow": GROW,
    "evaluate": EVALUATE,
    "ppo": PPO,
    "doctor": DOCTOR,
    "record": RECORD,
    "watch": WATCH,
    "report": REPORT,
    "runs": RUNS,
    "export": EXPORT,
    "config": CONFIG,
    "tasks": TASKS,
    "blueprints": BLUEPRINTS,
    "completion": COMPLETION,
}
EXAMPLES: Final = """\
examples:
  esper train                          train a controller (about five minutes)
  esper train --resume NAME            resume an interrupted run
  esper train --preset simulated       use the simulated world (three minutes)
  esper watch                          follow the newest run while it trains
  esper report NAME                    write the report of a run
  esper grow --task letter --controller tamiyo
                                       grow one network and print its history
  esper evaluate --task letter         compare all rule-based controllers
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Without `arguments`, use those of this process; Ctrl-C then ends the process.
    """
    if arguments is not None:
        return _main([*arguments])
    with sudden_interrupts():
        return _main(sys.argv[1:], outlive=True)


def _main(given: list[str], *, outlive: bool = False) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not os.environ.get("COLUMNS", "1").strip("0"):  # unknown width
        del os.environ["COLUMNS"]
    with safe_streams() as stdout, printed_warnings():
        try:
            options = parser(given[:1]).parse_args(given)
        except SystemExit as stop:  # after help or an error
            code = stop.code if isinstance(stop.code, int) else 0
            return finish_output(stdout, code)
        watch = Watch() if COMMANDS[options.command].environments else None
        if outlive and (watch or getattr(options, "ray", None) is not None):
            return outlived(lambda: finish_output(stdout, _run(options, watch)), watch)
        return finish_output(stdout, _run(options, watch))


def _run(options: Namespace, watch: Watch | None) -> int:
    try:
        command = COMMANDS[options.command]
        if command.torch:
            import torch

            torch.set_num_threads(1)
        with watch or nullcontext():
            code = command.run(options)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        print("esper: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:  # no command raises SystemExit itself
        return report_failure(error)


def parser(complete: Collection[str] = ()) -> Parser:
    """Returns the parser of all commands.

    Adds settings as options only for the commands in `complete`: their import is slow.
    """
    main_parser = Parser(
        prog="esper",
        description="Grow neural networks while they train, and train controllers that "
        "decide when.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    main_parser.add_argument(
        "--version", action="version", version=f"esper {__version__}"
    )
    commands = main_parser.add_subparsers(
        dest="command", required=True, metavar="command"
    )
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.help,
            description=_wrapped(command.description or command.help),
            epilog=command.examples,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command.settings:
            own.usage = f"esper {name} [--help] [--SETTING VALUE]"
        if command.options and (name in complete or not command.settings):
            command.options(own)
    return main_parser


def _wrapped(text: str) -> str:
    """Paragraphs wrapped for a terminal of 80 columns."""
    return "\n\n".join(
        fill(part, 79, break_on_hyphens=False) for part in text.split("\n\n")
    )


__all__ = ["COMMANDS", "main", "parser"]
