"""`esper export`: what a run recorded, as tables for other tools."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from esper.cli.words import add_runs, folder, place

HELP = "write what a run recorded as Parquet or CSV"
EXAMPLES = """\
examples:
  esper export NAME                    writes runs/NAME/export/*.parquet
  esper export NAME --format csv --out tables
"""


def add(parser: ArgumentParser) -> None:
    """Its options."""
    parser.add_argument(
        "run", type=place, metavar="RUN", help="name or folder (see esper runs)"
    )
    parser.add_argument(
        "--format",
        choices=("parquet", "csv"),
        default="parquet",
        help="of the files; parquet needs DuckDB (default: parquet)",
    )
    parser.add_argument(
        "--out",
        type=folder,
        default=None,
        metavar="FOLDER",
        help="where files go",
    )
    add_runs(parser)


def run(options: Namespace) -> int:
    """Write them and say where they are."""
    from esper.experiment.lookup import find_run
    from esper.experiment.reading import export
    from esper.experiment.run import STORE

    path = find_run(options.run, Path(options.runs))
    folder = path / "export" if options.out is None else options.out
    files = export(path / STORE, folder, options.format)
    print(f"{len(files)} tables are in {folder}.")
    return 0
