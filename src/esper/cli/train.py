"""`esper train` and `esper config`, and `--resume`, which `esper ppo` shares."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from esper.cli.arguments import (
    Command,
    add_option,
    add_settings,
    add_workers,
    given_options,
    worker_starter,
)
from esper.cli.output import print_line

if TYPE_CHECKING:
    from esper.runs.run import Run
    from esper.training.recovery import RunResult


def add_train_options(parser: ArgumentParser) -> None:
    """Add the options of `esper train`."""
    add_resume(parser)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also show KL divergence, entropy and speed of every round",
    )
    add_workers(parser)
    add_config_options(parser)


def add_config_options(parser: ArgumentParser) -> None:
    """Add `--preset`, `--config` and every setting of a training run."""
    from esper.runs.train_config import DEFAULT, PRESETS

    presets = f"base settings: {', '.join(PRESETS)} (default: {DEFAULT})"
    add_option(parser, "--preset", str, SUPPRESS, "NAME", presets)
    parser.add_argument(
        "--config",
        action="append",
        default=SUPPRESS,
        metavar="FILE",
        help="TOML file with settings that override the preset; can be repeated",
    )
    add_settings(parser, PRESETS[DEFAULT])


def train(options: Namespace) -> int:
    """Start or resume a run, then print its results and write its report."""
    from esper.runs.settings import parsed_options
    from esper.runs.train_config import TrainConfig, resolve
    from esper.training.callbacks import ConsoleProgress
    from esper.training.train import begin_run, resume_run, settings_of

    given = given_options(options)
    console = ConsoleProgress(details=given.pop("verbose"))
    start_workers = worker_starter(given)
    if "resume" in given:
        advice = "Omit it, or start a new run with --start_from RUN."
        mutable = ("device", "logger")
        changes = {name: given.pop(name) for name in mutable if name in given}
        path = unfinished_run(given, settings_of, advice)
        if path is None:
            return 0
        more, _ = parsed_options(TrainConfig, changes)
        with start_workers() as workers:
            result = resume_run(path, [console], workers, **more)
    else:
        settings = resolve(given, draw_seed=True)
        with start_workers() as workers:
            result = begin_run(settings, [console], workers)
    if result.signal is not None:
        return report_interruption(result, "train")
    from esper.evaluation.summary import print_training
    from esper.report import write_report

    print_training(result.path)
    print_line(f"The report is in {write_report(result.path)}.")
    return 0


def config(options: Namespace) -> None:
    """Print the resolved settings of a training run."""
    from esper.runs.settings import as_toml
    from esper.runs.train_config import resolve

    print(as_toml(resolve(given_options(options)), explain=True), end="")


def add_resume(parser: ArgumentParser) -> None:
    """Add `--resume`."""
    text = "resume an interrupted run, given by name or folder"
    add_option(parser, "--resume", str, SUPPRESS, "RUN", text)


def unfinished_run(
    given: dict[str, Any], read_settings: Callable[["Run"], object], advice: str
) -> Path | None:
    """The folder of the run to resume, or None if that run is complete.

    A run keeps its settings, so only `resume` and `runs` may be `given`. The error
    about others ends with `advice`. `read_settings` refuses runs of other commands.
    """
    from esper.contracts.messages import refusal
    from esper.runs.run import Run, find_run

    name, root = given.pop("resume"), Path(given.pop("runs", "runs"))
    if given:
        raise refusal(
            f"--{min(given)} cannot be combined with --resume, which keeps the run's "
            f"settings. {advice}"
        )
    path = find_run(name, root)
    run = Run.read(path)
    read_settings(run)
    if run.finished is None:
        return path
    print_line(f"Run {run.name} is already complete. See: esper report {path}")
    return None


def report_interruption(result: "RunResult", command: str) -> int:
    """Print how to resume an interrupted run; returns the exit code."""
    from esper.runs.run import OWN_RECORDINGS, Run

    again = f"esper {command} --resume {quote(str(result.path))}"
    if command == "ppo":
        from esper.rl.training import ppo_settings_of, resume_command

        again = resume_command(result.path, ppo_settings_of(Run.read(result.path)).env)

    saved = Run.read(result.path).checkpoints().steps()
    when, kept = f"after round {result.rounds}", "everything is saved"
    if not saved:
        when, kept = "before round 1", "pretraining will be repeated"
        if recorded := len([*(result.path / OWN_RECORDINGS).glob("*.safetensors")]):
            kept = f"{recorded} recordings are kept, {kept}"
    elif max(saved) < result.rounds:
        kept = f"rounds after {max(saved)} will be repeated"
    print_line(f"Interrupted {when}; {kept}. Resume with: {again}")
    return 128 + (result.signal or 0)


TRAIN: Final = Command(
    run=train,
    options=add_train_options,
    settings=True,
    help="train a controller and compare it with rules, or resume a run",
    description="""\
Train Tamiyo, the controller that decides when and where networks grow. Then compare it
with rule-based controllers and static networks, and write a report.""",
    examples="""\
Values are TOML. Text needs no quotes. A list of names needs no brackets.
Write a range as [low, high], and no value as none.

examples:
  esper train                          default settings, about five minutes
  esper train --preset quick           about one minute
  esper train --tasks letter,digits --budget.minutes 10
  esper train --tasks letter --world.rent "[0.0, 0.05]"
  esper train --config mine.toml --learner.ppo.learning_rate 1e-3
""",
)

CONFIG: Final = Command(
    run=config,
    options=add_config_options,
    settings=True,
    help="print all training settings with descriptions",
    examples="""\
examples:
  esper config > mine.toml             then: esper train --config mine.toml
  esper config --preset thorough --tasks letter
""",
)
