"""`esper train`: a run from its settings to its report, or the rest of one."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.cli.arguments import add_settings

if TYPE_CHECKING:
    from esper.experiment.train import RunResult

HELP = "train Tamiyo and compare it with controllers that do not learn; or resume a run"
USAGE = "esper train [--help] [--preset NAME] [--config FILE] [--SETTING VALUE]"
EXAMPLES = """\
A value is written as in a TOML file; text needs no quotes and a list of words no
brackets. A range is [low, high]; the word none stands for nothing.

examples:
  esper train                          as it comes, about five minutes
  esper train --preset quick           about one
  esper train --tasks letter,digits --budget.minutes 10
  esper train --tasks letter --world.rent "[0.0, 0.05]"
  esper train --config mine.toml --learner.ppo.learning_rate 1e-3
"""


def add(parser: ArgumentParser) -> None:
    """Add the settings and `--resume`."""
    parser.add_argument(
        "--resume",
        default=SUPPRESS,
        metavar="RUN",
        help="go on with a run that was interrupted, by its name or folder",
    )
    add_settings(parser)


def run(options: Namespace) -> int:
    """Begin a run, or go on with one."""
    from esper.experiment.console import ConsoleProgress
    from esper.experiment.presets import resolve

    given = vars(options)
    del given["command"]
    if "resume" in given:
        return _resume(given)
    config = resolve(given, draw_seed=True)
    from esper.experiment.train import begin_run

    return _end(begin_run(config, [ConsoleProgress()]))


def _resume(given: dict[str, Any]) -> int:
    from esper.experiment.console import ConsoleProgress
    from esper.experiment.messages import quoted, refusal
    from esper.experiment.run import Run, find_run
    from esper.experiment.train import resume_run, settings_of

    name, root = given.pop("resume"), Path(given.pop("runs", "runs"))
    if given:
        raise refusal(
            f"--resume goes on with the run's own settings, but --{min(given)} was "
            "given; leave it out, or begin another run with --start_from "
            f"{quoted(name)}."
        )
    path = find_run(name, root)
    run = Run.read(path)
    settings_of(run)  # refuses other kinds of runs
    if run.finished is not None:
        print(f"Run {run.name} is already complete. See: esper report {path}")
        return 0
    return _end(resume_run(path, [ConsoleProgress()]))


def _end(result: "RunResult") -> int:
    """Print the results and write the report."""
    from esper.experiment.summary import print_training
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
