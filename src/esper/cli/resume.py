"""`--resume`: the run to continue, and what to print when a run is interrupted."""

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from esper.cli.arguments import add_option
from esper.cli.output import print_line

if TYPE_CHECKING:
    from esper.runs.run import Run
    from esper.training.recovery import RunResult


def add_resume(parser: ArgumentParser) -> None:
    """Add `--resume`."""
    text = "resume an interrupted run, given by name or folder"
    add_option(parser, "--resume", str, SUPPRESS, "RUN", text)


def unfinished_run(
    given: dict[str, Any], read_settings: Callable[["Run"], object], advice: str
) -> Path | None:
    """The folder of the run to resume, or None if that run is complete.

    Args:
        given: The options that were given, among them `resume`. A run keeps its
            settings, so the only other option can be `runs`.
        read_settings: Raises an error for a run that another command started.
        advice: What the error about other options recommends.
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
