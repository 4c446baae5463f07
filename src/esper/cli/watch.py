"""`esper watch`: follow runs in the terminal or in a browser."""

from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from esper.cli.arguments import Command, add_option, add_runs, integer, path_text
from esper.cli.output import print_line
from esper.contracts.errors import InvalidInputError

PORT: Final = 8_765


def add_watch_options(parser: ArgumentParser) -> None:
    """Add the options of `esper watch`."""
    text = "name or folder of a run (default: the newest)"
    parser.add_argument("run", type=path_text, nargs="?", metavar="RUN", help=text)
    add_runs(parser)
    parser.add_argument(
        "--once", action="store_true", help="print the terminal view once and exit"
    )
    parser.add_argument(
        "--web",
        action="store_true",
        help="show all runs of the folder in a browser on this machine (requires "
        "starlette and uvicorn: pip install '.[web]' in the clone of Esper)",
    )
    port = f"port of --web; 0: any free one (default: {PORT})"
    add_option(parser, "--port", integer(0, 65_535), None, "N", port)


def watch(options: Namespace) -> None:
    """Show a run until Ctrl-C."""
    if options.web and options.once:
        raise InvalidInputError("--once is for the terminal. Leave out --web.")
    if options.port is not None and not options.web:
        raise InvalidInputError("--port is for the browser. Add --web.")
    root = Path(options.runs)
    path = None
    if options.run is not None:
        from esper.runs.run import find_run

        path = find_run(options.run, root)
    if options.web:
        _serve(root, path, PORT if options.port is None else options.port)
        return
    from esper.watch.reading import find_by_id, list_runs
    from esper.watch.terminal import watch

    if path is None:
        found = [each for each in list_runs(root) if not each.trouble]
        if not found:
            raise InvalidInputError(
                f"there is no run in {options.runs!r:.60}. Start one with: esper train"
            )
        path = find_by_id(root, found[0].id)
    watch(path, once=options.once)


def _serve(root: Path, path: Path | None, port: int) -> None:
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InvalidInputError(
            f'--web needs {" and ".join(missing)}. Run pip install ".[web]" in the '
            "clone of Esper."
        )
    from esper.watch.reading import run_id
    from esper.watch.server import serve

    if path is not None:  # its folder, which may be another than --runs
        path = path.absolute()
        root = path.parent
    if not root.is_dir():
        raise InvalidInputError(
            f"there is no folder {str(root)!r:.60}. Name one with --runs."
        )
    serve(
        root,
        None if path is None else run_id(path.name),
        port,
        lambda address: print_line(f"Open {address} in a browser. Ctrl-C ends it."),
    )


WATCH: Final = Command(
    run=watch,
    torch=False,
    options=add_watch_options,
    help="follow a run while it trains, in the terminal or in a browser",
    description="Follow a run while it trains. Without --web, in this terminal. Runs "
    "are only read: the training is not touched, and may end or resume meanwhile.\n\n"
    "--web shows all runs of the folder at http://127.0.0.1. Only this machine can "
    "open it; from another, forward the port: ssh -L 8765:127.0.0.1:8765 HOST",
    examples="""\
examples:
  esper watch                          the newest run, in the terminal
  esper watch NAME --once              print it once
  esper watch --web                    all runs, in a browser
  esper watch --web --port 0 --runs /data/runs
""",
)
