"""`esper report`: a run as one page."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from esper.cli.arguments import add_option, add_run, file

HELP = "write a run as one page that a browser opens"
EXAMPLES = """\
examples:
  esper report NAME                    writes runs/NAME/report.html, plots beside it
  esper report runs/NAME --out page.html
"""


def add(parser: ArgumentParser) -> None:
    """Add its options."""
    add_run(parser)
    add_option(parser, "--out", file, None, "FILE", "where the page goes")


def run(options: Namespace) -> int:
    """Write it and print where it is."""
    from esper.experiment.run import find_run
    from esper.report import write_report

    page = write_report(find_run(options.run, Path(options.runs)), options.out)
    print(f"The report is in {page}.")
    return 0
