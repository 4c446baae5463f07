"""`esper runs`: every run of a folder."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from esper.cli.arguments import add_runs

HELP = "list runs: how far they are, how good, how large"
EXAMPLES = """\
examples:
  esper runs
  esper runs --json --runs /data/runs  the same as data, of another folder
"""


def add(parser: ArgumentParser) -> None:
    """Add its options."""
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print data, not a table")


def run(options: Namespace) -> int:
    """Print the table, or data."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from esper.experiment.run import Run

    found = Run.list(Path(options.runs))
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return 0
    if not found:
        print(f"No runs in {options.runs!r}. Begin one: esper train")
        return 0
    shown = Table()
    for column in ("name", "state", "rounds", "return", "size"):
        left = column in ("name", "state")
        shown.add_column(column, justify="left" if left else "right")
    for each in found:
        shown.add_row(
            Text(each.name),
            Text(f"{each.state}: {each.trouble}" if each.trouble else each.state),
            "-" if each.step is None else str(each.step),
            "-" if each.score is None else f"{each.score:.4f}",
            f"{each.size / 1e6:.1f} MB",
        )
    Console().print(shown)
    return 0
