"""How words become values, and what is said of those that cannot."""

import argparse
import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NoReturn

from esper.cli.failures import one_line

LONGEST: Final = 255
"""Bytes that every file system lets a name have."""


class Parser(argparse.ArgumentParser):
    """Says what was probably meant."""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[Any, list[str]]:
        """Refuse what is not known here, before what is missing is asked for."""
        words = [] if args is None else list(args)
        for word in words:
            if word == "--" or (self._subparsers and not word.startswith("-")):
                break
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                self.error(f"unrecognized arguments: {name}")
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """One line with the nearest right word, exit code 2."""
        named = re.search(r"(?:choice: '|arguments: )(-*[\w-]+)", message)
        near = get_close_matches(named[1][:99], self._words(), 1, 0.5) if named else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = one_line(" ".join(message.split()), 120)
        self.exit(2, f"esper: {message}{hint} (see {self.prog} --help)\n")

    def _words(self) -> list[str]:
        """Everything that could have been meant here."""
        words: list[str] = []
        for action in self._actions:
            words += action.option_strings
            words += map(str, action.choices or ())
        return words


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r:.60}")
    return number


def place(text: str) -> str:
    """A path that there could be."""
    names = text.split("/")
    longest = max(len(name.encode(errors="replace")) for name in names)
    if not text or not text.isprintable() or longest > LONGEST:
        raise argparse.ArgumentTypeError(
            f"expected a path of printable names of at most {LONGEST} bytes, "
            f"got {text!r:.60}"
        )
    return text


def folder(text: str) -> Path:
    """A folder that may be there or be made."""
    return Path(place(text))


def file(text: str) -> Path:
    """A file that may be there or be made."""
    path = folder(text)
    if path.name in ("", "..") or os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"expected a file, got folder {text!r:.60}")
    return path


def places(text: str) -> list[str]:
    """Names or paths with commas between."""
    names = [place(name.strip()) for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"expected names, got {text!r:.60}")
    return names


def add_runs(parser: argparse.ArgumentParser) -> None:
    """The option that says where runs are."""
    parser.add_argument(
        "--runs",
        type=place,
        default="runs",
        metavar="FOLDER",
        help="where runs are (default: runs)",
    )


class Whole:
    """Parses a whole number in a range, in plain ASCII digits."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def __call__(self, text: str) -> int:
        """The number."""
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) < 20:
            number = int(text)
            if self._low <= number <= self._high:
                return number
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {self._low} to {self._high}, "
            f"got {text!r:.60}"
        )


RNG_SEED = Whole(0, 2**32 - 1)
"""What a random stream can start from."""
