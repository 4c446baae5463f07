"""Commands and their arguments.

A wrong argument is an error of one line, with the nearest valid name.
"""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from esper.contracts.messages import nearest, one_line, quoted

if TYPE_CHECKING:
    from esper.workers.jobs import Workers

MAX_NAME: Final = 255
"""Maximum length of a file name in bytes, on any file system."""
METAVARS: Final = {
    "integer": "N",
    "number": "X",
    "string": "TEXT",
    "boolean": "true|false",
    "array": "LIST",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of `esper`."""

    run: Callable[[argparse.Namespace], object]
    """Runs it; returns an exit code, or None for 0."""
    help: str
    examples: str
    options: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds its options."""
    description: str = ""
    """Replaces `help` in the help of the command itself."""
    settings: bool = False
    """Whether `options` adds settings, whose import is slow."""
    torch: bool = True
    """Whether it needs torch."""
    environments: bool = False
    """Whether it calls environments, which may hang or crash."""


class Parser(argparse.ArgumentParser):
    """Reports errors in one line with the nearest valid name; exit code 2."""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[Any, list[str]]:
        """Report unknown options before missing ones."""
        words = [] if args is None else list(args)
        # An option can be written with hyphens or underscores.
        known = {name.replace("_", "-"): name for name in self._option_string_actions}
        for index, word in enumerate(words):
            if word == "--" or (self._subparsers and not word.startswith("-")):
                break
            name, equals, value = word.partition("=")
            if not re.match("--[^-]", name):
                continue
            if value == "--":  # argparse would end the options here
                self.error(f"argument {name}: expected one argument")
            found = known.get(name.replace("_", "-"))
            if found is None:
                options = [each for each in known.values() if each.startswith("--")]
                near = nearest(name, options)
                self._exit(f"there is no option {quoted(name)}; did you mean {near!r}?")
            words[index] = f"{found}{equals}{value}"
        parsed, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Exit with a message, and with the nearest choice if there are choices."""
        hint = ""
        if choice := re.search(r"invalid choice: '(.*?)'", message):
            choices = [
                str(name) for action in self._actions for name in action.choices or ()
            ]
            hint = f"; did you mean {nearest(choice[1], choices)!r}?"
        self._exit(one_line(" ".join(message.split()), 120) + hint)

    def _exit(self, text: str) -> NoReturn:
        self.exit(2, f"esper: {text} (see {self.prog} --help)\n")


def integer(low: int, high: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `low` to `high`, in ASCII digits."""

    def parse(text: str) -> int:
        if re.fullmatch("-?[0-9]{1,19}", text) and low <= int(text) <= high:
            return int(text)
        raise _expected(f"a whole number from {low} to {high}", text)

    return parse


RNG_SEED: Final = integer(0, 2**32 - 1)


def positive_float(text: str) -> float:
    """Parses a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not 0.0 < number < inf:
        raise _expected("a finite number above 0", text)
    return number


def path_text(text: str) -> str:
    """Checks that a path is printable and that no name in it is too long."""
    longest = max(len(name.encode(errors="replace")) for name in text.split("/"))
    if not text or not text.isprintable() or longest > MAX_NAME:
        raise _expected(f"a path of printable names of at most {MAX_NAME} bytes", text)
    return text


def folder_path(text: str) -> Path:
    """Parses the path of a folder."""
    return Path(path_text(text))


def file_path(text: str) -> Path:
    """Parses a path that is not a folder."""
    path = folder_path(text)
    if path.name in ("", "..") or os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"expected a file, got folder {quoted(text)}")
    return path


def add_option(
    parser: "argparse._ActionsContainer",
    name: str,
    kind: Callable[[str], object],
    default: object,
    metavar: str,
    text: str,
) -> None:
    """Add an option with one value; the help shows a default unless it is None."""
    if default not in (None, argparse.SUPPRESS):
        shown = f"{default:g}" if isinstance(default, float) else default
        text = f"{text} (default: {shown})"
    parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument RUN, and `--runs`."""
    parser.add_argument(
        "run", type=path_text, metavar="RUN", help="name or folder of a run"
    )
    add_runs(parser)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add `--runs`."""
    text = "folder that contains the runs"
    add_option(parser, "--runs", path_text, "runs", "FOLDER", text)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the options for parallel work."""
    group = parser.add_argument_group("parallel work (does not change the results)")
    workers = "worker processes; 0: use only this process (default: one per core)"
    deadline = "maximum seconds per job; then another worker repeats it (default: 600)"
    add_option(group, "--workers", integer(0, 1_024), None, "N", workers)
    group.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="use the Ray cluster at ADDRESS; without ADDRESS, start a local cluster "
        "(requires ray, see docs/scaling.md)",
    )
    add_option(group, "--deadline", positive_float, None, "X", deadline)


def worker_starter(given: dict[str, Any]) -> Callable[[], "Workers"]:
    """Removes the options of `add_workers`; returns a function that starts workers.

    Call it after everything else was checked, because starting a cluster is slow.
    """
    from esper.workers.jobs import DEADLINE, available_cores, workers

    count, ray = given.pop("workers"), given.pop("ray")
    if count is None:
        count = 0 if ray else available_cores()
    deadline = given.pop("deadline") or DEADLINE
    return partial(workers, count, ray=ray, deadline=deadline)


def add_settings(
    parser: argparse.ArgumentParser,
    defaults: object,
    short: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add an option for every setting, named by its dotted path.

    The namespace has only the options that were given, as text for
    `settings.parsed_options`. `short` has second names of some settings.
    """
    from esper.runs.settings import as_flat, known_settings, toml_value

    groups: dict[str, Any] = {}
    values = as_flat(defaults)
    for name, setting in known_settings(type(defaults)).items():
        title = name.rpartition(".")[0] or "the run"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        text = setting.description.removesuffix(".")
        if not setting.is_derived:  # then the text says what it depends on
            text += f" (default: {toml_value(values[name])})".replace('"', "")
        more: dict[str, Any] = {}
        if setting.type == "boolean":
            more = {"nargs": "?", "const": "true"}
        elif setting.type == "array":  # comma-separated, or repeated
            more = {"action": "append"}
        groups[title].add_argument(
            *[f"--{each}" for each in (name, short.get(name)) if each],
            dest=name,
            default=argparse.SUPPRESS,
            metavar=METAVARS.get(setting.type, "VALUE"),
            help=text.replace("%", "%%"),
            **more,
        )


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """All parsed options but the name of the command."""
    return {name: value for name, value in vars(options).items() if name != "command"}


def _expected(what: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {what}, got {quoted(text)}")
