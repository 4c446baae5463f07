"""`python -m evidence`: whether a learned controller pays, by a protocol."""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Final

from esper.cli.arguments import Parser, file, folder, names, positive, whole
from esper.cli.failures import report_failure

HELP = "compare controllers by a protocol, and write the page of what was found"
FOLDER: Final = "runs/evidence"
KINDS: Final = ("training", "search", "bandit", "tuning", "counted")
RUN: Final = """\
Carry out what a protocol asks for and has not been done: controllers are trained,
learning rates tuned, and everybody grows the same hosts. It can be ended at any moment
and begun again; whatever is done is kept in FOLDER/campaign.sqlite."""
EXAMPLES = """\
examples:
  python -m evidence run docs/evidence/protocol.toml --dry        what there is to do
  python -m evidence run docs/evidence/protocol.toml --minutes 60 an hour of it
  python -m evidence page                          writes docs/evidence/README.md
"""


def add(parser: ArgumentParser) -> None:
    """One command for each step."""
    steps = parser.add_subparsers(dest="step", required=True, metavar="step")
    run = steps.add_parser(
        "run",
        help="carry out a protocol, or go on with it",
        description=RUN,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("protocol", type=file, metavar="PROTOCOL", help="a TOML file")
    _add_folder(run)
    run.add_argument(
        "--processes",
        type=whole(1, 64),
        default=2,
        metavar="N",
        help="jobs at the same time (default: 2)",
    )
    run.add_argument(
        "--minutes",
        type=positive,
        default=None,
        metavar="X",
        help="begin no more jobs after so long; trainings save where they are",
    )
    run.add_argument(
        "--only",
        type=names,
        default=[],
        metavar="KINDS",
        help=f"kinds of jobs, with commas between: {', '.join(KINDS)}",
    )
    run.add_argument(
        "--tasks",
        type=names,
        default=[],
        metavar="NAMES",
        help="tasks, with commas between (default: all of the protocol)",
    )
    run.add_argument(
        "--dry", action="store_true", help="print the jobs and the hours only"
    )
    page = steps.add_parser(
        "page",
        help="write tables and figures of what is done",
        description="Write tables and figures of whatever is done so far.",
        allow_abbrev=False,
    )
    _add_folder(page)
    page.add_argument(
        "--to",
        type=folder,
        default="docs/evidence",
        metavar="FOLDER",
        help="where the page goes (default: docs/evidence)",
    )


def run(options: Namespace) -> int:
    """Carry out a protocol, or write the page."""
    if options.step == "page":
        return _page(options)
    from esper.contracts.errors import WorkersTrouble
    from evidence.campaign import run as carry_out

    ended = carry_out(
        options.protocol,
        options.folder,
        processes=options.processes,
        minutes=options.minutes,
        only=options.only,
        tasks=options.tasks,
        dry=options.dry,
    )
    if options.dry:
        return 0
    print(f"{ended.done} jobs are done, {ended.left} are left.")
    if ended.signal is not None:
        return 128 + ended.signal
    if ended.failed:
        number = len(ended.failed)
        raise WorkersTrouble(
            f"{number} job{'s' * (number > 1)} failed and will be tried again next "
            f"time; {ended.failed[0]}"
        )
    return 0


def _page(options: Namespace) -> int:
    from evidence.page import write_page

    write_page(options.folder, options.to)
    print(f"The page is in {options.to}.")
    return 0


def _add_folder(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        type=folder,
        default=FOLDER,
        metavar="FOLDER",
        help=f"where the campaign is kept (default: {FOLDER})",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one step; returns the exit code."""
    parser = Parser(prog="python -m evidence", description=HELP, allow_abbrev=False)
    add(parser)
    try:
        return run(parser.parse_args(arguments))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report_failure(error)


if __name__ == "__main__":
    sys.exit(main())
