"""`esper export`: what a run recorded, or what it learned, for use elsewhere."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from esper.cli.arguments import add_option, add_run, folder

HELP = "write what a run recorded as Parquet or CSV, or what it learned"
EXAMPLES = """\
examples:
  esper export NAME                    writes runs/NAME/export/*.parquet
  esper export NAME --format csv --out tables
  esper export NAME --format controller --out tamiyo

A controller is the policy of the best checkpoint, with a manifest that says how it was
trained: the two files in which Esper's own Tamiyo comes.
"""


def add(parser: ArgumentParser) -> None:
    """Add its options."""
    add_run(parser)
    parser.add_argument(
        "--format",
        choices=("parquet", "csv", "controller"),
        default="parquet",
        help="of the files; parquet needs DuckDB; controller: what the run learned "
        "(default: parquet)",
    )
    add_option(parser, "--out", folder, None, "FOLDER", "where files go")


def run(options: Namespace) -> int:
    """Write them and print where they are."""
    from esper.experiment.database import export
    from esper.experiment.run import STORE, find_run

    path = find_run(options.run, Path(options.runs))
    folder = path / "export" if options.out is None else options.out
    if options.format == "controller":
        from esper.experiment.controllers import export_controller

        export_controller(path, folder)
        print(f"The controller is in {folder}.")
        return 0
    files = export(path / STORE, folder, options.format)
    print(f"{len(files)} tables are in {folder}.")
    return 0
