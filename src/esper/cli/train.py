"""`esper train`: a run from its settings to its report, or the rest of one."""

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser as SettingsParser

    from esper.experiment.train import RunResult

HELP = "train Tamiyo, watch her and judge her; or go on with a run"


def add(parser: ArgumentParser) -> None:
    """Its options are the settings of a run, which take torch to know."""
    parser.add_argument("settings", nargs="*", help="see esper train --help")


def run_words(words: Sequence[str]) -> int:
    """Begin a run, or go on with one."""
    from esper.experiment.console import ConsoleProgress
    from esper.experiment.settings.arguments import parse_options, resolve

    options = parse_options(settings_parser(), words)
    if "resume" in options:
        return _resume(options)
    config = resolve(options, draw=True)
    from esper.experiment.train import begin_run

    return _end(begin_run(config, [ConsoleProgress()]))


def settings_parser() -> "SettingsParser":
    """All of its options."""
    from esper.experiment.settings.arguments import train_parser

    parser = train_parser()
    parser.add_argument(
        "--resume",
        default=SUPPRESS,
        metavar="RUN",
        help="go on with a run that was interrupted, by its name or folder",
    )
    return parser


def _resume(options: dict[str, object]) -> int:
    from esper.contracts.errors import BadInput
    from esper.experiment.console import ConsoleProgress
    from esper.experiment.lookup import find_run
    from esper.experiment.run import Run
    from esper.experiment.train import resume_run, settings_of

    name, root = str(options.pop("resume")), Path(str(options.pop("runs", "runs")))
    if options:
        other = _first(options)
        raise BadInput(
            f"--resume goes on with the run's own settings, but --{other} was given; "
            f"leave it out, or begin another run with --start_from {name!r:.60}."
        )
    path = find_run(name, root)
    run = Run.read(path)
    settings_of(run)  # refuses other kinds of runs
    if run.finished is not None:
        print(f"Run {run.name} is already complete. See: esper report {path}")
        return 0
    return _end(resume_run(path, [ConsoleProgress()]))


def _first(options: Mapping[str, object]) -> str:
    """The dotted name of one option."""
    name, value = next(iter(options.items()))
    return f"{name}.{_first(value)}" if isinstance(value, Mapping) else name


def _end(result: "RunResult") -> int:
    """Print what came of it, and where it is."""
    from esper.experiment.evaluate import print_training
    from esper.report import write_report

    if result.signal is not None:
        print(
            f"Interrupted after round {result.rounds}; all is saved. Go on with: "
            f"esper train --resume {result.path}"
        )
        return 128 + result.signal
    print_training(result.path)
    print(f"The report is in {write_report(result.path)}.")
    return 0
