"""`esper runs`, `esper report`, `esper export` and `esper completion`."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Final

from esper.cli.arguments import (
    Command,
    add_option,
    add_run,
    add_runs,
    file_path,
    folder_path,
)
from esper.cli.output import print_line, print_table


def add_runs_options(parser: ArgumentParser) -> None:
    """Add the options of `esper runs`."""
    add_runs(parser)
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table"
    )


def runs(options: Namespace) -> None:
    """Print a table of all runs, or JSON."""
    from esper.runs.run import Run

    found = Run.list(Path(options.runs))
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    elif not found:
        print(f"No runs in {options.runs!r}. Start one with: esper train")
    else:
        rows = [
            (
                each.name,
                f"{each.state}: {each.trouble}" if each.trouble else each.state,
                "-" if each.step is None else str(each.step),
                "-" if each.score is None else f"{each.score:.4f}",
                f"{each.size / 1e6:.1f} MB",
            )
            for each in found
        ]
        print_table(("name", "state", "rounds", "return", "size"), rows, left=2)


def add_report_options(parser: ArgumentParser) -> None:
    """Add the options of `esper report`."""
    add_run(parser)
    out = "output file (default: report.html in the folder of the run)"
    add_option(parser, "--out", file_path, None, "FILE", out)


def report(options: Namespace) -> None:
    """Write the report and print its path."""
    from esper.report import write_report
    from esper.runs.run import find_run

    page = write_report(find_run(options.run, Path(options.runs)), options.out)
    print_line(f"The report is in {page}.")


def add_export_options(parser: ArgumentParser) -> None:
    """Add the options of `esper export`."""
    add_run(parser)
    parser.add_argument(
        "--format",
        choices=("parquet", "csv", "controller"),
        default="parquet",
        help="parquet (requires DuckDB) and csv export the tables of the run, "
        "controller its trained controller (default: parquet)",
    )
    out = "output folder (default: export in the folder of the run)"
    add_option(parser, "--out", folder_path, None, "FOLDER", out)


def export(options: Namespace) -> None:
    """Write tables or a controller and print their folder."""
    from esper.runs.controllers import export_controller
    from esper.runs.run import STORE, find_run
    from esper.runs.store import export

    path = find_run(options.run, Path(options.runs))
    out = path / "export" if options.out is None else options.out
    if options.format == "controller":
        export_controller(path, out)
        print_line(f"The controller is in {out}.")
    else:
        files = export(path / STORE, out, options.format)
        print_line(f"{len(files)} tables are in {out}.")


def add_completion_options(parser: ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument(
        "shell", choices=("bash", "zsh", "tcsh"), help="shell to write the script for"
    )


def completion(options: Namespace) -> None:
    """Print a completion script for all commands whose packages are installed."""
    from importlib.util import find_spec

    import shtab

    from esper.cli import COMMANDS, parser

    known = {*COMMANDS} - ({"ppo"} if find_spec("gymnasium") is None else set())
    print(shtab.complete(parser(known), options.shell))


RUNS: Final = Command(
    run=runs,
    torch=False,
    options=add_runs_options,
    help="list all runs with state, rounds, return and size",
    examples="""\
examples:
  esper runs
  esper runs --json --runs /data/runs  JSON, for another folder
""",
)

REPORT: Final = Command(
    run=report,
    options=add_report_options,
    help="write the report of a run as an HTML page",
    examples="""\
examples:
  esper report NAME                    writes runs/NAME/report.html and plots
  esper report runs/NAME --out page.html
""",
)

EXPORT: Final = Command(
    run=export,
    options=add_export_options,
    help="export the tables of a run, or its trained controller",
    examples="""\
examples:
  esper export NAME                    writes runs/NAME/export/*.parquet
  esper export NAME --format csv --out tables
  esper export NAME --format controller --out tamiyo

An exported controller is a folder with two files: the policy of the best
checkpoint, and a manifest with its training settings.
""",
)

COMPLETION: Final = Command(
    run=completion,
    options=add_completion_options,
    help="print a shell completion script",
    examples="""\
examples:
  eval "$(esper completion bash)"                       in ~/.bashrc
  esper completion zsh > ~/.zfunc/_esper                with fpath+=(~/.zfunc)
""",
)
